"""A plain implementation of a varlen kernel's contract, to compare the cascade's kernels with on a CPU."""

from __future__ import annotations

import torch

from mcore_prefix_tree.attention import AttentionOptions, Case
from mcore_prefix_tree.attention.cascade import CPU_KERNELS
from mcore_prefix_tree.attention.cascade.kernels import QKV, Result, _spans, exact
from mcore_prefix_tree.attention.cascade.sequences import Sequences


class Plain:
    """The contract spelled out, one sequence at a time, in fp32 or better. Holds one number per pair of a sequence."""

    name: str = "plain"
    head_dim_multiple: int | None = None

    def refusal(self, case: Case) -> str | None:
        """For the CPU: it would crawl on a GPU."""
        return None if case.device.type == "cpu" else f"device={case.device.type}"

    def forward(self, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
        query, key, value = qkv
        group = query.shape[1] // key.shape[1]
        out = query.new_empty(*query.shape[:2], value.shape[2])
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=exact(query.dtype))
        for q, k in _spans(sequences):
            scores = _scores(query[q], key[k], options, causal=sequences.causal)
            lse[:, q] = scores.logsumexp(dim=-1)
            weights = torch.exp(scores - lse[:, q, None])
            out[q] = torch.einsum("hij,jhw->ihw", weights, _repeated(value[k], group)).to(out.dtype)
        return Result(out, lse)

    def backward(
        self, grad_out: torch.Tensor, qkv: QKV, result: Result, sequences: Sequences, options: AttentionOptions
    ) -> QKV:
        query, key, value = qkv
        group = query.shape[1] // key.shape[1]
        grads = QKV(*map(torch.empty_like, qkv))
        for q, k in _spans(sequences):
            scores = _scores(query[q], key[k], options, causal=sequences.causal)
            weights = torch.exp(scores - result.lse[:, q, None])
            grad, out = (one[q].to(weights.dtype) for one in (grad_out, result.out))
            grad_weights = torch.einsum("ihw,jhw->hij", grad, _repeated(value[k], group))
            grad_scores = weights * (grad_weights - (grad * out).sum(-1).T[..., None]) * options.softmax_scale
            grads.query[q] = torch.einsum("hij,jhd->ihd", grad_scores, _repeated(key[k], group))
            grad_key = torch.einsum("hij,ihd->jhd", grad_scores, query[q].to(weights.dtype))
            grads.key[k] = grad_key.unflatten(1, (-1, group)).sum(2)
            grad_value = torch.einsum("hij,ihw->jhw", weights, grad)
            grads.value[k] = grad_value.unflatten(1, (-1, group)).sum(2)
        return grads


def _repeated(rows: torch.Tensor, group: int) -> torch.Tensor:
    return rows.to(exact(rows.dtype)).repeat_interleave(group, dim=1)


def _scores(query: torch.Tensor, key: torch.Tensor, options: AttentionOptions, *, causal: bool) -> torch.Tensor:
    """``[H, i, j]``, scaled and masked."""
    repeated = _repeated(key, query.shape[1] // key.shape[1])
    scores = torch.einsum("ihd,jhd->hij", query.to(repeated.dtype), repeated) * options.softmax_scale
    if causal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


KERNELS = (*CPU_KERNELS, Plain())
