"""Multi-latent attention along a tree: it makes its own rotary embeddings, so those need the tree there.

Its core attention is :class:`~mcore_prefix_tree.mcore.seam.core_attention.TreeCoreAttentionMixin`, as elsewhere.

Legend: P tokens of a micro-batch, L of them on this rank, S tokens of its stack, H heads, D and W sizes of keys and
values, l size of a latent and of a rotary key together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mcore_prefix_tree.mcore.seam.all_tokens import gather_tokens, padding_multiple, split_tokens
from mcore_prefix_tree.mcore.seam.carried_keys import Carry
from mcore_prefix_tree.mcore.seam.core_attention import rows_by_position
from mcore_prefix_tree.mcore.seam.packed_seq_params import get_tree_params
from mcore_prefix_tree.metadata import TreeMetadata


class TreeAbsorbedAttentionMixin:
    """Multi-latent attention that gives every token the rotary embedding of its position."""

    # A patched Megatron-Core asks, and refuses a tree elsewhere.
    follows_prefix_trees = True
    # Of the stock layer.
    rotary_pos_emb: torch.nn.Module
    config: Any

    def follow_tree(self) -> None:
        """Make a rotary embedding that follows trees; see :func:`check_rotary_keys`."""
        check_rotary_keys(self)
        self.rotary_pos_emb = PathRotaryEmbedding(self.rotary_pos_emb)


class TreeLatentAttentionMixin(TreeAbsorbedAttentionMixin):
    """Multi-latent attention that projects keys and values from latents, and carries what is smaller."""

    # Of the stock layer.
    core_attention: Any
    linear_kv_up_proj: Any
    num_attention_heads_per_partition: int
    # Whether carried tokens keep their latents, because these are smaller than keys and values.
    carries_latents: bool

    def follow_tree(self) -> None:
        """Follow trees as the base class does, and choose what carried tokens keep."""
        super().follow_tree()
        sizes, heads = self.config, self.num_attention_heads_per_partition
        of_token = heads * (sizes.qk_head_dim + sizes.qk_pos_emb_head_dim + sizes.v_head_dim)
        self.carries_latents = sizes.kv_lora_rank + sizes.qk_pos_emb_head_dim < of_token

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the base class; keys ``[S + P, H, D]`` and values of a chunk begin with those of its stack."""
        stock: Any = super()
        made = stock.get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, *args, **kwargs
        )
        tree = get_tree_params(packed_seq_params)
        if tree is None or tree.carry is None or not self.carries_latents:
            return made
        query, key, value, compressed, latent = made
        key, value = self._with_stack(tree.carry, key, value, latent)
        return query, key, value, compressed, latent

    def _with_stack(
        self, carry: Carry, key: torch.Tensor, value: torch.Tensor, latent: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[S + P, H, D]`` and values, of ``[P, H, D], [P, H, W]`` and latents ``[L, l - rotary]``."""
        # The store has latents with their rotary keys, and the stack's are projected here: they are a small part of
        # keys and values in size, and of attention in work.
        carry = carry.within(self.core_attention.tree_window)
        carry, which, sizes = replace(carry, states=carry.tokens), (self, "latent"), self.config
        own = torch.cat([gather_tokens(latent, self), key[:, 0, sizes.qk_head_dim :]], dim=-1)
        stack = carry.read_states(which, own)
        value = carry.leave_states(which, value, own)
        if stack is None:
            return key, value
        above, rotary = stack.split([sizes.kv_lora_rank, sizes.qk_pos_emb_head_dim], dim=-1)
        padding = -len(above) % padding_multiple(self)
        above = split_tokens(torch.nn.functional.pad(above, (0, 0, 0, padding)), self)
        projected = self.linear_kv_up_proj(above)[0][: len(stack)].unflatten(-1, (key.shape[1], -1))
        keys, values = projected.split([sizes.qk_head_dim, sizes.v_head_dim], dim=-1)
        keys = torch.cat([keys, rotary.unsqueeze(1).expand(-1, key.shape[1], -1)], dim=-1)
        return torch.cat([keys, key]), torch.cat([values, value])


def check_rotary_keys(attention: Any) -> None:
    """Reject tensor parallelism if upstream loses gradients of the rotary keys, which all heads share.

    Each rank has those of its own heads. If keys come from a projection that all ranks hold in full, the backward pass
    of their gather under sequence parallelism sums over the ranks; if they come from a split projection, nothing
    does (https://github.com/NVIDIA/Megatron-LM/issues/1699).
    """
    config = attention.config
    name = "linear_kv_down_proj" if hasattr(attention, "linear_kv_down_proj") else "linear_qkv_down_proj"
    width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    if name == "linear_qkv_down_proj":
        width += config.q_lora_rank
    if getattr(attention, name).weight.shape[0] < width:
        raise NotImplementedError(
            f"prefix-tree training does not support multi_latent_attention with tensor_model_parallel_size="
            f"{config.tensor_model_parallel_size} where {name} is split over the ranks: Megatron-Core's own gradient "
            "of the rotary keys lacks the other ranks' heads (NVIDIA/Megatron-LM issue 1699); use TransformerEngine's "
            "layers, with mla_down_proj_fusion=False, or tensor_model_parallel_size=1"
        )


@dataclass(frozen=True)
class _RowsOf:
    """Length of a table, and the tree whose rows to take; not a number, so that no other caller computes with it."""

    length: int
    metadata: TreeMetadata


class PathRotaryEmbedding(torch.nn.Module):
    """Wrapper of the rotary embedding that an attention owns: each token of a tree gets its position's row.

    Such an attention (``MultiLatentAttention.get_query_key_value_tensors``) asks its rotary embedding for the number of
    positions that the micro-batch needs, and passes the answer back to it for the table. So that answer has the tree.
    """

    def __init__(self, base: torch.nn.Module, *, has_batch: bool = False) -> None:
        """Wrap ``base``, a ``RotaryEmbedding`` or ``YarnRotaryEmbedding``, which has no state that is saved.

        With ``has_batch`` its queries and keys keep the batch's dimension.
        """
        super().__init__()
        self.base: Any = base
        self.has_batch = has_batch

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: torch.Tensor,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the argument of :meth:`forward` for input ``[P, 1, h]``; without a tree the base class's number."""
        length = self.base.get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params, **kwargs
        )
        tree = get_tree_params(packed_seq_params)
        if tree is None:
            return length
        assert tree.tree_metadata is not None
        return _RowsOf(length, tree.tree_metadata)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # As the base class does with its own prefix: checkpoints of old have a table that nobody reads.
        state_dict.pop(f"{prefix}inv_freq", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the base class's table ``[max_seq_len, 1, 1, dim]``, or a tree's ``[P, 1, dim]``; with YaRN's factor.

        A tree's rows lack a dimension because Megatron takes the batch's from queries and keys if there are
        ``packed_seq_params``; ``has_batch`` says that it does not.
        """
        if not isinstance(max_seq_len, _RowsOf):
            return self.base(max_seq_len, *args, **kwargs)
        answer = self.base(max_seq_len.length, *args, **kwargs)
        table, *factor = answer if isinstance(answer, tuple) else (answer,)
        rows = rows_by_position(table, max_seq_len.metadata)
        rows = rows if self.has_batch else rows.squeeze(1)
        return (rows, *factor) if factor else rows
