"""Depth-first order of S samples by sorting: neighbours are in one subtree and share the longest prefixes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import RoutedExperts
from mcore_prefix_tree.utils.choices import Share

IntArray = npt.NDArray[np.int64]
Routes = Sequence[RoutedExperts | None]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Common prefixes that samples share. A plan and the folding of its micro-batches take the same one.

    Attributes:
        share: ``"all"`` shares every common prefix, scored tokens too. ``"prompt"`` shares the tokens that two samples
            have in common before the first scored token of either: each sample computes its own completion.
        min_shared_tokens: smallest length of a common prefix that is shared; samples with fewer tokens in common are in
            different trees.
        use_first_samples_routes: whether samples also share a token to which their engines gave different routes: it
            takes those of the first sample in depth-first order, which is not exact. Otherwise samples share a token
            only while their routes agree in every layer; the last token of a sample has none, and agrees with any.

    Raises:
        ValueError: raised on construction, for another ``share`` or a negative ``min_shared_tokens``.
    """

    share: Share = "all"
    min_shared_tokens: int = 0
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
    order), so every rank and every shuffle of the same samples builds the same trie and the same plan. Needs 4 bytes
    for every logical token while it sorts.
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


def _token_and_route(tokens: npt.NDArray[np.int32], route: RoutedExperts | None) -> bytes:
    """Return bytes that compare like ``[n]`` pairs of a token and its route; no route comes before any."""
    pairs = np.zeros(len(tokens), dtype=[("token", ">i4"), ("route", ">u8")])
    pairs["token"] = tokens
    if route is not None:
        pairs["route"] = route.digest[: len(tokens)]
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
    """Return how many of the ``length`` tokens that two samples have in common were routed alike.

    ``left`` comes before ``right`` in depth-first order, so that only the former's last token can be one that takes the
    other's route.
    """
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
    samples: Sequence[Sample],
    shareable: Sequence[npt.NDArray[np.int32]],
    compared: Routes | None,
    tied: Routes | None,
) -> list[list[int]]:
    """Return the samples of each ``merge_key``; the order depends only on their content, int32 ``[n]`` each."""
    # Big-endian bytes compare like the integers they hold, so the sort is memcmp on full samples. Unshared tokens, and
    # routes that do not matter, only decide between equal ones, or their order would be the caller's.
    unrouted: Routes = [None] * len(samples)
    keys = [
        (
            part.astype(">i4").tobytes() if compared is None else _token_and_route(part, compared[index]),
            sample.tokens[len(part) :].astype(">i4").tobytes(),
            _Scored(sample.loss_mask),
            b"" if route is None else route.digest.tobytes(),
        )
        for index, (part, sample, route) in enumerate(zip(shareable, samples, tied or unrouted, strict=True))
    ]
    groups: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.merge_key, []).append(index)
    runs = [sorted(group, key=keys.__getitem__) for group in groups.values()]
    # The merge key's repr decides between groups that start with the same tokens.
    return sorted(runs, key=lambda run: (keys[run[0]], repr(samples[run[0]].merge_key)))


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
