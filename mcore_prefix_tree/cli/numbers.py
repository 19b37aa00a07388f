"""Numbers as all commands print them."""

from __future__ import annotations

import math

_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def count(number: float) -> str:
    """Return an integer with commas: ``13,218``."""
    return f"{number:,.0f}"


def ratio(number: float) -> str:
    """Return a factor: ``6.40x``."""
    return f"{number:.2f}x"


def share(number: float) -> str:
    """Return a share in percent: ``12.4%``."""
    return f"{number:.1%}"


def error(number: float) -> str:
    """Return a relative error: ``3.0e-07``."""
    return f"{number:.1e}"


def figure(number: float) -> str:
    """Return any other number to four digits: ``0.05384``, ``132.5``, ``3.334e-14``; a large one is :func:`short`."""
    return short(number) if 1000 <= abs(number) < math.inf else f"{number:.4g}"


def short(number: float) -> str:
    """Return a large number to three digits, with the letter of its thousands: ``66.1k``, ``69.9G``."""
    for letter in _THOUSANDS[:-1]:
        if abs(number) < 999.5:
            return f"{number:.3g}{letter}"
        number /= 1000
    return f"{number:.3g}{_THOUSANDS[-1]}"


def seconds(number: float) -> str:
    """Return a time: ``24.1 ms``, ``3.31 s``, ``12 min 5 s``."""
    if number < 1:
        return f"{number * 1000:.3g} ms"
    if number < 120:
        return f"{number:.3g} s"
    return f"{number // 60:,.0f} min {number % 60:.0f} s"


def size(number: int | None) -> str:
    """Return bytes of memory: ``951 MiB``; None is unknown."""
    return "not known" if number is None else f"{number / 2**20:,.0f} MiB"


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number of things: ``1 token``, ``2 tokens``."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
