#!/usr/bin/env python3
"""Measure the fold ratio after slime cuts the rows of its steps into micro-batches for data-parallel ranks.

    SLIME_PATH=~/slime benchmarks/slime_dealing.py  # a checkout; writes results/slime_dealing.json

Micro-batches are those of slime's ``build_dp_schedule``. Rows can share tokens only in one micro-batch.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from inside import QUICKSTART, rollouts
from verl_dealing import ANSWERS, rows_of

from mcore_prefix_tree import Sample, fold

sys.path.insert(0, os.environ["SLIME_PATH"])
from slime.utils.dp_schedule import build_dp_schedule

RESULTS = Path(__file__).parent / "results" / "slime_dealing.json"
RANKS = (1, 4, 8, 16)
PROMPT, ANSWER, STEP = 2048, 512, 256
# Of Qwen3-8B, for slime's FLOPs.
MODEL = {
    "num_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128,
    "ffn_hidden_size": 12288, "vocab_size": 151936, "num_experts": None,
}  # fmt: skip
# Ways to cut micro-batches, by the option of slime's command line: dynamically, and by FLOPs.
WAYS = {
    f"--micro-batch-size {ANSWERS}": (False, False),
    "--use-dynamic-batch-size": (True, False),
    "--balance-by-flops": (True, True),
}


def measure(rows: list[Sample], way: str, ranks: int, step: int, budget: int, group: int) -> dict[str, Any]:
    """Fold ratio, and the number of micro-batches, of the steps of these rows."""
    dynamic, by_flops = WAYS[way]
    how = {"use_dynamic_batch_size": dynamic, "balance_by_flops": by_flops, "balance_data": by_flops}
    args = Namespace(micro_batch_size=group, max_tokens_per_gpu=budget, **how, **MODEL)
    layout = {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    lengths = [len(row) for row in rows]
    order = list(range(len(rows)))
    taken, cut, _, _ = build_dp_schedule(args, layout, lengths, global_batch_size=step, rollout_indices=order)
    batches = [[mine[at] for at in batch] for mine, of_rank in zip(taken, cut, strict=True) for batch in of_rank]
    assert sorted(row for batch in batches for row in batch) == order
    unique = sum(fold([rows[row] for row in batch]).physical_tokens for batch in batches)
    return {"way": way, "ranks": ranks, "fold_ratio": sum(lengths) / unique, "micro_batches": len(batches)}


def main() -> None:
    """Write the result file."""
    generated = [Sample(tokens=row) for row in rows_of(PROMPT, ANSWER)[0]]
    shipped = rollouts(QUICKSTART, 0, sys.maxsize)
    workloads = {
        f"{ANSWERS} answers of {ANSWER} tokens to prompts of {PROMPT:,}, log-normal": (generated, STEP, 32768, ANSWERS),
        f"{len(shipped)} turns of the shipped rollouts": (shipped, len(shipped), 8192, 0),
    }
    results = []
    for name, (rows, step, budget, group) in workloads.items():
        ways = WAYS if group else list(WAYS)[1:]
        measured = [measure(rows, way, ranks, step, budget, group) for way in ways for ranks in RANKS]
        tokens = sum(map(len, rows))
        of_steps = [rows[start : start + step] for start in range(0, len(rows), step)]
        bound = tokens / sum(fold(part).physical_tokens for part in of_steps)
        results.append({"name": name, "step": step, "budget": budget, "bound": bound, "results": measured})
        print(json.dumps(results[-1], indent=1), flush=True)
    RESULTS.write_text(json.dumps({"workloads": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
