"""Subclasses of Megatron-Core's attention that follow the tree when a micro-batch carries one.

Each is mixed into the class of a built module. Without tree metadata they only call that class.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention

from mcore_prefix_tree.attention import tree_attention
from mcore_prefix_tree.mcore.seam.packed_seq_params import CORE_KNOWS_TREES, TreePackedSeqParams, get_tree_params
from mcore_prefix_tree.metadata import TreeMetadata


class TreeSelfAttentionMixin:
    """Self-attention that gives every token the rotary embedding of its position on its own path."""

    config: Any

    def follow_tree(self) -> None:
        """Reject a model with ``multi_latent_attention``: it would have no positions here."""
        if self.config.multi_latent_attention:
            raise NotImplementedError(
                "multi_latent_attention=True, but the layer spec names another attention, whose model would have no "
                "positions: take a spec made with multi_latent_attention=True"
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the base class; ``rotary_pos_emb`` is a table by position ``[max_path_len, 1, 1, dim]`` or two.

        If layers take turns between embeddings (Gemma 3), the table is a stack ``[n, max_path_len, 1, 1, dim]``.
        """
        tree = get_tree_params(packed_seq_params)
        if tree is not None and rotary_pos_emb is not None and not tree.rotary_by_token:
            assert tree.tree_metadata is not None
            rotary_pos_emb = _gather_rotary(rotary_pos_emb, tree.tree_metadata)
        return super().forward(  # type: ignore[misc]
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )


class TreeFlatAttentionMixin(TreeSelfAttentionMixin):
    """Self-attention of Megatron-Bridge's Qwen3-VL: with any ``packed_seq_params``, queries have no batch's dimension.

    Its rotary embeddings, ``[P, 1, 1, dim]``, have a row for each token.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the base class, which turns queries ``[P, H, D]`` by rows ``[P, 1, dim]`` if there is a tree."""
        if rotary_pos_emb is not None and get_tree_params(packed_seq_params) is not None:
            rotary_pos_emb = rotary_pos_emb.squeeze(1)
        return super().forward(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )


def _gather_rotary(table: Any, metadata: TreeMetadata) -> Any:
    """Return the rows of the rotary table at each token's position; gathered once per micro-batch and table."""
    tables = table if isinstance(table, tuple) else (table,)
    if CORE_KNOWS_TREES and all(one.shape[-4] == metadata.padded_size for one in tables):
        # The GPTModel of a patched Megatron-Core has gathered them. (Its table has max_path_len rows; if these are as
        # many as there are tokens, the forest is one path without padding and gathering changes nothing.)
        return table
    known, rows = metadata.cache.get("rotary", ((), ()))
    # A recomputed layer is given a detached table, another object over the same memory. The tables are kept with
    # their rows, so that this can never be memory that was used again.
    if len(known) != len(tables) or not all(a is b or a.is_set_to(b) for a, b in zip(known, tables, strict=True)):
        rows = tuple(rows_by_position(one, metadata) for one in tables)
        metadata.cache["rotary"] = (tables, rows)
    return rows if isinstance(table, tuple) else rows[0]


def rows_by_position(table: torch.Tensor, metadata: TreeMetadata) -> torch.Tensor:
    """Return each token's row, ``[..., P, 1, 1, dim]``, of a table by position ``[..., positions, 1, 1, dim]``.

    Raises:
        ValueError: the longest path has more positions than the table.
    """
    if table.shape[-4] < metadata.max_path_len:
        raise ValueError(
            f"the rotary table has {table.shape[-4]} positions but the longest path has {metadata.max_path_len} "
            "tokens; build packed_seq_params with TreePackedSeqParams.from_metadata"
        )
    return table.index_select(-4, metadata.tree_position_ids)


class TreeCoreAttentionMixin:
    """Core attention along the tree, when the micro-batch carries one."""

    config: Any

    def follow_tree(self, attention: Any) -> None:
        """Read the settings that a tree needs, of a configuration that may be this layer's."""
        config = self.config
        # Latent attention has its own. With apply_query_key_layer_scaling upstream divides the core's by a factor, and
        # multiplies by it in its softmax.
        scale = getattr(attention, "softmax_scale", attention.config.softmax_scale)
        self.tree_softmax_scale = 1.0 / math.sqrt(config.kv_channels) if scale is None else scale
        self.tree_deterministic = is_deterministic(config)
        self.tree_window = layer_window(config, attention.layer_number)
        self.tree_has_stack = getattr(attention, "carries_latents", False)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the base class without a tree, and :func:`attend`, with its shapes, with one."""
        tree = get_tree_params(packed_seq_params)
        if tree is None:
            out: torch.Tensor = super().forward(  # type: ignore[misc]
                query,
                key,
                value,
                attention_mask,
                *args,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
            return out
        return attend(
            tree,
            query,
            key,
            value,
            attention_mask,
            attention_bias,
            layer=self,
            softmax_scale=self.tree_softmax_scale,
            window=self.tree_window,
            sinks=read_sinks(self),
            deterministic=tree.deterministic_attention or self.tree_deterministic,
            has_stack=self.tree_has_stack,
        )


def is_deterministic(config: Any) -> bool:
    """Return whether Megatron's ``deterministic_mode`` or TransformerEngine's variable asks for the same bits twice."""
    return bool(config.deterministic_mode) or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


def layer_window(config: Any, layer_number: int) -> int | None:
    """Return the number of keys that a layer's query sees, itself included, or None for all; layers count from 1."""
    size, skip = window_settings(config)
    if size is None or not is_layer_window_attention(size, skip, layer_number):
        return None
    return int(size[0]) + 1  # upstream does not count the query itself


