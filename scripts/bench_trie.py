#!/usr/bin/env python3
"""Measure host time and memory from samples to tensors, on one core, and AReaL's trie builder for comparison.

    scripts/bench_trie.py ../shared/data/tau_bench_airline_gpt4o.jsonl --expand-turns

The steps are trie, layout, plan and metadata. AReaL's builder is the only function of its tree training that needs no
dependencies; it is read from an installed `areal`, or from a folder with its sources that --areal or AREAL_PATH names
(`pip download --no-deps areal`, unzipped).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import statistics
import sys
import time
import tracemalloc
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_plan import COST
from rich.console import Console
from rich.table import Table

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.bench.machine import describe_machine as machine
from mcore_prefix_tree.data import load_tokenizer, read_samples
from mcore_prefix_tree.plan import plan_step
from mcore_prefix_tree.trie import build_trie

TREE_FILE = Path("areal/models/tree_attn/tree.py")
BUILDER = {"TrieNode", "_BuildNode", "_count_additional_nodes", "_insert_sequence", "_compress_trie"}
BUILDER |= {"_greedy_build_tries"}


def timed(run: Callable[[], Any], repeats: int) -> float:
    """Return median milliseconds, after a warm-up run."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the peak of newly allocated bytes, including the result."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def areal_builder(named: str | None) -> Callable[..., Any] | None:
    """Return AReaL's greedy trie builder, compiled from its source file by itself, or None if there is no source."""
    folder = named or os.environ.get("AREAL_PATH")
    if folder is None:
        installed = importlib.util.find_spec("areal")
        if installed is None or not installed.submodule_search_locations:
            return None
        folder = str(Path(next(iter(installed.submodule_search_locations))).parent)
    source = Path(folder) / TREE_FILE
    if not source.exists():
        return None
    module = ast.parse(source.read_text())
    module.body = [
        node
        for node in module.body
        if (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        or (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in BUILDER)
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


def measure(samples: Sequence[Sample], *, max_tokens: int, dp_size: int, repeats: int) -> dict[str, Any]:
    trie = build_trie(samples)
    layout = fold(samples, trie=trie)
    steps: dict[str, Callable[[], Any]] = {
        "trie": lambda: build_trie(samples),
        "layout": lambda: fold(samples, trie=trie),
        "plan": lambda: plan_step(samples, max_tokens=max_tokens, dp_size=dp_size, cost_model=COST),
        "metadata": lambda: TreeMetadata.from_layout(layout).segments,
    }
    times = {name: timed(run, repeats) for name, run in steps.items()}
    times["all four"] = timed(
        lambda: (steps["plan"](), TreeMetadata.from_layout(fold(samples)).segments),
        repeats,
    )
    logical = layout.logical_tokens
    peaks = {name: peak_bytes(run) for name, run in steps.items()}
    peaks["all four"] = peak_bytes(lambda: (steps["plan"](), TreeMetadata.from_layout(fold(samples)).segments))
    times["sample map"] = timed(lambda: fold(samples, trie=trie).sample_map, repeats) - times["layout"]
    return {
        "samples": len(samples),
        "logical_tokens": logical,
        "physical_tokens": layout.physical_tokens,
        "nodes": layout.num_nodes,
        "max_tokens": max_tokens,
        "dp_size": dp_size,
        "median_ms": times,
        "million_logical_tokens_per_second": {name: logical / ms / 1e3 for name, ms in times.items() if ms > 0},
        "peak_bytes_per_logical_token": {name: peak / logical for name, peak in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", default="mistral-v7")
    parser.add_argument("--expand-turns", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=32768)
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--areal", metavar="FOLDER", help="with areal/models/tree_attn/tree.py in it")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/trie.json"))
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core
    samples = read_samples(
        arguments.files, tokenizer=load_tokenizer(arguments.tokenizer), expand_turns=arguments.expand_turns
    )
    result = measure(samples, max_tokens=arguments.max_tokens, dp_size=arguments.dp, repeats=arguments.repeats)

    builder = areal_builder(arguments.areal)
    if builder is not None:
        sequences = [sample.tokens.tolist() for sample in samples]
        started = time.perf_counter()
        tries, _ = builder({"sequences": sequences}, result["logical_tokens"])
        seconds = time.perf_counter() - started
        assert len(tries) == 1
        assert sum(node.num_tokens for node in tries[0].nodes) == result["physical_tokens"], "AReaL's trie differs"
        result["areal_ms"] = seconds * 1e3
        result["areal_over_ours"] = seconds * 1e3 / result["median_ms"]["trie"]

    table = Table("step", "ms", "M logical tokens/s", "peak bytes / logical token", box=None)
    for name, ms in result["median_ms"].items():
        peak = result["peak_bytes_per_logical_token"].get(name)
        speed = result["logical_tokens"] / ms / 1e3
        table.add_row(name, f"{ms:.1f}", f"{speed:,.0f}", "" if peak is None else f"{peak:.2f}")
    if builder is not None:
        table.add_row(
            "AReaL's trie",
            f"{result['areal_ms']:,.0f}",
            f"{result['logical_tokens'] / result['areal_ms'] / 1e3:.2f}",
            "",
        )
    console = Console()
    console.print(
        f"{result['samples']:,} samples, {result['logical_tokens']:,} logical and {result['physical_tokens']:,} "
        f"physical tokens; plan for dp={arguments.dp}, {arguments.max_tokens:,} tokens per micro-batch"
    )
    console.print(table)
    if builder is None:
        console.print("AReaL's trie builder: skipped; install `areal` or name its sources with --areal or AREAL_PATH")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
