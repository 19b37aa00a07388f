"""Layers of hybrid models: the one table of the pattern's letters, and of the layers that follow a tree.

A ``HybridStack`` (megatron-core 0.18 and later) builds one kind of layer for each letter of its pattern, and passes all
of them the ``packed_seq_params`` of the micro-batch, as a ``TransformerBlock`` does.
"""

from __future__ import annotations

from typing import NamedTuple

from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_SPARSE_ATTENTION
from mcore_prefix_tree.plan.model_shape import MTP, PIPE

# Older versions of megatron-core have a MambaModel, whose pattern always has Mamba layers.
NEEDS_NEWER = "hybrid models need HybridModel, which came with megatron-core 0.18"

_OLD = "it follows a tree since megatron-core 0.19"


class HybridLayer(NamedTuple):
    """Kind of layer that a letter of a pattern stands for, and the reason why it cannot follow a tree, or None."""

    name: str
    refused: str | None = None


LAYERS = {
    "*": HybridLayer("attention"),
    "+": HybridLayer("multi-latent attention"),
    "-": HybridLayer("MLP"),
    "E": HybridLayer("experts"),
    "M": HybridLayer("Mamba"),
    "G": HybridLayer("Gated DeltaNet", None if HAS_DELTA_NET else _OLD),
    "D": HybridLayer("DeepSeek sparse attention", None if HAS_SPARSE_ATTENTION else _OLD),
}


def check_pattern(pattern: str) -> None:
    """Reject a ``HybridModel``'s pattern, for example ``*-*-|*E*E``, with a layer that cannot follow a tree.

    Raises:
        NotImplementedError: one sentence for every letter at fault, with its name.
    """
    found = []
    for letter in dict.fromkeys(pattern.replace(MTP, "").replace(PIPE, "")):
        layer = LAYERS.get(letter)
        if layer is None:
            found.append(f"{letter} (a layer that this package does not know)")
        elif layer.refused is not None:
            found.append(f"{letter} ({layer.name}: {layer.refused})")
    if found:
        follow = ", ".join(f"{letter} ({layer.name})" for letter, layer in LAYERS.items() if layer.refused is None)
        raise NotImplementedError(
            f"prefix-tree training does not support {' nor '.join(found)} in the hybrid layer pattern {pattern!r}; "
            f"use {follow}"
        )
