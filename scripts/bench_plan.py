#!/usr/bin/env python3
"""Measure the host's part on one core, with one sample per assistant turn of a file's conversations.

    scripts/bench_plan.py ../shared/data/tau_bench_airline_gpt4o.jsonl

It writes plan.json, order.json and trie.json in benchmarks/results.

plan: how far the slowest rank is above the lower bound, with plans by cost, by tokens, by count, and Karmarkar-Karp. In
addition to the file itself, it plans several copies of the file, each with different tokens after the prompt that all
samples share (a larger global batch of the same lengths and tree shapes), and difficult synthetic inputs. The same cost
model judges all methods, after every rank has folded its samples, including each rank's repeated context.
order: the fold ratio of training steps, with shuffled samples and with steps planned for folding.
trie: the time from samples to a trie and to tensors. --areal FOLDER, or AREAL_PATH, has areal/models/tree_attn/tree.py
(`pip download --no-deps areal`, unzipped), whose trie builder needs no dependencies.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import itertools
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mcore_prefix_tree import Sample, TreeMetadata, fold, trie
from mcore_prefix_tree.bench import describe_machine as machine
from mcore_prefix_tree.data import LineOptions, iter_sample_groups, load_tokenizer
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.plan import CostModel, ForestPlan, ModelWork, plan_step, report_plan, report_steps
from mcore_prefix_tree.plan.cuts import fewest_runs
from mcore_prefix_tree.plan.pack import Leaves, first_scored
from mcore_prefix_tree.trie import sort_samples
from mcore_prefix_tree.utils.choices import OverBudget

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PARTS = ("plan", "order", "trie")
# Samples of a step.
STEPS = (16, 24, 64, 256)
# Functions of AReaL's trie builder.
BUILDER = {"TrieNode", "_BuildNode", "_count_additional_nodes", "_insert_sequence", "_compress_trie"}
BUILDER |= {"_greedy_build_tries"}
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
    cut, tokens = [], []
    for indices in ranks:
        own = [samples[index] for index in indices]
        order, shared = sort_samples(own)
        lengths = np.array([len(own[index]) for index in order], dtype=np.int64)
        runs = fewest_runs(shared, lengths - shared, max_tokens)
        cut.append([tuple(indices[index] for index in order[start:end].tolist()) for start, end in runs])
        # The first sample of a run computes its entire path.
        tokens.append([int(lengths[start:end].sum() - shared[start + 1 : end].sum()) for start, end in runs])
    most = max(1, max(len(rank) for rank in cut))
    return ForestPlan(
        micro_batches=tuple((*rank, *[()] * (most - len(rank))) for rank in cut),
        physical_tokens=tuple((*rank, *[0] * (most - len(rank))) for rank in tokens),
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


def plan_cases(samples: list[Sample], copies: int, max_tokens: int) -> dict[str, Any]:
    """Return the figures of every input."""
    many = several_times(samples, copies)
    cases = [
        Case(name=name, samples=some, dp_size=dp_size, max_tokens=max_tokens)
        for name, some in (("file", samples), (f"file x {copies}", many))
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
    return {"cost": vars(COST), "results": results}


def epochs(conversations: list[list[Sample]]) -> list[dict[str, Any]]:
    """Return the fold ratio of an epoch's steps, and the seconds to draw the first epoch and another one.

    Rollout engines write a conversation as one line, whose turns stay together in training, or as one line per turn.
    """
    turns = [[sample] for line in conversations for sample in line]
    views = {"a line per conversation": conversations, "a line per turn": turns}
    results = []
    for (name, lines), step, order in itertools.product(views.items(), STEPS, ("shuffled", "folded")):
        drawn, seconds = SampleOrder(lines, seed=1234, order=order, step=step), []
        for epoch in range(2):
            started = time.process_time()
            drawn.take(epoch * drawn.per_epoch, step)
            seconds.append(time.process_time() - started)
        report = asdict(report_steps(drawn.first_epoch()))
        results.append({"lines": name, "order": order, "step": step, "seconds": seconds, **report})
    return results


def host_times(samples: list[Sample], max_tokens: int, areal: str | None) -> dict[str, Any]:
    """Return the milliseconds from samples to a trie, and to planned metadata; and those of AReaL's trie builder."""

    def planned() -> None:
        plan_step(samples, max_tokens=max_tokens, dp_size=8, cost_model=COST)
        _ = TreeMetadata.from_layout(fold(samples)).segments

    steps = {"trie": lambda: trie.build_trie(samples), "all four": planned}
    layout = fold(samples)
    logical, physical = layout.logical_tokens, layout.physical_tokens
    found: dict[str, Any] = {"samples": len(samples), "logical_tokens": logical, "physical_tokens": physical}
    found["median_ms"] = {name: milliseconds(run) for name, run in steps.items()}
    if areal is not None:
        builder, sequences = areal_builder(areal), [sample.tokens.tolist() for sample in samples]
        started = time.perf_counter()
        (tree,), _ = builder({"sequences": sequences}, logical)
        found["areal_ms"] = (time.perf_counter() - started) * 1e3
        assert sum(node.num_tokens for node in tree.nodes) == physical, "AReaL's trie differs"
    return found


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median of seven runs, after a first one."""
    times = []
    for _ in range(8):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]) * 1e3


def areal_builder(folder: str) -> Callable[..., Any]:
    """Return AReaL's greedy trie builder, compiled from its source file by itself: it needs no dependencies."""
    source = Path(folder) / "areal/models/tree_attn/tree.py"
    module = ast.parse(source.read_text())
    module.body = [
        node
        for node in module.body
        if (isinstance(node, ast.ImportFrom) and node.module == "__future__") or getattr(node, "name", "") in BUILDER
    ]
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []  # their tracing
    # dataclass looks up its classes' module by name, so the builder needs a module.
    areal = types.ModuleType("areal_tree")
    sys.modules[areal.__name__] = areal
    vars(areal).update(
        dataclass=dataclass,
        field=field,
        logger=types.SimpleNamespace(warning=print),
        _extract_sequences=lambda data: data["sequences"],  # already lists: unpadding is not measured
    )
    exec(compile(module, str(source), "exec"), vars(areal))
    builder: Callable[..., Any] = vars(areal)["_greedy_build_tries"]
    return builder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--tokenizer", default="mistral-v7")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this; can be repeated")
    parser.add_argument("--max-tokens", type=int, default=32768)
    parser.add_argument("--copies", type=int, default=16, help="copies of the file, for the larger global batch")
    parser.add_argument("--areal", metavar="FOLDER", default=os.environ.get("AREAL_PATH"), help="AReaL's sources")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core
    options = LineOptions(tokenizer=load_tokenizer(arguments.tokenizer), expand_turns=True)
    conversations = list(iter_sample_groups(arguments.file, options))
    samples = [sample for line in conversations for sample in line]
    for part in arguments.only or PARTS:
        if part == "trie":
            found = host_times(samples, arguments.max_tokens, arguments.areal)
        elif part == "plan":
            found = plan_cases(samples, arguments.copies, arguments.max_tokens)
        else:
            found = {
                "samples": len(samples),
                "logical_tokens": sum(map(len, samples)),
                "fold_ratio": report_steps([samples]).fold_ratio.mean,
                "results": epochs(conversations),
            }
        output = arguments.output / f"{part}.json"
        output.write_text(json.dumps({"machine": machine(), **found}, indent=2) + "\n")
        print(f"{output}: scripts/render_results.py writes its table")


if __name__ == "__main__":
    main()
