"""Run the tests that need a GPU and both benchmarks, and write one JSON: see scripts/gpu_check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

from mcore_prefix_tree.bench.machine import describe_machine

ROOT = Path(__file__).parents[2]
RECIPES = (ROOT / "recipes" / "quickstart.yaml", ROOT / "recipes" / "one_gpu.yaml")


def run_tests(folder: Path) -> dict[str, Any]:
    """Counts of tests/gpu and tests/kernels, and the name and first line of each that failed."""
    report = folder / "tests.xml"
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "tests/kernels", f"--junitxml={report}"], cwd=ROOT, check=False
    )
    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    faults = [
        {"test": f"{case.attrib['classname']}::{case.attrib['name']}", "message": fault.attrib.get("message", "")}
        for case in suite.iter("testcase")
        for fault in case
        if fault.tag in ("failure", "error")
    ]
    return {**counts, "seconds": time.perf_counter() - started, "faults": faults}


def run_command(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """The JSON that ``mcore-prefix-tree bench`` writes; what it said on standard error if it failed."""
    output = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, "-m", "mcore_prefix_tree", "bench", *arguments, "--output", str(output)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr)
    if output.exists():
        written: dict[str, Any] = json.loads(output.read_text())
        # Some measurements may have failed; their reasons are in the file.
        return written
    return {"failed": done.stderr[-2000:]}


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU; run it on a machine with one", file=sys.stderr)
        return 2
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            "kind": "gpu_check",
            "machine": machine,
            "tests": run_tests(folder),
            "attention": run_command(folder, "attention", "attention", *sys.argv[1:]),
            "steps": {
                recipe.stem: run_command(
                    folder, recipe.stem, "step", str(recipe), "model.dtype=bfloat16", "verify.enabled=false"
                )
                for recipe in RECIPES
            },
        }
    slug = re.sub(r"[^a-z0-9]+", "_", str(machine["device"]).lower()).strip("_")
    target = ROOT / "benchmarks" / "results" / f"gpu_{slug}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {target.relative_to(ROOT)}; scripts/render_results.py puts its figures into the documents")
    tests = result["tests"]
    failed = tests["failures"] + tests["errors"] or "failed" in result["attention"]
    return 1 if failed or any("failed" in step for step in result["steps"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
