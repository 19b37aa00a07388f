"""Output blocks of pages: comparison with the printed output, and rewriting with the same cuts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_MEASURED = re.compile(r"\s*(?:s|ms|us|µs|[KMG]i?B|k? ?tok(?:ens)?/s|[MGT]?FLOP/s)(?:\W|$)")
_PIECE = re.compile(
    rf"(?P<any>\.\.\.)|(?P<number>(?<![\w.]){_NUMBER}|(?<=[A-Za-z]){_NUMBER})|(?P<space>\s+)|(?P<rule>[─━-]{{3,}})"
)
_END = r"\s*"


def _pattern(shown: str) -> tuple[re.Pattern[str], list[tuple[str, bool]]]:
    """Return a pattern of a shown line, and of each number its text and whether a clock or a memory gave it."""
    built, numbers, end = "", [], 0
    for piece in _PIECE.finditer(shown):
        built += re.escape(shown[end : piece.start()])
        if piece["any"]:
            built += ".*"
        elif piece["number"]:
            built += f"({_NUMBER})"
            numbers.append((piece["number"], _MEASURED.match(shown, piece.end()) is not None))
        else:
            built += r"\s+" if piece["space"] else r"[─━-]+"
        end = piece.end()
    return re.compile(built + re.escape(shown[end:]) + _END), numbers


def same_line(shown: str, printed: str) -> bool:
    """Tell whether a printed line is the one that a page shows.

    Words are equal. Integers and numbers in front of an ``x`` are equal; decimals, which processors round
    differently, agree within a hundredth or 1e-5; measured values, for example times, may be any number.
    """
    pattern, numbers = _pattern(shown)
    found = pattern.fullmatch(printed)
    if found is None:
        return False
    for at, (text, measured) in enumerate(numbers, start=1):
        ratio = printed[found.end(at) : found.end(at) + 1] == "x"
        if measured or found[at] == text:
            continue
        if ratio or "." not in text + found[at]:
            return False
        one, other = float(text.replace(",", "")), float(found[at].replace(",", ""))
        if abs(one - other) > max(1e-2 * abs(one), 1e-5):
            return False
    return True


def _unwrapped(lines: list[str]) -> list[str]:
    """Join the metrics below a step's line: their line breaks depend on the length of the numbers."""
    joined: list[str] = []
    below = False
    for line in lines:
        goes_on = line.startswith("  ") and below
        if goes_on and joined[-1].startswith("  "):
            joined[-1] += " |" + line[1:]
        else:
            joined.append(line)
        below = goes_on or line.startswith("step ")
    return joined


def _segments(shown: list[str]) -> list[list[str]]:
    """Return the runs of lines between lines of ``...``; the first and the last may be empty."""
    runs: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == "...":
            runs.append([])
        else:
            runs[-1].append(line)
    return runs


def _positions(shown: list[str], printed: list[str]) -> Iterator[tuple[list[str], range]]:
    """Yield each run of shown lines with the printed lines at which it may begin."""
    runs, free = _segments(shown), 0
    for number, run in enumerate(runs):
        last = len(printed) - len(run)
        if len(runs) == 1:
            yield run, range(0, 1 if last == 0 else 0)
        elif number == 0:
            yield run, range(0, 1)
        elif number == len(runs) - 1 and run:
            yield run, range(max(last, 0), last + 1)
        elif run:
            yield run, range(free, last + 1)
        free += 1 if run else 0


def difference(shown: list[str], printed: list[str]) -> str | None:
    """Return how a page's output block differs from its commands' output; None if it shows that."""
    free, printed = 0, _unwrapped(printed)
    for run, places in _positions(_unwrapped(shown), printed):
        for at in places:
            window = printed[at : at + len(run)]
            if at >= free and len(window) == len(run) and all(map(same_line, run, window)):
                free = at + len(run)
                break
        else:
            return "\n".join(["shown:", *run, "printed:", *printed])
    return None


def rewritten(shown: list[str], printed: list[str]) -> list[str]:
    """Return an output block with the same cuts, of the commands' present output.

    Raises:
        ValueError: a line with ``...`` inside it no longer resembles the printed line.
    """
    if not any(line.strip() == "..." for line in shown):
        return [_cut(old, new) for old, new in _paired(shown, printed)]
    lines: list[str] = []
    runs, free = _segments(shown), 0
    for number, run in enumerate(runs):
        if number:
            lines.append("...")
        if not run:
            continue
        at = 0 if number == 0 else len(printed) - len(run) if number == len(runs) - 1 else _place(run, printed, free)
        lines += [_cut(old, new) for old, new in _paired(run, printed[at : at + len(run)])]
        free = at + len(run)
    return lines


def _masked(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub(_NUMBER, "#", line))


def _alike(one: str, other: str) -> float:
    # The number of a step counts more than all figures below it.
    same_step = one.startswith("step ") and one.split(" | ")[0] == other.split(" | ")[0]
    return 100 * same_step + difflib.SequenceMatcher(None, _masked(one), _masked(other), autojunk=False).ratio()


def _place(run: list[str], printed: list[str], free: int) -> int:
    """Return the printed line at which a run of shown lines begins: the one with the most similarity."""
    places = range(free, max(len(printed) - len(run), free) + 1)
    return max(places, key=lambda at: sum(map(_alike, run, printed[at : at + len(run)])))


def _paired(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    for line in new:
        yield max(old, key=lambda one: _alike(one, line), default=""), line


def _cut(old: str, new: str) -> str:
    """Return a printed line with the ``...`` of the line that stood there."""
    parts = old.split("...")
    if len(parts) == 1:
        return new
    fields, kept = new.split(" | "), old.count(" | ")
    if old.endswith("| ...") and len(fields) > kept:
        return " | ".join([*fields[:kept], "..."])
    kept_parts = (_pattern(part)[0].pattern.removesuffix(_END) for part in parts)
    named = (f"(?P<part{number}>{part})" for number, part in enumerate(kept_parts))
    found = re.fullmatch(".*".join(named) + _END, new)
    if found is not None:
        return "...".join(found[f"part{number}"] for number in range(len(parts)))
    if _alike(old, new) > 0.6:
        raise ValueError(f"{old!r} does not fit {new!r}: cut that by hand")
    return new
