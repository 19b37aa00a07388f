"""Run contestants on the same tensors: each is warmed up and compared with the first, then all are timed in turn.

Legend: T tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from attention_bench.clock import seconds_of, wait_for
from attention_bench.contestants import Contestant
from attention_bench.memory import misfit, parts_that_fit
from attention_bench.settings import Row, Settings
from attention_bench.workloads import Workload, chains
from mcore_prefix_tree.attention.tile_blocks import BlockPlan, visible_pairs
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.memory import PeakMemory, available_bytes

T = TypeVar("T")

# Of the norm. Sound 16-bit kernels are within 4e-3 of each other; the speed of a wrong result means nothing.
LARGEST_DIFFERENCE = 5e-2
# Numbers of a result that are compared at a time.
_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedMetadata(TreeMetadata):
    """Metadata that records the time to build each plan derived from it.

    Attributes:
        build_seconds: seconds of each plan, without the plans that it derived in turn.
        open_builds: names of the plans that are being built.
    """

    build_seconds: list[float] = field(default_factory=list)
    open_builds: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, metadata: TreeMetadata) -> TimedMetadata:
        """Return the same forest without derived plans."""
        return cls(**{name: getattr(metadata, name) for name in TreeMetadata.__dataclass_fields__ if name != "cache"})

    def derived(self, name: str, build: Callable[[TreeMetadata], T]) -> T:
        """Contest on a clock that waits for the device."""
        if name in self.cache or self.open_builds:
            return super().derived(name, build)
        self.open_builds.append(name)
        wait_for(self.subtree_end.device)  # work queued earlier does not count
        started = time.perf_counter()
        plan = super().derived(name, build)
        wait_for(self.subtree_end.device)
        self.build_seconds.append(time.perf_counter() - started)
        self.open_builds.pop()
        return plan


class LayoutPart(NamedTuple):
    """Arguments of one call: a tree, and query, key, value and a gradient of the result."""

    metadata: TreeMetadata
    inputs: list[torch.Tensor]


class Runner:
    """One contestant on its inputs: those of a layout, or of its parts one after another."""

    def __init__(self, contestant: Contestant, parts: list[LayoutPart]) -> None:
        self.contestant = contestant
        self.parts = parts
        self.forward_seconds: list[float] = []
        self.backward_seconds: list[float] = []
        self.metadata_seconds = 0.0
        self.peak_bytes: int | None = None
        self.difference = 0.0
        self._device = parts[0].inputs[3].device

    def _forward(self, part: LayoutPart) -> torch.Tensor:
        query, key, value, _ = part.inputs
        return self.contestant.attention(query, key, value, part.metadata, self.contestant.options)

    def _backward(self, part: LayoutPart, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, part.inputs[:3], part.inputs[3])

    def warm_up(self) -> list[torch.Tensor]:
        """Compile, then plan and measure memory on fresh metadata; out, dQ, dK and dV of the first part."""
        for part in self.parts:
            self._backward(part, self._forward(part))
        self.parts = [LayoutPart(TimedMetadata.of(part.metadata), part.inputs) for part in self.parts]
        for part in self.parts:
            self._forward(part)
            assert isinstance(part.metadata, TimedMetadata)
            self.metadata_seconds += sum(part.metadata.build_seconds)
        peak = PeakMemory(self._device)
        out = self._forward(self.parts[0])
        results = [out.detach(), *self._backward(self.parts[0], out)]
        self.peak_bytes = peak.bytes()
        wait_for(self._device)  # so that a kernel's error is found here, not in the next kernel
        return results

    def run(self) -> None:
        """One timed round."""
        forward_seconds = backward_seconds = 0.0
        for part in self.parts:
            out: list[torch.Tensor] = []
            forward_seconds += seconds_of(partial(self._append_forward, out, part), self._device)
            backward_seconds += seconds_of(partial(self._backward, part, out[0]), self._device)
        self.forward_seconds.append(forward_seconds)
        self.backward_seconds.append(backward_seconds)

    def _append_forward(self, out: list[torch.Tensor], part: LayoutPart) -> None:
        out.append(self._forward(part))

    def row(self) -> Row:
        """Return the results so far."""
        plans = [plan for part in self.parts for plan in part.metadata.cache.values() if isinstance(plan, BlockPlan)]
        return Row(
            method=self.contestant.method,
            layout=self.contestant.layout,
            deterministic=self.contestant.options.deterministic,
            tokens=sum(part.metadata.num_tokens for part in self.parts),
            pairs=sum(visible_pairs(part.metadata) for part in self.parts),
            forward_seconds=list(self.forward_seconds),
            backward_seconds=list(self.backward_seconds),
            metadata_seconds=self.metadata_seconds,
            peak_bytes=self.peak_bytes,
            tile_efficiency={f"{plan.query_block}x{plan.key_block}": plan.efficiency for plan in plans},
            difference=self.difference,
            parts=len(self.parts),
        )


class Contest:
    """One workload's contestants on the same tensors."""

    def __init__(self, workload: Workload, settings: Settings) -> None:
        self.workload = workload
        self._settings = settings
        self._layouts: dict[str, list[LayoutPart]] = {}
        self._first: dict[str, list[torch.Tensor]] = {}

    def set_yardstick(self, contestant: Contestant) -> None:
        """Compare the others on its layout with this contestant, which is not measured."""
        self._difference(Runner(contestant, self._layout(contestant.layout)))

    def warm_up(self, contestant: Contestant) -> Runner | str:
        """Warm a contestant up and compare it with the yardstick, else with the first that was right on its layout.

        Returns:
            The runner, or why the result is wrong.
        """
        runner = Runner(contestant, self._layout(contestant.layout))
        runner.difference = self._difference(runner)
        if not math.isfinite(runner.difference):
            return "its result is not finite"
        if runner.difference > LARGEST_DIFFERENCE:
            return f"its result differs from the first on this layout by {runner.difference:.1e} of the norm"
        return runner

    def forget_results(self) -> None:
        """Free the results that contestants were compared with."""
        self._first.clear()

    def _layout(self, name: str) -> list[LayoutPart]:
        if name not in self._layouts:
            self._layouts[name] = self._made(name)
        return self._layouts[name]

    def _made(self, name: str) -> list[LayoutPart]:
        device, workload = self._settings.case.device, self.workload
        free = available_bytes(device)
        if name == "unfolded":
            # On a CPU it is one batch, and the user must provide the memory.
            lens = workload.sample_lens
            parts = parts_that_fit(lens, self._settings, free) if device.type == "cuda" else [lens]
            trees = [chains(part, device) for part in parts]
        else:
            trees = [workload.folded(device) if name == "tree" else workload.dense(device)]
        reason = misfit(max(tree.padded_size for tree in trees), self._settings, free)
        if device.type == "cuda" and reason is not None:
            raise NoRoomError(reason)
        inputs = _inputs(max(tree.padded_size for tree in trees), self._settings)
        return [LayoutPart(tree, _rows(inputs, tree.padded_size)) for tree in trees]

    def _difference(self, runner: Runner) -> float:
        results, layout = runner.warm_up(), runner.contestant.layout
        found = difference(results, self._first.get(layout, results))
        if math.isfinite(found):
            self._first.setdefault(layout, results)
        return found


