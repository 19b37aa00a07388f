"""Mamba-2 along a tree: all segments in one scan from a zero state, then what is linear in the states of branch points.

With a_t = dt_t A, a token's output and a segment's last state are (Dao and Gu, https://arxiv.org/abs/2405.21060,
section 6, whose chunks are our segments)

    y_t = own y_t + exp(sum of a up to t) C_t S,   S' = own S' + exp(sum of a) S

where S is the last state of the parent, and sums begin at the segment's first token. All else runs once for all tokens.

Legend: P tokens of a micro-batch with padding, K branch points, H heads of p channels in g groups, n size of a state;
m runs of L tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer

from mcore_prefix_tree.mcore.seam.core_attention import check_batch_size
from mcore_prefix_tree.mcore.seam.levels import (
    BranchPoints,
    Level,
    Levels,
    Padded,
    convolve_paths,
    leave_states,
    read_states,
)
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams, get_tree_params


def check_packages() -> None:
    """Raise ImportError if mamba-ssm, causal-conv1d or einops is not installed."""
    found = {
        "mamba-ssm": mamba_mixer.HAVE_MAMBA_SSM,
        "causal-conv1d": mamba_mixer.causal_conv1d_fn is not None,
        "einops": mamba_mixer.HAVE_EINOPS,
    }
    missing = [name for name, is_there in found.items() if not is_there]
    if missing:
        raise ImportError(f"Mamba layers need {' and '.join(missing)}; pip install {' '.join(missing)}")


class TreeMambaMixin:
    """A Mamba-2 mixer whose convolution and states follow the paths of a tree; without one, the stock."""

    # Of the stock layer.
    config: Any
    cp: Any
    layer_number: int
    d_state: int
    chunk_size: int
    activation: str
    rmsnorm: bool
    norm: torch.nn.Module

    def follow_tree(self) -> None:
        """Check the packages, which upstream does not all need; refuse ``use_mamba_mem_eff_path=False``."""
        check_packages()
        if not self.config.use_mamba_mem_eff_path:
            raise NotImplementedError(
                f"prefix-tree training does not support use_mamba_mem_eff_path=False: upstream's layer "
                f"{self.layer_number} takes no packed sequences then; set use_mamba_mem_eff_path=True"
            )

    def _ssm_training(self, zxBCdt: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
        """Run the base class without a tree; with one, return the gated and normed output ``[P, 1, H * p]``."""
        tree = get_tree_params(packed_seq_params)
        if tree is None:
            return cast(torch.Tensor, super()._ssm_training(zxBCdt, packed_seq_params))  # type: ignore[misc]
        check_batch_size(zxBCdt.shape[1])
        if zxBCdt.is_cuda and (tree.deterministic_attention or self.config.deterministic_mode):
            raise NotImplementedError(
                f"layer {self.layer_number} is Mamba, whose kernels add gradients up in any order; set "
                "deterministic_attention=False and deterministic_mode=False"
            )
        out = self._follow(zxBCdt.squeeze(1), tree).unsqueeze(1)
        return self.norm(out) if self.rmsnorm else out

    def _follow(self, projected: torch.Tensor, tree: TreePackedSeqParams) -> torch.Tensor:
        """Return ``[P, H * p]`` of flat tokens' z, x, B, C and dt."""
        assert tree.tree_metadata is not None
        levels = tree.tree_metadata.derived("levels", Levels.of)
        channels, heads = self.cp.d_inner_local_tpcp, self.cp.nheads_local_tpcp
        entries = self.cp.ngroups_local_tpcp * self.d_state
        z, x_b_c, dt = projected.split([channels, channels + 2 * entries, heads], dim=-1)
        weight, bias = self.cp.get_conv1d_weight().squeeze(1), self.cp.get_conv1d_bias()

        def convolve(row: torch.Tensor) -> torch.Tensor:
            by_channel = row.transpose(1, 2)
            mixed = mamba_mixer.causal_conv1d_fn(by_channel, weight, bias, activation=self.activation)
            return cast(torch.Tensor, mixed.transpose(1, 2))

        mixed = convolve_paths(x_b_c, tree, self, weight.shape[1], convolve)[0]
        x, b, c = (
            part.unflatten(-1, (-1, size))
            for part, size in zip(
                mixed.split([channels, entries, entries], dim=-1),
                (channels // heads, self.d_state, self.d_state),
                strict=True,
            )
        )
        # fp32, as in the kernels.
        wide = torch.promote_types(x.dtype, torch.float32)
        steps = F.softplus(dt.index_select(0, levels.order).to(wide) + self.cp.get_dt_bias().float())
        out = self._scan(x, steps, b, c, tree)
        gated = out.index_select(0, levels.inverse).flatten(1) * F.silu(z.to(wide))
        return gated.to(projected.dtype)

    def _scan(
        self, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, tree: TreePackedSeqParams
    ) -> torch.Tensor:
        """Return outputs ``[P, H, p]`` of inputs ``[P, H, p]``, steps ``[P, H]``, B and C ``[P, g, n]``, by level."""
        metadata = tree.tree_metadata
        assert metadata is not None
        points = metadata.derived("branch points", BranchPoints.of)
        decay = -torch.exp(self.cp.get_A_log().float())
        state_dtype = {}
        if getattr(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", False):  # since megatron-core 0.19
            state_dtype["state_dtype"] = self.mamba_training_ssm_states_dtype  # type: ignore[attr-defined]
        out: torch.Tensor = mamba_mixer.mamba_chunk_scan_combined(
            *(one.unsqueeze(0) for one in (x, dt)),
            decay,
            *(one.unsqueeze(0) for one in (b, c)),
            self.chunk_size,
            D=self.cp.get_D().view(x.shape[1], -1) if self.cp.D_has_hdim else self.cp.get_D(),
            seq_idx=points.segment.unsqueeze(0),
            **state_dtype,
        )[0].to(dt.dtype)
        given = read_states(tree, self, x, dt, b, decay)
        if not given and not len(points.last):
            return out
        # Sums over a long row, of which only differences count: fp64.
        sums = (dt * decay).double().cumsum(0)
        before = F.pad(sums, (0, 0, 1, 0))[points.first]
        decayed = (sums - before[points.segment]).to(dt.dtype)
        levels = metadata.derived("levels", Levels.of).levels
        states = _states(given, x, dt, b, decayed, points, levels)
        below = points.start
        if below < len(out):
            inherited = _read(c, torch.cat(states), points).view_as(out[below:]) * decayed[below:].exp().unsqueeze(-1)
            out = torch.cat([out[:below], out[below:] + inherited])
        return leave_states(tree, self, out, states)


def _states(
    given: list[torch.Tensor],
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    decayed: torch.Tensor,
    points: BranchPoints,
    levels: Sequence[Level],
) -> list[torch.Tensor]:
    """Return the given states, if there are any, and those that each level keeps, ``[k, g, H * p / g, n]``."""
    # decayed has the sums of a, [P, H].
    whole = decayed.index_select(0, points.last)
    (_, heads, size), (_, groups, entries) = x.shape, b.shape
    own = [dt.new_empty(0, groups, heads // groups * size, entries)]
    for batch, point in zip(points.own.batches, points.own.points, strict=True):
        left = whole.index_select(0, point).unsqueeze(1) - _rows(decayed, batch)
        weight = (left.exp() * _rows(dt, batch)).masked_fill(~batch.is_token.unsqueeze(-1), 0)
        written = _rows(x, batch) * weight.unsqueeze(-1)
        keys = _rows(b, batch).to(written.dtype)
        own.append(torch.einsum("mlgq,mlgn->mgqn", written.flatten(2).unflatten(2, (groups, -1)), keys))
    made = torch.cat(own).index_select(0, points.row)
    factors = whole.exp().view(-1, groups, heads // groups, 1).repeat_interleave(size, 2)
    kept = [level.kept for level in levels]
    states = list(given)
    for state, factor, level in zip(made.split(kept), factors.split(kept), levels, strict=True):
        before = states[-1][level.parent[: level.kept]] if states else None
        states.append(state if before is None else state + factor * before)
    return states


def _rows(x: torch.Tensor, batch: Padded) -> torch.Tensor:
    """Return the rows of a batch, ``[m, L, ...]``."""
    rows: torch.Tensor = x.index_select(0, batch.tokens).unflatten(0, batch.is_token.shape)
    return rows


def _read(c: torch.Tensor, states: torch.Tensor, points: BranchPoints) -> torch.Tensor:
    """Return the product of C with the state that its segment begins with, of each token that begins with one."""
    out = []
    for batch, point in zip(points.below.batches, points.below.points, strict=True):
        queries = _rows(c, batch).to(states.dtype)
        out.append(torch.einsum("mlgn,mgqn->mlgq", queries, states.index_select(0, point)).flatten(0, 1))
    return torch.cat(out).index_select(0, points.slot)
