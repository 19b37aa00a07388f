"""CUDA graphs on a CPU: a capture records every operation with its tensors, and a replay runs them on these again.

``python te_recorded.py train RECIPE ...`` is ``mcore-prefix-tree train`` with them. As on a GPU, a replay knows nothing
of Python: values that the capture read, shapes and branches stay those of the capture, and only what was copied into
the captured tensors is new.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

import te_compiled  # isort: skip  before Megatron-Core
import torch
import transformer_engine.pytorch.graph as engine
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from mcore_prefix_tree.cli.main import app


class Recorder(TorchDispatchMode):
    """Record operations while it is entered."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # A graph knows memory, not tensors: these may get other data.
        self.calls.append((func, *tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}, found))))
        return found


class RecordedGraph:
    """A ``torch.cuda.CUDAGraph`` of recorded operations; ``replays`` counts those of all graphs, by number."""

    replays: ClassVar[Counter[int]] = Counter()
    made = itertools.count()
    captured: ClassVar[list[RecordedGraph]] = []  # and not reset

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.number = next(self.made)

    def replay(self) -> None:
        assert self.calls, "captured, and not reset"
        self.replays[self.number] += 1
        with torch.no_grad():
            for func, args, kwargs, found in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                    if isinstance(new, torch.ScriptObject):
                        new.wait()  # type: ignore[attr-defined]  # the ranks' communication
                    elif isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.data.copy_(new)  # a replay is no write that autograd notices

    def reset(self) -> None:
        self.calls.clear()
        if self in self.captured:
            self.captured.remove(self)

    def register_generator_state(self, state: Any) -> None:
        """Nothing here draws."""


_wait = Work.wait


def wait_unrecorded(work: Any, *given: Any) -> Any:
    """Wait for communication; gloo's last copies belong to it, and a replay waits for its own."""
    with _disable_current_modes():
        return _wait(work, *given)


@contextmanager
def capture(graph: RecordedGraph, **_: Any) -> Iterator[None]:
    """Stand for ``torch.cuda.graph``."""
    RecordedGraph.captured.append(graph)
    with Recorder(graph.calls):
        yield


@contextmanager
def _recording() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch.cuda, "CUDAGraph", RecordedGraph),
            (torch.cuda, "graph", capture),
            (Work, "wait", wait_unrecorded),
            (torch.cuda, "set_rng_state", lambda *_: None),
            (engine, "_graph_pool_handle", lambda: None),
            # On a GPU it frees memory that another capture may take; here nothing is shared.
            (engine, "make_weak_ref", lambda tensors: tensors),
            (engine, "graph_safe_rng_available", lambda: False),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Give the sessions of recipes TransformerEngine's GPU, and graphs that are recorded."""
    RecordedGraph.replays.clear()
    with te_compiled.in_sessions(_recording):
        yield


if __name__ == "__main__":
    with recorded_graphs():
        app()
