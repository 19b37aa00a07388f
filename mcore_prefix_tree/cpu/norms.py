"""Norms in plain PyTorch that Megatron can train under sequence parallelism, unlike its ``WrappedTorchNorm``.

They only add ``sequence_parallel`` to their parameters: ``finalize_model_grads`` sums the gradients of those with that
attribute over the tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

_KINDS: dict[str, Any] = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class Norm:
    """A class that a spec names: builds the norm of PyTorch that ``config.normalization`` sets."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """Return the norm in ``config.params_dtype``; raise ValueError for another norm or zero-centered weights."""
        if config.normalization not in _KINDS:
            raise ValueError(f"normalization={config.normalization!r} is not supported: use 'RMSNorm' or 'LayerNorm'")
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma is not supported by the norms of PyTorch: turn it off")
        norm = _KINDS[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
