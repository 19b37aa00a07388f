"""Counts of the house: its size, its rooms, its names. ``python tests/docs/house.py`` prints them beside the goals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "mcore_prefix_tree", ROOT / "tests"
# Of a function that computes a value, in place of a verb.
_OF = re.compile(r"^_?(?:of_\w+|\w+_of)$")


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def count_lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in files_in(folder))


def root_modules() -> list[str]:
    return [file.name for file in sorted(PACKAGE.glob("*.py"))]


def repeated_names() -> dict[str, int]:
    """Count the rooms of each file name that stands in several."""
    names = [file.name for file in files_in(PACKAGE) if file.name != "__init__.py"]
    return {name: names.count(name) for name in sorted(set(names)) if names.count(name) > 1}


def functions() -> Iterator[ast.FunctionDef]:
    for file in files_in(PACKAGE):
        yield from (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.FunctionDef))


def share_of_nouns() -> float:
    """Return the share of functions that are named ``x_of`` or ``of_x``, in per cent."""
    names = [node.name for node in functions() if not node.name.startswith("__")]
    return 100 * sum(bool(_OF.match(name)) for name in names) / len(names)


def long_private_docstrings() -> list[str]:
    """Return the names of private functions whose docstring has more than one line."""
    return [
        node.name
        for node in functions()
        if node.name.startswith("_") and not node.name.startswith("__") and "\n" in (ast.get_docstring(node) or "")
    ]


def takers_of(annotation: str) -> list[str]:
    """Return the names of functions with a parameter of a type."""
    return [
        node.name
        for node in functions()
        if annotation
        in {ast.unparse(one.annotation) for one in chain(node.args.args, node.args.kwonlyargs) if one.annotation}
    ]


def _docstring_lines(node: ast.AST) -> int:
    body = getattr(node, "body", None)
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) or not body or not ast.get_docstring(node):
        return 0
    return int(body[0].end_lineno) - int(body[0].lineno) + 1


def share_of_docstrings() -> float:
    """Return the share of the package's lines that are docstrings, in per cent."""
    lines = sum(_docstring_lines(node) for file in files_in(PACKAGE) for node in ast.walk(tree_of(file)))
    return 100 * lines / count_lines(PACKAGE)


def raises() -> int:
    return sum(isinstance(node, ast.Raise) for file in files_in(PACKAGE) for node in ast.walk(tree_of(file)))


def circles() -> list[list[str]]:
    """Return the groups of files that import each other at their top, each as the modules of its circle."""
    names = {_module(file): file for file in files_in(PACKAGE)}
    imports = {name: _imported(file, names) - {name} for name, file in names.items()}
    return [circle for circle in strong_parts(imports) if len(circle) > 1]


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(file: Path, names: dict[str, Path]) -> set[str]:
    found = set()
    for node in tree_of(file).body:  # those in functions and under TYPE_CHECKING wait
        if isinstance(node, ast.ImportFrom) and node.module in names:
            found |= {f"{node.module}.{one.name}" for one in node.names} & set(names)
            found |= {node.module} if any(f"{node.module}.{one.name}" not in names for one in node.names) else set()
    # A room's entrance imports its files, which do not import it back.
    return found


def strong_parts(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected parts of a graph (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    parts: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            parts.append(sorted(stack[place:]))
            del stack[place:]

    for name in graph:
        if name not in index:
            visit(name)
    return parts


def imports_of_tests(file: Path) -> list[str]:
    """Return the test files that a file imports from, as ``file:line: module``."""
    found = []
    for node in ast.walk(tree_of(file)):
        modules = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"{file.name}:{node.lineno}: {name}" for name in modules if name.split(".")[-1].startswith("test_")]
    return found


def measure() -> list[tuple[str, float, float | None]]:
    """Return each measure with its value and its goal, None where it is reported only."""
    files = files_in(PACKAGE)
    return [
        ("lines of the package", count_lines(PACKAGE), 38_500),
        ("lines of the tests", count_lines(TESTS), 45_000),
        ("files of the package", len(files), 270),
        ("files of at most 60 lines", sum(len(file.read_text().splitlines()) <= 60 for file in files), 45),
        ("root modules", len(root_modules()), 8),
        ("file names in several rooms", len(repeated_names()), 0),
        ("import circles", len(circles()), 0),
        ("functions named x_of, %", share_of_nouns(), 2),
        ("functions that take a recipe", len(takers_of("Recipe")), 10),
        ("docstrings, % of lines", share_of_docstrings(), 13),
        ("raise statements", raises(), None),
    ]


if __name__ == "__main__":
    for name, value, goal in measure():
        print(f"{name:32} {value:10,.1f} {'' if goal is None else f'goal {goal:,}'}")
    print(*map(" <-> ".join, circles()), sep="\n")
    print(repeated_names())
