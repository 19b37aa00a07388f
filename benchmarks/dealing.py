#!/usr/bin/env python3
"""Measure the fold ratio after a trainer distributes the rows of a step over data-parallel ranks.

    VERL_USE_EXTERNAL_PLUGINS=none benchmarks/dealing.py verl    # needs verl; writes results/verl_dealing.json
    SLIME_PATH=~/slime benchmarks/dealing.py slime               # a checkout; writes results/slime_dealing.json

verl: its ``get_seqlen_balanced_partitions`` distributes rows, as in its V1 trainer, and complete groups are distributed
as in the trainers of ``mcore_prefix_tree.integrations.verl``. Sharing is counted per mini-batch of a rank, without a
budget of tokens. slime: its ``build_dp_schedule`` makes micro-batches, and rows share tokens only in one of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import Namespace
from itertools import batched
from typing import Any

import numpy as np
import torch
from inside import QUICKSTART, RESULTS, rollouts, write

from mcore_prefix_tree import Sample, fold

PROMPTS, ANSWERS = 256, 8
# Mean tokens of a prompt and an answer.
LENGTHS = ((512, 512), (2048, 512), (4096, 1024))
RANKS = {"verl": (1, 4, 8, 16, 32), "slime": (1, 4, 8, 16)}
UPDATES = (1, 4)
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


def rows_of(prompt: int, answer: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows of a step, prompt by prompt, and the length of each prompt; lengths are log-normal around their means."""
    rng = np.random.default_rng(0)

    def length(mean: int, spread: float) -> int:
        return max(1, int(mean * rng.lognormal(-spread * spread / 2, spread)))

    rows, prompts, token = [], [], 0
    for _ in range(PROMPTS):
        begin = np.arange(token, token := token + length(prompt, 0.5), dtype=np.int32)
        prompts.append(len(begin))
        for _ in range(ANSWERS):
            end = np.arange(token, token := token + length(answer, 0.7), dtype=np.int32)
            rows.append(np.concatenate([begin, end]))
    return rows, np.array(prompts)


def deal_rows(lengths: np.ndarray, ranks: int, updates: int) -> list[list[list[int]]]:
    """Rows of each mini-batch of each rank, as verl distributes them."""
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    workload = calculate_workload(torch.from_numpy(lengths))
    parts = get_seqlen_balanced_partitions(workload.tolist(), k_partitions=ranks, equal_size=True)
    return [[list(step) for step in batched(part, len(part) // updates)] for part in parts]


def measure_verl(lengths: np.ndarray, prompts: np.ndarray, dealt: list[list[list[int]]]) -> dict[str, float]:
    """Fold ratio, and unique tokens of the fullest rank over the mean: of the step, and summed over its updates."""

    def unique_tokens(rows: list[int]) -> int:
        group = np.array(rows) // ANSWERS
        return int((lengths[rows] - prompts[group]).sum() + prompts[np.unique(group)].sum())

    unique = np.array([[unique_tokens(step) for step in rank] for rank in dealt])
    of_ranks = unique.sum(axis=1)
    return {
        "fold_ratio": int(lengths.sum()) / int(unique.sum()),
        "fullest_rank": float(of_ranks.max() / of_ranks.mean()),
        "fullest_of_updates": float(unique.max(axis=0).sum() / of_ranks.mean()),
    }


def verl() -> None:
    """Write the result file of verl."""
    from mcore_prefix_tree.integrations.verl.dealing import deal_groups, group_rows

    result: dict[str, Any] = {"prompts": PROMPTS, "answers": ANSWERS, "results": []}
    for prompt, answer in LENGTHS:
        rows, prompts = rows_of(prompt, answer)
        lengths = np.array([len(row) for row in rows])
        groups = group_rows(rows, [row // ANSWERS for row in range(len(rows))])
        for updates in UPDATES:
            for ranks in RANKS["verl"]:
                whole = deal_groups(groups, ranks=ranks, mini_batches=updates)
                by_group = [[[row for group in step for row in group.rows] for step in rank] for rank in whole]
                about = {"prompt": prompt, "answer": answer, "updates": updates, "ranks": ranks}
                dealt = {"rows": deal_rows(lengths, ranks, updates), "groups": by_group}
                found = {name: measure_verl(lengths, prompts, one) for name, one in dealt.items()}
                result["results"].append(about | found)
                write(result, "results", RESULTS / "verl_dealing.json")


def measure_slime(rows: list[Sample], way: str, ranks: int, step: int, budget: int, group: int) -> dict[str, Any]:
    """Fold ratio, and the number of micro-batches, of the steps of these rows."""
    from slime.utils.dp_schedule import build_dp_schedule

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


def slime() -> None:
    """Write the result file of slime."""
    sys.path.insert(0, os.environ["SLIME_PATH"])
    prompt, answer = LENGTHS[1]
    generated = [Sample(tokens=row) for row in rows_of(prompt, answer)[0]]
    shipped = rollouts(QUICKSTART, 0, sys.maxsize)
    workloads = {
        f"{ANSWERS} answers of {answer} tokens to prompts of {prompt:,}, log-normal": (generated, 256, 32768, ANSWERS),
        f"{len(shipped)} turns of the shipped rollouts": (shipped, len(shipped), 8192, 0),
    }
    result: dict[str, Any] = {"workloads": []}
    for name, (rows, step, budget, group) in workloads.items():
        ways = WAYS if group else list(WAYS)[1:]
        measured = [measure_slime(rows, way, n, step, budget, group) for way in ways for n in RANKS["slime"]]
        steps = [rows[start : start + step] for start in range(0, len(rows), step)]
        bound = sum(map(len, rows)) / sum(fold(part).physical_tokens for part in steps)
        row = {"name": name, "step": step, "budget": budget, "bound": bound, "results": measured}
        result["workloads"].append(row)
        write(result, "workloads", RESULTS / "slime_dealing.json")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=RANKS)
    {"verl": verl, "slime": slime}[parser.parse_args().trainer]()
