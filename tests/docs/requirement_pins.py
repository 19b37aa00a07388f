"""The pins of a file of requirements."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def pins(file: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def packed_pins(name: str) -> dict[str, str]:
    """Return the pinned versions of ``requirements/pack-NAME.txt``."""
    found = pins(ROOT / f"requirements/pack-{name}.txt")
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in found}
