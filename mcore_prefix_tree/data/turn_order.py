"""Turns of a rollout in separate lines, which stay together like those of one line."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mcore_prefix_tree.sample import Sample

Turn = tuple[Hashable, int]


def read_turn(sample: Sample) -> Turn | None:
    """Return the rollout and the turn of a sample; None unless it names both."""
    rollout, turn = sample.signals.unit("rollout"), sample.signals.turn
    return None if rollout is None or turn is None else (rollout, turn)


def goes_on(before: Turn | None, turn: Turn | None) -> bool:
    """Return whether a turn is a later one of the rollout that the turn before it belongs to."""
    return before is not None and turn is not None and before[0] == turn[0] and before[1] < turn[1]


def with_later_turns(lines: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Join neighbouring lines that hold successive turns of a rollout, for example from ``score``."""
    joined: list[list[Sample]] = []
    last = None
    for line in lines:
        if line and joined and goes_on(last, read_turn(line[0])):
            joined[-1] += line
        else:
            joined.append(list(line))
        last = read_turn(line[-1]) if line else last
    return joined
