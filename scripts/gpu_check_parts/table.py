"""The short table at the end: one line per measurement, failures first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_check_parts.children import summary_of
from gpu_check_parts.results import FAILED, NOT_RUN, Key

# Some machines return only the end of a log.
MOST_LINES = 90
LONGEST_LINE = 118


def short_table(rows: Mapping[Key, Mapping[str, Any]]) -> str:
    """Return counts, failures, then figures by part; measurements that did not run are only counted."""
    failed = [row for row in rows.values() if FAILED in row]
    measured = [row for row in rows.values() if FAILED not in row and NOT_RUN not in row]
    left = len(rows) - len(failed) - len(measured)
    lines = [f"{len(measured)} measured, {len(failed)} failed, {left} not run"]
    lines += [
        f"{', '.join(str(row[part]) for part in Key._fields if row.get(part))}: {summary_of(dict(row))}"
        for row in (*failed, *measured)
    ]
    more = len(lines) - MOST_LINES
    if more > 0:
        lines[MOST_LINES:] = [f"... and {more} more in the file"]
    return "\n".join(line[:LONGEST_LINE] for line in lines)
