"""Part ``tune``: other launches of the Triton kernels than the table's, by ``scripts/tune_triton.py``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import tune_triton

from gpu_check_parts.context import Context
from gpu_check_parts.results import FAILED
from gpu_check_parts.using import packages_of, sources_of

PARTS = ("forward", "key_value", "query", "key", "value")
DIMS = ((128, 128), (64, 64), (192, 128), (256, 256))
GROUPS = (8, 4, 1)
HEADS = 32


def run(context: Context) -> None:
    """Measure every part of every shape, on two trees."""
    smoke = context.options.smoke
    dims, groups, heads = (DIMS[1:2], (2,), 2) if smoke else (DIMS, GROUPS, HEADS)
    used = context.used(*packages_of("triton"), sources=(*sources_of("triton"), "scripts/tune_triton.py"))
    device = torch.device("cuda")
    for part in PARTS:
        for dim, tree, problem in tune_triton.problems(dims, groups, heads, 0.004 if smoke else 1.0, device):
            case = problem.case
            name = f"{dim[0]}/{dim[1]}, {case.heads} heads on {case.kv_heads}, {tree}"
            key = context.key(name, part)
            if context.is_done(key, used) or not context.options.wants(name) or not problem.launches(part, dim):
                continue
            about = {
                "head_dim": dim[0],
                "value_dim": dim[1],
                "heads": case.heads,
                "kv_heads": case.kv_heads,
                "dtype": str(case.dtype).removeprefix("torch."),
                "tree": tree,
                "tokens": problem.metadata.num_tokens,
            }
            context.measure(key, used, partial(_launches, problem, part, dim, context.options.repeats, about))


def _launches(problem: Any, part: str, dim: tuple[int, int], repeats: int, about: dict[str, Any]) -> dict[str, Any]:
    rows = tune_triton.measure(problem, part, dim, repeats)
    found: dict[str, Any] = {**about, "launches": rows}
    wrong = [row for row in rows if "failed" in row or (row["table"] and "skipped" in row)]
    if wrong:
        found[FAILED] = str(wrong[0].get("failed") or wrong[0]["skipped"])
    ratios = [row["ratio"]["median"] for row in rows if "ratio" in row]
    found["shown"] = f"{len(ratios)} of {len(rows)} launches, the best {max(ratios, default=1.0):.2f} times the table's"
    return found
