#!/usr/bin/env python3
"""Measure the fold ratio after verl's trainer distributes the rows of a step over data-parallel ranks.

    VERL_USE_EXTERNAL_PLUGINS=none benchmarks/verl_dealing.py  # needs verl; writes results/verl_dealing.json

Rows are distributed by verl's ``get_seqlen_balanced_partitions``, as in its V1 trainer, and by complete groups, as in
the trainers of ``mcore_prefix_tree.integrations.verl``. Sharing is counted per mini-batch of a rank, without a budget
of tokens. Prompts and answers have random lengths and share no tokens.
"""

from __future__ import annotations

import json
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree.integrations.verl.dealing import deal_groups, group_rows

RESULTS = Path(__file__).parent / "results" / "verl_dealing.json"
PROMPTS, ANSWERS = 256, 8
# Mean tokens of a prompt and an answer.
LENGTHS = ((512, 512), (2048, 512), (4096, 1024))
RANKS = (1, 4, 8, 16, 32)
UPDATES = (1, 4)


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


def measure(lengths: np.ndarray, prompts: np.ndarray, dealt: list[list[list[int]]]) -> dict[str, float]:
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


def main() -> None:
    """Write the result file."""
    results: list[dict[str, Any]] = []
    for prompt, answer in LENGTHS:
        rows, prompts = rows_of(prompt, answer)
        lengths = np.array([len(row) for row in rows])
        groups = group_rows(rows, [row // ANSWERS for row in range(len(rows))])
        for updates in UPDATES:
            for ranks in RANKS:
                whole = deal_groups(groups, ranks=ranks, mini_batches=updates)
                by_group = [[[row for group in step for row in group.rows] for step in rank] for rank in whole]
                result = {
                    "prompt": prompt,
                    "answer": answer,
                    "updates": updates,
                    "ranks": ranks,
                    "rows": measure(lengths, prompts, deal_rows(lengths, ranks, updates)),
                    "groups": measure(lengths, prompts, by_group),
                }
                results.append(result)
                print(json.dumps(result), flush=True)
    RESULTS.write_text(json.dumps({"prompts": PROMPTS, "answers": ANSWERS, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
