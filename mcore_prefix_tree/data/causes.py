"""Reasons why samples that should begin with the same tokens do not: the first token that differs, and both texts.

Three kinds of neighbours are compared; other samples that part, for example several answers, are meant to differ.

- A turn of a rollout, and the turn before it, with which it should begin.
- A sample without a rollout, and one whose generated text it repeats in other tokens.
- Two contexts that differ in a few tokens ahead of many equal ones, for example in a date.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mcore_prefix_tree.data.text_parts import common_length
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import common_prefix_length, sort_samples

# Text of tokens, for people; None if the tokens are of another vocabulary.
Decode = Callable[[Sequence[int]], str | None]
CauseName = Literal["retokenised", "rewritten", "prompt", "unknown"]

# A turn continues one of so many before it: turns of subagents may be between. Samples that repeat the text of another
# lie within so many of it in order.
_TURNS = 3
_NEIGHBOURS = 8
# Contexts that should be equal differ in at most so many tokens, with so many equal ones behind them.
_FEW, _MANY = 32, 32
# Tokens that are decoded ahead of a difference, because a token's text may depend on them, and behind it.
_AHEAD, _SHOWN = 16, 64
# Texts that are compared.
_MOST = 4096


@dataclass(kw_only=True)
class Cause:
    """A cause, over all samples that have it."""

    name: CauseName
    is_format: bool  # whether the chat format changes earlier turns itself: the samples are turns of one conversation
    samples: int = 0  # number of samples that do not begin as others do because of it
    unshared_tokens: int = 0  # tokens of the others that these samples would share
    source: str  # the first of them
    other: str  # the sample that it should begin like
    common_tokens: int
    words: str | None  # its text behind the common tokens, and the other's; None if they cannot be decoded
    other_words: str | None


@dataclass(frozen=True, kw_only=True)
class Causes:
    """Causes, the costliest first; of more samples than those unless all texts were compared (``is_complete``)."""

    causes: list[Cause]
    branches: bool
    is_complete: bool


@dataclass
class _Search:
    samples: Sequence[Sample]
    decode: Decode | None
    texts_left: int
    found: dict[tuple[CauseName, bool], Cause] = field(default_factory=dict)

    def text(self, index: int, start: int, end: int | None) -> str | None:
        """Return the text of a sample's tokens ``start:end``; None without one."""
        self.texts_left -= 1
        if self.decode is None or self.texts_left < 0:
            return None
        text = self.decode(self.samples[index].tokens[start:end].tolist())
        return None if text is None else text.rstrip("\ufffd")

    def is_same_text(self, one: int, other: int, at: int) -> bool:
        """Return whether a sample has the text of the rest of another in other tokens."""
        start = max(0, at - _AHEAD)
        for end in (at + _SHOWN, None):  # most texts that differ do so at once
            text, rest = self.text(one, start, end), self.text(other, start, end)
            if text is None or rest is None or not (text.startswith(rest) or (end and rest.startswith(text))):
                return False
        return True

    def add(self, name: CauseName | None, one: int, other: int, at: int, *, samples: int = 1, tokens: int) -> None:
        """Count a sample that parts from another at a token; without a name, its text is another."""
        start = max(0, at - _AHEAD)
        text, other_text = (self.text(index, start, at + _SHOWN) for index in (one, other))
        word = 0
        if text is not None and other_text is not None:
            word = min(common_length(text, other_text), len(self.text(one, start, at) or ""))
            while word and not (text[word - 1].isspace() or text[word : word + 1].isspace()):
                word -= 1
            name = name or "rewritten"
        is_format = name != "prompt" and _is_one_record(self.samples[one], self.samples[other])
        cause = self.found.setdefault(
            (name or "unknown", is_format),
            Cause(
                name=name or "unknown", is_format=is_format, source=self.samples[one].source,
                other=self.samples[other].source, common_tokens=at, words=text and text[word:],
                other_words=other_text and other_text[word:],
            ),
        )  # fmt: skip
        cause.samples += samples
        cause.unshared_tokens += tokens


def _is_one_record(one: Sample, other: Sample) -> bool:
    """Return whether samples are turns of one conversation."""
    record = one.source.removesuffix(one.part)
    return bool(one.part and other.part) and record == other.source.removesuffix(other.part)


