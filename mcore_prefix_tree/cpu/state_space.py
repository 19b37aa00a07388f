"""Mamba's kernels in torch, for machines without a GPU: the Triton kernels of mamba-ssm and causal-conv1d need one.

Legend: b rows, s tokens, H heads of p channels in g groups, n size of a state.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Return the causal convolution of ``[b, D, s]`` with ``[D, W]``, as ``causal_conv1d_fn``."""
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=len(weight))[..., : x.shape[2]]
    return F.silu(out) if activation in ("silu", "swish") else out


def _scan(
    x: torch.Tensor,  # [b, s, H, p]
    dt: torch.Tensor,  # steps after softplus, [b, s, H]
    A: torch.Tensor,  # [H], negative
    B: torch.Tensor,  # [b, s, g, n]
    C: torch.Tensor,  # likewise
    chunk_size: int,  # tokens that are computed at once
    *,
    D: torch.Tensor,  # [H], or [H, p]
    seq_idx: torch.Tensor | None = None,  # int32 [b, s]; where it changes the state is zero
) -> torch.Tensor:
    """Return ``[b, s, H, p]`` of the state space model, as ``mamba_chunk_scan_combined`` of mamba-ssm."""
    heads = x.shape[2] // B.shape[2]
    B, C = (part.to(dt.dtype).repeat_interleave(heads, dim=2) for part in (B, C))
    sequence = torch.zeros_like(x[:, :, 0, 0], dtype=torch.int32) if seq_idx is None else seq_idx
    state, before = dt.new_zeros(len(x), *x.shape[2:], B.shape[3]), sequence[:, :1]
    out = []
    for start in range(0, x.shape[1], chunk_size):
        part = slice(start, start + chunk_size)
        own, keys, queries, step = sequence[:, part], B[:, part], C[:, part], x[:, part] * dt[:, part].unsqueeze(-1)
        sums = (dt[:, part] * A).cumsum(1)
        decay = sums.unsqueeze(2) - sums.unsqueeze(1)
        sees = (own.unsqueeze(2) == own.unsqueeze(1)).tril().unsqueeze(-1)
        weights = decay.masked_fill(~sees, -torch.inf).exp() * torch.einsum("bihn,bjhn->bijh", queries, keys)
        inherits = (own == before).unsqueeze(-1)
        read = torch.einsum("bihn,bhpn->bihp", queries, state) * (sums.exp() * inherits).unsqueeze(-1)
        out.append(torch.einsum("bijh,bjhp->bihp", weights, step) + read)
        left = (sums[:, -1:] - sums).exp() * (own == own[:, -1:]).unsqueeze(-1)
        state = state * (sums[:, -1].exp() * inherits[:, -1])[..., None, None]
        state = state + torch.einsum("bjhp,bjhn->bhpn", step * left.unsqueeze(-1), keys)
        before = own[:, -1:]
    return (torch.cat(out, dim=1) + x * (D if D.dim() == 2 else D.unsqueeze(-1))).to(x.dtype)


def _split_convolve_scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    activation: str,
    ngroups: int,
    headdim: int | None,
    norm_before_gate: bool,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``[b, s, H * p]`` of z, x, B, C and dt, as ``mamba_split_conv1d_scan_combined`` of mamba-ssm."""
    if seq_idx is not None or norm_before_gate:
        raise NotImplementedError("on a CPU Mamba takes no packed sequences (seq_idx), and no norm before its gate")
    heads = len(dt_bias)
    channels = heads * (D.shape[1] if headdim is None else headdim)
    z, mixed, dt = zxbcdt.split([channels, zxbcdt.shape[-1] - channels - heads, heads], dim=-1)
    mixed = convolve(mixed.transpose(1, 2), conv1d_weight, conv1d_bias, activation).transpose(1, 2)
    x, B, C = mixed.tensor_split([channels, (channels + mixed.shape[-1]) // 2], dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = _scan(
        x.unflatten(-1, (heads, -1)),
        F.softplus(dt.to(wide) + dt_bias),
        A,
        B.unflatten(-1, (ngroups, -1)),
        C.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D=D,
    )
    return (out.flatten(2).to(wide) * F.silu(z.to(wide))).to(zxbcdt.dtype)


class _GroupedNorm(torch.nn.Module):
    """RMSNorm of groups of channels ``[..., D]``, with the checkpoint of upstream's ``ExtendedRMSNorm``."""

    tp_group: Any

    def __init__(
        self, hidden_size: int, *, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``[..., D]``."""
        groups = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        normed: torch.Tensor = (groups * scale).flatten(-2) * self.weight
        return normed.to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        utils = importlib.import_module("megatron.core.transformer.utils")
        state, groups = self.state_dict(keep_vars=True), {"tp_group": self.tp_group}
        groups["dp_cp_group"] = metadata["dp_cp_group"]
        return utils.make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


def _rearrange(x: torch.Tensor, pattern: str) -> torch.Tensor:
    """Return ``einops.rearrange`` for the patterns of training."""
    if pattern == "d 1 w -> d w":
        return x.squeeze(1)
    if pattern in ("l b d -> b l d", "b l d -> l b d"):
        return x.transpose(0, 1)
    raise NotImplementedError(f"rearranging {pattern!r} needs einops; pip install einops")


def stand_ins() -> list[tuple[object, str, object]]:
    """Return ``(owner, attribute, replacement)`` for the kernels of Mamba layers; none without a ``HybridModel``."""
    if importlib.util.find_spec("megatron.core.models.hybrid") is None:
        return []  # no model whose Mamba layers could follow a tree
    mixer, parallel = (
        importlib.import_module(f"megatron.core.ssm.{name}") for name in ("mamba_mixer", "mamba_context_parallel")
    )
    found: list[tuple[object, str, object]] = [
        (mixer, "HAVE_MAMBA_SSM", True),
        (mixer, "MAMBA_HAS_STATE_DTYPE", False),
        (mixer, "causal_conv1d_fn", convolve),
        (mixer, "mamba_chunk_scan_combined", _scan),
        (mixer, "mamba_split_conv1d_scan_combined", _split_convolve_scan),
        (mixer, "ExtendedRMSNorm", _GroupedNorm),
    ]
    if not mixer.HAVE_EINOPS:
        found += [(owner, "HAVE_EINOPS", True) for owner in (mixer, parallel)]
        found.append((mixer, "rearrange", _rearrange))
    return found
