"""DeepSeek sparse attention along a tree: an indexer chooses the keys of a query among those of the query's path.

It computes what upstream's reference form does (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1), whose
scores have an entry for every pair of tokens, block by block.

Legend: P tokens of a micro-batch, H attention heads of a rank, I heads of the indexer, D and E head sizes of both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
    _compute_index_scores,
)
from megatron.core.transformer.experimental_attention_variant.dsa_indexer_loss import (
    indexer_kl_per_row,
    normalize_indexer_target,
)
from megatron.core.transformer.experimental_attention_variant.dsa_kernels import (
    run_fused_absorbed_sparse_attention,
    use_fused_dsa_kernels,
)
from megatron.core.transformer.experimental_attention_variant.dsa_masking import masked_log_softmax, masked_softmax

from mcore_prefix_tree.attention.chosen_keys import (
    attend_to_keys,
    blocks_of_rows,
    choose_keys,
    path_mask,
    score_by_kernel,
    wide,
)
from mcore_prefix_tree.mcore.seam.carried_keys import Carry
from mcore_prefix_tree.mcore.seam.core_attention import change_class, check_batch_size
from mcore_prefix_tree.mcore.seam.experts import Multiplicity
from mcore_prefix_tree.mcore.seam.latent_attention import PathRotaryEmbedding
from mcore_prefix_tree.mcore.seam.packed_seq_params import get_tree_params
from mcore_prefix_tree.metadata import TreeMetadata


class TreeIndexerMixin:
    """An indexer whose weights have fp32 also in a model of fp64: upstream multiplies them by fp32 in its loss."""

    config: Any

    def forward_before_topk(self, x: torch.Tensor, qr: torch.Tensor, packed_seq_params: Any = None) -> Any:
        """Return queries ``[P, 1, I, E]``, keys ``[P, 1, E]`` and weights ``[P, 1, I]``."""
        query, key, weights = super().forward_before_topk(x, qr, packed_seq_params)  # type: ignore[misc]
        return query, key, weights.float() if self.config.dsa_indexer_loss_coeff else weights


class TreeSparseAttentionMixin:
    """A core attention that chooses keys among those of a path; without a tree, the stock."""

    # Of the stock layer.
    config: Any
    indexer: Any
    index_topk: int
    softmax_scale: float
    skip_topk: bool
    index_share: bool
    source_layer: int
    layer_number: int
    pg_collection: Any
    training: bool
    _get_index_share_topk_holder: Any

    def follow_tree(self, attention: Any) -> None:
        """Let the indexer take positions by path."""
        if self.indexer is not None:  # a layer that takes its keys from a layer before has none
            change_class(self.indexer, TreeIndexerMixin)
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
        up_v_weight: torch.Tensor | None = None,
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
            up_v_weight: ``[H, value size, C]`` with absorbed latents, whose first C entries are their values.
        """
        tree = get_tree_params(packed_seq_params)
        if tree is None:
            kwargs |= {"packed_seq_params": packed_seq_params, "up_v_weight": up_v_weight}
            stock: torch.Tensor = super().forward(  # type: ignore[misc]
                query, key, value, attention_mask, x, qr, *args, **kwargs
            )
            return stock
        if attention_mask is not None:
            raise ValueError("attention_mask must be None with a folded micro-batch: the tree says who sees whom")
        check_batch_size(x.shape[1])
        metadata, carry = tree.tree_metadata, tree.carry
        assert metadata is not None
        seen = metadata if carry is None else carry.keys
        trains = bool(self.training and torch.is_grad_enabled() and self.config.dsa_indexer_loss_coeff)
        query, memory = (one.reshape(len(one), -1, one.shape[-1]) for one in (query, key))
        indexed = None if self.skip_topk else self._index(x.detach(), qr.detach(), packed_seq_params, carry, trains)
        if carry is not None:
            along = None if indexed is None or trains else (self, "index key")
            memory = carry.with_stack((self, "key"), memory, along=along)
        chosen = self._choose(indexed, packed_seq_params, seen)
        loss = None
        if trains and indexed is not None:
            samples = metadata.derived("multiplicity", Multiplicity.of).of_token
            loss = self._indexer_loss(indexed, query.detach(), memory.detach(), chosen, seen, samples)
            DSAIndexerLossLoggingHelper.save_loss_to_tracker(
                loss, layer_number=self.layer_number, num_layers=self.config.num_layers
            )
        if value is not None:
            start = memory.shape[-1]
            value = value.reshape(len(value), -1, value.shape[-1])
            value = value if carry is None else carry.with_stack((self, "value"), value)
            memory = torch.cat([memory, value], dim=-1)
            out = attend_to_keys(query, memory, chosen, self.softmax_scale, slice(start, memory.shape[-1]))
        else:
            assert up_v_weight is not None, "absorbed latents come with the weight of their values"
            # Upstream's kernel has as many keys as queries.
            is_torch = tree.deterministic_attention or self.config.deterministic_mode or carry is not None
            latents = None if is_torch else self._attend_by_kernel(query, memory, chosen, up_v_weight.shape[-1])
            if latents is None:
                values = slice(0, up_v_weight.shape[-1])
                latents = attend_to_keys(query, memory, chosen, self.softmax_scale, values)
            out = torch.einsum("phc,hdc->phd", latents, up_v_weight.to(latents.dtype))
        out = out.reshape(len(out), 1, -1)
        return out if loss is None else DSAIndexerLossAutoScaler.apply(out, loss)

    def _index(
        self, x: torch.Tensor, qr: torch.Tensor, packed_seq_params: Any, carry: Carry | None, trains: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the indexer's queries ``[P, 1, I, E]``, keys ``[S, 1, E]`` and weights ``[P, 1, I]``."""
        with torch.set_grad_enabled(trains):
            query, key, weights = self.indexer.forward_before_topk(x, qr, packed_seq_params)
            if carry is not None:
                key = carry.with_stack((self, "index key"), key)
        return query, key, weights

    def _choose(self, indexed: Any, packed_seq_params: Any, metadata: TreeMetadata) -> torch.Tensor:
        """Return the keys of each query, int32 ``[P, T]``: chosen here, or by the layer whose choice this one takes."""
        shared = self._get_index_share_topk_holder(packed_seq_params) if self.index_share else {}
        if indexed is None:
            if self.source_layer not in shared:
                raise ValueError(
                    f"layer {self.layer_number} takes the keys of layer {self.source_layer}, which is in another "
                    "stage of the pipeline; let every stage begin with a layer that chooses (dsa_indexer_topk_freq)"
                )
            taken: torch.Tensor = shared[self.source_layer]
            return taken
        query, key, weights = (one.detach() for one in indexed)
        relu = self.config.dsa_indexer_scoring_relu

        def score(rows: slice, columns: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = _compute_index_scores(query[rows], weights[rows], key[columns], use_relu=relu)[0]
            return scores.masked_fill_(~path_mask(metadata, rows, columns), -torch.inf)

        kernel = score_by_kernel(query.squeeze(1), key.squeeze(1), weights.squeeze(1), metadata, relu=relu)
        chosen = choose_keys(kernel or score, metadata, self.index_topk, query.shape[2] if kernel is None else 1)
        shared[self.layer_number] = chosen
        return chosen

    def _attend_by_kernel(
        self, query: torch.Tensor, latents: torch.Tensor, chosen: torch.Tensor, values: int
    ) -> torch.Tensor | None:
        """Return the output of upstream's ``dsa_kernel_backend``, ``[P, H, values]``; None if it declines."""
        # It takes keys in any order, with -1 for keys that are absent, and sums gradients in any order.
        if not use_fused_dsa_kernels(self.config):
            return None
        # TileLang's takes 64 keys at a time.
        padded = F.pad(chosen, (0, -chosen.shape[1] % 64), value=-1)
        found = run_fused_absorbed_sparse_attention(
            self.config, query.unsqueeze(1), latents.unsqueeze(1), padded.unsqueeze(0), self.softmax_scale, values
        )
        return None if found is None else found.squeeze(1)

    def _indexer_loss(
        self,
        indexed: Any,  # the indexer's queries [P, 1, I, E], keys [S, 1, E] and weights [P, 1, I]
        query: torch.Tensor,  # [P, H, D]
        key: torch.Tensor,  # [S, 1, D] or [S, H, D]
        chosen: torch.Tensor,  # int32 [P, T], the keys of each query
        metadata: TreeMetadata,  # of the S keys, of which P are queries
        samples: torch.Tensor,  # fp32 [P], number of samples through each query
    ) -> torch.Tensor:
        """Return the sum over all samples' tokens of the divergence of the indexer's choice from attention."""
        # Upstream's compute_dsa_indexer_loss (the paper's eq. 3 and 4), each row times the samples through it. Its
        # gradient is linear in that of the loss, so that each block makes both at once and keeps no scores.
        index_query, index_key, weights = (wide(one.detach()) for one in indexed)
        gradients = [torch.zeros_like(one) for one in (index_query, index_key, weights)]
        total = index_query.new_zeros(())
        for rows, columns in blocks_of_rows(metadata, max(query.shape[1], index_query.shape[2])):
            counted = path_mask(metadata, rows, columns)
            if self.config.dsa_indexer_use_sparse_loss:
                # The first column takes the -1 of keys that are absent.
                marks = torch.zeros(len(counted), len(key) + 1, dtype=torch.bool, device=key.device)
                counted &= marks.scatter_(1, chosen[rows].long() + 1, True)[:, 1:][:, columns]
            heads = [wide(one).transpose(0, 1) for one in (query[rows], key[columns])]
            attended = heads[0] @ heads[1].transpose(1, 2) * self.softmax_scale
            target = masked_softmax(attended, counted.expand_as(attended)).sum(0, keepdim=True)
            if self.pg_collection.tp.size() > 1:
                torch.distributed.all_reduce(target, group=self.pg_collection.tp)
            parts = [index_query[rows], index_key[columns], weights[rows]]
            with torch.enable_grad():
                q, k, w = (one.requires_grad_() for one in parts)
                scores = _compute_index_scores(q, w, k, use_relu=self.config.dsa_indexer_scoring_relu)
                predicted = masked_log_softmax(scores, counted[None])
                divergence = indexer_kl_per_row(normalize_indexer_target(target), predicted)[0]
                loss = (divergence * samples[rows]).sum() * self.config.dsa_indexer_loss_coeff
                found = torch.autograd.grad(loss, (q, k, w))
            total += loss.detach()
            gradients[0][rows], gradients[2][rows] = found[0], found[2]
            gradients[1].index_add_(0, columns, found[1])
        # The value of the loss, and its gradient.
        for one, gradient in zip(indexed, gradients, strict=True):
            total = total + (gradient * (one - one.detach())).sum()
        return total
