#!/usr/bin/env python3
"""Search for every hook of a trainer that this package relies on, and report those that moved.

    scripts/trainer_hooks.py               # installed trainers, and checkouts in SLIME_PATH and NEMO_RL_PATH
    scripts/trainer_hooks.py verl=../verl  # a checkout

Reads source files only, and imports no trainer. Each entry of lib/trainer_hooks.json has a file, the name of a function
or class in it ("" for the file), parameters that we pass, text in its source, and its use.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

HOOKS = Path(__file__).parent / "lib" / "trainer_hooks.json"
DISTRIBUTIONS = {"verl": "verl", "megatron_bridge": "megatron-bridge", "trl": "trl"}
CHECKOUTS = {"slime": "SLIME_PATH", "nemo_rl": "NEMO_RL_PATH"}


@dataclass(frozen=True)
class Hook:
    """A function, class or file of a trainer.

    Attributes:
        file: path in the trainer's packages.
        name: qualified name in the file; "" is the file.
        parameters: parameters that we pass or take.
        text: parts of its source.
        use: our use of it.
    """

    file: str
    name: str
    parameters: tuple[str, ...]
    text: tuple[str, ...]
    use: str

    def check(self, root: Path) -> tuple[str, str]:
        """Return its place below ``root`` and its missing parts, "" for none."""
        path = root / self.file
        if not path.is_file():
            return self.file, "no such file"
        source = path.read_text()
        node = find(ast.parse(source), self.name)
        if node is None:
            return self.file, f"no {self.name}"
        place, segment = self.file, source
        if not isinstance(node, ast.Module):
            place, segment = f"{self.file}:{node.lineno}", ast.get_source_segment(source, node) or ""
        missing = [f"parameter {name}" for name in self.parameters if name not in parameters(node)]
        missing += [f"text {text!r}" for text in self.text if text not in segment]
        return place, ", ".join(missing)


Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def find(tree: ast.Module, name: str) -> Node | None:
    """Return the definition with a qualified name."""
    node: Node = tree
    for part in filter(None, name.split(".")):
        definitions = [child for child in ast.walk(node) if isinstance(child, Node) and child is not node]
        found = [child for child in definitions if getattr(child, "name", "") == part]
        if not found:
            return None
        node = found[0]
    return node


def parameters(node: Node) -> set[str]:
    """Return the names of a function's parameters."""
    if isinstance(node, ast.Module | ast.ClassDef):
        return set()
    arguments = node.args
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def hooks() -> dict[str, list[Hook]]:
    """Return the hooks of each trainer."""
    entries = json.loads(HOOKS.read_text())
    return {
        trainer: [Hook(file, name, tuple(given), tuple(text), use) for file, name, given, text, use in found]
        for trainer, found in entries.items()
    }


def root_of(trainer: str) -> Path | None:
    """Return the folder of a trainer's packages, installed or checked out; None if there is neither."""
    if trainer in CHECKOUTS:
        path = os.getenv(CHECKOUTS[trainer])
        return Path(path) if path else None
    try:
        return Path(str(importlib.metadata.distribution(DISTRIBUTIONS[trainer]).locate_file("")))
    except importlib.metadata.PackageNotFoundError:
        return None


def moved(trainer: str, root: Path) -> list[str]:
    """Return one line per hook of a trainer that moved."""
    checked = [(hook, *hook.check(root)) for hook in hooks()[trainer]]
    return [f"{place}: {missing}; used where {hook.use}" for hook, place, missing in checked if missing]


def main(arguments: list[str]) -> int:
    """Print a table of the hooks of each trainer; return 1 if some moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", metavar="TRAINER=PATH", help="checkout to search")
    arguments = parser.parse_args(arguments).checkouts
    roots = {trainer: root_of(trainer) for trainer in hooks()}
    roots |= {trainer: Path(path) for trainer, _, path in (argument.partition("=") for argument in arguments)}
    lost = 0
    for trainer, root in roots.items():
        if root is None:
            print(f"{trainer}: neither installed nor checked out")
            continue
        for hook in hooks()[trainer]:
            place, missing = hook.check(root)
            lost += bool(missing)
            print(f"{trainer}: {place} {hook.name} ({hook.use}): {'MOVED, ' + missing if missing else 'found'}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
