"""Prefix-tree training on stock Megatron-Core: every shared token computed once, every gradient unchanged."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_prefix_tree.layout import FlatLayout, fold
    from mcore_prefix_tree.logprob import restore
    from mcore_prefix_tree.metadata import TreeMetadata
    from mcore_prefix_tree.plan import plan_step
    from mcore_prefix_tree.sample import Sample, SampleError, Signals, Tempered
    from mcore_prefix_tree.signals import SamplingMask, Teacher

__all__ = [
    "FlatLayout",
    "Sample",
    "SampleError",
    "SamplingMask",
    "Signals",
    "Teacher",
    "Tempered",
    "TreeMetadata",
    "fold",
    "plan_step",
    "restore",
]

_HOMES = {
    "FlatLayout": "layout",
    "SamplingMask": "signals",
    "Teacher": "signals",
    "TreeMetadata": "metadata",
    "fold": "layout",
    "plan_step": "plan",
    "restore": "logprob",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import and NumPy tenths of one; the command line's --help needs neither.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'sample')}"), name)
