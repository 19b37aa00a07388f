"""Time, memory and metadata of every way to attend, on the same forests in the same process.

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


def bench_attention(
    workloads: Sequence[Workload],
    settings: Settings,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
    on_result: Callable[[AttentionResult], None] = lambda result: None,
) -> AttentionResult:
    """Measure everything that runs. Peers come last of all: an error of CUDA ends whatever comes after it.

    Args:
        workloads: the forests.
        settings: of the calls.
        on_progress: is told what is about to be measured.
        on_result: is given all that there is so far, after each workload and once more after its peers.
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
    # Counted on the host, so that they are known of a GPU that an error has ended too.
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
    """With rows of the peers, which are compared with the first method of the result."""
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
    """Rows of what ran; method, layout and reason of what did not.

    Args:
        workload: the forest.
        entered: those that cannot run among them.
        settings: of the calls.
        yardstick: see :meth:`Contest.set_yardstick`; None compares with the first on each layout.
    """
    contest, entered = Contest(workload, settings), list(entered)
    if yardstick is not None and any(contestant.refusal is None for contestant in entered):
        why_not(lambda: contest.set_yardstick(yardstick))
    for contestant in entered:
        contest.enter(contestant)
    contest.run(settings.repeats)
    return [runner.row() for runner in contest.runners], contest.missing
