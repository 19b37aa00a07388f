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


def bench_trie_table(result: dict[str, Any]) -> str:
    """Markdown for a result of scripts/bench_trie.py."""
    times = result["median_ms"]
    lines = ["| from samples to | milliseconds |", "|---|---|"]
    lines += [f"| {name} | {times[key]:.0f} |" for name, key in (("a trie", "trie"), ("planned metadata", "all four"))]
    peer = ""
    if result.get("areal_ms"):
        peer = f" AReaL's trie builder took {result['areal_ms']:,.0f} ms for the same samples in the same run."
    lines += [
        "",
        f"{result['samples']:,} samples, {result['logical_tokens']:,} logical and {result['physical_tokens']:,} unique "
        f"tokens, one core ({result['machine']['cpu']}).{peer}",
    ]
    return "\n".join(lines)


TABLES = {
    "bench_step": ("step_quickstart_cpu.json", bench_step_table),
    "bench_trie": ("trie.json", bench_trie_table),
}


def rendered(readme: str) -> str:
    """The README with its tables renewed."""
    for name, (file, table) in TABLES.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, rest = readme.split(begin)
        _, after = rest.split(end)
        readme = f"{before}{begin}{table(json.loads((RESULTS / file).read_text()))}\n{end}{after}"
    return readme


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rendered(readme.read_text()))
