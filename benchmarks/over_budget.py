#!/usr/bin/env python3
"""Compare the ways to cut trees above the budget, ``batch.over_budget``: ``repeat``, ``carry`` and ``auto``.

    OMP_NUM_THREADS=1 benchmarks/over_budget.py      # writes benchmarks/results/over_budget.json; takes minutes

Times are processor time of a training step on one process; the ways take turns. Four batches: the shipped rollouts,
rollouts of one prompt that fork at four depths, rollouts that share only a prompt, and in a model of one small layer
forking rollouts of 65,536 tokens. The part "memory" trains single samples of growing length under one budget, each in
a separate process, and reports the process's peak memory beyond that of a sample that fits the budget, next to the
estimate of keys, values and their gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mcore_prefix_tree.mcore.loop.jobs import run_train
from mcore_prefix_tree.mcore.seam.carried_keys import CarryStore
from mcore_prefix_tree.plan import BudgetError
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.settings import load_recipe

ROOT = Path(__file__).parents[1]
RECIPE = str(ROOT / "recipes/quickstart.yaml")
RESULT = ROOT / "benchmarks/results/over_budget.json"
WAYS = ("repeat", "carry", "auto")
QUIET = ["compare=false", "verify.enabled=false", "checkpoint.save=null", "log.metrics=null"]
BUDGET = 4096
LONG = 65_536
SMALL = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=1", "model.num_query_groups=null"]
SMALL += ["model.ffn_hidden_size=64"]
PARTS = ("shipped", "forks", "prompted", "long", "memory")


class Steps:
    """Reporter that keeps the reports of steps, and the processor seconds of each."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self._ends: list[float] = []

    def started(self, first: int, last: int) -> None:
        self._ends.append(time.process_time())

    def step(self, report: Any) -> None:
        self.reports.append(report)
        self._ends.append(time.process_time())

    @property
    def seconds(self) -> list[float]:
        return np.diff(self._ends).tolist()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def made(folder: Path, name: str, rollouts: list[list[int]]) -> list[str]:
    """Write rollouts, and return the settings of a recipe that trains all of them in each step."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in rollouts))
    data = [f"data.path={path}", "data.tokenizer=null", "data.expand_turns=false"]
    return [*data, "model.vocab_size=256", f"batch.global_batch_size={len(rollouts)}"]


def forks(length: int) -> Iterator[list[int]]:
    """Yield 16 rollouts of ``length`` tokens: a common half, and forks at 1/2, 5/8, 3/4 and 7/8 of it."""
    draw = np.random.default_rng(0)
    known: dict[tuple[int, ...], list[int]] = {}
    for rollout in range(16):
        parts = [((), length // 2), *((tuple(f"{rollout:04b}"[: n + 1]), length // 8) for n in range(4))]
        yield [
            token
            for branch, size in parts
            for token in known.setdefault(branch, draw.integers(1, 256, size=size).tolist())
        ]


def prompted(length: int) -> list[list[int]]:
    """Return 16 rollouts of ``length`` tokens that share the first quarter."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(1, 256, size=length // 4).tolist()
    return [prompt + draw.integers(1, 256, size=length - length // 4).tolist() for _ in range(16)]


def measure(settings: list[str], budget: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of each way; ``refused`` is the reason if there are none."""
    found: dict[str, dict[str, Any]] = {way: {"budget": budget, "way": way, "seconds": []} for way in WAYS}
    for _ in range(rounds):
        for way, figures in found.items():
            if "refused" in figures:
                continue
            kept = Steps()
            limits = [f"batch.max_tokens={budget}", f"batch.over_budget={way}", f"train_iters={steps}"]
            try:
                run_train(load_recipe(RECIPE, [*settings, *QUIET, *limits]), kept)
            except (BudgetError, SampleError) as error:
                figures["refused"] = str(error).partition(": ")[2]
                continue
            figures["seconds"] += kept.seconds[steps > 1 :]
            figures["tokens"] = statistics.median(report.physical_tokens for report in kept.reports)
            figures["carried"] = statistics.median(report.carried_tokens for report in kept.reports)
            figures["bytes"] = max(report.carried_bytes for report in kept.reports)
            figures["losses"] = [report.loss for report in kept.reports]
    for figures in found.values():
        # A shared machine only adds to a time: the least of a step's repetitions is nearest to it.
        times = np.array(figures.pop("seconds")).reshape(-1, max(steps - 1, 1))
        if times.size:
            figures["seconds"] = float(times.min(axis=0).mean())
    return list(found.values())


class HeldBytes(threading.Thread):
    """Thread that watches the one store of keys and values of a step, and knows the most bytes it has held."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        """Find the store, then look at it until the process ends."""
        stores: list[CarryStore] = []
        while True:
            if not stores:
                stores = [thing for thing in gc.get_objects() if isinstance(thing, CarryStore)]
            # A dictionary that changes meanwhile is looked at again.
            with contextlib.suppress(RuntimeError):
                self.most = max([self.most, *(store.num_bytes for store in stores)])
            time.sleep(0.02 if stores else 0.2)


def train_one(length: int) -> dict[str, Any]:
    """Train a single sample; return the peak memory of this process, what of it is carried, and its estimate."""
    kept, held = Steps(), HeldBytes()
    held.start()
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(1, 256, size=length).tolist()
        settings = made(Path(folder), "one", [tokens])
        full = "model.transformer={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
        sizes = [*SMALL, "model.num_layers=2", full]
        limits = [f"batch.max_tokens={BUDGET}", "batch.over_budget=carry", "train_iters=1"]
        run_train(load_recipe(RECIPE, [*settings, *sizes, *QUIET, *limits]), kept)
    (report,) = kept.reports
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"length": length, "peak": peak, "held": held.most, "estimate": report.carried_bytes}


def grow(lengths: list[int]) -> list[dict[str, Any]]:
    """Return the memory of samples of these lengths."""
    rows = []
    for length in lengths:
        command = [sys.executable, __file__, "--one", str(length)]
        rows.append(
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[-2])
        )
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="Parts to measure.")
    parser.add_argument("--steps", type=int, default=3, help="Steps of a run; the first of several is not timed.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="Tokens of a rollout of forks and prompted.")
    parser.add_argument("--lengths", default="4096,8192,16384,32768,65536,131072", help="Samples of the part memory.")
    parser.add_argument("--one", type=int, help="Train one sample of this length, and print its memory.")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(train_one(options.one)))
        return
    figures: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        length = options.length
        batches: dict[str, tuple[list[str], list[int]]] = {
            "shipped": ([], [1024, 2048, 4096]),
            "forks": (made(Path(folder), "forks", list(forks(length))), [length // 2, length, 2 * length]),
            "prompted": (made(Path(folder), "prompted", prompted(length)), [length // 2, length, 2 * length]),
            "long": ([*made(Path(folder), "long", list(forks(LONG))), *SMALL], [LONG // 2, LONG, 2 * LONG]),
        }
        for name, (settings, budgets) in batches.items():
            if name in options.parts:
                turns = (1, 1) if name == "long" else (options.steps, options.rounds)  # each takes minutes
                figures[name] = [row for budget in budgets for row in measure(settings, budget, *turns)]
                print(name, *figures[name], sep="\n")
                options.output.write_text(json.dumps(figures, indent=1) + "\n")
    if "memory" in options.parts:
        figures["memory"] = grow([int(length) for length in options.lengths.split(",")])
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
