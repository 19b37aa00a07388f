"""Layers of hybrid models: the one table of the pattern's letters, and of the layers that follow a tree.

A ``HybridStack`` (megatron-core 0.18 and later) builds one kind of layer for each letter of its pattern, and passes all
of them the ``packed_seq_params`` of the micro-batch, as a ``TransformerBlock`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mcore_prefix_tree.mcore import compat

# Older versions of megatron-core have a MambaModel, whose pattern always has Mamba layers.
HAS_HYBRID_MODEL = compat.has_hybrid_model()
NEEDS_NEWER = "hybrid models need HybridModel, which came with megatron-core 0.18"

HAS_DELTA_NET = compat.has_delta_net()

if HAS_HYBRID_MODEL:
    compat.check(compat.HYBRID)

# Kinds of computation, for counting FLOPs.
Part: TypeAlias = Literal["attention", "mlp", "experts", "delta net", "mamba"]

_PIPE, _MTP = "|", "/"
_OLD = None if HAS_DELTA_NET else "it follows a tree since megatron-core 0.19"


@dataclass(frozen=True)
class HybridLayer:
    """Kind of layer that a letter of a pattern stands for.

    ``name`` is used in messages; ``submodule`` is the field of ``HybridStackSubmodules`` with its spec, ``part`` the
    kind of its computation, ``refused`` the reason why it cannot follow a tree, or None.
    """

    name: str
    submodule: str
    part: Part
    refused: str | None = None


LAYERS = {
    "*": HybridLayer("attention", "attention_layer", "attention"),
    "+": HybridLayer("multi-latent attention", "mla_layer", "attention"),
    "-": HybridLayer("MLP", "mlp_layer", "mlp"),
    "E": HybridLayer("experts", "moe_layer", "experts"),
    "M": HybridLayer("Mamba", "mamba_layer", "mamba"),
    "G": HybridLayer("Gated DeltaNet", "gdn_layer", "delta net", _OLD),
    "D": HybridLayer("DeepSeek sparse attention", "dsa_layer", "attention", "it chooses keys along the flat layout"),
}


def layer_letters(pattern: str) -> str:
    """Return the letters of a pattern's layers, without boundaries of pipeline stages and multi-token prediction."""
    return pattern.partition(_MTP)[0].replace(_PIPE, "")


def layer_parts(pattern: str | None) -> list[Part] | None:
    """Return the kind of computation of each layer of a pattern; None, for a GPT, stays None."""
    return None if pattern is None else [LAYERS[letter].part for letter in layer_letters(pattern)]


def check_pattern(pattern: str) -> None:
    """Reject a ``HybridModel``'s pattern, for example ``*-*-|*E*E``, with a layer that cannot follow a tree.

    Raises:
        NotImplementedError: one sentence for every letter at fault, with its name.
    """
    found = []
    for letter in dict.fromkeys(layer_letters(pattern)):
        layer = LAYERS.get(letter)
        if layer is None:
            found.append(f"{letter} (a layer that this package does not know)")
        elif layer.refused is not None:
            found.append(f"{letter} ({layer.name}: {layer.refused})")
    if pattern.partition(_MTP)[2].strip(_MTP):
        found.append(f"{_MTP} (multi-token prediction: it rolls labels along the flat layout, which crosses branches)")
    if found:
        follow = ", ".join(f"{letter} ({layer.name})" for letter, layer in LAYERS.items() if layer.refused is None)
        raise NotImplementedError(
            f"prefix-tree training does not support {' nor '.join(found)} in the hybrid layer pattern {pattern!r}; "
            f"use {follow}"
        )
