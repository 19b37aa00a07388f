"""Other projects' attention over shared prefixes, called as those projects call it.

Legend: P padded tokens, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from mcore_prefix_tree.attention import AttentionOptions, Case
from mcore_prefix_tree.attention.api import load_backend
from mcore_prefix_tree.metadata import TreeMetadata

Attention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, TreeMetadata, AttentionOptions],
    torch.Tensor,
]

# AReaL loops over all tokens in Python and keeps one bit per pair of tokens.
_AREAL_MASK_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer's attention.

    Attributes:
        attention: function with the arguments of a back-end.
        refusal: why it cannot compute a case, or None.
        misfit: why it cannot compute a forest, or None.
    """

    attention: Attention
    refusal: Callable[[Case], str | None]
    misfit: Callable[[TreeMetadata], str | None]


def _prefix_grouper(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    grouper = metadata.derived("prefix-grouper", _build_grouper)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys_there: torch.Tensor) -> torch.Tensor:
        # With one prefix, padding is to the right of all visible tokens, so the causal order hides it.
        square = query.shape[2] == key.shape[2]
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if square else causal_lower_right(query.shape[2], key.shape[2]),
            is_causal=square,
            scale=options.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)

    out: torch.Tensor = grouper.forward(attend, *(one.transpose(0, 1)[None] for one in (query, key, value)))
    return out.squeeze(0)


def _build_grouper(metadata: TreeMetadata) -> Any:
    from prefix_grouper import PrefixGrouper

    lens = np.diff(metadata.cu_node_lens).tolist()
    return PrefixGrouper([lens], device=metadata.subtree_end.device)


def _grouper_refusal(case: Case) -> str | None:
    if importlib.util.find_spec("prefix_grouper") is None:
        return "prefix_grouper is not installed"
    options = case.options
    if options.window is not None or options.sinks is not None:
        return "SDPA has no window or sinks"
    return None


def _grouper_misfit(metadata: TreeMetadata) -> str | None:
    parents = metadata.node_parent
    if len(parents) < 2 or parents[0] != -1 or parents[1:].any() or metadata.padded_size > metadata.num_tokens:
        return "it supports one prefix shared by all samples, and this forest has more"
    return None


def _areal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    data = metadata.derived("areal", _build_areal)
    out: torch.Tensor = _areal_module().tree_attention(
        *(one.transpose(0, 1)[None] for one in (query, key, value)),
        data["packed_mask"],
        data["kv_indices"],
        data["kv_offsets"],
        data["q_indices"],
        data["q_offsets"],
        options.softmax_scale,
    )
    return out.squeeze(0).transpose(0, 1)


def _build_areal(metadata: TreeMetadata) -> dict[str, torch.Tensor]:
    data = _areal_module().precompute_tree_attention_data(token_parents(metadata)[None])
    # The project's own call moves them in every layer; here they are moved once.
    return {name: tensor.to(metadata.subtree_end.device) for name, tensor in vars(data).items()}


def token_parents(metadata: TreeMetadata) -> torch.Tensor:
    """int64 ``[P]``: each token's predecessor on its path, -1 for a first token."""
    parents = np.arange(metadata.padded_size, dtype=np.int64) - 1
    parents[metadata.num_tokens :] = -1
    borders = metadata.cu_node_lens.astype(np.int64)
    last = np.full(metadata.num_nodes, -1, dtype=np.int64)  # of the path that ends with a node
    for node, above in enumerate(metadata.node_parent.tolist()):
        before = last[above] if above >= 0 else -1
        start, end = borders[node], borders[node + 1]
        last[node] = end - 1 if end > start else before
        if end > start:
            parents[start] = before
    return torch.from_numpy(parents)


@cache
def _areal_module() -> Any:
    """Import only the kernel's file: the package would load a reinforcement-learning stack that it does not use."""
    package = importlib.util.find_spec("areal")
    assert package is not None, "refused before"
    file = Path((package.submodule_search_locations or [""])[0]) / "models" / "tree_attn" / "triton_kernel.py"
    spec = importlib.util.spec_from_file_location("areal_tree_attention_kernel", file)
    assert spec is not None, "refused before"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _areal_refusal(case: Case) -> str | None:
    if importlib.util.find_spec("areal") is None:
        return "areal is not installed"
    if case.device.type != "cuda":
        return "its kernel needs a GPU"
    options = case.options
    if options.window is not None or options.sinks is not None:
        return "its kernel has no window or sinks"
    if case.head_dim != case.value_dim or case.head_dim & (case.head_dim - 1):
        return "its kernel needs equal head dims that are powers of two"
    return None


def _areal_misfit(metadata: TreeMetadata) -> str | None:
    mask_bytes = metadata.padded_size**2 // 8
    if mask_bytes > _AREAL_MASK_BYTES:
        return f"its mask of {mask_bytes / 2**30:.1f} GiB is built token by token in Python"
    return None


class _Gathered(NamedTuple):
    """Queries by segment, and copies of the keys of each segment's path.

    Attributes:
        tokens: int64 ``[C]``, the token of each copy.
        borders: of the segments among queries, and of the paths among copies, each int32 ``[G + 1]``.
        longest: tokens of the longest segment and of the longest path.
    """

    tokens: torch.Tensor
    borders: tuple[torch.Tensor, ...]
    longest: tuple[int, int]


def _gathered(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Attend as TRL 1.16's tree packing does, with FlashAttention-4 in place of 3: one varlen call on copied keys."""
    plan = metadata.derived("gathered", _gather)
    keys, values = key.index_select(0, plan.tokens), value.index_select(0, plan.tokens)
    return _varlen(query, keys, values, plan, options)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: _Gathered, options: AttentionOptions
) -> torch.Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    out: torch.Tensor
    out, _ = flash_attn_varlen_func(
        *(query, key, value),
        **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), plan.borders, strict=True)),
        **dict(zip(("max_seqlen_q", "max_seqlen_k"), plan.longest, strict=True)),
        softmax_scale=options.softmax_scale,
        causal=True,
    )
    return out


def _gather(metadata: TreeMetadata) -> _Gathered:
    borders = metadata.cu_node_lens.astype(np.int64)
    paths: list[np.ndarray] = []
    for node, above in enumerate(metadata.node_parent.tolist()):
        own = np.arange(borders[node], borders[node + 1])
        paths.append(own if above < 0 else np.concatenate([paths[above], own]))
    paths = [path for path, length in zip(paths, np.diff(borders), strict=True) if length]
    segments = [int(length) for length in np.diff(borders) if length]
    device = metadata.subtree_end.device
    cumulated = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in (segments, map(len, paths))
    )
    return _Gathered(
        tokens=torch.from_numpy(np.concatenate(paths)).to(device),
        borders=tuple(cumulated),
        longest=(max(segments), max(map(len, paths))),
    )


def _gathered_refusal(case: Case) -> str | None:
    if case.options.window is not None or case.options.sinks is not None:
        return "it has no sinks, and copies whole paths for a window"
    return load_backend("fa4").refusal(case)


def _gathered_misfit(metadata: TreeMetadata) -> str | None:
    return None if metadata.padded_size == metadata.num_tokens else "it has no segments of padding"


PEERS: dict[str, Peer] = {
    "gathered keys (TRL)": Peer(attention=_gathered, refusal=_gathered_refusal, misfit=_gathered_misfit),
    "PrefixGrouper": Peer(attention=_prefix_grouper, refusal=_grouper_refusal, misfit=_grouper_misfit),
    "AReaL Triton": Peer(attention=_areal, refusal=_areal_refusal, misfit=_areal_misfit),
}
