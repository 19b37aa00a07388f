"""Contestants of the attention benchmark with one interface: back-ends and stock kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from mcore_prefix_tree.attention import BACKENDS, AttentionOptions, Case
from mcore_prefix_tree.attention.api import load_backend
from mcore_prefix_tree.metadata import TreeMetadata

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TreeMetadata, AttentionOptions], torch.Tensor]
# tree: the forest, folded. unfolded: every sample by itself, in one packed batch. dense: one causal sequence with as
# many visible pairs as the forest.
Layout = Literal["tree", "unfolded", "dense"]

# Methods with one backward, measured once.
ALWAYS_DETERMINISTIC = ("triton", "flex", "path", "cascade", "reference")
# The reference holds numbers for every pair of tokens and head.
_LARGEST_DENSE_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, eq=False)
class Contestant:
    """One method on one layout; ``refusal`` is the reason why it cannot run."""

    method: str
    layout: Layout
    options: AttentionOptions
    attention: Attention
    refusal: str | None


def contestants(forest: TreeMetadata, case: Case) -> Iterator[Contestant]:
    """Return all methods on their layouts; on a GPU, those with two backwards for both values of ``deterministic``."""
    modes = [True, False] if case.device.type == "cuda" else [True]
    for options in (replace(case.options, deterministic=deterministic) for deterministic in modes):
        asked = replace(case, options=options)
        for name in BACKENDS:
            if options.deterministic or name not in ALWAYS_DETERMINISTIC:
                backend = load_backend(name)
                refusal = backend.refusal(asked) or (_too_large(forest, case) if name == "reference" else None)
                yield _one(name, "tree", options, backend.attention, refusal)
    fastest = replace(case, options=replace(case.options, deterministic=False))
    refusal = load_backend("fa4").refusal(fastest)
    cascade = load_backend("cascade")
    for layout in ("unfolded", "dense"):
        yield _one("FlashAttention-4", layout, fastest.options, _causal_fa4, refusal)
        if case.device.type == "cpu":  # without sharing, the cascade is one call of torch's kernel
            yield _one("torch on the CPU", layout, case.options, cascade.attention, cascade.refusal(case))


def _one(method: str, layout: Any, options: AttentionOptions, attention: Attention, refusal: str | None) -> Contestant:
    return Contestant(method=method, layout=layout, options=options, attention=attention, refusal=refusal)


def _too_large(forest: TreeMetadata, case: Case) -> str | None:
    size = 4 * case.heads * forest.padded_size**2
    return f"it would hold {size / 2**30:.1f} GiB of scores" if size > _LARGEST_DENSE_BYTES else None


def _causal_fa4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """FlashAttention-4's own causal kernel on a forest without sharing: its nodes are the sequences."""
    from flash_attn.cute import flash_attn_varlen_func

    longest = metadata.max_path_len
    borders = metadata.derived(
        "borders", lambda metadata: torch.from_numpy(metadata.cu_node_lens).to(metadata.subtree_end.device)
    )
    out: torch.Tensor
    out, _ = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=borders,
        cu_seqlens_k=borders,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=options.softmax_scale,
        causal=True,
    )
    return out
