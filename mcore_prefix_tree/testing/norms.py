"""Norms in plain PyTorch that Megatron can train under sequence parallelism.

Without TransformerEngine and Apex, megatron-core builds its layers with ``WrappedTorchNorm``, which refuses sequence
parallelism. The arithmetic would be right; what is missing is one attribute on the parameters:
``finalize_model_grads`` sums, over the tensor-parallel ranks, the gradients of those that say ``sequence_parallel``.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

S = TypeVar("S")


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


def with_sequence_parallel_norms(spec: S) -> S:
    """Return a copy of a spec, or of its submodules, with :class:`Norm` wherever ``WrappedTorchNorm`` stood.

    Args:
        spec: a ``ModuleSpec``, a dataclass of submodules, a ``functools.partial`` over one, as newer megatron-core
            has for an MLP, or a list of them, at any depth. It is not changed.
    """
    result: Any = spec
    if result is WrappedTorchNorm:
        result = Norm
    elif isinstance(result, list):
        result = [with_sequence_parallel_norms(item) for item in result]
    elif isinstance(result, ModuleSpec):
        changed = copy.copy(result)
        changed.module = with_sequence_parallel_norms(result.module)
        changed.submodules = with_sequence_parallel_norms(result.submodules)
        result = changed
    elif isinstance(result, functools.partial):
        keywords = {name: with_sequence_parallel_norms(value) for name, value in result.keywords.items()}
        result = functools.partial(result.func, *result.args, **keywords)
    elif is_dataclass(result) and not isinstance(result, type):
        result = replace(
            result, **{f.name: with_sequence_parallel_norms(getattr(result, f.name)) for f in fields(result) if f.init}
        )
    return result  # type: ignore[no-any-return]


def sequence_parallel_block_spec(
    spec: ModuleSpec | TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the block of this pipeline stage with norms that may run under sequence parallelism.

    A layer's spec cannot say which final norm the block gets (Megatron then takes ``WrappedTorchNorm``), so the answer
    is always a whole block.

    Args:
        spec: a layer, repeated as often as this stage has layers; or a block, or its submodules.
        config: tells how many layers this stage has.
        vp_stage: index of the model chunk within this stage, under virtual pipelining.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        return with_sequence_parallel_norms(spec)
    if isinstance(spec.submodules, TransformerBlockSubmodules):
        return with_sequence_parallel_norms(spec.submodules)
    layer = with_sequence_parallel_norms(spec)
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=Norm)
