#!/usr/bin/env python3
"""Measure how far the slowest rank is above the lower bound: plans by cost, by tokens, by count, and Karmarkar-Karp.

    scripts/bench_plan.py ../shared/data/tau_bench_airline_gpt4o.jsonl --expand-turns

In addition to the file itself, it plans several copies of the file, each with different tokens after the prompt that
all samples share (a larger global batch of the same lengths and tree shapes), and difficult synthetic inputs. The same
cost model judges all methods, after every rank has folded its samples, including each rank's repeated context.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mcore_prefix_tree import Sample
from mcore_prefix_tree.bench.machine import describe_machine as machine
from mcore_prefix_tree.data import load_tokenizer, read_samples
from mcore_prefix_tree.plan import CostModel, ForestPlan, ModelWork, plan_step, report_plan
from mcore_prefix_tree.plan.cuts import fewest_runs
from mcore_prefix_tree.plan.pack import Leaves, first_scored
from mcore_prefix_tree.trie import sort_samples
from mcore_prefix_tree.utils.choices import OverBudget

# A 7B model: 32 layers of 4096, grouped queries, a vocabulary of 131,072.
COST = CostModel.from_work(
    ModelWork.from_dimensions(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=131072,
        fused_head=True,
    )
)
# Karmarkar-Karp in Python is quadratic: with more than this many (items x ranks) it is skipped.
KK_LIMIT = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    samples: list[Sample]
    dp_size: int
    max_tokens: int
    over_budget: OverBudget = "repeat"


def cut_ranks(samples: Sequence[Sample], ranks: Sequence[Sequence[int]], max_tokens: int) -> ForestPlan:
    """Fold each rank's samples under the budget, in as few micro-batches as consecutive samples allow."""
    cut = []
    for indices in ranks:
        own = [samples[index] for index in indices]
        order, shared = sort_samples(own)
        lengths = np.array([len(own[index]) for index in order], dtype=np.int64)
        runs = fewest_runs(shared, lengths - shared, max_tokens)
        cut.append([tuple(indices[index] for index in order[start:end].tolist()) for start, end in runs])
    most = max(1, max(len(rank) for rank in cut))
    return ForestPlan(
        micro_batches=tuple((*rank, *[()] * (most - len(rank))) for rank in cut),
        physical_tokens=tuple((0,) * most for _ in cut),  # report_plan counts
    )


def by_count(case: Case) -> ForestPlan:
    """Give each rank the same number of samples, with neighbours in depth-first order together."""
    order, _ = sort_samples(case.samples)
    return cut_ranks(case.samples, [part.tolist() for part in np.array_split(order, case.dp_size)], case.max_tokens)


