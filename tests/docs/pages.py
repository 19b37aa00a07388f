"""The pages of the project, their links, and the commands in their blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / folder / "README.md" for folder in ("recipes", "tests", "patches")),
    ]
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def fences_of(page: Path) -> list[tuple[int, str, int]]:
    """Return the fenced blocks of a page: the lines of both fences, from 1, and the text after the first.

    Raises:
        ValueError: a fence is never closed.
    """
    found: list[tuple[int, str, int]] = []
    opened: tuple[int, str] | None = None
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not line.lstrip().startswith("```"):
            continue
        if opened is None:
            opened = number, line.lstrip().removeprefix("```")
        else:
            found.append((*opened, number))
            opened = None
    if opened is not None:
        raise ValueError(f"the fence in line {opened[0]} is never closed")
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose_of(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text())


def links_of(page: Path) -> list[tuple[str, str]]:
    """Return path and anchor of every link within the repository; either may be empty."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    return [(path, anchor) for path, _, anchor in (link.partition("#") for link in found) if "://" not in path]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site form them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command in blocks of shell, without comments and variables in front."""
    for language, block in _BLOCK.findall(page.read_text()):
        if language != "bash":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                words = shlex.split(command, comments=True)
                while words and re.match(r"[A-Z_0-9]+=", words[0]):
                    words = words[1:]
                if words:
                    yield words


def inline_of(page: Path) -> list[str]:
    """Return the texts between single backticks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose_of(page))
