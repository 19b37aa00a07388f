"""The interface of a varlen attention kernel to the cascade, and the kernels that run on a CPU.

A kernel returns its result and the log-sum-exp of the scores, and its backward takes both as arguments. The backward of
softmax needs nothing else of the forward (Dao, FlashAttention-2, algorithm 2): given the result and the log-sum-exp
over *all* keys of a query, it returns the exact gradients with respect to the keys it is shown.

Legend: Q queries, N keys of all sequences of a call, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol

import torch

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.attention.cascade.sequences import Sequences


class QKV(NamedTuple):
    """Query, key and value ``[Q, H, D], [N, K, D], [N, K, W]`` of a call, or their gradients."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Result(NamedTuple):
    """Result of a call: ``out``, ``[Q, H, W]``, and ``lse``, ``[H, Q]``, the natural log-sum-exp in fp32 or better."""

    out: torch.Tensor
    lse: torch.Tensor


class VarlenKernel(Hashable, Protocol):
    """One varlen attention; D and W must be equal multiples of ``head_dim_multiple``, unless it is None."""

    name: str
    head_dim_multiple: int | None

    def refusal(self, case: Case) -> str | None:
        """Return the argument that the kernel does not support and why, or None, like a back-end's ``refusal``."""

    def forward(self, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
        """Attend within each sequence, ``[Q, H, D], [N, K, D], [N, K, W]``."""

    def backward(
        self, grad_out: torch.Tensor, qkv: QKV, result: Result, sequences: Sequences, options: AttentionOptions
    ) -> QKV:
        """Return the gradients for a result that may cover more keys than these; ``grad_out`` is ``[Q, H, W]``."""


def _spans(sequences: Sequences) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and rows of keys of each sequence."""
    q, k = sequences.host_cu_q, sequences.host_cu_k
    for q_start, q_end, k_start, k_end in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True):
        yield slice(q_start, q_end), slice(k_start, k_end)


def exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics: fp32, or ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)


class CpuFlash:
    """The flash kernel behind torch's own SDPA on a CPU, one sequence at a time."""

    name: str = "torch on the CPU"
    head_dim_multiple: int | None = 1

    def refusal(self, case: Case) -> str | None:
        return None if case.device.type == "cpu" else f"device={case.device.type}"

    def forward(self, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
        """See :class:`VarlenKernel`; ``[Q, H, D], [N, K, D], [N, K, W]``."""
        query, key, value = qkv
        out = query.new_empty(*query.shape[:2], value.shape[2])
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=exact(query.dtype))
        for q, k in _spans(sequences):
            own = map(_batched, (query[q], key[k], value[k]))
            rows, lse[:, q] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *own, 0.0, sequences.causal, scale=options.softmax_scale
            )
            out[q] = rows[0].transpose(0, 1)
        return Result(out, lse)

    def backward(
        self, grad_out: torch.Tensor, qkv: QKV, result: Result, sequences: Sequences, options: AttentionOptions
    ) -> QKV:
        """See :class:`VarlenKernel`; ``grad_out`` is ``[Q, H, W]``."""
        grads = QKV(*map(torch.empty_like, qkv))
        for q, k in _spans(sequences):
            own = map(_batched, (grad_out[q], qkv.query[q], qkv.key[k], qkv.value[k], result.out[q]))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *own, result.lse[None, :, q], 0.0, sequences.causal, scale=options.softmax_scale
            )
            for grad, rows, one in zip(grads, (q, k, k), found, strict=True):
                grad[rows] = one[0].transpose(0, 1)
        return grads


def _batched(rows: torch.Tensor) -> torch.Tensor:
    """Reshape ``[n, heads, dim]`` to ``[1, heads, n, dim]``."""
    return rows.transpose(0, 1).unsqueeze(0)
