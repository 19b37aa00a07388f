"""A trie over samples, built by sorting: neighbours in lexicographic order share the longest prefixes.

Sorting the samples and keeping only the tokens of each that its predecessor in that order does not have yields the
tokens of the trie in depth-first pre-order. The nodes follow from the longest common prefixes (LCPs) of neighbours with
one stack, as in the construction of a suffix tree from an LCP array (Kasai et al., CPM 2001). Nothing recurses and
nothing walks tokens in Python.

Legend: S samples, N nodes, T physical tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample, SampleError, check_samples
from mcore_prefix_tree.signals import RoutedExperts
from mcore_prefix_tree.utils.choices import Share

IntArray = npt.NDArray[np.int64]
Routes = Sequence[RoutedExperts | None]

# Tokens that a sort holds as bytes, and the least of each sample that it compares at once.
_AT_ONCE, _LEAST = 1 << 24, 64


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Common prefixes that samples share. A plan and the folding of its micro-batches take the same one.

    Raises:
        ValueError: raised on construction, for another ``share`` or a negative ``min_shared_tokens``.
    """

    # "all" shares every common prefix, scored tokens too. "prompt" shares the tokens that two samples have in common
    # before the first scored token of either: each sample computes its own completion.
    share: Share = "all"
    # Smallest length of a common prefix that is shared; samples with fewer tokens in common are in different trees.
    min_shared_tokens: int = 0
    # Whether samples also share a token to which their engines gave different routes: it takes those of the first
    # sample in depth-first order, which is not exact. Otherwise samples share a token only while their routes agree in
    # every layer; the last token of a sample has none, and agrees with any.
    use_first_samples_routes: bool = False

    def __post_init__(self) -> None:
        if self.share not in get_args(Share):
            raise ValueError(f"share={self.share!r} must be one of {', '.join(map(repr, get_args(Share)))}")
        if self.min_shared_tokens < 0:
            raise ValueError(f"min_shared_tokens={self.min_shared_tokens} must be >= 0")


SHARE_ALL = Sharing()


def sort_samples(samples: Sequence[Sample], sharing: Sharing = SHARE_ALL) -> tuple[IntArray, IntArray]:
    """Return ``order`` and ``shared`` of a :class:`Trie`, int64 ``[S]`` each: a depth-first order of the samples.

    Raises SampleError for samples with routes of different shapes.

    The order depends on the samples' content only (samples that score the same of equal tokens keep the caller's
    order), so every rank and every shuffle of the same samples builds the same trie and the same plan.
    """
    shareable = [
        sample.tokens if sharing.share == "all" else sample.tokens[: prompt_length(sample)] for sample in samples
    ]
    routes = _routes(samples)
    compared = None if sharing.use_first_samples_routes else routes
    runs = _sorted_runs(samples, shareable, compared, routes)
    order = np.fromiter((index for run in runs for index in run), dtype=np.int64, count=len(samples))
    shared = np.zeros(len(samples), dtype=np.int64)
    at = 0
    for run in runs:
        for left, right in pairwise(run):
            at += 1
            shared[at] = common_prefix_length(shareable[left], shareable[right])
            if compared is not None:
                shared[at] = _common_route_length(compared, left, right, int(shared[at]), len(samples[left]))
        at += 1
    # The prefix common to two samples is the shortest between the neighbours from one to the other: dropping the short
    # ones leaves exactly the pairs that have enough in common.
    shared[shared < sharing.min_shared_tokens] = 0
    return order, shared


def _token_and_route(tokens: npt.NDArray[np.int32], route: RoutedExperts | None, start: int) -> bytes:
    """Return bytes that compare like ``[n]`` pairs of a token and its route; no route comes before any.

    ``start`` is the position of the first token.
    """
    pairs = np.zeros(len(tokens), dtype=[("token", ">i4"), ("route", ">u8")])
    pairs["token"] = tokens
    if route is not None:
        pairs["route"] = route.digest[start : start + len(tokens)]
    return pairs.tobytes()


def _routes(samples: Sequence[Sample]) -> Routes | None:
    """Return each sample's routes, or None if no sample has any; raise SampleError for different shapes."""
    routes = [sample.signals.routes for sample in samples]
    given = [(sample, one) for sample, one in zip(samples, routes, strict=True) if one is not None]
    if not given:
        return None
    first, shape = given[0][0].source, given[0][1].ids.shape[1:]
    for sample, one in given:
        if one.ids.shape[1:] != shape:
            raise SampleError(
                f"{sample.source}: field 'routed_experts' has {one.ids.shape[1]} layers of {one.ids.shape[2]} experts, "
                f"but {shape[0]} layers of {shape[1]} in {first}; use samples that one model made"
            )
    return routes