def find_causes(samples: Sequence[Sample], *, decode: Decode | None = None) -> Causes:
    """Find why samples share at least one per cent less than they should.

    Texts are unknown if ``decode`` is None or returns None.
    """
    search = _Search(samples, decode, _MOST)
    rollouts: dict[Hashable, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        key = sample.signals.unit("rollout")
        if key is not None:
            rollouts[key, sample.merge_key].append(index)
    for turns in rollouts.values():
        turns.sort(key=lambda index: (samples[index].signals.turn or 0, len(samples[index])))
        for number in range(1, len(turns)):
            _follow(search, turns[max(0, number - _TURNS) : number], turns[number])

    sorted_order, common = sort_samples(samples)
    order, shared = sorted_order.tolist(), [*common.tolist(), 0]
    for place in range(len(order)):
        if decode is not None and samples[order[place]].signals.rollout is None:
            _find_repeated(search, order, shared, place)
        if place:
            _compare_contexts(search, order, shared, place)
    # Less than a hundredth of the unique tokens is not worth a change of the data.
    unique = sum(map(len, samples)) - sum(shared)
    costly = [cause for cause in search.found.values() if 100 * cause.unshared_tokens >= unique]
    return Causes(
        causes=sorted(costly, key=lambda cause: -cause.unshared_tokens),
        branches=any(shared[place] < len(samples[order[place - 1]]) for place in range(1, len(order))),
        is_complete=search.texts_left >= 0,
    )


def _follow(search: _Search, before: Sequence[int], turn: int) -> None:
    """Compare a turn with the one of the turns ``before`` that it has most in common with."""
    sample = search.samples[turn]
    at, other = max((common_prefix_length(search.samples[one].tokens, sample.tokens), one) for one in before)
    origin = search.samples[other]
    if at == min(len(origin), len(sample)) or (sample.loss_mask[at] and origin.loss_mask[at]):
        return  # it continues the other, or is another answer
    # A turn that leaves the other ahead of its answer may be a subagent's.
    if not origin.loss_mask[:at].any() and not origin.loss_mask[at] and not _is_one_record(sample, origin):
        return
    name: CauseName | None = "retokenised" if search.is_same_text(turn, other, at) else None
    search.add(name, turn, other, at, tokens=len(origin) - at)


def _find_repeated(search: _Search, order: Sequence[int], shared: Sequence[int], place: int) -> None:
    """Look among the neighbours of a sample for one that generated the text of its context in other tokens."""
    sample = search.samples[order[place]]
    for step in (-1, 1):
        at = len(sample)
        for near in range(place + step, place + step * (_NEIGHBOURS + 1), step):
            at = min(at, shared[max(near, near - step)]) if 0 <= near < len(order) else 0
            if at == 0:
                break
            origin = search.samples[order[near]]
            is_repeated = _differ(sample, origin, at) and not sample.loss_mask[at] and origin.loss_mask[at]
            if is_repeated and search.is_same_text(order[place], order[near], at):
                search.add("retokenised", order[place], order[near], at, tokens=len(origin) - at)
                return


def _compare_contexts(search: _Search, order: Sequence[int], shared: Sequence[int], place: int) -> None:
    """Compare the contexts of two neighbours: after few tokens that differ, many equal ones may follow."""
    one, other, at = search.samples[order[place]], search.samples[order[place - 1]], shared[place]
    rollout = one.signals.unit("rollout")
    if one.merge_key != other.merge_key or (rollout is not None and rollout == other.signals.unit("rollout")):
        return
    if not _differ(one, other, at) or one.loss_mask[at] or other.loss_mask[at]:
        return
    ahead, other_ahead = one.tokens[at:], other.tokens[at:]
    window = other_ahead[: _FEW + _MANY].tobytes()
    for skip in range(min(_FEW, len(ahead) - _MANY) + 1):
        met, odd = divmod(window.find(ahead[skip : skip + _MANY].tobytes()), ahead.itemsize)
        if met >= 0 and not odd:
            equal = common_prefix_length(ahead[skip:], other_ahead[met:])
            end = next(end for end in range(place + 1, len(shared)) if shared[end] <= at)
            search.add("prompt", order[place], order[place - 1], at, samples=end - place, tokens=equal)
            return


def _differ(one: Sample, other: Sample, at: int) -> bool:
    """Return whether samples go on with other tokens, and not only, for example, with other routes."""
    return at < min(len(one), len(other)) and bool(one.tokens[at] != other.tokens[at])
