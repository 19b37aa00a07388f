"""The README says what the result files say, and names only files that exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_come_from_the_result_files() -> None:
    readme = (ROOT / "README.md").read_text()
    rendered = runpy.run_path(str(ROOT / "scripts" / "render_results.py"))["rendered"]
    assert rendered(readme) == readme, "run scripts/render_results.py"


def test_the_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert len(links) >= 4
    assert [link for link in links if not (ROOT / link).exists()] == []
