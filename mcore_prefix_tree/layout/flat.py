"""The flat layout: every unique token once, in depth-first pre-order, with the map back to the samples.

Legend: T physical tokens, P padded size, N nodes, S samples, L logical tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import Trie, build_trie

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatLayout:
    """One micro-batch of folded samples.

    Query token i sees key token j exactly if ``j <= i < subtree_end[j]``. Tokens from T to P are padding: roots
    of their own that see only themselves and are never scored.

    Attributes:
        input_ids: int64 ``[P]``.
        position_ids: int32 ``[P]``, each token's depth on its own path; 0 for padding.
        subtree_end: int32 ``[P]``, exclusive flat end of the subtree under the token's node.
        predictor: int32 ``[P]``, flat index of the token's predecessor on its path; -1 where nothing predicts the
            token (first in a root, padding).
        loss_weight: float32 ``[P]``, the loss masks of all samples through a token, summed; 0 without a predictor.
        cu_node_lens: int32 ``[N + 1]``, node n holds flat tokens ``cu_node_lens[n]:cu_node_lens[n + 1]``.
        node_parent: int32 ``[N]``, -1 for a root.
        node_depth: int32 ``[N]``, position of the node's first token on its path.
        sample_map: int32 ``[L]``, flat indices of the samples' tokens, one sample after another, in the caller's order.
        cu_sample_lens: int64 ``[S + 1]``, sample s is ``sample_map[cu_sample_lens[s]:cu_sample_lens[s + 1]]``.
        sample_node: int32 ``[S]``, the node in which each sample ends.
        num_supervised: logical tokens that have a predictor and a non-zero loss mask.
    """

    input_ids: Int64Array
    position_ids: Int32Array
    subtree_end: Int32Array
    predictor: Int32Array
    loss_weight: npt.NDArray[np.float32]
    cu_node_lens: Int32Array
    node_parent: Int32Array
    node_depth: Int32Array
    sample_map: Int32Array
    cu_sample_lens: Int64Array
    sample_node: Int32Array
    num_supervised: int

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.node_parent)

    @property
    def num_samples(self) -> int:
        """S."""
        return len(self.cu_sample_lens) - 1

    @property
    def num_trees(self) -> int:
        """Nodes without a parent."""
        return int(np.count_nonzero(self.node_parent < 0))

    @property
    def padded_size(self) -> int:
        """P."""
        return len(self.input_ids)

    @property
    def physical_tokens(self) -> int:
        """T, the unique tokens, before padding."""
        return int(self.cu_node_lens[-1])

    @property
    def logical_tokens(self) -> int:
        """L, the sum of the sample lengths."""
        return len(self.sample_map)

    @property
    def fold_ratio(self) -> float:
        """Logical over physical tokens: the ideal speed-up of all token-wise work. 1 for an empty layout."""
        return self.logical_tokens / self.physical_tokens if self.physical_tokens else 1.0

    @cached_property
    def visible_pairs(self) -> int:
        """(query, key) pairs that attention computes, padding aside."""
        physical = self.physical_tokens
        return int((self.subtree_end[:physical].astype(np.int64) - np.arange(physical)).sum())

    @cached_property
    def unfolded_pairs(self) -> int:
        """(query, key) pairs that causal attention over each sample alone computes."""
        lengths = np.diff(self.cu_sample_lens)
        return int((lengths * (lengths + 1) // 2).sum())

    @property
    def pair_ratio(self) -> float:
        """Unfolded over visible pairs: the ideal speed-up of attention. 1 for an empty layout."""
        return self.unfolded_pairs / self.visible_pairs if self.visible_pairs else 1.0

    @property
    def max_path_len(self) -> int:
        """Longest path, i.e. longest sample; padding counts as a path of one token."""
        return int(self.position_ids.max()) + 1

    def sample_tokens(self, sample: int) -> Int32Array:
        """Flat indices of one sample's tokens, ``[n]``."""
        return self.sample_map[self.cu_sample_lens[sample] : self.cu_sample_lens[sample + 1]]


