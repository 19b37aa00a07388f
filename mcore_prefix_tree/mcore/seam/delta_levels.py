"""The rule of Gated DeltaNet along a tree with FLA's kernels: only the passes of states run level by level.

Most of a chunk of 64 tokens is the same for any state (Yang et al., https://arxiv.org/abs/2412.06464, section 3.3). So
FLA's rule computes that for all chunks, passes the state from chunk to chunk, and reads it in all chunks. Each of these
is a function of FLA, and so are the gradients: here they run once for all levels, and a pass of states for each level.

Legend: P tokens by level, S states, H heads, K and V sizes of keys and values.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from mcore_prefix_tree.mcore.seam.levels import Level, Levels
from mcore_prefix_tree.plan.model_shape import CHUNK

_RULE = "fla.ops.gated_delta_rule.chunk"  # has all functions that FLA's own rule calls
_USED = (
    *("chunk_local_cumsum", "recompute_w_u_fwd", "chunk_gated_delta_rule_fwd_h", "chunk_fwd_o", "chunk_bwd_dv_local"),
    *("chunk_gated_delta_rule_bwd_dhu", "chunk_bwd_dqkwg", "prepare_wy_repr_bwd"),
)
# What solves a chunk: one function since 0.5, two before.
_FUSED, _APART = "chunk_gated_delta_rule_fwd_intra", ("chunk_scaled_dot_kkt_fwd", "solve_tril")


def check_kernels() -> None:
    """Check that the installed FLA has the functions that are called here, and that they take the plan of chunks.

    Raises:
        ImportError: it lacks some.
    """
    rule = importlib.import_module(_RULE)
    used = (*_USED, *((_FUSED,) if hasattr(rule, _FUSED) else _APART))
    missing = [name for name in used if "chunk_indices" not in _parameters(getattr(rule, name, len))]
    if missing:
        raise ImportError(
            "with a tree Gated DeltaNet takes flash-linear-attention 0.4.2 to 0.6.0; this one has no chunk_indices in "
            f"{', '.join(missing)}; pip install flash-linear-attention==0.6.0, or set deterministic_mode=true"
        )


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def follow_levels(
    levels: Levels, given: Sequence[torch.Tensor], *inputs: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the rule's output ``[1, P, H, V]``, and the given states and those that the levels keep.

    ``given`` is what :func:`read_states` returns. ``inputs`` are queries, keys, values, decays and betas
    ``[1, P, H, ...]`` in the order of the levels.
    """
    _, key, value, *_ = inputs
    shape = 1, value.shape[2], key.shape[3], value.shape[3]
    first = given[0] if given else value.new_zeros(shape, dtype=torch.float32)  # as FLA's states
    out, states = _FollowLevels.apply(levels, first, *(one.contiguous() for one in inputs))  # type: ignore[no-untyped-call]
    return out, [states if given else states[1:]]


