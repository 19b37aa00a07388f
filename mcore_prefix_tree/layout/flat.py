"""The flat layout: every unique token once, in depth-first pre-order, with the map back to the samples.

Legend: T physical tokens, P padded size, N nodes, S samples, L logical tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout.forest import Forest, Int32Array, Int64Array, describe_nodes
from mcore_prefix_tree.layout.kept_sets import KeptSets, find_kept_sets
from mcore_prefix_tree.sample import INT32_MAX, Sample
from mcore_prefix_tree.trie import Trie, build_trie


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Sizes that micro-batches are rounded up to; construction raises ValueError for invalid buckets."""

    multiple: int = 1  # divisor of the size: see row_multiple
    # The only sizes, increasing multiples, if something downstream is compiled or captured once per size. Empty rounds
    # up to multiple and no further.
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"the multiple of a padded size, {self.multiple}, must be at least 1")
        for bucket in self.buckets:
            if bucket < 1:
                raise ValueError(f"a size of {bucket} is too small; sizes are at least 1")
            if bucket % self.multiple:
                raise ValueError(f"{bucket} is not a multiple of {self.multiple}, which parallel layout and FP8 need")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"{list(self.buckets)} must increase")

    def check_holds(self, max_tokens: int) -> None:
        """Raise ValueError if the largest bucket is below ``max_tokens``."""
        if self.buckets and self.buckets[-1] < max_tokens:
            raise ValueError(
                f"the largest, {self.buckets[-1]}, cannot hold a micro-batch of {max_tokens} tokens; add one that can"
            )

    def size(self, tokens: int) -> int:
        """Return the size with padding, at least one token; raise ValueError if ``tokens`` exceed all buckets."""
        if not self.buckets:
            return max(1, -(-tokens // self.multiple)) * self.multiple
        self.check_holds(tokens)
        return self.buckets[bisect_left(self.buckets, tokens)]


NO_PADDING = Padding()


def row_multiple(ranks: int, fp8: str | None, fp8_recipe: str | None) -> int:
    """Return the divisor of a micro-batch's padded size, for layers with Megatron's settings of FP8, None without.

    Each of the ``ranks`` that share the sequence quantises its own rows, in whole groups: 16, or 32 with MXFP8.
    """
    rows = 1 if not fp8 else 32 if getattr(fp8_recipe, "value", fp8_recipe) == "mxfp8" else 16
    return ranks * rows


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatLayout(Forest):
    """One micro-batch of folded samples: a forest with its tokens, which take 24 bytes each without :attr:`sample_map`.

    Query token i sees key token j exactly if ``j <= i < subtree_end[j]``. Tokens from T to P are padding: separate
    roots that see only themselves and are never scored.

    Attributes:
        input_ids: int32 ``[P]``; 0 for padding.
        position_ids: int32 ``[P]``, each token's depth on its path; 0 for padding.
        subtree_end: int32 ``[P]``, exclusive flat end of the subtree under the token's node.
        predictor: int32 ``[P]``, flat index of the token's predecessor on its path; -1 if nothing predicts the token
            (first in a root, padding).
        loss_weight: float64 ``[P]``, the loss masks of all samples through a token, summed; 0 without a predictor.
        temperature: float64 ``[P]``, divisor of the logits at each token; None if it is 1 for all.
        kept: sets of ids that samples were drawn from; None if no sample has a sampling mask. Each of its M edges has a
            score of its own, at place P + m behind those of the tokens.
        routes: int8 or int16 ``[P, layers, top-k]``, the experts of each token, -1 where the model routes; None if no
            sample has routes.
        depth_weight: float64 ``[K, P]``, ``loss_weight`` of each of K depths of multi-token prediction, whose depth k
            predicts a token from k tokens earlier: each sample's masks, times its ratio of Megatron's
            ``original_num_tokens / num_tokens``. No rows for models without.
    """

    input_ids: Int32Array
    position_ids: Int32Array
    subtree_end: Int32Array
    predictor: Int32Array
    loss_weight: npt.NDArray[np.float64]
    temperature: npt.NDArray[np.float64] | None = None
    kept: KeptSets | None = None
    routes: npt.NDArray[np.int8] | npt.NDArray[np.int16] | None = None
    depth_weight: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def padded_size(self) -> int:
        return len(self.input_ids)

    @cached_property
    def sample_map(self) -> Int32Array:
        """Flat indices of the samples' tokens, int32 ``[L]``, one sample after another, in the caller's order.

        The only array here with an entry per logical token: made when it is first requested.
        """
        sample_map = np.empty(self.logical_tokens, dtype=np.int32)
        lengths = np.diff(self.cu_sample_lens)[self.sample_order]
        starts = self.cu_sample_lens[self.sample_order]
        for path, start, length in zip(
            _paths(self.sample_shared, lengths), starts.tolist(), lengths.tolist(), strict=True
        ):
            sample_map[start : start + length] = path[:length]
        return sample_map

    @cached_property
    def last_tokens(self) -> Int64Array:
        """Flat index of each sample's last token, int64 ``[S]``."""
        return self.sample_map[self.cu_sample_lens[1:] - 1].astype(np.int64)

    @property
    def num_places(self) -> int:
        """P + M, the number of scores; P without sampling masks."""
        return self.padded_size + (0 if self.kept is None else len(self.kept))

    @property
    def has_edge(self) -> npt.NDArray[np.bool_]:
        """Return whether a sample has its score at each place, bool ``[P + M]``."""
        if self.kept is None:
            return self.predictor >= 0
        return np.append(self.kept.has_whole, np.ones(len(self.kept), dtype=np.bool_))

    @property
    def edge_predictor(self) -> Int32Array:
        """Return the predictor of the token at each place of a token's score, int32; -1 without one."""
        return self.predictor

    @property
    def edge_token_id(self) -> Int32Array:
        """Return the id of the token at each place of :attr:`edge_predictor`, int32."""
        return self.input_ids

    @property
    def counts_samples(self) -> bool:
        """Return whether the samples count in the step's divisor here; of several chunks they do in one."""
        return True

    @property
    def edge_weight(self) -> npt.NDArray[np.float64]:
        """Return the loss masks of all samples with a score at each place, summed, float64 ``[P + M]``."""
        return self.loss_weight if self.kept is None else np.append(self.kept.whole_weight, self.kept.loss_weight)

    @property
    def places(self) -> Int32Array:
        """Place of each logical token's score, int32 ``[L]``: :attr:`sample_map`, but P + m for kept edge m."""
        return self.sample_map if self.kept is None else self.kept.place

    @cached_property
    def num_predictors(self) -> int:
        predicts = np.zeros(self.padded_size, dtype=np.bool_)
        predicts[self.predictor[self.loss_weight != 0]] = True
        return int(np.count_nonzero(predicts))

    @cached_property
    def heads(self) -> tuple[Int64Array, Int64Array]:
        """First tokens of nodes below others, int64 ``[n]``, by their predictors, which are the second array."""
        starts = self.cu_node_lens[:-1]
        heads = np.unique(starts[starts < self.physical_tokens]).astype(np.int64)
        heads = heads[self.predictor[heads] >= 0]
        heads = heads[np.argsort(self.predictor[heads], kind="stable")]
        return heads, self.predictor[heads].astype(np.int64)

    @property
    def max_path_len(self) -> int:
        """Longest path, i.e. longest sample; padding counts as a path of one token."""
        return int(self.position_ids.max()) + 1

    def sample_tokens(self, sample: int) -> Int32Array:
        """Flat indices of one sample's tokens, ``[n]``, a view of :attr:`sample_map`."""
        return self.sample_map[self.cu_sample_lens[sample] : self.cu_sample_lens[sample + 1]]

    def sample_places(self, sample: int) -> Int32Array:
        """Places of the scores of one sample's tokens, ``[n]``, a view of :attr:`places`."""
        return self.places[self.cu_sample_lens[sample] : self.cu_sample_lens[sample + 1]]


def fold(
    samples: Sequence[Sample],
    *,
    trie: Trie | None = None,
    pad_to_multiple_of: int = 1,
    padded_size: int | None = None,
    depths: int = 0,
) -> FlatLayout:
    """Fold samples into one flat layout.

    It depends on the samples only, not on their order, except ``sample_map``, ``cu_sample_lens``, ``sample_node`` and
    ``sample_order``, which follow the caller's order.

    Args:
        samples: any number; no samples give a layout of padding only (a rank without work).
        trie: trie of these samples, if it is known or shares less than everything; ``build_trie(samples)`` by default.
        pad_to_multiple_of: number whose multiples the size is rounded up to (tensor parallel size, under sequence
            parallelism).
        padded_size: exact size to pad to; it must hold all tokens and be such a multiple.
        depths: number of depths of multi-token prediction that the model trains.

    Raises:
        ValueError: if ``padded_size`` cannot hold the tokens or is not a multiple of ``pad_to_multiple_of``; if
            ``trie`` has another number of samples.
        TypeError: something in ``samples`` is not a :class:`Sample`, or another argument has the wrong type.
    """
    if not isinstance(trie, Trie | None):
        raise TypeError(f"trie is a {type(trie).__name__}; give the result of build_trie, or omit it")
    if trie is None:
        trie = build_trie(samples)
    elif len(trie.order) != len(samples):
        raise ValueError(f"the trie has {len(trie.order)} samples, but {len(samples)} are given")
    physical = trie.num_tokens
    padded_size = _choose_size(physical, pad_to_multiple_of, padded_size)
    nodes = describe_nodes(samples, trie)
    nodes |= {
        name: nodes[name].astype(np.int32) for name in ("cu_node_lens", "node_parent", "node_depth", "sample_node")
    }
    borders, parent, depth = nodes["cu_node_lens"], nodes["node_parent"], nodes["node_depth"]
    node_lens = np.diff(borders)
    # In place, and steps that need a second array first: the peak is no more memory than the result.
    position_ids = np.arange(padded_size, dtype=np.int32)
    position_ids[:physical] -= np.repeat(borders[:-1] - depth, node_lens)
    position_ids[physical:] = 0
    subtree_end = np.arange(1, padded_size + 1, dtype=np.int32)
    subtree_end[:physical] = np.repeat(trie.node_subtree_end.astype(np.int32), node_lens)
    # A node's first token is predicted by its parent's last, every other token by its left neighbour.
    predictor = np.arange(-1, padded_size - 1, dtype=np.int32)
    predictor[borders[:-1]] = np.where(parent < 0, -1, borders[1:][parent] - 1)
    predictor[physical:] = -1
    input_ids = np.zeros(padded_size, dtype=np.int32)
    if physical:
        fresh = [samples[s].tokens[p:] for s, p in zip(trie.order.tolist(), trie.shared.tolist(), strict=True)]
        np.concatenate(fresh, out=input_ids[:physical])

    lengths = np.diff(nodes["cu_sample_lens"])
    masks = [sample.loss_mask for sample in samples]
    walk = trie.order, trie.shared, lengths, padded_size
    loss_weight, num_supervised = sum_masks(masks, *walk)
    deeper = ([_deeper(mask, depth) for mask in masks] for depth in range(1, depths + 1))
    layout = FlatLayout(
        input_ids=input_ids,
        position_ids=position_ids,
        subtree_end=subtree_end,
        predictor=predictor,
        loss_weight=loss_weight,
        num_supervised=num_supervised,
        **nodes,
        temperature=_temperature(samples, trie, lengths, padded_size),
        routes=_routes(samples, trie, lengths, padded_size),
        depth_weight=np.array([sum_masks(masks, *walk)[0] for masks in deeper]),
    )
    if all(sample.signals.sampling_mask is None for sample in samples):
        return layout
    return replace(layout, kept=find_kept_sets(samples, layout))


def _choose_size(physical: int, pad_to_multiple_of: int, padded_size: int | None) -> int:
    """Return the size of a layout of so many tokens; the errors are those of :func:`fold`."""
    for name, value in (("pad_to_multiple_of", pad_to_multiple_of), ("padded_size", padded_size)):
        if not isinstance(value, int | np.integer | None) or (value is None and name == "pad_to_multiple_of"):
            raise TypeError(f"{name}={value!r} must be an integer")
    if pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of={pad_to_multiple_of} must be at least 1")
    if padded_size is None:
        padded_size = max(1, -(-physical // pad_to_multiple_of)) * pad_to_multiple_of
    if padded_size < max(1, physical):
        raise ValueError(f"padded_size={padded_size} cannot hold the {physical} unique tokens of these samples")
    if padded_size % pad_to_multiple_of:
        raise ValueError(f"padded_size={padded_size} is not a multiple of pad_to_multiple_of={pad_to_multiple_of}")
    if padded_size > INT32_MAX:
        raise ValueError(f"{padded_size} tokens are more than a layout's {INT32_MAX}; fold fewer samples at once")
    return padded_size


def _temperature(
    samples: Sequence[Sample], trie: Trie, lengths: Int64Array, padded_size: int
) -> npt.NDArray[np.float64] | None:
    """Return each token's temperature, float64 ``[P]``, or None; samples that share a token agree on it."""
    sample_scores = np.fromiter((sample.temperature for sample in samples), dtype=np.float64, count=len(samples))
    if (sample_scores == 1).all():
        return None
    temperature = np.ones(padded_size, dtype=np.float64)
    temperature[: trie.num_tokens] = np.repeat(sample_scores[trie.order], lengths[trie.order] - trie.shared)
    return temperature


def _routes(
    samples: Sequence[Sample], trie: Trie, lengths: Int64Array, padded_size: int
) -> npt.NDArray[np.int8] | npt.NDArray[np.int16] | None:
    """Return each token's experts ``[P, layers, top-k]``, or None: those of the first sample that routed it."""
    given = [sample.signals.routes for sample in samples]
    ids = [one.ids for one in given if one is not None]
    if not ids:
        return None
    routes = np.full((padded_size, *ids[0].shape[1:]), -1, dtype=np.result_type(*ids))
    flat = 0
    ordered = lengths[trie.order]
    for index, prefix, path, length in zip(
        trie.order.tolist(), trie.shared.tolist(), _paths(trie.shared, ordered), ordered.tolist(), strict=True
    ):
        own, fresh = given[index], length - prefix
        if own is not None:
            routes[flat : flat + fresh] = own.ids[prefix:]
            # The sample before may end here: its last token has no route.
            if prefix and routes[path[prefix - 1]].max() < 0:
                routes[path[prefix - 1]] = own.ids[prefix - 1]
        flat += fresh
    return routes


def _paths(shared: Int64Array, lengths: Int64Array) -> Iterator[Int32Array]:
    """Yield per sample, depth-first, a reused buffer whose first ``length`` entries are flat indices, ``[S]``."""
    path = np.empty(int(lengths.max(initial=0)), dtype=np.int32)
    flat = 0
    for prefix, length in zip(shared.tolist(), lengths.tolist(), strict=True):
        path[prefix:length] = np.arange(flat, flat + length - prefix, dtype=np.int32)
        flat += length - prefix
        yield path


def _deeper(mask: npt.NDArray[np.floating], depth: int) -> npt.NDArray[np.float64]:
    """Return a sample's loss mask ``[n]`` at a depth of multi-token prediction, as ``process_mtp_loss`` scales it."""
    deeper = mask.astype(np.float64)
    total = deeper[1:].sum()
    deeper[: 1 + depth] = 0
    deeper *= total / max(deeper.sum(), 1.0)
    return deeper


def sum_masks(
    masks: Sequence[npt.NDArray[np.generic]], order: Int64Array, shared: Int64Array, lengths: Int64Array, size: int
) -> tuple[npt.NDArray[np.float64], int]:
    """Return the summed masks of the samples through each token, float64 ``[P]``, and the scored logical tokens.

    ``order`` is the depth-first order, and ``shared`` the tokens that each sample in it has in common with the one
    before, int64 ``[S]`` each; ``lengths``, int64 ``[S]``, are in the caller's order.
    """
    loss_weight = np.zeros(size)  # float64: a sum of masks then equals the sum in a float64 loss
    num_supervised = 0
    on_path = np.zeros(int(lengths.max(initial=0)), dtype=np.float64)
    ordered = lengths[order]
    # After each sample the walk leaves the tokens that the next one does not share.
    left = np.append(shared, 0)[1:]
    for index, path, length, keep in zip(
        order.tolist(), _paths(shared, ordered), ordered.tolist(), left.tolist(), strict=True
    ):
        mask = masks[index]
        on_path[1:length] += mask[1:]  # nothing predicts the first token
        num_supervised += int(np.count_nonzero(mask[1:]))
        if keep < length:
            loss_weight[path[keep:length]] = on_path[keep:length]
            on_path[keep:length] = 0.0
    return loss_weight, num_supervised
