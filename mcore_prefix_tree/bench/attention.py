"""Time, memory and metadata of every way to attend, on the same forests in the same process.

Legend: T tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from mcore_prefix_tree.attention import AttentionOptions, Case
from mcore_prefix_tree.attention.auto import TreeShape
from mcore_prefix_tree.attention.blocks import BlockPlan, visible_pairs
from mcore_prefix_tree.bench.contestants import Contestant, contestants
from mcore_prefix_tree.bench.machine import Ceilings, describe_machine, measure_ceilings, seconds_of
from mcore_prefix_tree.bench.workloads import Workload
from mcore_prefix_tree.mcore.train.memory import PeakMemory
from mcore_prefix_tree.metadata import TreeMetadata

T = TypeVar("T")

# How the reason begins where a method should have run and did not.
FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        heads: H.
        kv_heads: K.
        head_dim: D.
        value_dim: W.
        dtype: name of a torch dtype.
        device: ``cuda`` or ``cpu``.
        repeats: timed rounds, in each of which every method runs once.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str
    repeats: int

    @property
    def case(self) -> Case:
        """As back-ends judge it."""
        device = torch.device(self.device)
        return Case(
            device=device,
            capability=torch.cuda.get_device_capability() if device.type == "cuda" else None,
            dtype=getattr(torch, self.dtype),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            needs_grad=True,
            options=AttentionOptions(softmax_scale=1 / math.sqrt(self.head_dim)),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one layout of one workload.

    Attributes:
        method: its name.
        layout: ``tree``, ``unfolded`` or ``dense``.
        deterministic: whether it was asked for the same bits twice.
        tokens: of the layout.
        pairs: visible ones of the layout.
        forward_seconds, backward_seconds: of each round.
        metadata_seconds: for what is derived from a micro-batch once, and shared by its layers.
        peak_bytes: beyond inputs, of forward and backward; None where it cannot be known.
        tile_efficiency: visible pairs over visited ones, by block size, of methods that visit blocks of our lists.
        difference: relative, in the norm, of out, dQ, dK and dV from the first method on the same layout; the largest.
    """

    method: str
    layout: str
    deterministic: bool
    tokens: int
    pairs: int
    forward_seconds: list[float]
    backward_seconds: list[float]
    metadata_seconds: float
    peak_bytes: int | None
    tile_efficiency: dict[str, float]
    difference: float

    @property
    def seconds(self) -> list[float]:
        """Forward and backward of each round."""
        return [sum(both) for both in zip(self.forward_seconds, self.backward_seconds, strict=True)]


@dataclass(frozen=True, kw_only=True)
class WorkloadResult:
    """All rows of a workload.

    Attributes:
        name: of the workload.
        tokens: T, of the forest.
        pairs: its visible ones.
        unfolded_tokens: of its samples.
        unfolded_pairs: theirs.
        nodes: of the forest.
        shape: of the forest, as ``attention_backend=auto`` compares it.
        rows: what ran.
        missing: method, layout and reason of what did not.
    """

    name: str
    tokens: int
    pairs: int
    unfolded_tokens: int
    unfolded_pairs: int
    nodes: int
    shape: TreeShape
    rows: list[Row]
    missing: list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class AttentionResult:
    """A whole benchmark, as its JSON file holds it."""

    machine: dict[str, object]
    settings: Settings
    ceilings: Ceilings
    workloads: list[WorkloadResult]

    def to_json(self) -> dict[str, Any]:
        """For ``json.dump``."""
        return {"kind": "attention", **asdict(self)}


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedMetadata(TreeMetadata):
    """Metadata that knows how long the plans derived from it took to make.

    Attributes:
        build_seconds: of each plan, without those that it derived in turn.
        open_builds: names of the plans that are being made.
    """

    build_seconds: list[float] = field(default_factory=list)
    open_builds: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, metadata: TreeMetadata) -> TimedMetadata:
        """The same forest, with nothing derived yet."""
        return cls(**{name: getattr(metadata, name) for name in TreeMetadata.__dataclass_fields__ if name != "cache"})

    def derived(self, name: str, build: Callable[[TreeMetadata], T]) -> T:
        """As the base class, on a clock that waits for the device."""
        if name in self.cache or self.open_builds:
            return super().derived(name, build)
        self.open_builds.append(name)
        started = time.perf_counter()
        plan = super().derived(name, build)
        if self.subtree_end.is_cuda:
            torch.cuda.synchronize(self.subtree_end.device)
        self.build_seconds.append(time.perf_counter() - started)
        self.open_builds.pop()
        return plan


