"""Samples that diverge from one that they should begin with or resemble: the place and the words.

Three kinds of branches are examined; all others are continuations of one prompt, which are meant to differ.

- A turn of a rollout that does not begin with the turn before it.
- Context that no sample generated, when another sample generated the same text in other tokens, or with thinking.
- Prompts, or calls, that differ only in words that should not matter: a date, an id, a system prompt's wording.

Legend: S samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mcore_prefix_tree.data.causes.resend import last_answer, resend, same_text, unmet
from mcore_prefix_tree.data.causes.words import (
    RUN,
    Decode,
    Difference,
    Region,
    Span,
    Tokens,
    Words,
    differing_words,
    find_region,
    has_time,
    meeting,
    near_meeting,
    retokenised,
)
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import common_prefix_length, sort_samples

# Alike samples differ in at most this many tokens, but for tools, and in this many words.
SHORT = 64
_WORDS = 12
# Numbers, and unknown tokens, are in the same prompt only if so many tokens behind them are equal.
_LONG_RUN = 64


def judged(
    one: Tokens,
    other: Tokens,
    span: Span,
    run: int,
    *,
    is_scored: bool,
    decode: Decode | None,
) -> Difference | None:
    """Return a difference of two prompts, int32 ``[n]`` and ``[m]``, if it is in words that should not matter."""
    start, end, other_start, other_end = span
    longest = max(end - start, other_end - other_start)
    here = partial(Difference, other_start, other_end, one[start:end])
    if decode is None:
        return here("unknown") if longest <= RUN and run >= _LONG_RUN and not is_scored else None
    words = differing_words(decode, one, other, span)
    if words is None or (longest > SHORT and words.kind != "words"):
        return None
    if words.kind == "call id":
        return here("call ids", words=words)
    return None if is_scored else _compare_prompts(here, words, find_region(decode, one, start), longest, run)


def _compare_prompts(
    here: Callable[..., Difference], words: Words, region: Region, longest: int, run: int
) -> Difference | None:
    prompt = partial(here, "prompt", words=words)
    if words.kind in ("date", "id"):
        is_fixed = region in ("system", "tools", "unknown")
        return prompt(detail=words.kind) if is_fixed or (region == "opening" and has_time(words)) else None
    if words.kind == "number":
        is_fixed = region in ("system", "tools") or (region == "unknown" and run >= _LONG_RUN)
        return prompt(detail="number") if is_fixed else None
    if region == "tools":
        return prompt(detail="tools")
    is_short = longest <= SHORT and max(len(text.split()) for text in words[:2]) <= _WORDS
    return prompt(detail="words") if region == "system" and is_short else None


# A turn continues one of so many before it: turns of subagents may be between.
_TURNS = 3
# Branches that are looked at, and samples and differences that are tried at each.
_BRANCHES = 4096
_CANDIDATES = 16
# Tokens that all comparisons together may look at, a few seconds of work; decoding one counts as several.
_TOKENS = 2**23
_DECODING = 4
# Texts that are kept.
_TEXTS = 1024
# A sample generated a branch if its first scored token is this near: prompts may end in a mark of thinking.
_SOON = 8
# Alike samples meet again within so many tokens.
_LONG = 2048


class Mismatch(NamedTuple):
    """A sample and another that it diverges from, by index, and their differences; both share ``inherited`` of them."""

    sample: int
    other: int
    differences: list[Difference]
    inherited: int = 0


@dataclass
class _Search:
    samples: Sequence[Sample]
    decode: Decode | None = None
    found: dict[int, list[Mismatch]] = field(default_factory=lambda: defaultdict(list))
    tokens_left: int = _TOKENS

    def spends(self, tokens: int) -> bool:
        """Take a comparison's token count from the budget; return False if nothing is left."""
        self.tokens_left -= tokens + _SOON
        return self.tokens_left > 0

    def end(self, sample: int) -> int:
        """Return the end of a sample's last difference."""
        return max((one.differences[-1].end for one in self.found.get(sample, [])), default=0)


def find_mismatches(samples: Sequence[Sample], decode: Decode | None = None) -> tuple[list[Mismatch], bool]:
    """Return the mismatches, the costliest first, and whether all branches were examined; ``decode`` may be None."""
    search = _Search(samples)
    if decode is not None:
        known = decode

        @lru_cache(maxsize=_TEXTS)  # shared tokens come before each of the samples' differences
        def counted(tokens: tuple[int, ...]) -> str | None:
            search.tokens_left -= _DECODING * len(tokens)
            return known(tokens)

        search.decode = lambda tokens: counted(tuple(tokens))
    _follow_rollouts(search)
    branches, is_complete = _costliest(samples)
    for branch in branches:
        _compare_branches(search, branch)
    return [
        one for sample_scores in search.found.values() for one in sample_scores
    ], is_complete and search.tokens_left > 0


