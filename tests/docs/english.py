"""How often our English uses words that it once overused, per 10,000 words of each kind of text."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from pages import PAGES, ROOT, prose_of

PACKAGE, TESTS = ROOT / "mcore_prefix_tree", ROOT / "tests"
# Conditional, not "the folder where it is".
_WHERE = r"where (?:it|they|there|no|none|nothing|the|a|an|this|that|these|one|both|its|our|your|torch|megatron)"
# The ceilings are about three times the rates of torchtitan and Megatron-Bridge.
WORDS = {
    "alone": r"alone",
    "beside": r"besides?",
    "what": r"what(?:ever)?",
    "where (if)": _WHERE,
    "whole": r"whole",
    "leave out": r"(?:leave|leaves|left|leaving) (?:\w+ )?out",
    "of its own": r"of (?:its|their) own",
    "go on": r"(?:go|goes|going|went) on",
}
CEILINGS = {
    "alone": 2, "beside": 1, "what": 15, "where (if)": 3.5, "whole": 9, "leave out": 1.5, "of its own": 1, "go on": 1,
}  # fmt: skip
EXAMPLE = r"for example"
FLOOR = 4
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")


def rates(text: str) -> dict[str, float]:
    """Return how often each of WORDS stands in 10,000 words of a text."""
    total = max(1, len(WORD.findall(text)))
    return {
        name: 10_000 * len(re.findall(rf"\b(?:{pattern})\b", text, flags=re.IGNORECASE)) / total
        for name, pattern in WORDS.items()
    }


def files_in(place: Path) -> list[Path]:
    """Return a Python file, or those of a folder."""
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def rate_of_examples(text: str) -> float:
    return 10_000 * len(re.findall(rf"\b{EXAMPLE}\b", text, flags=re.IGNORECASE)) / max(1, len(WORD.findall(text)))


def text_of_docs() -> str:
    return "\n".join(prose_of(page) for page in PAGES)


def text_of_code(files: Iterable[Path], *, names: bool = False) -> str:
    """Return docstrings, comments and messages; with ``names``, functions' names as words too."""
    return "\n".join(text for file in files for text in _texts_of(file, names=names))


def _texts_of(file: Path, *, names: bool) -> Iterable[str]:
    source = file.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        # A sentence, not a key or a pattern.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 2:
            yield node.value
        elif names and isinstance(node, ast.FunctionDef):
            yield node.name.replace("_", " ")


TEXTS = {
    "docs": text_of_docs,
    "package": lambda: text_of_code(files_in(PACKAGE)),
    "tests": lambda: text_of_code(files_in(TESTS), names=True),
}


if __name__ == "__main__":
    # Without arguments, of everything; else of Python files or folders, for a writer who rewrites them.
    texts = {name: partial(text_of_code, files_in(Path(name))) for name in sys.argv[1:]} or TEXTS
    for kind, read in texts.items():
        print(f"{kind}: {', '.join(f'{name} {rate:.1f}' for name, rate in rates(read()).items())}")