class NoRoomError(ValueError):
    """A layout does not fit the device's memory by the estimate of :mod:`attention_bench.memory`."""


def _inputs(size: int, settings: Settings) -> list[torch.Tensor]:
    """Return query, key, value and a gradient of the result, with new random numbers."""
    dtype, device = settings.case.dtype, settings.case.device
    shapes = [
        (settings.heads, settings.head_dim),
        (settings.kv_heads, settings.head_dim),
        (settings.kv_heads, settings.value_dim),
        (settings.heads, settings.value_dim),
    ]
    tensors = [torch.randn(size, *shape, dtype=dtype, device=device) for shape in shapes]
    return [*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3]]


def _rows(inputs: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Return the first rows of inputs; if there are more, as new leaves."""
    if inputs[0].shape[0] == size:
        return inputs
    return [*(tensor.detach()[:size].requires_grad_() for tensor in inputs[:3]), inputs[3][:size]]


def difference(results: list[torch.Tensor], first: list[torch.Tensor]) -> float:
    """Return the largest distance of results from others in the norm; NaN if any has a number that is not finite."""
    found = [_apart(one, other) for one, other in zip(results, first, strict=True)]
    return max(found) if all(map(math.isfinite, found)) else math.nan


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the difference in the norm, relative to ``other``.

    Compares some rows at a time, because fp32 copies of all rows would take more memory than the measured calls.
    """
    apart, whole = torch.zeros(2, dtype=torch.float64, device=other.device)
    for ours, theirs in zip(one.split(_ROWS_AT_ONCE), other.split(_ROWS_AT_ONCE), strict=True):
        truth = theirs.float()
        apart += (ours.float() - truth).square().sum()
        whole += truth.square().sum()
    return float((apart / whole.clamp_min(1e-60)).sqrt())
