"""Comparison of a model with itself: one that answers the same question twice draws no random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_prefix_tree.utils.randomness import SHARED

# Owner, name and off value.
Setting: TypeAlias = "tuple[Any, str, Any]"

# Some kernels add in any order. With other random numbers, runs have to differ by this much more than with the same.
_FACTOR = 4.0


@contextmanager
def kept_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore the buffers of a model at the end: runs in training mode change statistics of routers."""
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers()]
    values = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the generators at the end: torch's, Megatron's and Python's."""
    others, tracker = random.getstate(), get_cuda_rng_tracker()
    tracked = tracker.get_states()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        if tracked:
            tracker.set_states(tracked)
        random.setstate(others)


@contextmanager
def temporary_settings(settings: Sequence[Setting]) -> Iterator[None]:
    """Set attributes of objects to values, and restore them at the end."""
    with ExitStack() as restored:
        for owner, name, value in settings:
            restored.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def without_fp8(chunks: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Turn FP8 off, whose rounding would hide a mistake; its weights are quantised as if nothing had run meanwhile."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    configs = (one.config for one in modules if getattr(getattr(one, "config", None), "fp8", None))
    kept = [(one, name, getattr(one, name)) for one in modules if hasattr(one, name := "is_first_microbatch")]
    return temporary_settings([*((config, "fp8", None) for config in configs), *kept])


def why_not_the_same(run: Callable[[], torch.Tensor]) -> str | None:
    """Return a sentence if a model's answer, of any shape, differs under other random numbers, or None."""
    with kept_generators():
        first, other = run(), run()
    with kept_generators():
        again = run()
    if not _distance(other, first) > _FACTOR * _distance(again, first):  # nor is a NaN
        return None
    return (
        "a second run on the same tokens in training mode gives other answers, so the model draws random numbers: "
        f"{SHARED}; set dropout and noise to 0, also in layers and adapters that were added to the model"
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one shape."""
    return float((one.detach().double() - other.detach().double()).norm())
