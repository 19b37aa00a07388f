#!/usr/bin/env python3
"""Run the part attention or head of scripts/gpu_check on a CPU, in this process, with small shapes.

scripts/bench_cpu.py attention    # writes benchmarks/results/attention_cpu.json
scripts/bench_cpu.py head         # writes benchmarks/results/head_cpu.json
scripts/bench_cpu.py head --case 1024 512 32768 --output benchmarks/results/head_kept_cpu.json
scripts/render_results.py         # writes the tables
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check_parts.children import summary_of
from gpu_check_parts.context import LocalContext, Options
from gpu_check_parts.results import FAILED
from gpu_check_parts.sections import sections

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# Rows, hidden size and vocabulary.
CASES = ((2048, 128, 32768), (1024, 512, 32768), (512, 512, 131072))


class Printed(LocalContext):
    """A context that prints its rows, and writes them to a file."""

    output: Path
    machine: dict[str, Any]

    def _send(self, line: dict[str, Any]) -> None:
        super()._send(line)
        if "row" not in line:
            return
        row = line["row"]
        print(f"{row['workload']}, {row['method']}: {summary_of(row)}", flush=True)
        found = sections(self.machine, list(self.rows.values())).get(self.part)
        if found is not None:
            self.output.write_text(json.dumps(found, indent=2) + "\n")


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("attention", "head"))
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file for the results")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed rounds")
    parser.add_argument("--workload", action="append", metavar="NAME", help="only those whose name contains this")
    parser.add_argument("--data", metavar="FILE", help="measure the forests of these samples too")
    parser.add_argument("--scale", type=float, default=0.05, metavar="F", help="factor on the lengths of forests")
    parser.add_argument("--case", nargs=3, type=int, action="append", metavar=("ROWS", "HIDDEN", "VOCAB"))
    asked = parser.parse_args(given)

    import torch
    from attention_bench.settings import Settings
    from gpu_check_parts import attention, head

    from mcore_prefix_tree.bench import describe_machine

    context = Printed(
        asked.part, Options(repeats=asked.repeats, workloads=tuple(asked.workload or ()), data=asked.data)
    )
    context.output = asked.output or RESULTS / f"{asked.part}_cpu.json"
    context.machine = describe_machine() | {"device": "cpu"}
    if asked.part == "head":
        head.run_cases(context, asked.case or CASES, torch.device("cpu"))
    else:
        shape = {"heads": 4, "kv_heads": 1, "head_dim": 64, "value_dim": 64}
        settings = Settings(**shape, dtype="float32", device="cpu", repeats=asked.repeats)
        attention.run_workloads(context, settings, attention.workloads_of(context, asked.scale))
    return int(any(FAILED in row for row in context.rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
