"""Part ``head``: the vocabulary heads and cases of ``scripts/bench_head.py``."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import bench_head
import torch

from gpu_check_parts.context import Context
from gpu_check_parts.results import FAILED
from mcore_prefix_tree.utils.memory import available_bytes

# The size of a model with a large vocabulary first.
CASES = ((16384, 4096, 131072), (16384, 2048, 32768), (32768, 4096, 131072))
SMOKE_CASES = ((8, 32, 256),)
PACKAGES = ("torch", "triton", "liger-kernel")


def needed_bytes(rows: int, hidden: int, vocab: int) -> int:
    """Return the largest memory of a head: logits in 16 bits and in fp32, each with a gradient, and exact gradients."""
    return rows * vocab * 12 + (rows + vocab) * hidden * (2 + 2 + 8 + 8)


def run(context: Context) -> None:
    """Measure each case, all rows supervised first."""
    device = torch.device("cuda")
    for sizes in SMOKE_CASES if context.options.smoke else CASES:
        for supervised in bench_head.SUPERVISED:
            rows, hidden, vocab = sizes
            name = f"{rows} x {hidden} x {vocab}, {supervised:.0%} scored"
            if context.options.wants(name):
                _run_case(context, name, (*sizes, supervised), device)


def _run_case(context: Context, name: str, sizes: tuple[int, int, int, float], device: torch.device) -> None:
    ways, missing = bench_head.ways(device)
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
    made = bench_head.Case(*sizes, torch.bfloat16, device)
    for kept in (None, *made.kept):
        runs = {way: run for way, run in wanted.items() if bench_head.kept_by(run) == kept}
        key = context.key(name, "exact gradients" if kept is None else f"exact gradients, {kept} kept")
        exact: list[torch.Tensor] = []
        if not runs or key in context.skip or not context.measure(key, {}, partial(_prepare, made, kept, exact)):
            continue
        for way, run in runs.items():
            found = partial(_way, run, made, exact, context.options.repeats)
            context.measure(context.key(name, way), used, lambda found=found: {**found(), **about}, also=about)  # type: ignore[misc]
            torch.cuda.empty_cache()


def _prepare(case: bench_head.Case, kept: int | None, exact: list[torch.Tensor]) -> dict[str, Any]:
    exact += bench_head.exact_gradients(case, None if kept is None else case.kept[kept].kept)
    return {"shown": "computed in fp64"}


def _way(run: Any, case: bench_head.Case, exact: list[torch.Tensor], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = bench_head.tried(run, case, tuple(exact))
    if FAILED in found:
        return found
    found["seconds"] = [bench_head.seconds(run, case) for _ in range(repeats)]
    found["median_seconds"] = statistics.median(found["seconds"])
    found["shown"] = (
        f"{found['median_seconds'] * 1e3:.1f} ms, gradient error {found['gradient_error']:.0e}, "
        f"{found['bytes_per_logit']:.0f} bytes per logit beside the products"
    )
    return found
