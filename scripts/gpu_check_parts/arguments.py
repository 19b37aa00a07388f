"""Arguments of ``scripts/gpu_check``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from gpu_check_parts.context import ROOT, Options
from gpu_check_parts.registry import PARTS

RESULTS = ROOT / "benchmarks" / "results"


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; ``options`` are read by parts, ``parts`` are the parts to run in their order."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", allow_abbrev=False)
    parser.add_argument("--minutes", type=float, metavar="N", help="stop after N minutes with exit code 0")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="run this part; can be repeated")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the result; $OUT if that is set")
    parser.add_argument("--workload", action="append", metavar="NAME", help="only forests whose name contains this")
    parser.add_argument("--data", metavar="FILE", help="measure the forests of these samples too")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed rounds; 5")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes: shows that every part runs, measures nothing"
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="use a folder that --pack made; needs no index")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="only make the folders to copy to another machine")
    parser.add_argument("--no-install", action="store_true", help="use python3 with its packages")
    parser.add_argument("--runs-fa4", action="store_true", help=argparse.SUPPRESS)  # scripts/gpu_check asks
    found = parser.parse_args(given)
    if found.minutes is not None and found.minutes <= 0:
        parser.error("--minutes must be more than 0")
    if found.repeats < 1:
        parser.error("--repeats must be at least 1")
    if found.output is None:
        found.output = Path(os.environ.get("OUT") or RESULTS)
    found.parts = [part for name, part in PARTS.items() if name in (found.only or PARTS)]
    found.options = Options(
        smoke=found.smoke, repeats=found.repeats, workloads=tuple(found.workload or ()), data=found.data
    )
    return found
