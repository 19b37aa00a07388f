"""Gated DeltaNet along a tree: a segment starts from the state at the end of its parent.

Only the rule (Yang et al., https://arxiv.org/abs/2412.06464, eq. 10) runs level by level; all else runs once for all
tokens, in upstream's own methods.

Legend: P tokens of a micro-batch, H heads, K and V sizes of keys and values, n segments of a level.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

from mcore_prefix_tree.mcore.seam.core_attention import check_batch_size
from mcore_prefix_tree.mcore.seam.delta_levels import check_kernels, follow_levels
from mcore_prefix_tree.mcore.seam.levels import Levels, Padded, PaddedLevels, convolve_paths, leave_states, read_states
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams, get_tree_params

MAKES_ALL_INPUTS = hasattr(GatedDeltaNet, "_compute_gates")


def check_packages() -> None:
    """Raise ImportError if FLA is not installed."""
    if not common.HAVE_FLA:
        raise ImportError(
            "layers of Gated DeltaNet need flash-linear-attention, which is not installed; "
            "pip install flash-linear-attention"
        )


class TreeDeltaNetMixin:
    """A Gated DeltaNet whose convolution and states follow the paths of a tree; without one, the stock."""

    # Of the stock layer.
    config: Any
    conv1d: torch.nn.Conv1d
    conv_kernel_dim: int
    value_head_dim: int
    feat_dim_split: tuple[int, ...]
    act_fn: Any
    activation: str
    gated_delta_rule: Any
    out_norm: torch.nn.Module
    tp_group: Any
    tp_size: int

    def follow_tree(self) -> None:
        """Check the functions that the layer was built with, and sum the gradients that upstream does not.

        Raises:
            ImportError: FLA lacks functions that a tree needs.
        """
        if self.gated_delta_rule is not gdn.torch_chunk_gated_delta_rule:
            check_kernels()
        if self.tp_size > 1 and not self.config.sequence_parallel:
            # Each rank's gradient has its own heads only, and upstream sums it under sequence parallelism alone.
            for parameter in filter(lambda one: one.requires_grad, self.out_norm.parameters()):
                parameter.register_hook(
                    lambda gradient: reduce_from_tensor_model_parallel_region(gradient.clone(), group=self.tp_group)
                )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the base class without a tree; with one, return its output ``[P, 1, hidden]`` and bias."""
        tree = get_tree_params(packed_seq_params)
        if tree is None:
            return super().forward(  # type: ignore[misc]
                hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
            )
        check_batch_size(hidden_states.shape[1])
        is_torch = tree.deterministic_attention or self.config.deterministic_mode
        return self._follow(hidden_states, tree, is_torch=is_torch)

    def _follow(self, hidden_states: torch.Tensor, tree: TreePackedSeqParams, *, is_torch: bool) -> Any:
        metadata = tree.tree_metadata
        assert metadata is not None
        levels = metadata.derived("levels", Levels.of)
        size: int = metadata.padded_size
        stock: Any = self
        projected, _ = stock.in_proj(hidden_states)
        sizes = self.feat_dim_split
        qkv, gates = projected.squeeze(1).split([sizes[0], sum(sizes[1:])], dim=-1)
        qkv = self._convolve(qkv, tree, is_torch=is_torch)
        gate, beta, alpha = gates.index_select(0, levels.order).unsqueeze(0).split(sizes[1:], dim=-1)
        gate = gate.reshape(1, size, -1, self.value_head_dim)
        decays = stock.A_log, stock.dt_bias
        if MAKES_ALL_INPUTS:
            made = stock._prepare_input_for_gated_delta_rule(qkv, gate, *decays, 1, size, beta, alpha)
            query, key, value, decay, beta, gate = (made[name] for name in ("q", "k", "v", "g", "beta", "gate"))
        else:
            query, key, value, gate, beta, alpha = stock._prepare_input_for_gated_delta_rule(
                qkv, gate, 1, size, beta, alpha
            )
            decay, beta = stock._compute_g_and_beta(*decays, alpha, beta)
        mixed = self._over_levels((query, key, value, decay, beta), tree, is_torch=is_torch)

        def gated_norm(mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = stock._gated_norm_and_a2a(mixed, gate, None, 1, size)
            return normed.index_select(0, levels.inverse)

        if not stock.recompute_norm_out:
            return stock.out_proj(gated_norm(mixed, gate))
        recomputed = CheckpointWithoutOutput(fp8=None)  # upstream's own False asks TransformerEngine for its state
        out, bias = stock.out_proj(recomputed.checkpoint(gated_norm, mixed, gate))
        recomputed.discard_output_and_register_recompute(out)
        return out, bias

    def _convolve(self, qkv: torch.Tensor, tree: TreePackedSeqParams, *, is_torch: bool) -> torch.Tensor:
        """Return the convolution of flat tokens ``[P, channels]`` along their paths, ``[1, P, channels]`` by level."""
        width, weight, bias = self.conv_kernel_dim, self.conv1d.weight, self.conv1d.bias

        def convolve(row: torch.Tensor) -> torch.Tensor:
            if is_torch:
                by_channel = F.conv1d(row.transpose(1, 2), weight, bias, padding=width - 1, groups=len(weight))
                mixed = self.act_fn(by_channel[..., : row.shape[1]]).transpose(1, 2)
            else:
                mixed, _ = gdn.causal_conv1d(x=row, weight=weight.squeeze(1), bias=bias, activation=self.activation)
            return cast(torch.Tensor, mixed)

        return convolve_paths(qkv, tree, self, width, convolve)

    def _over_levels(
        self, given: tuple[torch.Tensor, ...], tree: TreePackedSeqParams, *, is_torch: bool
    ) -> torch.Tensor:
        """Return the rule's output ``[1, P, H, V]`` of queries, keys, values, decays and betas ``[1, P, H, ...]``."""
        metadata = tree.tree_metadata
        assert metadata is not None
        levels, states = metadata.derived("levels", Levels.of), read_states(tree, self, *given)
        if not is_torch and self.gated_delta_rule is not gdn.torch_chunk_gated_delta_rule:
            mixed, states = follow_levels(levels, states, *given)
            return leave_states(tree, self, mixed, states)
        out: list[torch.Tensor] = []
        batches = metadata.derived("padded levels", PaddedLevels.of).levels
        for level, padded in zip(levels.levels, batches, strict=True):
            part = [one[:, level.start : level.end] for one in given]
            mixed, last = _padded_rule(part, states[-1][level.parent] if states else None, padded)
            out.append(mixed)
            if level.kept:
                states.append(last[: level.kept])
        return leave_states(tree, self, torch.cat(out, dim=1), states)


def _padded_rule(
    given: list[torch.Tensor], initial: torch.Tensor | None, batches: tuple[Padded, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a level's output ``[1, tokens, H, V]`` and last states ``[n, H, K, V]`` of upstream's rule in torch."""
    out, states, first = [], [], 0
    for batch in batches:
        shape = batch.is_token.shape
        query, key, value, *gates = (one[0].index_select(0, batch.tokens).unflatten(0, shape) for one in given)
        # Without decay and with a beta of 0 a token changes no state.
        decay, beta = (gate.masked_fill(~batch.is_token.unsqueeze(-1), 0) for gate in gates)
        before = None if initial is None else initial[first : first + len(batch.is_token)]
        mixed, last = gdn.torch_chunk_gated_delta_rule(
            query, key, value, g=decay, beta=beta, initial_state=before, output_final_state=True
        )
        out.append(mixed.flatten(0, 1).index_select(0, batch.own))
        states.append(last)
        first += len(batch.is_token)
    return torch.cat(out).unsqueeze(0), torch.cat(states)
