"""Check that a GPU's kernel computes tree attention on this machine, once before it is trusted.

A forest of a thousand tokens, with borders before, on and after those of tiles, runs forward, and backward if the
caller trains, through the kernel and through the reference in fp64. The comparison takes the worst row of a head, not a
norm over all of them: one wrong token must not drown in a thousand right ones. Weights are kept even, so that no pair
is too light to be missed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from mcore_prefix_tree.attention import reference
from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.triton_here import can_compare, require_parity, worst_row

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TreeMetadata, AttentionOptions], torch.Tensor]

# In machine epsilons of a 16-bit dtype. Sound kernels stay below 1 on this forest; one key too few, of a query that
# sees 400, makes 6 in bfloat16 and 50 in float16.
EPSILONS = 4
# Of dQ and dK, which carry the rounding of out too, through the sums of out * grad_out: with sinks, sound kernels reach
# 4.2, at a head_dim of 256.
EPSILONS_OF_SCORES = 8
_OF_SCORES = ("dQ", "dK")
# Most numbers of a tensor that kernels of other projects take, which may compute its offsets in 32 bits. On an H200,
# torch 2.11's FlashAttention gave wrong results for 4.8e9 and stopped with an illegal memory access at 4.4e9.
MOST_NUMBERS = (1 << 31) - 1

# Node lengths and parents: a trunk, nodes that end near multiples of 64 and 128, a chain, empty and one-token nodes.
_NODES = (
    *((127, -1), (130, 0), (1, 1), (57, 1), (65, 0), (0, 4), (63, 4), (128, 4), (3, 0), (64, 8), (121, 9)),
    *((70, -1), (1, 11), (1, 11), (33, 11), (1, -1)),
)
_PADDING = 5


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything but the lengths of the tree that decides which code a kernel runs."""

    device: torch.device
    dtype: torch.dtype
    group: int
    head_dim: int
    value_dim: int
    window: int | None
    has_sinks: bool
    deterministic: bool
    needs_grad: bool

    @classmethod
    def of(cls, case: Case) -> Question:
        """Return the question that a case asks."""
        return cls(
            device=case.device,
            dtype=case.dtype,
            group=case.heads // case.kv_heads,
            head_dim=case.head_dim,
            value_dim=case.value_dim,
            window=case.options.window,
            has_sinks=case.options.sinks is not None,
            deterministic=case.options.deterministic,
            needs_grad=case.needs_grad,
        )


def check_parity(name: str, attention: Attention, case: Case) -> None:
    """Compare on first use of a (dtype, group, head dims, options, backward or not); raise ParityError if wrong.

    It reads numbers back, so nothing is compared while torch.compile traces or a CUDA graph is captured; the next call
    outside of these makes up for it. ``attention``, a module-level function, keeps a record of completed checks.
    """
    if can_compare():
        _check(name, attention, Question.of(case))


def check_size(kernel: str, query: torch.Tensor) -> None:
    """Raise ValueError if ``query``, ``[P, H, D]``, is too large for the kernels of another project."""
    if query.numel() > MOST_NUMBERS:
        tokens, heads, width = query.shape
        raise ValueError(
            f"{kernel} takes at most {MOST_NUMBERS // (heads * width):,} tokens of {heads} heads of {width} numbers, "
            f"and a micro-batch has {tokens:,}: lower batch.max_tokens, or take attention_backend=triton"
        )


@cache
def _check(name: str, attention: Attention, question: Question) -> None:
    way_out = f"use attention backend {'flex' if name == 'triton' else 'triton'!r} and report the versions"
    require_parity(
        f"attention backend {name!r}",
        lambda: worst_rows(attention, question),
        lambda what: error_limit(what, question.dtype),
        f"{question.dtype}, head_dim {question.head_dim}/{question.value_dim}, {question.group} query heads a key head",
        way_out,
    )


def error_limit(what: str, dtype: torch.dtype) -> float:
    """Return the largest error of a row that is still rounding, for one of the names of :func:`worst_rows`."""
    return (EPSILONS_OF_SCORES if what in _OF_SCORES else EPSILONS) * torch.finfo(dtype).eps


def worst_rows(attention: Attention, question: Question) -> dict[str, float]:
    """Largest error of a row of out, and if it trains of dQ, dK, dV (and of d sinks), relative to the row."""
    metadata = _forest(question.device)
    generator = torch.Generator().manual_seed(0)
    kv_heads = 2 if question.group <= 8 else 1

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
        return values.to(question.dtype).to(question.device)

    size, heads = metadata.padded_size, kv_heads * question.group
    inputs = [
        draw(size, heads, question.head_dim),
        draw(size, kv_heads, question.head_dim),
        draw(size, kv_heads, question.value_dim),
    ]
    grad_out = draw(size, heads, question.value_dim) if question.needs_grad else None
    options = AttentionOptions(
        softmax_scale=0.5 * question.head_dim**-0.5,
        window=question.window,
        sinks=draw(heads).float() if question.has_sinks else None,
        deterministic=question.deterministic,
    )
    actual = _results(attention, inputs, options, metadata, grad_out)
    expected = _results(reference.attention, [one.double() for one in inputs], options, metadata, grad_out)
    names = ("out", "dQ", "dK", "dV", "d sinks")
    return {
        # The first tokens of a path have almost no dQ, and the last ones almost no dK: the remainder is rounding.
        name: worst_row(*pair, may_vanish=name in _OF_SCORES)
        for name, pair in zip(names, zip(actual, expected, strict=True), strict=False)
    }


def _forest(device: torch.device) -> TreeMetadata:
    borders = [0]
    for length, _ in _NODES:
        borders.append(borders[-1] + length)
    parents = [parent for _, parent in _NODES]
    return TreeMetadata.from_nodes(borders, parents, padded_size=borders[-1] + _PADDING, device=device)


def _results(
    attention: Attention,
    inputs: list[torch.Tensor],
    options: AttentionOptions,
    metadata: TreeMetadata,
    grad_out: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return out ``[P, H, W]``, and with ``grad_out`` of that shape dQ, dK, dV (and d sinks)."""
    if grad_out is None:
        # As the caller asks: a kernel may have no backward in this mode.
        with torch.no_grad():
            return [attention(inputs[0], inputs[1], inputs[2], metadata, options)]
    # If the caller is recomputed, activation checkpointing must not see the tensors saved here.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        leaves = [one.detach().requires_grad_() for one in inputs]
        if options.sinks is not None:
            sinks = options.sinks.detach().requires_grad_()
            options, wanted = replace(options, sinks=sinks), [*leaves, sinks]
        else:
            wanted = leaves
        out = attention(leaves[0], leaves[1], leaves[2], metadata, options)
        return [out.detach(), *torch.autograd.grad(out, wanted, grad_out.to(out.dtype))]
