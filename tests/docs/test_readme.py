"""Tables of the pages equal the result files, and the example of a trainer runs."""

from __future__ import annotations

import runpy
from pathlib import Path

from harness.torchrun_jobs import run

ROOT = Path(__file__).parents[2]


def test_the_tables_come_from_the_result_files() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "render_results.py"))
    pages = {name: (ROOT / name).read_text() for name in script["PAGES"]}
    for name, page in pages.items():
        assert script["rendered"](page) == page, f"{name}: run scripts/render_results.py"
    for table in script["TABLES"]:
        assert sum(f"<!-- {table}:begin -->" in page for page in pages.values()) == 1, table


def test_the_example_of_an_own_trainer_runs() -> None:
    done = run(1, program=(str(ROOT / "examples" / "own_trainer.py"),), code=0)
    first, *_, last = done.out.splitlines()
    assert first == "40 tokens of 5 samples, computed as 18"
    error = float(last.removeprefix("largest relative difference of a gradient: "))
    assert 0 < error < 1e-13
