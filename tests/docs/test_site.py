"""The site builds without a warning; pages that are generated from code match the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.commands import run_process

pytest.importorskip("mkdocs", reason="the site needs Python 3.11 and requirements/docs.txt")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "lib"))
    import docs_site

    return docs_site


def test_page_of_recipe_keys_has_every_key(site) -> None:
    page = site.recipe_page()
    assert "| `max_tokens` | integer | required | number of physical tokens" in page
    assert "| `order` | `shuffled`, `folded`, `file` | `shuffled` |" in page
    assert "| `tolerance` | number or null | null |" in page
    assert "| `expand_turns` | true or false | `false` |" in page
    assert page.count("\n## ") == 13


def test_page_of_commands_has_every_command(site) -> None:
    from typer.main import get_command

    from mcore_prefix_tree.cli.main import app

    page = site.command_page()
    for name, command in get_command(app).commands.items():
        for below in getattr(command, "commands", {None: None}):
            assert f"\n## {name} {below}\n" in page if below else f"\n## {name}\n" in page
    assert "| `--trees` | N | `3` | Trees to draw, largest first. |" in page
    assert "| `--prefix-tree-order` |" in page


def test_page_of_objectives_has_every_objective(site) -> None:
    from mcore_prefix_tree.objectives import OBJECTIVES

    headings = re.findall(r"^### (.*)$", site.objectives_page(), flags=re.MULTILINE)
    assert {name for heading in headings for name in heading.split(", ")} == set(OBJECTIVES)


def test_links_point_at_pages_of_the_site(site) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="howto/sft.md"))
    text = "[a](../data.md#x) [b](../../README.md) [`c`](../../pyproject.toml) [d](https://e.org) ![f](../g.svg)"
    made = site.on_page_markdown(f"{text}\n```\n[a](../../README.md)\n```\n", page)
    assert made.splitlines()[0] == "[a](../data.md#x) [b](../index.md) `c` [d](https://e.org) ![f](../g.svg)"
    assert made.splitlines()[2] == "[a](../../README.md)"


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    run_process(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        env={"NO_MKDOCS_2_WARNING": "1"},
        cwd=ROOT,
        code=0,
    )
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 35
    for page in pages:
        fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)', page.read_text())
        assert fetched == [], page.name