def _follow_rollouts(search: _Search) -> None:
    """Compare each turn of a rollout with the one of the turns before that it has most in common with."""
    rollouts: dict[Hashable, list[int]] = defaultdict(list)
    for index, sample in enumerate(search.samples):
        key = sample.signals.unit("rollout")
        if key is not None:
            rollouts[key, sample.merge_key].append(index)
    for turns in rollouts.values():
        turns.sort(key=lambda index: (search.samples[index].signals.turn or 0, len(search.samples[index])))
        for number in range(1, len(turns)):
            _follow(search, turns[max(0, number - _TURNS) : number], turns[number])


def _follow(search: _Search, before: Sequence[int], turn: int) -> None:
    tokens = search.samples[turn].tokens
    shared = [common_prefix_length(search.samples[one].tokens, tokens) for one in before]
    at, other = max(zip(shared, before, strict=True))
    known = [one for mismatch in search.found.get(other, []) for one in mismatch.differences if one.end <= at]
    found: list[Difference] = []
    if at < len(search.samples[other]) and at < len(tokens) and search.spends(len(search.samples[other]) - at):
        found = resend(search.samples[other], search.samples[turn], at, search.decode)
        if not found and " turn " in search.samples[turn].source:  # of one conversation, so it is one
            found = [unmet(search.samples[other], search.samples[turn], at, at, search.decode)]
    if known or found:
        search.found[turn].append(Mismatch(turn, other, known + found, inherited=len(known)))


class _Branch(NamedTuple):
    """A place where samples part: how many tokens they have in common, and the samples of each child."""

    depth: int
    children: list[list[int]]
    cost: int


def _costliest(samples: Sequence[Sample]) -> tuple[list[_Branch], bool]:
    """Return the branches below which most tokens are computed more than once, from the roots on."""
    order, shared = sort_samples(samples)
    lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))[order]
    new_before = np.concatenate([[0], np.cumsum(lengths - shared)])

    def tokens(start: int, end: int, depth: int) -> int:
        return int(new_before[end] - new_before[start + 1] + lengths[start] - depth)

    places = []
    for depth, starts in _intervals(shared.tolist()):
        ranges = [pair for pair in pairwise(starts) if lengths[pair[0]] > depth]
        sizes = [tokens(start, end, depth) for start, end in ranges]
        if len(ranges) > 1:
            places.append((sum(sizes) - max(sizes), depth, ranges))
    places.sort(key=lambda place: -place[0])
    kept = sorted(places[:_BRANCHES], key=lambda place: place[1])
    samples_of = order.tolist()
    return [_Branch(depth, [samples_of[a:b] for a, b in ranges], cost) for cost, depth, ranges in kept], len(
        kept
    ) == len(places)