def _common_route_length(routes: Routes, left: int, right: int, length: int, left_length: int) -> int:
    """Return how many of the ``length`` tokens that two samples have in common were routed alike."""
    # left comes before right in depth-first order, so that only the former's last token can be one that takes
    # the other's route.
    one, other = routes[left], routes[right]
    end = left_length - 1 if length == left_length else length  # the last token agrees with any
    if one is not None and other is not None:
        differs = one.digest[:end] != other.digest[:end]
        same = int(differs.argmax()) if differs.any() else end
        if not np.array_equal(one.ids[:same], other.ids[:same]):  # equal numbers of different routes
            same = int((one.ids[:same] != other.ids[:same]).any(axis=(1, 2)).argmax())
    elif one is not None or other is not None:
        routed = (one or other).digest[:end] != 0  # type: ignore[union-attr]
        same = int(routed.argmax()) if routed.any() else end
    else:
        same = end
    return length if same == end else same


def _sorted_runs(
    samples: Sequence[Sample], shareable: Sequence[npt.NDArray[np.int32]], compared: Routes | None, tied: Routes | None
) -> list[list[int]]:
    """Return the samples of each ``merge_key``; the order depends only on their content, int32 ``[n]`` each."""

    # Unshared tokens, and routes that do not matter, only decide between equal samples. Otherwise the caller's order
    # would decide. When two groups start with equal samples, the repr of their merge keys decides.
    def shared_part(index: int, start: int, end: int) -> bytes:
        part = shareable[index][start:end]
        if compared is None:
            return part.astype(">i4").tobytes()  # big-endian bytes compare like the integers that they hold
        return _token_and_route(part, compared[index], start)

    def rest(index: int, start: int, end: int) -> bytes:
        return samples[index].tokens[len(shareable[index]) :][start:end].astype(">i4").tobytes()

    def digest(index: int) -> bytes:
        route = None if tied is None else tied[index]
        return b"" if route is None else route.digest.tobytes()

    keys: list[Callable[[int], Any]] = [
        lambda index: _Scored(samples[index].loss_mask),
        digest,
        lambda index: repr(samples[index].merge_key),
    ]
    groups: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.merge_key, []).append(index)
    runs = {run[0]: run for run in (_sort(group, [shared_part, rest], keys[:2]) for group in groups.values())}
    return [runs[first] for first in _sort(list(runs), [shared_part, rest], keys)]


def _sort(
    indices: list[int], texts: Sequence[Callable[[int, int, int], bytes]], keys: Sequence[Callable[[int], Any]]
) -> list[int]:
    """Sort by the texts of each index, of which ``text(index, start, end)`` gives a part, then by its ``keys``."""
    # The parts of all at one place are compared, then the next of those that are equal so far: no more than _AT_ONCE
    # tokens are held as bytes, and samples that differ early are not read to their end.
    part = max(_LEAST, _AT_ONCE // max(len(indices), 1))
    found: list[int] = []
    waiting = [(0, 0, indices)]  # text, start in it, and those that are equal before it
    while waiting:
        text, start, group = waiting.pop()
        if len(group) == 1:
            found += group
        elif text == len(texts):
            found += sorted(group, key=lambda index: tuple(key(index) for key in keys))
        else:
            parts = {index: texts[text](index, start, start + part) for index in group}
            ordered = sorted(group, key=parts.__getitem__)
            equal = [(one, list(some)) for one, some in groupby(ordered, key=parts.__getitem__)]
            # An empty part is behind the end of all of its group.
            waiting += [(text, start + part, some) if one else (text + 1, 0, some) for one, some in reversed(equal)]
    return found


@dataclass(frozen=True, eq=False)
class _Scored:
    """Order of samples with equal tokens: more scored ones first, so that they cover the others, as plans assume."""

    mask: npt.NDArray[np.float32]

    @property
    def key(self) -> tuple[int, bytes]:
        unscored = self.mask == 0
        return int(np.count_nonzero(unscored)), unscored.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Scored) and self.key == other.key

    def __lt__(self, other: _Scored) -> bool:
        return self.key < other.key


def prompt_length(sample: Sample) -> int:
    """Leading tokens before the first scored one; all of them if nothing is scored."""
    scored = sample.loss_mask[1:] > 0
    first = int(scored.argmax()) if len(scored) else 0
    return first + 1 if len(scored) and scored[first] else len(sample)


