"""Measure time, memory and metadata of every attention method, on the same forests in the same process.

Legend: T tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from attention_bench.clock import Ceilings, measure_ceilings
from attention_bench.contest import Contest, why_not
from attention_bench.contestants import Contestant, contestants, peers
from attention_bench.settings import Row, Settings
from attention_bench.workloads import Workload
from mcore_prefix_tree.attention.auto import TreeShape
from mcore_prefix_tree.attention.tile_blocks import visible_pairs
from mcore_prefix_tree.bench.machine import describe_machine


@dataclass(frozen=True, kw_only=True)
class WorkloadResult:
    """All rows of a workload.

    Attributes:
        name: name of the workload.
        tokens: T, tokens of the forest.
        pairs: visible pairs of the forest.
        unfolded_tokens: tokens of its samples.
        unfolded_pairs: visible pairs of its samples.
        nodes: nodes of the forest.
        shape: shape of the forest, as ``attention_backend=auto`` compares it.
        rows: methods that ran.
        missing: method, layout and reason of methods that did not run.
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
    """A complete benchmark, as in its JSON file."""

    machine: dict[str, object]
    settings: Settings
    ceilings: Ceilings
    workloads: list[WorkloadResult]

    def to_json(self) -> dict[str, Any]:
        """For ``json.dump``."""
        return {"kind": "attention", **asdict(self)}


def bench_attention(
    workloads: Sequence[Workload],
    settings: Settings,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
    on_result: Callable[[AttentionResult], None] = lambda result: None,
) -> AttentionResult:
    """Measure all methods that can run. Peers come last, because an error of CUDA ends all later work.

    Args:
        workloads: the forests.
        settings: settings of the calls.
        on_progress: called with the name of the next measurement.
        on_result: called with all results so far, after each workload and again after its peers.
    """
    on_progress("the machine's ceilings")
    ceilings = measure_ceilings(settings.case.device, settings.case.dtype)
    machine = describe_machine()
    done: list[WorkloadResult] = []

    def result() -> AttentionResult:
        return AttentionResult(machine=machine, settings=settings, ceilings=ceilings, workloads=list(done))

    for workload in workloads:
        on_progress(workload.name)
        done.append(_bench_workload(workload, settings))
        on_result(result())
    for place, workload in enumerate(workloads):
        theirs = list(peers(workload.folded(_HOST), settings.case))
        if any(peer.refusal is None for peer in theirs):
            on_progress(f"{workload.name}, peers")
        done[place] = _with_peers(done[place], workload, theirs, settings)
        on_result(result())
    return result()


_HOST = torch.device("cpu")


def _bench_workload(workload: Workload, settings: Settings) -> WorkloadResult:
    # Counted on the host, so that they are also known after an error on the GPU.
    forest, unfolded = workload.folded(_HOST), workload.unfolded(_HOST)
    rows, missing = _measure(workload, contestants(forest, settings.case), settings)
    return WorkloadResult(
        name=workload.name,
        tokens=forest.num_tokens,
        pairs=visible_pairs(forest),
        unfolded_tokens=unfolded.num_tokens,
        unfolded_pairs=visible_pairs(unfolded),
        nodes=forest.num_nodes,
        shape=TreeShape.of([forest]),
        rows=rows,
        missing=missing,
    )


def _with_peers(
    result: WorkloadResult, workload: Workload, theirs: list[Contestant], settings: Settings
) -> WorkloadResult:
    """Return the result with rows of the peers, which are compared with the first method of the result."""
    first = next(((row.method, row.deterministic) for row in result.rows if row.layout == "tree"), None)
    yardstick = next(
        (
            one
            for one in contestants(workload.folded(_HOST), settings.case)
            if one.layout == "tree" and (one.method, one.options.deterministic) == first
        ),
        None,
    )
    rows, missing = _measure(workload, theirs, settings, yardstick=yardstick)
    return replace(result, rows=result.rows + rows, missing=result.missing + missing)


def _measure(
    workload: Workload, entered: Iterable[Contestant], settings: Settings, *, yardstick: Contestant | None = None
) -> tuple[list[Row], list[dict[str, str]]]:
    """Return the rows of methods that ran; and method, layout and reason of the others.

    Args:
        workload: the forest.
        entered: contestants, including those that cannot run.
        settings: settings of the calls.
        yardstick: see :meth:`Contest.set_yardstick`; None compares with the first on each layout.
    """
    contest, entered = Contest(workload, settings), list(entered)
    if yardstick is not None and any(contestant.refusal is None for contestant in entered):
        why_not(lambda: contest.set_yardstick(yardstick))
    for contestant in entered:
        contest.enter(contestant)
    contest.run(settings.repeats)
    return [runner.row() for runner in contest.runners], contest.missing
