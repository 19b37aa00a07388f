"""Time of a step by its parts, by hooks on the modules of the model: they note when a part begins, and change nothing.

A step is one line of time. Each mark on it ends the part that ran and begins another, so that the parts add up to the
step. Forward, attention runs inside its module, and the head from its module to the end of the loss. Backward, each
runs until the gradients of its inputs are there. Everything else until the last backward ends is the body:
planning, and waiting for other pipeline stages, included. Both shrink with the tokens. The rest finishes the gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mcore_prefix_tree.plan import Parts


class Clock(Protocol):
    """Clock that sorts time by parts. It begins with the body."""

    def begin(self, part: str) -> None:
        """End the part that runs, and begin another."""

    def parts(self) -> Parts:
        """End the step, and return the seconds of each part."""


class HostClock:
    """Clock of the host, for example ``time.perf_counter`` or ``time.process_time``."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._found = dict.fromkeys(Parts._fields, 0.0)
        self._part, self._since = "body", now()

    def begin(self, part: str) -> None:
        now = self._now()
        self._found[self._part] += now - self._since
        self._part, self._since = part, now

    def parts(self) -> Parts:
        self.begin("rest")
        return Parts(**self._found)


class EventClock:
    """Clock of the GPU's current stream. The device has to be idle when it is made; nothing waits before the end."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self.begin("body")

    def begin(self, part: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))

    def parts(self) -> Parts:
        self.begin("rest")
        torch.cuda.synchronize()
        found = dict.fromkeys(Parts._fields, 0.0)
        for (part, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            found[part] += begin.elapsed_time(end) / 1e3
        return Parts(**found)


def make_clocks(device: torch.device) -> list[Clock]:
    """Return the clocks of a device, now: on a CPU the wall's and the processor's, on a GPU the stream's."""
    if device.type == "cuda":
        return [EventClock()]
    return [HostClock(time.perf_counter), HostClock(time.process_time)]


@dataclass
class Marks:
    """Hooks of the modules, which begin parts on the clocks that are there."""

    clocks: Sequence[Clock] = ()

    def begin(self, part: str) -> None:
        for clock in self.clocks:
            clock.begin(part)

    def on_gradient(self, tensor: torch.Tensor, part: str) -> None:
        """Mark a part when the gradient of a tensor, of any shape, is computed."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.begin(part))

    def attention_begins(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.begin("attention")
        for tensor in _tensors((*args, *kwargs.values())):
            self.on_gradient(tensor, "body")

    def attention_ends(self, _: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in _tensors(output if isinstance(output, tuple) else (output,)):
            self.on_gradient(tensor, "attention")
        self.begin("body")

    def head_begins(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.begin("head")
        # The hidden states come first. The gradient of the weight, which may follow, is the head's too.
        self.on_gradient(next(_tensors((*args, *kwargs.values()))), "body")


@contextmanager
def marked(chunks: Sequence[torch.nn.Module], config: Any) -> Iterator[Marks]:
    """Let steps of a model mark their parts; ``finalize_model_grads_func`` of its config ends the last backward."""
    hooks, finalize_model_grads = Marks(), config.finalize_model_grads_func

    def finalize(*args: Any, **kwargs: Any) -> Any:
        hooks.begin("rest")
        return finalize_model_grads(*args, **kwargs)

    with ExitStack() as until_the_end:
        for chunk in chunks:
            until_the_end.callback(chunk.register_forward_pre_hook(lambda *_: hooks.begin("body")).remove)
            for name, module in chunk.named_modules():
                kind = name.rpartition(".")[2]
                begins = {"core_attention": hooks.attention_begins, "output_layer": hooks.head_begins}.get(kind)
                if begins is not None:
                    until_the_end.callback(module.register_forward_pre_hook(begins, with_kwargs=True).remove)
                if kind == "core_attention":
                    until_the_end.callback(module.register_forward_hook(hooks.attention_ends).remove)
        if finalize_model_grads is not None:
            config.finalize_model_grads_func = finalize
            until_the_end.callback(setattr, config, "finalize_model_grads_func", finalize_model_grads)
        yield hooks


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))
