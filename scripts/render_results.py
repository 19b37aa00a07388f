#!/usr/bin/env python
"""Write the tables of the README from the files under benchmarks/results: no figure there is typed by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def bench_step_table(result: dict[str, Any]) -> str:
    """Markdown for a result of scripts/bench_step.py."""
    comparison, machine = result["comparison"], result["machine"]
    lines = ["| | tokens | seconds | peak memory |", "|---|---|---|---|"]
    for name in ("folded", "packed", "stock"):
        row = comparison[name]
        seconds, mebibytes = statistics.median(row["seconds"]), row["peak_bytes"] / 2**20
        lines.append(f"| {row['name']} | {row['tokens']:,} | {seconds:.2f} | {mebibytes:,.0f} MiB |")
    lines.append("")
    lines.append(
        f"{result['speedup']:.2f}x the faster unfolded way, at a fold ratio of {comparison['fold_ratio']:.2f} "
        f"({machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}, torch {machine['torch']}, "
        f"megatron-core {machine['megatron-core']})."
    )
    return "\n".join(lines)


def rendered(readme: str) -> str:
    """The README with its tables renewed."""
    begin, end = "<!-- bench_step:begin -->\n", "<!-- bench_step:end -->"
    before, rest = readme.split(begin)
    _, after = rest.split(end)
    table = bench_step_table(json.loads((RESULTS / "step_quickstart_cpu.json").read_text()))
    return f"{before}{begin}{table}\n{end}{after}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rendered(readme.read_text()))