def karmarkar_karp(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Run the largest differencing method for ``parts`` sets (Karmarkar and Karp, 1982).

    It merges partial partitions, those with the largest spread first: the heaviest set of one with the lightest set of
    the other.
    """
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, cost in enumerate(costs):
        sets = [(0, [])] * (parts - 1) + [(cost, [index])]
        heapq.heappush(heap, (-cost, index, sets))
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, number, other = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda item: item[0])
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], number, merged))
    return [members for _, members in heap[0][2]] if heap else [[] for _ in range(parts)]


def by_karmarkar_karp(case: Case, *, leaves: bool) -> ForestPlan | None:
    """Run Karmarkar-Karp on the samples' costs, as rollout frameworks do, or on the cost that each leaf adds."""
    order, shared = sort_samples(case.samples)
    lengths = np.array([len(case.samples[index]) for index in order], dtype=np.int64)
    if leaves:
        items = Leaves.of_samples(shared, lengths, first_scored(case.samples, order, shared))
        costs = COST.units_of_path(items.length) - COST.units_of_path(items.context)
    else:
        scored = np.array([np.count_nonzero(case.samples[index].loss_mask[1:]) for index in order], dtype=np.int64)
        items = Leaves.every_sample(shared, lengths, scored)
        costs = COST.units_of_path(items.length)
    costs = costs + COST.units_of_scored(items.scored)
    if len(costs) * case.dp_size > KK_LIMIT:
        return None
    ranks = karmarkar_karp(costs.tolist(), case.dp_size)
    members = [
        [index for item in rank for index in order[items.start[item] : items.end[item]].tolist()] for rank in ranks
    ]
    return cut_ranks(case.samples, members, case.max_tokens)


def several_times(samples: list[Sample], copies: int) -> list[Sample]:
    """Return copies with different tokens after the prompt that all samples share."""
    _, shared = sort_samples(samples)
    prompt = int(shared[1:].min())
    largest = 1 + max(int(sample.tokens.max()) for sample in samples)
    more = list(samples)
    for copy in range(1, copies):
        for sample in samples:
            tokens = sample.tokens.copy()
            tokens[prompt:] += copy * largest
            more.append(Sample(tokens=tokens, loss_mask=sample.loss_mask, source=sample.source))
    return more


def groups(prompts: int, completions: int) -> list[Sample]:
    """Return completions of various lengths on long prompts that differ between groups."""
    rng = np.random.default_rng(0)
    samples = []
    for prompt in range(prompts):
        head = np.full(int(rng.integers(500, 8000)), prompt)
        tails = [np.full(int(rng.lognormal(7.3, 0.7)) + 1, 1000 + one) for one in range(completions)]
        samples += [Sample(tokens=np.concatenate([head, tail])) for tail in tails]
    return samples


def star(leaves: int, trunk: int, length: int) -> list[Sample]:
    """Return equal leaves on one trunk: each cut repeats the trunk."""
    return [Sample(tokens=np.r_[np.zeros(trunk), np.full(length, 1 + leaf)].astype(np.int64)) for leaf in range(leaves)]


def powers(count: int) -> list[Sample]:
    """Return samples that share nothing, with lengths over three orders of magnitude."""
    return [Sample(tokens=np.full(int(8 * 1.06**index), index)) for index in range(count)]


def one_turn(count: int, shared: int) -> list[Sample]:
    """Return samples of 100 tokens that have only the first ones in common."""
    rng = np.random.default_rng(0)
    return [Sample(tokens=np.r_[np.arange(shared), rng.integers(0, 32000, 100 - shared)]) for _ in range(count)]


def judge(case: Case) -> dict[str, Any]:
    started = time.process_time()  # one thread, so this is the time on an idle machine
    limits = {"max_tokens": case.max_tokens, "dp_size": case.dp_size, "cost_model": COST}
    ours = plan_step(case.samples, over_budget=case.over_budget, **limits)
    seconds = time.process_time() - started
    ways = {
        "by cost": ours,
        "by tokens": plan_step(case.samples, max_tokens=case.max_tokens, dp_size=case.dp_size),
        "by count": by_count(case),
        "Karmarkar-Karp, samples": by_karmarkar_karp(case, leaves=False),
        "Karmarkar-Karp, leaves": by_karmarkar_karp(case, leaves=True),
    }
    reports = {
        name: report_plan(case.samples, plan, COST, max_tokens=case.max_tokens)
        for name, plan in ways.items()
        if plan is not None
    }
    # The bound for our number of micro-batches; more of them never increase it unless each has an overhead.
    bound = reports["by cost"].lower_bound
    best = reports["by cost"]
    return {
        "case": case.name,
        "dp_size": case.dp_size,
        "max_tokens": case.max_tokens,
        "samples": len(case.samples),
        "logical_tokens": best.logical_tokens,
        "unique_tokens": best.unique_tokens,
        "micro_batches": {name: len(report.ranks[0]) for name, report in reports.items()},
        "over_lower_bound": {name: report.slowest / bound for name, report in reports.items()},
        "imbalance": {name: report.imbalance for name, report in reports.items()},
        "repeated_tokens": {name: report.repeated_tokens for name, report in reports.items()},
        "plan_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", default="mistral-v7")
    parser.add_argument("--expand-turns", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=32768)
    parser.add_argument("--copies", type=int, default=16, help="copies of the file, for the larger global batch")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/plan.json"))
    arguments = parser.parse_args()
    samples = read_samples(
        arguments.files, tokenizer=load_tokenizer(arguments.tokenizer), expand_turns=arguments.expand_turns
    )
    many = several_times(samples, arguments.copies)
    cases = [
        Case(name=name, samples=some, dp_size=dp_size, max_tokens=arguments.max_tokens)
        for name, some in (("file", samples), (f"file x {arguments.copies}", many))
        for dp_size in (8, 64, 512)
    ]
    cases += [
        Case(name="64 prompts x 16 completions", samples=groups(64, 16), dp_size=dp_size, max_tokens=32768)
        for dp_size in (8, 64)
    ]
    cases.append(Case(name="star, trunk 2000", samples=star(1000, 2000, 300), dp_size=64, max_tokens=8192))
    cases.append(Case(name="powers, none shared", samples=powers(120), dp_size=8, max_tokens=16384))

    turns = one_turn(8000, shared=0)
    cases.append(Case(name="8,000 one-turn samples", samples=turns, dp_size=8, max_tokens=32768))
    answers = one_turn(4000, shared=64)
    cases.append(Case(name="4,000 samples, carry", samples=answers, dp_size=8, max_tokens=4096, over_budget="carry"))

    results = [judge(case) for case in cases]
    ways = list(results[0]["over_lower_bound"])
    table = Table("input", "dp", "K", "samples", *ways, "plan, ms", box=None, title="slowest rank / lower bound")
    for result in results:
        ratios = [result["over_lower_bound"].get(way, math.nan) for way in ways]
        table.add_row(
            result["case"],
            str(result["dp_size"]),
            str(result["micro_batches"]["by cost"]),
            f"{result['samples']:,}",
            *("-" if math.isnan(ratio) else f"{ratio:.3f}" for ratio in ratios),
            f"{result['plan_seconds'] * 1e3:,.0f}",
        )
    Console(width=140).print(table)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(
        json.dumps({"machine": machine(), "cost": vars(COST), "results": results}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
