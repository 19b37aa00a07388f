"""The layer spec of a Megatron-Bridge provider whose models fold.

It is a function with a public name, in a separate file: Megatron-Bridge writes a provider's spec into checkpoints by
name.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mcore_prefix_tree.mcore.seam.layer_specs import with_prefix_tree


def provided_spec(given: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return a provider's layer spec, tree-capable; ``given`` is its own, or a function of its configuration."""
    if isinstance(given, ModuleSpec | TransformerBlockSubmodules):
        return with_prefix_tree(given)
    takes_stage = "vp_stage" in inspect.signature(given).parameters
    return with_prefix_tree(given(config, vp_stage=vp_stage) if takes_stage else given(config))
