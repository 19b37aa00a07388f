"""Run the tests that need a GPU and the benchmarks, and write one JSON after each part: see scripts/gpu_check."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_prefix_tree.attention import fa4
from mcore_prefix_tree.bench.machine import describe_machine, name_in_files
from mcore_prefix_tree.data.write import whole_file

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RECIPES = (ROOT / "recipes" / "quickstart.yaml", ROOT / "recipes" / "one_gpu.yaml")
PARTS = ("tests", "attention", "steps", "head")
# For who changes the kernels: only where --only asks for it.
OPTIONAL = ("tune",)
BENCH_ATTENTION = (str(ROOT / "scripts" / "bench_attention.py"),)
BENCH_STEP = ("-m", "mcore_prefix_tree", "bench", "step")
BENCH_HEAD = (str(ROOT / "scripts" / "bench_head.py"),)
TUNE = (str(ROOT / "scripts" / "tune_triton.py"),)
# Between looks at what a benchmark has written so far.
POLL_SECONDS = 5.0
USAGE_ERROR = 2
UNFINISHED = "it did not come to its end"


def run_tests(folder: Path) -> dict[str, Any]:
    """Counts of tests/gpu and tests/kernels, the name and first line of each that failed, and what tests measured.

    ``failed`` says so if pytest died, of a crash in a kernel for example, before it wrote its report.
    """
    report = folder / "tests.xml"
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "tests/kernels", f"--junitxml={report}"], cwd=ROOT, check=False
    )
    seconds = time.perf_counter() - started
    try:
        suite = ElementTree.parse(report).getroot()[0]
    except (OSError, ElementTree.ParseError, IndexError):
        return {"failed": f"pytest ended with exit code {done.returncode} and wrote no report", "seconds": seconds}
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    faults = [
        {"test": _name_of(case), "message": fault.attrib.get("message", "")}
        for case in suite.iter("testcase")
        for fault in case
        if fault.tag in ("failure", "error")
    ]
    figures = {
        _name_of(case): {one.attrib["name"]: float(one.attrib["value"]) for one in case.iter("property")}
        for case in suite.iter("testcase")
        if case.find("properties") is not None
    }
    # A skipped test says why: what was missing is part of what is known.
    skips = Counter(fault.attrib.get("message", "") for fault in suite.iter("skipped"))
    return {**counts, "seconds": seconds, "faults": faults, "skips": dict(skips), "figures": figures}


def _name_of(case: ElementTree.Element) -> str:
    return f"{case.attrib['classname']}::{case.attrib['name']}"


def run_bench(
    folder: Path, name: str, *arguments: str, on_written: Callable[[dict[str, Any]], None] = lambda written: None
) -> dict[str, Any]:
    """The JSON that a benchmark writes; under ``failed`` what it said on standard error if it failed.

    Args:
        folder: for its file.
        name: of its file.
        arguments: of Python: the benchmark and its own.
        on_written: is given what it has written, whenever it has written more and goes on.
    """
    output = folder / f"{name}.json"
    command = [sys.executable, *arguments, "--output", str(output)]
    seen: dict[str, Any] | None = None
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, cwd=ROOT, stderr=said) as process:
            while True:
                try:
                    process.wait(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    written = _written(output)
                    if written is not None and written != seen:
                        on_written(written)
                        seen = written
        said.seek(0)
        errors = said.read()
    sys.stderr.write(errors)
    written = _written(output)
    if written is not None and process.returncode == 0:
        return written
    # Some measurements may have failed, and their reasons are in the file; or it is of what came before a crash.
    return {**(written or {}), "failed": errors[-2000:] or f"it ended with exit code {process.returncode}"}


def _written(output: Path) -> dict[str, Any] | None:
    """What is in a file; None if there is none, or if it is just being written."""
    try:
        written: dict[str, Any] = json.loads(output.read_text())
    except (OSError, ValueError):
        return None
    return written


class ResultFile:
    """What is known of a machine, on disk whenever there is more of it."""

    def __init__(self, target: Path, content: dict[str, Any]) -> None:
        self.target = target
        self.content = content

    @classmethod
    def at(cls, target: Path, machine: dict[str, object], *, keep: bool) -> ResultFile:
        """A new file, or with ``keep`` the one that is there.

        Raises:
            ValueError: that one is of another machine or of other versions.
        """
        if not keep or not target.exists():
            return cls(target, {"kind": "gpu_check", "machine": machine})
        content = json.loads(target.read_text())
        there = content["machine"]
        differing = sorted(key for key in {*there, *machine} if there.get(key) != machine.get(key))
        if differing:
            found = ", ".join(f"{key} {there.get(key)} (now {machine.get(key)})" for key in differing)
            raise ValueError(
                f"--only adds to {target.name}, which was measured with {found}; move it away, or run all parts"
            )
        return cls(target, content)

    def set(self, part: str, value: dict[str, Any]) -> None:
        """Put a part into the file. Whoever reads it meanwhile, or stops this, finds a whole one."""
        self.content[part] = value
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self.target) as unfinished:
            unfinished.write_text(json.dumps(self.content, indent=2) + "\n")


def run_part(part: str, benchmark: Sequence[str], results: ResultFile, folder: Path) -> bool:
    """Run a benchmark that is a part, into the file as it goes on, and say whether it is well."""
    found = run_bench(
        folder,
        part,
        *benchmark,
        on_written=lambda written: results.set(part, {**written, "failed": UNFINISHED}),
    )
    results.set(part, found)
    return "failed" not in found


def run_parts(parts: Sequence[str], for_attention: Sequence[str], results: ResultFile, folder: Path) -> bool:
    """Run parts, and say whether all of them are well."""
    well = True
    if "tests" in parts:
        tests = run_tests(folder)
        results.set("tests", tests)
        well &= "failed" not in tests and not tests["failures"] + tests["errors"]
    if "attention" in parts:
        well &= run_part("attention", (*BENCH_ATTENTION, *for_attention), results, folder)
    if "steps" in parts:
        steps: dict[str, Any] = {}
        for recipe in RECIPES:
            options = ("model.dtype=bfloat16", "verify.enabled=false")
            steps[recipe.stem] = run_bench(folder, recipe.stem, *BENCH_STEP, str(recipe), *options)
            results.set("steps", steps)
        well &= not any("failed" in step for step in steps.values())
    if "head" in parts:
        well &= run_part("head", BENCH_HEAD, results, folder)
    if "tune" in parts:
        well &= run_part("tune", TUNE, results, folder)
    return well


def arguments_of(given: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The parts to run, and what is for the benchmark of attention: all that is unknown, and all behind ``--``."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="The tests that need a GPU and the benchmarks. Further arguments, and those behind --, go to "
        "scripts/bench_attention.py.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=PARTS + OPTIONAL,
        help="run this part, into the file of the others; can be repeated",
    )
    own = list(given)
    behind = own.index("--") if "--" in own else len(own)
    chosen, unknown = parser.parse_known_args(own[:behind])
    parts = tuple(part for part in PARTS + OPTIONAL if part in (chosen.only or PARTS))
    return parts, [*unknown, *own[behind + 1 :]]


def gpu_runs_fa4() -> bool:
    """Whether FlashAttention-4 has kernels for this machine's GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (fa4.HOPPER, fa4.BLACKWELL)


def main(given: Sequence[str]) -> int:
    if list(given) == ["--gpu-runs-fa4"]:  # asked by scripts/gpu_check before it installs
        return 0 if gpu_runs_fa4() else 1
    parts, for_attention = arguments_of(given)
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU; run it on a machine with one", file=sys.stderr)
        return USAGE_ERROR
    machine = describe_machine()
    target = RESULTS / f"gpu_{name_in_files(machine)}.json"
    try:
        results = ResultFile.at(target, machine, keep=parts != PARTS)
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return USAGE_ERROR
    with tempfile.TemporaryDirectory() as name:
        well = run_parts(parts, for_attention, results, Path(name))
    print(f"wrote {target}; scripts/render_results.py puts its figures into the documents")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
