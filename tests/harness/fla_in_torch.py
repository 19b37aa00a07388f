"""FLA's functions of Gated DeltaNet in torch and in the dtype of their inputs, with FLA's names and parameters.

They are written from the equations of the rule in chunks (Yang et al., https://arxiv.org/abs/2412.06464, section 3.3),
and the backward ones are autograd's. ``tests/peers/test_fla.py`` runs FLA's own.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

RULE = "fla.ops.gated_delta_rule.chunk"
CHUNK = 64
RCP_LN2 = 1.4426950408889634  # decays are exponents of 2


def chunks_of(cu_seqlens: Tensor, chunk_indices: Tensor) -> list[slice]:
    """The tokens of each chunk."""
    assert cu_seqlens.dtype is chunk_indices.dtype is torch.int64
    borders, found, places = cu_seqlens.tolist(), [], []
    for at, (start, end) in enumerate(itertools.pairwise(borders)):
        assert start < end
        found += [slice(begin, min(begin + CHUNK, end)) for begin in range(start, end, CHUNK)]
        places += [[at, place] for place in range(-(-(end - start) // CHUNK))]
    assert chunk_indices.tolist() == places
    return found


def solve(k: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    products = beta.unsqueeze(-1) * (k @ k.mT) * torch.exp2((g.unsqueeze(-1) - g.unsqueeze(-2)).tril(-1))
    inverse: Tensor = torch.linalg.inv(torch.eye(k.shape[-2], dtype=k.dtype) + products.tril(-1))
    return inverse


def represent(k: Tensor, v: Tensor, beta: Tensor, g: Tensor, solved: Tensor) -> tuple[Tensor, Tensor]:
    return solved @ (k * (beta * torch.exp2(g)).unsqueeze(-1)), solved @ (v * beta.unsqueeze(-1))


def write(k: Tensor, v: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """The state after a chunk."""
    last = g[..., -1:]
    return h * torch.exp2(last).unsqueeze(-1) + (k * torch.exp2(last - g).unsqueeze(-1)).mT @ v


def read(q: Tensor, k: Tensor, v: Tensor, h: Tensor, g: Tensor) -> Tensor:
    decay = torch.exp2((g.unsqueeze(-1) - g.unsqueeze(-2)).tril())
    return (q * torch.exp2(g).unsqueeze(-1)) @ h + (q @ k.mT * decay).tril() @ v


def by_chunk(function: Callable[..., Any], tensors: tuple[Tensor, ...], where: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Apply a function to ``[H, t, ...]`` of each chunk of ``[1, P, H, ...]``; join its results as these."""
    found = [
        function(*(one[0, own].transpose(0, 1) for one in tensors), at) for at, own in enumerate(chunks_of(*where))
    ]
    return [torch.cat([part.transpose(0, 1) for part in parts]).unsqueeze(0) for parts in zip(*found, strict=True)]


def gradients(function: Callable[..., Any], inputs: tuple[Tensor, ...], of_outputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        outputs = function(*leaves)
        return list(torch.autograd.grad(outputs, leaves, of_outputs, allow_unused=True, materialize_grads=True))


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    reverse: bool = False,
    scale: float | None = None,
) -> Tensor:
    assert chunk_size == CHUNK
    summed = (lambda x, _: [x.flip(1).cumsum(1).flip(1)]) if reverse else (lambda x, _: [x.cumsum(1)])
    return by_chunk(summed, (g,), (cu_seqlens, chunk_indices))[0] * (scale or 1)


def chunk_gated_delta_rule_fwd_intra(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor
) -> list[Tensor]:
    def of_chunk(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, _: int) -> list[Tensor]:
        solved = solve(k, beta, g)
        return [*represent(k, v, beta, g, solved), torch.nn.functional.pad(solved, (0, CHUNK - solved.shape[-1]))]

    return by_chunk(of_chunk, (k, v, g, beta), (cu_seqlens, chunk_indices))


def recompute_w_u_fwd(
    k: Tensor, v: Tensor, beta: Tensor, A: Tensor, g: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor
) -> list[Tensor]:
    return by_chunk(
        lambda k, v, beta, g, solved, _: represent(k, v, beta, g, solved[..., : k.shape[-2]]),
        (k, v, beta, g, A),
        (cu_seqlens, chunk_indices),
    )


