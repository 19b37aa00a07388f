"""TransformerEngine's layers as Megatron-Bridge's providers compose them, tree-capable."""

from __future__ import annotations

from functools import cache
from typing import Any

from mcore_prefix_tree.cpu.specs import exchanged
from mcore_prefix_tree.mcore import compat
from mcore_prefix_tree.mcore.seam.bridge_provider import provided_spec


def engine_layers(given: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return a provider's layer spec, tree-capable; the norms behind its linear layers have the model's epsilon."""
    compat.check(compat.TRANSFORMER_ENGINE)
    from megatron.bridge.models.common.te_layers import TERowParallelLinearLayerNorm as Given

    return exchanged(provided_spec(given, config, vp_stage), {Given: _with_epsilon(Given)})


@cache
def _with_epsilon(base: Any) -> type:
    """Return Megatron-Bridge's linear layer with a norm behind it (Gemma), with the model's epsilon instead of 1e-5."""

    def __init__(self: Any, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        from megatron.core.extensions.transformer_engine import TENorm

        base.__init__(self, input_size, output_size, config=config, **options)
        self.post_layernorm = TENorm(config, output_size, eps=config.layernorm_epsilon)

    # The name stays: Megatron-Bridge recognises the layers whose weights it converts by their classes' names.
    return type(base.__name__, (base,), {"__init__": __init__, "__doc__": base.__doc__, "__module__": __name__})