def fold(
    samples: Sequence[Sample], *, pad_to_multiple_of: int = 1, padded_size: int | None = None, pad_token: int = 0
) -> FlatLayout:
    """Fold samples into one flat layout.

    Args:
        samples: any number; no samples give a layout of padding alone (a rank without work).
        pad_to_multiple_of: round the size up to a multiple of this (tensor parallel size, under sequence parallelism).
        padded_size: pad to this size exactly; it must hold all tokens and be such a multiple.
        pad_token: id of the padding tokens; any id inside the vocabulary.

    Returns:
        The layout. It depends on the samples only, not on their order, apart from ``sample_map``, ``cu_sample_lens``
        and ``sample_node``, which follow the caller's order.

    Raises:
        ValueError: if ``padded_size`` cannot hold the tokens or is not a multiple of ``pad_to_multiple_of``.
    """
    trie = build_trie(samples)
    physical = trie.num_tokens
    if padded_size is None:
        padded_size = max(1, -(-physical // pad_to_multiple_of)) * pad_to_multiple_of
    if padded_size < max(1, physical):
        raise ValueError(f"padded_size={padded_size} cannot hold the {physical} unique tokens of these samples")
    if padded_size % pad_to_multiple_of:
        raise ValueError(f"padded_size={padded_size} is not a multiple of pad_to_multiple_of={pad_to_multiple_of}")

    node_lens = np.diff(trie.cu_node_lens)
    flat_index = np.arange(padded_size, dtype=np.int64)
    input_ids = np.full(padded_size, pad_token, dtype=np.int64)
    position_ids = np.zeros(padded_size, dtype=np.int32)
    subtree_end = (flat_index + 1).astype(np.int32)
    predictor = np.full(padded_size, -1, dtype=np.int32)

    if physical:
        input_ids[:physical] = np.concatenate(
            [samples[s].tokens[p:] for s, p in zip(trie.order.tolist(), trie.shared.tolist(), strict=True)]
        )
        position_ids[:physical] = flat_index[:physical] - np.repeat(trie.cu_node_lens[:-1] - trie.node_depth, node_lens)
        subtree_end[:physical] = np.repeat(trie.node_subtree_end, node_lens)
        # A node's first token is predicted by its parent's last, every other token by its left neighbour.
        predictor[:physical] = flat_index[:physical] - 1
        predictor[trie.cu_node_lens[:-1]] = np.where(
            trie.node_parent < 0, -1, trie.cu_node_lens[1:][trie.node_parent] - 1
        )

    sample_map, cu_sample_lens = _sample_map(samples, trie)
    mask = np.concatenate([sample.loss_mask for sample in samples]) if samples else np.zeros(0, dtype=np.float32)
    scored = predictor[sample_map] >= 0
    return FlatLayout(
        input_ids=input_ids,
        position_ids=position_ids,
        subtree_end=subtree_end,
        predictor=predictor,
        loss_weight=np.bincount(sample_map, weights=mask * scored, minlength=padded_size).astype(np.float32),
        cu_node_lens=trie.cu_node_lens.astype(np.int32),
        node_parent=trie.node_parent.astype(np.int32),
        node_depth=trie.node_depth.astype(np.int32),
        sample_map=sample_map,
        cu_sample_lens=cu_sample_lens,
        sample_node=trie.sample_node.astype(np.int32),
        num_supervised=int(np.count_nonzero(mask[scored])),
    )


def _sample_map(samples: Sequence[Sample], trie: Trie) -> tuple[Int32Array, Int64Array]:
    """Flat indices of every sample's tokens, in the caller's order, and where each sample's begin."""
    cu_sample_lens = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum([len(sample) for sample in samples], out=cu_sample_lens[1:])
    sample_map = np.empty(cu_sample_lens[-1], dtype=np.int32)
    # Depth-first: a sample keeps the shared part of the path before it and continues with new flat tokens.
    path = np.empty(max((len(sample) for sample in samples), default=0), dtype=np.int32)
    flat = 0
    for index, shared in zip(trie.order.tolist(), trie.shared.tolist(), strict=True):
        length = len(samples[index])
        path[shared:length] = np.arange(flat, flat + length - shared, dtype=np.int32)
        sample_map[cu_sample_lens[index] : cu_sample_lens[index + 1]] = path[:length]
        flat += length - shared
    return sample_map, cu_sample_lens
