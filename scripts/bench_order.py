#!/usr/bin/env python3
"""Measure the fold ratio of training steps, with shuffled samples and with steps planned for folding.

    scripts/bench_order.py ../shared/data/tau_bench_airline_gpt4o.jsonl

A conversation becomes one sample per assistant turn. Rollout engines write these as one line, whose turns stay together
in training, or as one line per turn.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_prefix_tree.bench.machine import describe_machine
from mcore_prefix_tree.data import LineOptions, iter_sample_groups, load_tokenizer
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.plan import report_steps
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.utils.choices import Order

STEPS = (16, 24, 64, 256)
ORDERS: tuple[Order, ...] = ("shuffled", "folded")


def measure(lines: list[list[Sample]], step: int, order: Order) -> dict[str, Any]:
    """Return the fold ratio of an epoch's steps, and the time to draw the first epoch and another one."""
    seconds = []
    drawn = SampleOrder(lines, seed=1234, order=order, step=step)
    for epoch in range(2):
        started = time.process_time()
        drawn.take(epoch * drawn.per_epoch, step)
        seconds.append(time.process_time() - started)
    return {"order": order, "step": step, "seconds": seconds, **asdict(report_steps(drawn.first_epoch()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--tokenizer", default="mistral-v7")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/order.json"))
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    conversations = list(iter_sample_groups(arguments.file, LineOptions(tokenizer=tokenizer, expand_turns=True)))
    samples = [sample for line in conversations for sample in line]
    whole = report_steps([samples])
    views = {"a line per conversation": conversations, "a line per turn": [[sample] for sample in samples]}
    results = [
        {"lines": name, **measure(lines, step, order)}
        for name, lines in views.items()
        for step in STEPS
        for order in ORDERS
    ]
    arguments.output.write_text(
        json.dumps(
            {
                "machine": describe_machine(),
                "samples": len(samples),
                "logical_tokens": sum(map(len, samples)),
                "fold_ratio": whole.fold_ratio.mean,
                "results": results,
            },
            indent=2,
        )
        + "\n"
    )
    for row in results:
        print(row["lines"], row["step"], row["order"], f"{row['fold_ratio']['mean']:.2f}", row["seconds"])


if __name__ == "__main__":
    main()