def _intervals(shared: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield the common length of every run of neighbours in depth-first order, and the borders of its children."""
    stack: list[tuple[int, list[int]]] = []
    for place in range(1, len(shared) + 1):
        common = shared[place] if place < len(shared) else -1
        start = place - 1
        while stack and stack[-1][0] > common:
            depth, starts = stack.pop()
            yield depth, [*starts, place]
            start = starts[0]
        if stack and stack[-1][0] == common:
            stack[-1][1].append(place)
        elif common >= 0:
            stack.append((common, [start, place]))


def _compare_branches(search: _Search, branch: _Branch) -> None:
    samples, depth = search.samples, branch.depth

    # Generated tokens begin at the branch, or near it if prompts end in a mark of thinking.
    soon = 1 if any(samples[index].loss_mask[depth] for child in branch.children for index in child) else _SOON

    def generates(index: int) -> bool:
        return bool(samples[index].loss_mask[depth : depth + soon].any())

    def ends_soon(index: int) -> bool:
        return last_answer(samples[index]) <= depth + soon

    generating = [child for child in branch.children if any(map(generates, child))]
    origins = [index for child in generating for index in child if generates(index) and ends_soon(index)][:_CANDIDATES]
    others = [
        child
        for child in branch.children
        if child in generating or not origins or not _compare_resent(search, child, origins, depth, is_exact=soon == 1)
    ]
    if soon == 1 and search.decode is not None:
        for child in generating:
            context = [index for index in child if not samples[index].loss_mask[depth:][:1].any()]
            _compare_text(search, context, [index for index in origins if index not in child], depth, search.decode)
    heaviest = max(others, key=len)
    for child in others:
        if child is not heaviest:
            # Others are made alike to the first that nothing was found about.
            first = next((index for index in heaviest if index not in search.found), heaviest[0])
            _compare_alike(search, child, first, depth)


def _compare_resent(
    search: _Search, child: Sequence[int], origins: Sequence[int], depth: int, *, is_exact: bool
) -> bool:
    """Find the one of ``origins`` that generated the context of a child's samples, at ``depth`` exactly or near it."""
    samples = search.samples
    if samples[child[0]].signals.unit("rollout") is not None or search.end(child[0]) > depth:
        return False  # its origin is known
    origins = [index for index in origins if samples[index].merge_key == samples[child[0]].merge_key]
    for index in child:
        origin, found = _best_origin(search, index, origins, depth, is_exact=is_exact)
        if origin is None and (search.decode is not None or not is_exact or not origins):
            if index == child[0]:
                return False
            continue
        if origin is None:
            origin, found = origins[0], [unmet(samples[origins[0]], samples[index], depth, depth, None)]
        origins = [origin, *(one for one in origins if one != origin)]  # most likely that of the next sample too
        search.found[index].append(Mismatch(index, origin, found))
    return bool(origins)


def _compare_text(search: _Search, context: Sequence[int], origins: Sequence[int], depth: int, decode: Decode) -> None:
    """Look for the text of an answer whose first differing tokens happen to be those of another answer."""
    samples = search.samples
    for index in context:
        if samples[index].signals.unit("rollout") is not None or search.end(index) > depth:
            continue
        for origin in origins:
            if samples[index].merge_key != samples[origin].merge_key or not search.spends(_SOON):
                continue
            rest = same_text(samples[origin].tokens, depth, samples[index].tokens, depth, decode)
            if rest is not None and rest.end < len(samples[index]):
                search.found[index].append(Mismatch(index, origin, [rest]))
                break


def _best_origin(
    search: _Search, index: int, origins: Sequence[int], depth: int, *, is_exact: bool
) -> tuple[int | None, list[Difference]]:
    """Return the sample that another was most likely sent again from, and the differences; None if there is no such."""
    best: tuple[int, int | None, list[Difference]] = 0, None, []
    for origin in origins:
        rest = len(search.samples[origin]) - depth
        if not search.spends(rest):
            break
        found = resend(search.samples[origin], search.samples[index], depth, search.decode)
        if found and all(one.cause in ("retokenised", "thinking") for one in found):
            return origin, found
        if found and is_exact and 2 * (replaced := sum(len(one.tokens) for one in found)) <= rest:
            best = min(best, (replaced - rest, origin, found), key=lambda one: one[0])
    return best[1:]


def _compare_alike(search: _Search, child: Sequence[int], other: int, depth: int) -> None:
    """Look for words that should not matter between the samples of a child and another sample."""
    samples = search.samples
    for index in child:
        ours, theirs = samples[index].signals.unit("rollout"), samples[other].signals.unit("rollout")
        if samples[index].merge_key != samples[other].merge_key or search.end(index) > depth:
            continue
        if ours is not None and ours == theirs:
            continue
        found = _alike(search, samples[other], samples[index], depth)
        if not found:
            return  # the other samples of the child continue alike
        search.found[index].append(Mismatch(index, other, found))


def _alike(search: _Search, reference: Sample, sample: Sample, depth: int) -> list[Difference]:
    one, other = reference.tokens, sample.tokens
    left = right = depth
    found: list[Difference] = []
    while left < len(one) and right < len(other) and len(found) < _CANDIDATES and search.spends(SHORT):
        both_scored = bool(reference.loss_mask[left] and sample.loss_mask[right])
        if both_scored and search.decode is not None and not found:
            rest = same_text(one, left, other, right, search.decode)
            # An answer that ends, and that another sample continues, was sent again.
            if rest is not None and rest.end < len(other) and len(rest.tokens) > 1:
                return [rest]
        ahead = one[left : left + _LONG], other[right : right + _LONG]
        met = meeting(*ahead) or near_meeting(*ahead)
        if met is None:
            break
        span = left, left + met[0], right, right + met[1]
        run = common_prefix_length(one[span[1] :], other[span[3] :])
        is_scored = bool(reference.loss_mask[left : span[1] + 1].any() or sample.loss_mask[right : span[3] + 1].any())
        difference = None if both_scored else retokenised(one, other, span, search.decode)
        difference = difference or judged(one, other, span, run, is_scored=is_scored, decode=search.decode)
        if difference is None:
            break
        found.append(difference)
        left, right = span[1] + run, span[3] + run
    return found
