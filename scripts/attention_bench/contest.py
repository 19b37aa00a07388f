"""Run contestants on the same tensors: each is warmed up and compared with the first, then all are timed in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from attention_bench.contestants import Contestant
from attention_bench.settings import Settings, misfit, parts_that_fit
from attention_bench.workloads import Workload, chains
from mcore_prefix_tree.attention.tile_blocks import BlockPlan, visible_pairs
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.memory import PeakMemory, available_bytes

T = TypeVar("T")

# Of the norm. Sound 16-bit kernels are within 4e-3 of each other; the speed of a wrong result means nothing.
LARGEST_DIFFERENCE = 5e-2
# Numbers of a result that are compared at a time.
_ROWS_AT_ONCE = 8192
# Two milliseconds of a GPU at 2 GHz.
_HEAD_START_CYCLES = 4_000_000
# Size of the work that measures the ceilings.
_REPEATS = 5


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; return at once for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run on the device: by events on a GPU, by the clock on a CPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # On an idle stream `begin` would be over before the host has launched anything, and the time would be that of the
    # launches. So the GPU sleeps first, while the host gets ahead: the work after `begin` runs back to back. If the
    # host needs longer than this to launch the work, the time includes the rest of its launches.
    torch.cuda._sleep(_HEAD_START_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> dict[str, float]:
    """Return the best rate of a matrix product and the median of a copy, whose bytes are read and written.

    They use random numbers, because zeros take less power and less time. ``small`` work has meaningless rates.
    """
    size, count = (64, 1 << 12) if small else (8192, 1 << 30) if device.type == "cuda" else (1024, 1 << 24)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    numbers = torch.randn(count, device=device, dtype=torch.float32)
    copy = torch.empty_like(numbers)

    def product() -> None:
        torch.mm(one, other)

    def copying() -> None:
        copy.copy_(numbers)

    product()
    copying()
    seconds = [[seconds_of(run, device) for _ in range(_REPEATS)] for run in (product, copying)]
    return {
        "matrix_tflops": 2 * size**3 / min(seconds[0]) / 1e12,
        "copy_gbytes": 2 * numbers.nbytes / statistics.median(seconds[1]) / 1e9,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedMetadata(TreeMetadata):
    """Metadata that records the time to build each plan derived from it, with the plans that it derives in turn."""

    build_seconds: list[float] = field(default_factory=list)
    open_builds: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, metadata: TreeMetadata) -> TimedMetadata:
        """Return the same forest without derived plans."""
        return cls(**{name: getattr(metadata, name) for name in TreeMetadata.__dataclass_fields__ if name != "cache"})

    def derived(self, name: str, build: Callable[[TreeMetadata], T]) -> T:
        """Build a plan on a clock that waits for the device."""
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

    def row(self) -> dict[str, Any]:
        """Return the results so far; ``peak_bytes`` and ``difference`` are those of the first part."""
        plans = [plan for part in self.parts for plan in part.metadata.cache.values() if isinstance(plan, BlockPlan)]
        return {
            "name": self.contestant.method,
            "layout": self.contestant.layout,
            "deterministic": self.contestant.options.deterministic,
            "tokens": sum(part.metadata.num_tokens for part in self.parts),
            "pairs": sum(visible_pairs(part.metadata) for part in self.parts),
            "forward_seconds": list(self.forward_seconds),
            "backward_seconds": list(self.backward_seconds),
            "metadata_seconds": self.metadata_seconds,
            "peak_bytes": self.peak_bytes,
            "tile_efficiency": {f"{plan.query_block}x{plan.key_block}": plan.efficiency for plan in plans},
            "difference": self.difference,
            "parts": len(self.parts),
        }


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
        """Return the runner, or why its result is wrong: compared with the yardstick, else with the first right one."""
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
    """A layout does not fit the device's memory by the estimate of :func:`misfit`."""


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