def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> list[Tensor]:
    def of_chunk(k: Tensor, v: Tensor, beta: Tensor, g: Tensor, dw: Tensor, du: Tensor, _: int) -> list[Tensor]:
        def forward(k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
            return represent(k, v, beta, g, solve(k, beta, g))

        return gradients(forward, (k, v, beta, g), (dw, du))

    dk, dv, db, dg = by_chunk(of_chunk, (k, v, beta, g, dw, du), (cu_seqlens, chunk_indices))
    return [dk, dv, db, dg * RCP_LN2]


def chunk_gated_delta_rule_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    count = len(cu_seqlens) - 1
    shape = (count, k.shape[2], k.shape[3], u.shape[3])
    states = k.new_zeros(shape) if initial_state is None else initial_state.clone()
    assert states.shape == shape
    check_offsets(chunk_offsets, chunk_indices, count)
    h: list[Tensor] = []

    def of_chunk(k: Tensor, w: Tensor, u: Tensor, g: Tensor, at: int) -> list[Tensor]:
        sequence = int(chunk_indices[at, 0])
        h.append(states[sequence].clone())
        written = u - w @ h[-1]
        states[sequence] = write(k, written, g, h[-1])
        return [written]

    (new,) = by_chunk(of_chunk, (k, w, u, g), (cu_seqlens, chunk_indices))
    return torch.stack(h).unsqueeze(0), new, states if output_final_state else None


def check_offsets(chunk_offsets: Tensor | None, chunk_indices: Tensor, sequences: int) -> None:
    counts = torch.bincount(chunk_indices[:, 0], minlength=sequences).tolist()
    assert chunk_offsets is None or chunk_offsets.tolist() == [sum(counts[:at]) for at in range(sequences + 1)]


def chunk_fwd_o(
    q: Tensor, k: Tensor, v: Tensor, h: Tensor, g: Tensor, scale: float, cu_seqlens: Tensor, chunk_indices: Tensor
) -> Tensor:
    return by_chunk(
        lambda q, k, v, g, at: [read(q, k, v, h[0, at], g) * scale], (q, k, v, g), (cu_seqlens, chunk_indices)
    )[0]


def chunk_bwd_dv_local(
    q: Tensor, k: Tensor, g: Tensor, do: Tensor, scale: float, cu_seqlens: Tensor, chunk_indices: Tensor
) -> Tensor:
    def of_chunk(q: Tensor, k: Tensor, g: Tensor, do: Tensor, _: int) -> list[Tensor]:
        nothing = q.new_zeros(q.shape[0], q.shape[-1], do.shape[-1])
        return gradients(lambda v: read(q, k, v, nothing, g) * scale, (torch.zeros_like(do),), (do,))

    return by_chunk(of_chunk, (q, k, g, do), (cu_seqlens, chunk_indices))[0]


def chunk_gated_delta_rule_bwd_dhu(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    do: Tensor,
    dv: Tensor,
    g: Tensor,
    h0: Tensor | None,
    dht: Tensor | None,
    scale: float,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    count = len(cu_seqlens) - 1
    shape = (count, k.shape[2], k.shape[3], do.shape[3])
    assert all(one is None or one.shape == shape for one in (h0, dht))
    check_offsets(chunk_offsets, chunk_indices, count)
    after = k.new_zeros(shape) if dht is None else dht.clone()
    found: list[tuple[Tensor, Tensor]] = []
    for own, (at, _) in reversed(list(zip(chunks_of(cu_seqlens, chunk_indices), chunk_indices.tolist(), strict=True))):
        queries, keys, w_of_chunk, d_out, local, total = (one[0, own].transpose(0, 1) for one in (q, k, w, do, dv, g))
        of_state, last = after[at].clone(), total[..., -1:]
        d_new = local + (keys * torch.exp2(last - total).unsqueeze(-1)) @ of_state
        found.append((of_state, d_new.transpose(0, 1)))
        after[at] = of_state * torch.exp2(last).unsqueeze(-1) - w_of_chunk.mT @ d_new
        after[at] += scale * (queries * torch.exp2(total).unsqueeze(-1)).mT @ d_out
    states, values = zip(*reversed(found), strict=True)
    return torch.stack(states).unsqueeze(0), None if h0 is None else after, torch.cat(values).unsqueeze(0)


def chunk_bwd_dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    h: Tensor,
    dv: Tensor,
    do: Tensor,
    dh: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> list[Tensor]:
    def of_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, dv: Tensor, do: Tensor, at: int) -> list[Tensor]:
        def forward(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
            return read(q, k, v, h[0, at], g) * scale, write(k, v, g, h[0, at])

        dq, dk, dg = gradients(forward, (q, k, g), (do, dh[0, at]))
        return [dq, dk, -dv @ h[0, at].mT, dg * RCP_LN2]

    return by_chunk(of_chunk, (q, k, v, g, dv, do), (cu_seqlens, chunk_indices))


FUNCTIONS = (
    chunk_local_cumsum,
    chunk_gated_delta_rule_fwd_intra,
    recompute_w_u_fwd,
    prepare_wy_repr_bwd,
    chunk_gated_delta_rule_fwd_h,
    chunk_fwd_o,
    chunk_bwd_dv_local,
    chunk_gated_delta_rule_bwd_dhu,
    chunk_bwd_dqkwg,
)


@contextmanager
def fla_in_torch() -> Iterator[Counter[str]]:
    """Let an import of FLA's rule find these functions; count their calls."""
    module, calls = ModuleType(RULE), Counter[str]()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[function.__name__] += 1
            return function(*args, **kwargs)

        return call

    for function in FUNCTIONS:
        setattr(module, function.__name__, counted(function))
    module.RCP_LN2 = RCP_LN2  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {RULE: module}):
        yield calls
