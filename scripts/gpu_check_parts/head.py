"""Part ``head``: the ways of :mod:`gpu_check_parts.heads`, round by round in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gpu_check_parts import heads
from gpu_check_parts.context import Context
from gpu_check_parts.heads import Case
from gpu_check_parts.results import Key
from mcore_prefix_tree.utils.memory import PeakMemory, available_bytes

Way = Callable[[Case], torch.Tensor]

# Rows, hidden size and vocabulary; the size of a model with a large vocabulary first.
CASES = ((16384, 4096, 131072), (16384, 2048, 32768), (32768, 4096, 131072))
SMOKE_CASES = ((8, 32, 256),)
SUPERVISED = (1.0, 0.4)
PACKAGES = ("torch", "triton", "liger-kernel")


def needed_bytes(rows: int, hidden: int, vocab: int) -> int:
    """Return the largest memory of a head: logits in 16 bits and in fp32, each with a gradient, and exact gradients."""
    return rows * vocab * 12 + (rows + vocab) * hidden * (2 + 2 + 8 + 8)


def run(context: Context) -> None:
    """Measure the standard cases."""
    run_cases(context, SMOKE_CASES if context.options.smoke else CASES, torch.device("cuda"))


def run_cases(context: Context, cases: Sequence[tuple[int, int, int]], device: torch.device) -> None:
    """Measure each case, all rows supervised first."""
    for rows, hidden, vocab in cases:
        for supervised in SUPERVISED:
            name = f"{rows} x {hidden} x {vocab}, {supervised:.0%} scored"
            if context.options.wants(name):
                _run_case(context, name, (rows, hidden, vocab, supervised), device)


def _run_case(context: Context, name: str, sizes: tuple[int, int, int, float], device: torch.device) -> None:
    ways, missing = heads.ways(device)
    used = context.used(*PACKAGES, sources=("mcore_prefix_tree/logprob",), rounds=context.options.repeats)
    about = dict(zip(("rows", "hidden", "vocab", "supervised"), sizes, strict=True))
    for way, reason in missing.items():
        context.leave_out(context.key(name, way), used, reason, **about)
    wanted = {way: run for way, run in ways.items() if not context.is_done(context.key(name, way), used)}
    if not wanted:
        return
    needed, free = needed_bytes(*sizes[:3]), available_bytes(device)
    if needed > free:
        reason = f"it would need about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"
        for way in wanted:
            context.leave_out(context.key(name, way), used, reason, **about)
        return
    made = Case(*sizes, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    running: list[tuple[Key, Way, dict[str, Any]]] = []
    for kept in (None, *made.kept):
        runs = {way: run for way, run in wanted.items() if heads.kept_by(run) == kept}
        key = context.key(name, "exact gradients" if kept is None else f"exact gradients, {kept} kept")
        exact: list[torch.Tensor] = []
        if not runs or key in context.skip or not context.measure(key, {}, partial(_prepare, made, kept, exact)):
            continue
        for way, run in runs.items():
            key, row = context.key(name, way), {**about, "seconds": []}
            enter = partial(_enter, run, made, exact, row, context.options.repeats)
            if context.measure(key, used, enter, also=about):
                running.append((key, run, row))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for _ in range(context.options.repeats - 1):
        for entry in list(running):
            key, run, row = entry
            again = partial(_round, run, made, row, context.options.repeats)
            if not context.measure(key, used, again, also=about):
                running.remove(entry)


def _prepare(case: Case, kept: int | None, exact: list[torch.Tensor]) -> dict[str, Any]:
    exact += heads.exact_gradients(case, None if kept is None else case.kept[kept].kept)
    return {"shown": "computed in fp64"}


def _enter(run: Way, case: Case, exact: list[torch.Tensor], row: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Return the row of a way with its error, memory and first round."""
    row["gradient_error"] = heads.error(run, case, tuple(exact))
    case.hidden.grad = case.weight.grad = None
    peak = PeakMemory(case.hidden.device)
    heads.seconds(run, case)
    row["peak_bytes"] = peak.bytes()
    row["bytes_per_logit"] = heads.bytes_per_logit(run, case)
    return _round(run, case, row, repeats)


def _round(run: Way, case: Case, row: dict[str, Any], repeats: int) -> dict[str, Any]:
    row["seconds"].append(heads.seconds(run, case))
    row["median_seconds"] = statistics.median(row["seconds"])
    row["shown"] = (
        f"{row['median_seconds'] * 1e3:.1f} ms, gradient error {row['gradient_error']:.0e}, "
        f"{row['bytes_per_logit']:.0f} bytes per logit beside the products"
    )
    return row | {"unfinished": True} if len(row["seconds"]) < repeats else dict(row)
