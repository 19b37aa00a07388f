"""DeepSeek sparse attention along a tree: an indexer chooses the keys of a query among those of the query's path.

It is upstream's reference form (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1) with the tree as its
mask. That form keeps a score for every pair of tokens of a micro-batch, whether they see each other or not.

Legend: P tokens of a micro-batch, H attention heads of a rank, I heads of the indexer, D and E head sizes of both.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
    _compute_index_scores,
)
from megatron.core.transformer.experimental_attention_variant.dsa_indexer_loss import (
    indexer_kl_per_row,
    normalize_indexer_target,
)
from megatron.core.transformer.experimental_attention_variant.dsa_masking import masked_log_softmax, masked_softmax

from mcore_prefix_tree.attention.reference import visibility
from mcore_prefix_tree.mcore import compat, layer_names
from mcore_prefix_tree.mcore.seam.core_attention import check_batch_size, tree_class
from mcore_prefix_tree.mcore.seam.experts import Multiplicity
from mcore_prefix_tree.mcore.seam.latent_attention import PathRotaryEmbedding
from mcore_prefix_tree.mcore.seam.packed_seq_params import get_tree_params
from mcore_prefix_tree.mcore.seam.validation import check_config
from mcore_prefix_tree.metadata import TreeMetadata

compat.check(layer_names.SPARSE_ATTENTION)

_LARGE = 2**30  # bytes of a layer's scores that need a warning


class TreeIndexerMixin:
    """An indexer whose scores have fp32 also in a model of fp64.

    Upstream compares their dtype with that of a tree's mask, and multiplies them in the backward pass of the loss.
    """

    config: Any

    def forward_before_topk(self, x: torch.Tensor, qr: torch.Tensor, packed_seq_params: Any = None) -> Any:
        """Return queries ``[P, 1, I, E]``, keys ``[P, 1, E]`` and weights ``[P, 1, I]``."""
        query, key, weights = super().forward_before_topk(x, qr, packed_seq_params)  # type: ignore[misc]
        if self.config.dsa_indexer_loss_coeff or get_tree_params(packed_seq_params) is not None:
            weights = weights.float()
        return query, key, weights


class TreeSparseAttentionMixin:
    """A core attention that chooses keys among those of a path; without a tree, the stock."""

    # Of the stock layer.
    config: Any
    indexer: Any
    index_topk: int
    softmax_scale: float
    skip_topk: bool
    layer_number: int
    pg_collection: Any
    training: bool

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Reject the settings that :func:`check_config` rejects; initialise the base class, its positions by path."""
        check_config(config)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if self.indexer is not None:  # a layer that takes its keys from a layer before has none
            kind: type = type(self.indexer)
            self.indexer.__class__ = tree_class(TreeIndexerMixin, kind)
            self.indexer.rotary_pos_emb = PathRotaryEmbedding(self.indexer.rotary_pos_emb, has_batch=True)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        x: torch.Tensor,
        qr: torch.Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the base class without a tree; with one, return ``[P, 1, H * value size]``.

        Args:
            query: ``[P, H, D]``, perhaps with a batch's dimension of 1 after the first, here and below.
            key: ``[P, 1, D]`` of absorbed latents or ``[P, H, D]``.
            value: ``[P, H, value size]``; None of absorbed latents.
            attention_mask: must be None with a tree.
            x: ``[tokens of this rank, 1, hidden]``, the input of the layer.
            qr: the queries' latents of these tokens, or their input.
        """
        stock: Any = super().forward  # type: ignore[misc]
        tree = get_tree_params(packed_seq_params)
        if tree is None:
            out: torch.Tensor = stock(
                query, key, value, attention_mask, x, qr, *args, packed_seq_params=packed_seq_params, **kwargs
            )
            return out
        if attention_mask is not None:
            raise ValueError("attention_mask must be None with a folded micro-batch: the tree says who sees whom")
        check_batch_size(x.shape[1])
        metadata = tree.tree_metadata
        assert metadata is not None
        assert tree.carry is None, "trees of a model with sparse attention are not cut"
        _warn_of_size(self.config.dsa_indexer_n_heads, metadata)
        hidden = ~metadata.derived("reference", visibility)
        # Without a type of mask upstream takes the mask itself.
        kwargs["attn_mask_type"] = None
        trains, self.training = self.training, False  # upstream's own loss counts a token once
        try:
            out = stock(
                query, key, value, hidden[None, None], x, qr, *args, packed_seq_params=packed_seq_params, **kwargs
            )
        finally:
            self.training = trains
        if not (trains and torch.is_grad_enabled() and self.config.dsa_indexer_loss_coeff) or self.skip_topk:
            return out
        indexed = self.indexer.forward_before_topk(x.detach(), qr.detach(), packed_seq_params)
        loss = self._indexer_loss(indexed, query.detach(), key.detach(), hidden, metadata)
        DSAIndexerLossLoggingHelper.save_loss_to_tracker(
            loss, layer_number=self.layer_number, num_layers=self.config.num_layers
        )
        with_loss: torch.Tensor = DSAIndexerLossAutoScaler.apply(out, loss)
        return with_loss

    def _indexer_loss(
        self, indexed: Any, query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor, metadata: TreeMetadata
    ) -> torch.Tensor:
        """Return the sum over all samples' tokens of the divergence of the indexer's choice from attention.

        It is upstream's ``compute_dsa_indexer_loss`` (the paper's eq. 3 and 4), each row times the samples through it.

        Args:
            indexed: the indexer's queries ``[P, 1, I, E]``, keys ``[P, 1, E]`` and weights ``[P, 1, I]``.
            query: ``[P, H, D]``.
            key: ``[P, 1, D]`` or ``[P, H, D]``.
            hidden: bool ``[P, P]``, the keys that a query does not see.
            metadata: the tree, with its samples.
        """
        index_query, index_key, weights = indexed
        relu = self.config.dsa_indexer_scoring_relu
        scores = _compute_index_scores(index_query, weights, index_key, use_relu=relu)
        counted = ~hidden[None]
        if self.config.dsa_indexer_use_sparse_loss:
            chosen = scores.detach().masked_fill(hidden, -torch.inf).topk(min(self.index_topk, len(hidden))).indices
            counted = counted & torch.zeros_like(counted).scatter_(-1, chosen, True)
        by_head = [one.reshape(len(hidden), -1, one.shape[-1]).transpose(0, 1).float() for one in (query, key)]
        attended = by_head[0] @ by_head[1].transpose(1, 2) * self.softmax_scale
        target = masked_softmax(attended, counted.expand_as(attended)).sum(0, keepdim=True)
        if self.pg_collection.tp.size() > 1:
            torch.distributed.all_reduce(target, group=self.pg_collection.tp)
        target = normalize_indexer_target(target)
        predicted = masked_log_softmax(scores.float(), counted)
        samples = metadata.derived("multiplicity", Multiplicity.of).of_token
        divergence = indexer_kl_per_row(target, predicted)[0]
        loss: torch.Tensor = (divergence * samples).sum() * self.config.dsa_indexer_loss_coeff
        return loss


def _warn_of_size(heads: int, metadata: TreeMetadata) -> None:
    """Tell once how large the scores are of a micro-batch on a GPU, or of a large one."""
    tokens = metadata.padded_size
    if metadata.subtree_end.is_cuda or 4 * heads * tokens**2 >= _LARGE:
        _warn_once(heads, 1 << (tokens - 1).bit_length())


@cache
def _warn_once(heads: int, tokens: int) -> None:
    gib = 4 * heads * tokens**2 / 2**30
    warnings.warn(
        "sparse attention along a tree runs in Megatron-Core's reference form, whose memory grows with the square of "
        f"a micro-batch's tokens: up to {gib:,.1f} GiB of scores in a layer for micro-batches of {tokens} tokens; "
        "lower the token budget if memory runs out",
        stacklevel=2,
    )
