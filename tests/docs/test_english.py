"""The worst habits of our English do not come back: how docstrings open, and a few phrases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from english import CEILINGS, FLOOR, TEXTS, rate_of_examples, rates
from pages import PAGES, ROOT, name_of, prose_of

PACKAGE = ROOT / "mcore_prefix_tree"
# A docstring opens with an imperative verb or a noun phrase.
OPENINGS = re.compile(r"(Of|What|Whether|As|Who|Where|Which|How|Why|See there|The same)\b")
# Nor does an entry of Args, Attributes and the like continue its name: "order: of the samples".
ENTRIES = re.compile(r"\s+\w+: (?:of|whose|what|where|as|how|which|who)\b")
PHRASES = re.compile(
    r"\b(?:is|are|was|were) told\b(?! apart| to\b)|\bthere (?:is|are) none\b|\botherwise here\b"
    r"|(?:^|[.|] )Who \w+s .*[.|]"
)


def docstrings_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring of a module."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def lines_of(found: list[tuple[Path, int, str]]) -> str:
    return "\n".join(f"{name_of(file)}:{line}: {text}" for file, line, text in found)


def check(found: list[tuple[Path, int, str]]) -> None:
    assert not found, f"write them anew, as CONTRIBUTING.md asks:\n{lines_of(found)}"


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = [
        (file, line, text.splitlines()[0])
        for file in files
        for line, text in docstrings_of(file)
        if OPENINGS.match(text)
    ]
    check(found)


def test_docstring_entries_are_complete() -> None:
    found = [
        (file, line, entry.strip())
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, text in docstrings_of(file)
        for entry in text.splitlines()
        if ENTRIES.match(entry)
    ]
    check(found)


def test_code_and_messages_avoid_the_worst_phrases() -> None:
    found = [
        (file, number, line.strip())
        for file in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if PHRASES.search(line)
    ]
    check(found)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_avoid_the_worst_phrases(page: Path) -> None:
    assert [line for line in prose_of(page).splitlines() if PHRASES.search(line)] == []


@pytest.mark.parametrize(
    "text", ["their loss is told", "which there is none with x", "Who comes from TRL finds it here."]
)
def test_the_worst_phrases_are_found(text: str) -> None:
    assert PHRASES.search(text)


@pytest.mark.parametrize("kind", TEXTS)
def test_no_word_is_overused(kind: str) -> None:
    text = TEXTS[kind]()
    found = {name: round(rate, 1) for name, rate in rates(text).items() if rate > CEILINGS[name]}
    assert not found, f"per 10,000 words of the {kind}; ceilings: {CEILINGS}"
    assert rate_of_examples(text) >= FLOOR


def test_overused_words_are_counted() -> None:
    found = rates("The rank alone goes on, where it has a whole row of its own; what is left out stands beside it.")
    assert set(found) == set(CEILINGS)
    assert min(found.values()) > 400
