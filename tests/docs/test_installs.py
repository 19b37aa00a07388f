"""Packages that pages, examples and messages install: no foreign names, and only tested packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name
from pages import PAGES, ROOT

OURS = "mcore-prefix-tree"
TEXTS = [
    *PAGES,
    *(path for folder in ("recipes", "patches", "examples", "benchmarks") for path in (ROOT / folder).rglob("*")),
    *(path for path in (ROOT / "scripts").rglob("*")),
    ROOT / "mkdocs.yml",
    ROOT / "pyproject.toml",
]
SOURCES = sorted([*(ROOT / "mcore_prefix_tree").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
# Of pip, pipx, uv, poetry and conda; up to the end of the code in a page, of the command or of the clause.
_TOOLS = r"(?:pip3?|pipx|uv|poetry|conda|mamba)"
_COMMAND = re.compile(rf"\b{_TOOLS}\s+(?:install|add|download|wheel|run --with)\s+([^\n`#;&|)]*)")
# Projects of others that a GPU or a benchmark needs and no requirements file pins.
# TransformerEngine is compiled with the last two.
OTHERS = {"areal", "causal-conv1d", "flash-linear-attention", "mamba-ssm", "transformer-engine", "ninja", "wheel"}
_TAKES_VALUE = {"-r", "--requirement", "-c", "--constraint", "-t", "--target", "-w", "--wheel-dir", "--python"}


def installed_by(text: str) -> Iterator[str]:
    """Yield the packages that commands in a text install from an index."""
    for command in _COMMAND.findall(text.replace("\\\n", " ")):
        words = iter(command.replace(",", " , ").replace('"', " ").replace("'", " ").split())
        for word in words:
            if word in _TAKES_VALUE:
                next(words, None)
            elif word in {",", "or", "and", "into"}:
                break
            elif not word.startswith("-") and (name := index_name(word)):
                yield name
            if word.endswith("."):  # the sentence's, or the folder that is installed
                break


def index_name(word: str) -> str | None:
    """Return the name that pip would ask the index for; None for a path, a URL or a wheel."""
    if "/" in word or word.startswith((".", "$", "{", "<", ">")) or word.endswith(".whl"):
        return None
    found = re.match(r"[A-Za-z][\w.-]*", word)
    return canonicalize_name(found[0].rstrip(".")) if found else None


def strings_of(path: Path) -> Iterator[str]:
    """Yield the strings of a source file, those of an f-string joined."""
    tree = ast.parse(path.read_text())
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    for node in joined:
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    for one in ast.walk(tree):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in parts:
            yield one.value


def readable(path: Path) -> str:
    try:
        return path.read_text() if path.is_file() else ""
    except UnicodeDecodeError:
        return ""


def texts() -> Iterator[tuple[str, str]]:
    for path in TEXTS:
        yield str(path.relative_to(ROOT)), readable(path)
    for path in SOURCES:
        for text in strings_of(path):
            yield str(path.relative_to(ROOT)), text


def named_by_us() -> set[str]:
    """The packages of pyproject.toml and the requirements files."""
    lines = [line for file in ROOT.rglob("requirements/versions/*.txt") for line in file.read_text().splitlines()]
    lines += [line for file in ROOT.glob("requirements/*.txt") for line in file.read_text().splitlines()]
    lines += re.findall(r'"([a-z][\w.-]*(?:\[\w+\])?>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    return {name for line in lines if not line.startswith("#") and (name := index_name(line))}


def test_nothing_is_installed_by_a_name_that_is_not_ours() -> None:
    """No index has this package, so an owner of its name could run code on users' machines."""
    found = [(name, installed) for name, text in texts() for installed in installed_by(text) if installed == OURS]
    assert found == []
    extras = re.compile(rf"(?<![\w/-]){OURS}\s*\[|mcore_prefix_tree\[", re.I)
    assert [name for name, text in texts() if extras.search(text)] == []


def test_installed_packages_are_tested_packages() -> None:
    found = {installed: name for name, text in texts() for installed in installed_by(text)}
    assert {"tensorboard", "areal"} < set(found)
    assert {installed: name for installed, name in found.items() if installed not in named_by_us() | OTHERS} == {}