class _Runner:
    """One contestant on its inputs."""

    def __init__(self, contestant: Contestant, metadata: TreeMetadata, inputs: list[torch.Tensor]) -> None:
        self.contestant = contestant
        self.metadata = metadata
        self.inputs = inputs[:3]
        self.grad_out = inputs[3]
        self.forward_seconds: list[float] = []
        self.backward_seconds: list[float] = []
        self.metadata_seconds = 0.0
        self.peak_bytes: int | None = None
        self.difference = 0.0

    def forward(self) -> torch.Tensor:
        query, key, value = self.inputs
        return self.contestant.attention(query, key, value, self.metadata, self.contestant.options)

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.grad_out)

    def warm_up(self) -> list[torch.Tensor]:
        """Compile, then plan and measure memory on fresh metadata; out, dQ, dK and dV."""
        self.backward(self.forward())
        timed = self.metadata = TimedMetadata.of(self.metadata)
        self.forward()
        self.metadata_seconds = sum(timed.build_seconds)
        peak = PeakMemory(self.grad_out.device)
        out = self.forward()
        results = [out.detach(), *self.backward(out)]
        self.peak_bytes = peak.bytes()
        return results

    def run(self) -> None:
        """One timed round."""
        device = self.grad_out.device
        out: list[torch.Tensor] = []
        self.forward_seconds.append(seconds_of(lambda: out.append(self.forward()), device))
        self.backward_seconds.append(seconds_of(lambda: self.backward(out[0]), device))

    def row(self) -> Row:
        plans = [plan for plan in self.metadata.cache.values() if isinstance(plan, BlockPlan)]
        return Row(
            method=self.contestant.method,
            layout=self.contestant.layout,
            deterministic=self.contestant.options.deterministic,
            tokens=self.metadata.num_tokens,
            pairs=visible_pairs(self.metadata),
            forward_seconds=self.forward_seconds,
            backward_seconds=self.backward_seconds,
            metadata_seconds=self.metadata_seconds,
            peak_bytes=self.peak_bytes,
            tile_efficiency={f"{plan.query_block}x{plan.key_block}": plan.efficiency for plan in plans},
            difference=self.difference,
        )


def bench_attention(
    workloads: Sequence[Workload], settings: Settings, *, on_progress: Callable[[str], None] = lambda text: None
) -> AttentionResult:
    """Measure everything that runs.

    Args:
        workloads: the forests.
        settings: of the calls.
        on_progress: is told what is about to be measured.
    """
    on_progress("the machine's ceilings")
    ceilings = measure_ceilings(settings.case.device, settings.case.dtype)
    results = []
    for workload in workloads:
        on_progress(workload.name)
        results.append(_bench_workload(workload, settings))
    return AttentionResult(machine=describe_machine(), settings=settings, ceilings=ceilings, workloads=results)


def _bench_workload(workload: Workload, settings: Settings) -> WorkloadResult:
    case = settings.case
    layouts = {
        "tree": workload.folded(case.device),
        "unfolded": workload.unfolded(case.device),
        "dense": workload.dense(case.device),
    }
    inputs = {name: _inputs(metadata.padded_size, settings) for name, metadata in layouts.items()}
    missing: list[dict[str, str]] = []
    runners: list[_Runner] = []
    first: dict[str, list[torch.Tensor]] = {}
    for contestant in contestants(layouts["tree"], case):
        layout = contestant.layout

        def is_missing(reason: str, contestant: Contestant = contestant) -> None:
            missing.append({"method": contestant.method, "layout": contestant.layout, "reason": reason})

        if contestant.refusal is not None:
            is_missing(contestant.refusal)
            continue
        runner = _Runner(contestant, layouts[layout], inputs[layout])
        try:
            results = runner.warm_up()
        except torch.OutOfMemoryError:
            is_missing("out of memory")
            continue
        except Exception as error:  # one that fails must not cost the measurements of all others
            is_missing(f"{FAILED}: {type(error).__name__}: {' '.join(str(error).split())}")
            continue
        runner.difference = _difference(results, first.setdefault(layout, results))
        if not math.isfinite(runner.difference):
            is_missing(f"{FAILED}: its result is not finite")
            continue
        runners.append(runner)
    # In turn, so that a machine whose speed drifts slows all of them.
    for _ in range(settings.repeats):
        for runner in runners:
            runner.run()
    unfolded = layouts["unfolded"]
    return WorkloadResult(
        name=workload.name,
        tokens=layouts["tree"].num_tokens,
        pairs=visible_pairs(layouts["tree"]),
        unfolded_tokens=unfolded.num_tokens,
        unfolded_pairs=visible_pairs(unfolded),
        nodes=layouts["tree"].num_nodes,
        shape=TreeShape.of([layouts["tree"]]),
        rows=[runner.row() for runner in runners],
        missing=missing,
    )


def _inputs(size: int, settings: Settings) -> list[torch.Tensor]:
    """query, key, value and a gradient of the result: fresh random numbers."""
    dtype, device = settings.case.dtype, settings.case.device
    shapes = [
        (settings.heads, settings.head_dim),
        (settings.kv_heads, settings.head_dim),
        (settings.kv_heads, settings.value_dim),
        (settings.heads, settings.value_dim),
    ]
    tensors = [torch.randn(size, *shape, dtype=dtype, device=device) for shape in shapes]
    return [*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3]]


def _difference(results: list[torch.Tensor], first: list[torch.Tensor]) -> float:
    return max(
        float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30))
        for one, other in zip(results, first, strict=True)
    )
