"""Tree attention through MagiAttention's range interface: a causal range per run, a full one per branch.

MagiAttention is installed from source, for Hopper. Its kernel is compared with the reference before its first use.

Legend: P padded tokens, H query heads, K key/value heads, D head_dim, N ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch

from mcore_prefix_tree.attention.options import AttentionOptions, Case
from mcore_prefix_tree.attention.padding import apart_from_padding
from mcore_prefix_tree.attention.parity import check_parity
from mcore_prefix_tree.attention.spans import cut_into_spans
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.upload import upload

# Values of attn_type_map, from flex_flash_attn_func's documentation.
FULL, CAUSAL = 0, 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranges:
    """What MagiAttention takes for a mask.

    Attributes:
        queries: int32 ``[N, 2]``, start and exclusive end.
        keys: int32 ``[N, 2]``.
        kinds: int32 ``[N]``, :data:`FULL` or :data:`CAUSAL`.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    kinds: torch.Tensor


def build_ranges(metadata: TreeMetadata) -> Ranges:
    """The ranges of a micro-batch, on the device of its metadata."""
    spans = cut_into_spans(metadata)
    device = metadata.subtree_end.device
    runs = np.stack([spans.runs[:-1], spans.runs[1:]], axis=1)
    kinds = np.repeat([CAUSAL, FULL], [len(runs), len(spans.keys)])
    return Ranges(
        queries=upload(np.concatenate([runs, spans.queries]).astype(np.int32), device),
        keys=upload(np.concatenate([runs, spans.keys]).astype(np.int32), device),
        kinds=upload(kinds.astype(np.int32), device),
    )


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Tree attention in one kernel, ``[P, H, D], [P, K, D], [P, K, D] -> [P, H, D]``; checked on first use.

    Raises:
        ParityError: the kernel is wrong on this machine.
    """
    check(Case.of(query, key, value, options))
    return attend(query, key, value, metadata, options)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: TreeMetadata, options: AttentionOptions
) -> torch.Tensor:
    """:func:`attention`, unchecked."""
    from magi_attention.api import flex_flash_attn_func

    ranges = metadata.derived("magi", build_ranges)

    def attend_ranges(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        out, _ = flex_flash_attn_func(
            query,
            key,
            value,
            ranges.queries,
            ranges.keys,
            ranges.kinds,
            sink=None if options.sinks is None else options.sinks.float()[None],
            softmax_scale=options.softmax_scale,
            deterministic=options.deterministic,
        )
        return out

    return apart_from_padding(attend_ranges, query, key, value, metadata, options)


def plan(metadata: TreeMetadata, case: Case) -> Ranges:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    return metadata.derived("magi", build_ranges)


def check(case: Case) -> None:
    """See :class:`~mcore_prefix_tree.attention.api.Backend`."""
    check_parity("magi", attend, case)


@cache
def _is_installed() -> bool:
    return find_spec("magi_attention") is not None


def refusal(case: Case) -> str | None:
    """What MagiAttention's kernel of the ranges does not do, and windows, which its ranges do not have."""
    if case.capability is None:
        return f"device={case.device.type} (it is a CUDA kernel)"
    if not _is_installed():
        return "device=cuda without magi_attention, which is not installed"
    if case.capability[0] != 9:
        return f"a GPU of compute capability {case.capability[0]}.{case.capability[1]} (Hopper only)"
    if case.options.window is not None:
        return f"window={case.options.window} (its ranges see whole segments)"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype={case.dtype} (it takes bfloat16 and float16)"
    if case.head_dim != case.value_dim:
        return f"head_dim={case.head_dim} with values of {case.value_dim}"
    if case.head_dim not in (64, 128):
        return f"head_dim={case.head_dim} (64 or 128)"
    return None
