"""Norms in plain PyTorch that Megatron can train under sequence parallelism.

Without TransformerEngine and Apex, megatron-core builds its layers with ``WrappedTorchNorm``, which refuses sequence
parallelism. The arithmetic would be right; what is missing is one attribute on the parameters:
``finalize_model_grads`` sums, over the tensor-parallel ranks, the gradients of those that say ``sequence_parallel``.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


def _prepare(norm: torch.nn.Module, config: TransformerConfig) -> None:
    if config.layernorm_zero_centered_gamma:
        raise ValueError("layernorm_zero_centered_gamma is not supported by the norms of PyTorch: turn it off")
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` with the arguments that Megatron gives to a norm; ``weight`` has ``config.params_dtype``."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _prepare(self, config)


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` with the arguments that Megatron gives to a norm; its dtype is ``config.params_dtype``."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _prepare(self, config)


class Norm:
    """What a spec names: builds :class:`RMSNorm` or :class:`LayerNorm`, whichever ``config.normalization`` asks for."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """Return the norm.

        Raises:
            ValueError: ``config.normalization`` is neither ``RMSNorm`` nor ``LayerNorm``.
        """
        if config.normalization == "RMSNorm":
            return RMSNorm(config, hidden_size, eps)
        if config.normalization == "LayerNorm":
            return LayerNorm(config, hidden_size, eps)
        raise ValueError(f"normalization={config.normalization!r} is not supported: use 'RMSNorm' or 'LayerNorm'")
