"""Marks of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(*kept: Any, of: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter; tests of those that are not kept are slow."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in of]


def mostly_in_ci(*kept: Any, of: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter; tests of those that are not kept run in CI, not by default."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.ci) for value in of]