def window_settings(config: Any) -> tuple[Sequence[int] | None, int | list[int] | None]:
    """Return ``window_size`` and ``window_attn_skip_freq`` as Megatron-Core's own layers read them.

    Megatron-Bridge's Gemma 3 has one number, which counts the query itself, and a pattern of layers: its attention
    makes a separate configuration for each layer.
    """
    if isinstance(config.window_size, int):
        return (config.window_size - 1, 0), sum(config.interleaved_attn_pattern)
    return config.window_size, config.window_attn_skip_freq


def read_sinks(core_attention: Any) -> torch.Tensor | None:
    """Return ``[H]`` logits in addition to the keys', from their module: learned, or zeros that add one to the sum."""
    sinks: torch.Tensor | None = None
    if core_attention.config.softmax_type != "vanilla":
        sinks = core_attention.softmax_offset
    return sinks


def attend(
    tree: TreePackedSeqParams,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attention_bias: torch.Tensor | None,
    *,
    layer: object,
    softmax_scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    deterministic: bool,
    has_stack: bool = False,
) -> torch.Tensor:
    """Compute a core attention of Megatron-Core for a folded micro-batch.

    Args:
        query: ``[P, 1, H, D]``; multi-latent attention omits the batch's dimension, here and below.
        key: ``[P, 1, K, D]``, or ``[S + P, K, D]`` with a stack.
        value: ``[P, 1, K, W]``, or ``[S + P, K, W]`` with a stack.
        attention_mask: must be None.
        attention_bias: must be None.
        layer: the layer's core attention, under which a carry keeps its keys and values.
        softmax_scale: factor on the scores before the softmax.
        window: see :func:`layer_window`.
        sinks: see :func:`read_sinks`.
        deterministic: whether to give the same bits twice.
        has_stack: whether keys and values begin with those of a carry's stack.

    Returns:
        ``[P, 1, H * W]``.

    Raises:
        ValueError: a mask or a bias is given, the batch size is not one, or the back-end does not support the call.
    """
    if attention_mask is not None or attention_bias is not None:
        name = "attention_bias" if attention_mask is None else "attention_mask"
        raise ValueError(f"{name} must be None with a folded micro-batch: the tree says who sees whom")
    if query.ndim == 4:
        check_batch_size(query.shape[1])
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
    metadata, carry = tree.tree_metadata, tree.carry
    assert metadata is not None
    if carry is not None:
        carry = carry.within(window)
        metadata = carry.keys
        if not has_stack:
            key, value = carry.with_stack((layer, "key"), key), carry.with_stack((layer, "value"), value)
        # Queries that nobody reads, so that each back-end attends as ever.
        query = torch.cat([query.new_zeros(carry.size, *query.shape[1:]), query])
    folded = tree_attention(
        query,
        key,
        value,
        metadata,
        softmax_scale=softmax_scale,
        backend=tree.attention_backend,
        window=window,
        sinks=sinks,
        deterministic=deterministic,
    )
    if carry is not None:
        folded = folded[carry.size :]
    return folded.reshape(folded.shape[0], 1, -1)


def check_batch_size(size: int) -> None:
    """Raise ValueError for a folded micro-batch in more than one row."""
    if size != 1:
        raise ValueError(f"a folded micro-batch has batch size 1, not {size}; set micro_batch_size=1")


def change_class(module: torch.nn.Module, mixin: type) -> bool:
    """Give a built module the class that follows the tree; return whether it had another."""
    kind: Any = type(module)
    module.__class__ = tree_class(mixin, kind)
    return not issubclass(kind, mixin)


@cache
def tree_class(mixin: type, base: type) -> type:
    """Return the class that follows the tree if ``base`` does not; one per base, state-dict keys unchanged.

    It has the base's name: Megatron-Bridge recognises the layers whose weights it converts by their classes' names.
    """
    if issubclass(base, mixin):
        return base
    names = {"__module__": __name__, "__qualname__": f"Tree{base.__name__}", "__doc__": mixin.__doc__}
    return type(base.__name__, (mixin, base), names)
