"""What takes the place of packages that need a GPU, in tests of trainers."""

from __future__ import annotations

import importlib.machinery
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.dot_product_attention import DotProductAttention


class StandIn(ModuleType):
    """A package with some members."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        vars(self).update(members, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))


class PackedAttention(DotProductAttention):
    """Attention for packed rows, which TransformerEngine has and Megatron's local attention has not."""

    def forward(self, query: Any, key: Any, value: Any, *args: Any, packed_seq_params: Any = None, **kw: Any) -> Any:
        if packed_seq_params is None:
            return super().forward(query, key, value, *args, **kw)
        params, rows = packed_seq_params, []
        slots = params.cu_seqlens_q_padded
        for start, end in pairwise((params.cu_seqlens_q if slots is None else slots).tolist()):
            q, k, v = (part[start:end].transpose(0, 1) for part in (query, key, value))
            rows.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
        return torch.cat(rows).flatten(1)
