#!/usr/bin/env python3
"""Measure the steps of the README on a CPU, folded and unfolded: the quickstart's batch, in models of two shapes.

    scripts/bench_steps.py            # two cores take about four minutes; let nothing else run
    scripts/render_results.py         # writes the tables

In one model the body does most of the work, in the other the vocabulary head, so their bounds differ.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICKSTART = "recipes/quickstart.yaml"
# Overrides of the recipe and timed rounds, by the name of the result file.
SHAPES = {
    "step_hidden768_cpu": (
        (
            *("model.hidden_size=768", "model.ffn_hidden_size=2048"),
            *("model.num_attention_heads=12", "model.num_query_groups=4"),
        ),
        3,
    ),
    "step_quickstart_cpu": ((), 9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SHAPES, action="append", help="measure only this model; can be repeated")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads per process; all cores if omitted")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    for name in options.only or SHAPES:
        overrides, rounds = SHAPES[name]
        command = [sys.executable, "-m", "mcore_prefix_tree", "bench", "step", QUICKSTART, "device=cpu", *overrides]
        command += ["--repeats", str(rounds), "--output", str(options.output.absolute() / f"{name}.json")]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(options.threads)}, check=True)


if __name__ == "__main__":
    main()
