"""Agents' rollouts as data has them: groups of unequal sizes, rollouts of unequal numbers of turns.

Each rollout exists twice: as one sample in which every turn is scored, and as one sample per turn with its full history
as prefix and only that turn scored, as ``data.expand_turns`` does with a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, Signals

Shape = tuple[tuple[int, ...], ...]  # of each group, how many turns each of its rollouts has

shapes: st.SearchStrategy[Shape] = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4
).map(tuple)


@dataclass(frozen=True)
class Rollout:
    """One of a group; ``turns`` are the half-open spans that the policy wrote."""

    group: int
    number: int
    tokens: list[int]
    turns: list[tuple[int, int]]
    reward: float | list[float]


def rollouts(shape: Shape, seed: int, *, vocab: int, per_turn: bool = False) -> list[Rollout]:
    """Rollouts of each group in turn; they share a prompt, and often their first turns."""
    rng = np.random.default_rng(seed)

    def run(longest: int) -> list[int]:
        return rng.integers(1, vocab, size=rng.integers(1, longest + 1)).tolist()

    made: list[Rollout] = []
    for group, turns_of_each in enumerate(shape):
        prompt = run(4)
        for number, turns in enumerate(turns_of_each):
            tokens, spans = list(prompt), []
            for turn in range(turns):
                if turn:
                    tokens += run(3)  # the tools' answers
                start = len(tokens)
                # The first turn is often one that another rollout took too.
                tokens += [1, 2] if turn == 0 and rng.random() < 0.5 else run(3)
                spans.append((start, len(tokens)))
            reward = rng.choice([0.0, 0.25, 1.0], size=turns).tolist() if per_turn else float(rng.choice([0.0, 0.3, 1]))
            made.append(Rollout(group, number, tokens, spans, reward))
    return made


def as_samples(made: Sequence[Rollout], seed: int, *, scale: float, around: float) -> tuple[list[Sample], list[Sample]]:
    """One sample per rollout, and one per turn; log-probabilities lie around a value and are the same in both."""
    rng = np.random.default_rng(seed)
    wholes, turns = [], []
    for rollout in made:
        length = len(rollout.tokens)
        given = {
            name: around + scale * rng.standard_normal(length)
            for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
        }
        ids = {"reward": rollout.reward, "group": f"prompt {rollout.group}"}
        source = f"rollouts.jsonl:{len(wholes) + 1}"
        wholes.append(
            Sample(
                tokens=rollout.tokens,
                loss_mask=mask(length, rollout.turns),
                source=source,
                signals=Signals(**given, **ids),
            )
        )
        for turn, (start, end) in enumerate(rollout.turns):
            own = {name: values[:end] for name, values in given.items()}
            turns.append(
                Sample(
                    tokens=rollout.tokens[:end],
                    loss_mask=mask(end, [(start, end)]),
                    source=f"{source} turn {turn}",
                    signals=Signals(**own, **ids, rollout=rollout.number, turn=turn),
                )
            )
    return wholes, turns


def mask(length: int, spans: Sequence[tuple[int, int]]) -> list[float]:
    return [float(any(start <= t < end for start, end in spans)) for t in range(length)]


def advantages_by_hand(made: Sequence[Rollout], baseline: str, eps: float = 1e-6) -> list[list[float]]:
    """Advantages of each rollout's turns: the group's rewards count per rollout, or per turn if given so."""
    result = []
    for rollout in made:
        group = [other for other in made if other.group == rollout.group]
        pool = [value for other in group for value in listed(other.reward)]
        compared = []
        for value in listed(rollout.reward):
            others = [v for other in group if other is not rollout for v in listed(other.reward)]
            if len(group) == 1 or len(set(pool)) == 1:
                compared.append(0.0)
            elif baseline == "leave_one_out":
                compared.append(value - sum(others) / len(others))
            else:
                mean = sum(pool) / len(pool)
                deviation = (sum((v - mean) ** 2 for v in pool) / (len(pool) - 1)) ** 0.5
                compared.append((value - mean) / (deviation + eps if baseline == "group_mean_std" else 1.0))
        if isinstance(rollout.reward, float):
            compared = compared * len(rollout.turns)
            result.append(compared)
        else:
            result.append([sum(compared[turn:]) for turn in range(len(rollout.turns))])
    return result


def listed(reward: float | list[float]) -> list[float]:
    return [reward] if isinstance(reward, float) else reward