class _FollowLevels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, levels: Levels, given: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output and the states ``[S, H, K, V]``: the m given ones, one of zeros, and those kept."""
        rule, every, scale = importlib.import_module(_RULE), _sequences(levels), inputs[1].shape[-1] ** -0.5
        query, key, value, decay, beta = inputs
        pass_on = rule.chunk_gated_delta_rule_fwd_h
        # Decays are exponents of e before FLA 0.5.1, and of 2 since.
        to_base = None if "use_exp2" in _parameters(pass_on) else rule.RCP_LN2
        total = rule.chunk_local_cumsum(decay, chunk_size=CHUNK, scale=to_base, **every)
        chunk = {"k": key, "v": value, "beta": beta, "g": total}
        if hasattr(rule, _FUSED):
            w, u, solved = rule.chunk_gated_delta_rule_fwd_intra(**chunk, **every)
        else:
            products = rule.chunk_scaled_dot_kkt_fwd(k=key, g=total, beta=beta, output_dtype=torch.float32, **every)
            solved = rule.solve_tril(A=products, output_dtype=key.dtype, **every)
            w, u = rule.recompute_w_u_fwd(**chunk, A=solved, **every)
        states, h, new_value = [given], [], []
        for level in levels.levels:
            of_chunks, of_tokens, last = pass_on(
                **_part({"k": key, "w": w, "u": u, "g": total}, level),
                initial_state=states[-1].index_select(0, level.parent) if level.start or levels.given else None,
                output_final_state=level.kept > 0,
                **_sequences(level, pass_on),
            )
            h.append(of_chunks)
            new_value.append(of_tokens)
            if level.kept:
                states.append(last[: level.kept])
        out = rule.chunk_fwd_o(q=query, k=key, v=_joined(new_value), h=_joined(h), g=total, scale=scale, **every)
        found = torch.cat(states)
        ctx.save_for_backward(query, key, value, total, beta, solved, found)
        ctx.levels, ctx.dtypes = levels, [one.dtype for one in inputs]
        ctx.set_materialize_grads(False)
        return out.to(query.dtype), found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return gradients of the given states and of the inputs."""
        levels: Levels = ctx.levels
        query, key, value, total, beta, solved, states = ctx.saved_tensors
        rule, every, scale = importlib.import_module(_RULE), _sequences(levels), key.shape[-1] ** -0.5
        pass_on, pass_back = rule.chunk_gated_delta_rule_fwd_h, rule.chunk_gated_delta_rule_bwd_dhu
        d_out, d_states = grad_outputs
        d_out = torch.zeros_like(value) if d_out is None else d_out.contiguous()
        d_states = torch.zeros_like(states) if d_states is None else d_states.clone()
        chunk = {"k": key, "v": value, "beta": beta, "g": total, "A": solved}
        w, u = rule.recompute_w_u_fwd(**chunk, **every)
        # All first states are known, so that one call serves all levels.
        initial, firsts = None, [None]
        if len(levels.levels) > 1 or levels.given:
            initial = states.index_select(0, levels.first_state)
            firsts = initial.split([len(level.lens) for level in levels.levels])
        h, new_value, _ = pass_on(
            k=key, w=w, u=u, g=total, initial_state=initial, output_final_state=False, **_sequences(levels, pass_on)
        )
        tokens = {"q": query, "k": key, "g": total, "do": d_out}
        d_local = rule.chunk_bwd_dv_local(**tokens, scale=scale, **every)
        by_level = d_states.split([levels.given + 1, *(level.kept for level in levels.levels)])
        d_h, d_value = list[torch.Tensor](), list[torch.Tensor]()
        for level, first, above, kept in reversed([*zip(levels.levels, firsts, by_level, by_level[1:], strict=False)]):
            of_chunks, of_first, of_tokens = pass_back(
                **_part(tokens | {"w": w, "dv": d_local}, level),
                h0=first if level.start or levels.given else None,
                dht=F.pad(kept, (0, 0) * 3 + (0, len(level.lens) - level.kept)) if level.kept else None,
                scale=scale,
                **_sequences(level, pass_back),
            )
            d_h.insert(0, of_chunks)
            d_value.insert(0, of_tokens)
            if of_first is not None:
                above.index_put_((level.parent,), of_first, accumulate=True)  # adds in one order on a GPU
        d_written = _joined(d_value)
        read = {"v": new_value, "w": w, "h": h, "dv": d_written, "dh": _joined(d_h), "scale": scale}
        d_query, d_key, d_w, d_total = rule.chunk_bwd_dqkwg(**tokens, **read, **every)
        of_w, d_v, d_beta, d_total_of_w = rule.prepare_wy_repr_bwd(**chunk, dw=d_w, du=d_written, **every)
        d_decay = rule.chunk_local_cumsum(d_total + d_total_of_w, chunk_size=CHUNK, reverse=True, **every)
        gradients = d_query, d_key + of_w, d_v, d_decay, d_beta
        return None, by_level[0], *(one.to(dtype) for one, dtype in zip(gradients, ctx.dtypes, strict=True))


def _sequences(of: Level | Levels, pass_of_states: Any = None) -> dict[str, torch.Tensor]:
    """Return the sequences of a level, or of all; since FLA 0.6 a pass of states need not compute the offsets."""
    found = {"cu_seqlens": of.cu_lens, "chunk_indices": of.chunks, "chunk_offsets": of.offsets}
    if pass_of_states is None or "chunk_offsets" not in _parameters(pass_of_states):
        del found["chunk_offsets"]
    return found


def _part(tokens: dict[str, torch.Tensor], level: Level) -> dict[str, torch.Tensor]:
    return {name: one[:, level.start : level.end] for name, one in tokens.items()}


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the tokens or chunks of all levels, and forget those of each: they are as large together."""
    whole = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    parts.clear()
    return whole