def common_prefix_length(left: npt.NDArray[np.integer], right: npt.NDArray[np.integer]) -> int:
    """Count the leading tokens that two samples, ``[n]`` and ``[m]``, have in common."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


@dataclass(frozen=True, kw_only=True, eq=False)
class Trie:
    """A forest of token runs as a struct of arrays. Nodes are numbered in depth-first pre-order."""

    order: IntArray  # int64 [S], sample indices in depth-first order
    # int64 [S], number of leading tokens that order[i] has in common with order[i - 1]; its other tokens are new and
    # follow those of order[i - 1] in the flat layout.
    shared: IntArray
    cu_node_lens: IntArray  # int64 [N + 1], node n holds the flat tokens cu_node_lens[n]:cu_node_lens[n + 1]
    node_parent: IntArray  # int64 [N], -1 for a root
    node_depth: IntArray  # int64 [N], position of the node's first token on its path
    node_subtree_end: IntArray  # int64 [N], exclusive flat end of the node's subtree
    sample_node: IntArray  # int64 [S], the node in which each sample (in the caller's order) ends

    @property
    def num_nodes(self) -> int:
        return len(self.node_parent)

    @property
    def num_tokens(self) -> int:
        """T, the physical tokens."""
        return int(self.cu_node_lens[-1])


def build_trie(samples: Sequence[Sample], sharing: Sharing = SHARE_ALL) -> Trie:
    """Fold any number of samples into a trie; those with different ``merge_key`` never share a node.

    A sample that is a prefix of another ends in an inner node, equal samples end in the same node.

    Raises:
        TypeError: something in ``samples`` is not a :class:`Sample`.
    """
    check_samples(samples)
    order, shared = sort_samples(samples, sharing)
    lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))
    return trie_from_order(order, shared, lengths[order])


def trie_from_order(order: IntArray, shared: IntArray, lengths: IntArray) -> Trie:
    """Build the nodes that an order of the samples implies.

    Args:
        order: int64 ``[S]``, a permutation of the samples in which those of every subtree are neighbours.
        shared: int64 ``[S]``, leading tokens in common with the sample before; ``shared[i]`` is at most the length of
            either, and ``shared[0]`` is 0.
        lengths: int64 ``[S]``, tokens of each sample, in that order.
    """
    # Node records in creation order; a split creates the upper part later than the lower one.
    start_depth: list[int] = []
    flat_start: list[int] = []
    flat_end: list[int] = []
    parent: list[int] = []
    subtree_end: list[int] = []
    sample_node = np.empty(len(order), dtype=np.int64)
    stack: list[int] = []  # the current path, root first
    flat = 0

    def new_node(depth: int, begin: int, end: int, above: int) -> int:
        start_depth.append(depth)
        flat_start.append(begin)
        flat_end.append(end)
        parent.append(above)
        subtree_end.append(-1)
        return len(parent) - 1

    for index, length, prefix in zip(order.tolist(), lengths.tolist(), shared.tolist(), strict=True):
        while stack and start_depth[stack[-1]] >= prefix:
            subtree_end[stack.pop()] = flat
        if stack:
            top = stack[-1]
            cut = flat_start[top] + prefix - start_depth[top]
            if cut < flat_end[top]:
                upper = new_node(start_depth[top], flat_start[top], cut, parent[top])
                parent[top], start_depth[top], flat_start[top] = upper, prefix, cut
                subtree_end[top] = flat
                stack[-1] = upper
        if length > prefix:
            stack.append(new_node(prefix, flat, flat + length - prefix, stack[-1] if stack else -1))
            flat += length - prefix
        sample_node[index] = stack[-1]
    for node in stack:
        subtree_end[node] = flat

    by_flat = np.argsort(np.asarray(flat_start, dtype=np.int64), kind="stable")
    number = np.empty(len(by_flat) + 1, dtype=np.int64)
    number[by_flat] = np.arange(len(by_flat))
    number[-1] = -1  # the parent of a root stays -1
    return Trie(
        order=order,
        shared=shared,
        cu_node_lens=np.append(np.asarray(flat_start, dtype=np.int64)[by_flat], flat),
        node_parent=number[np.asarray(parent, dtype=np.int64)][by_flat],
        node_depth=np.asarray(start_depth, dtype=np.int64)[by_flat],
        node_subtree_end=np.asarray(subtree_end, dtype=np.int64)[by_flat],
        sample_node=number[sample_node],
    )
