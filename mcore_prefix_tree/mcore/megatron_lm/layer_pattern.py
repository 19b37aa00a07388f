"""The pattern of a hybrid model's layers among Megatron-LM's arguments."""

from __future__ import annotations

import argparse

from mcore_prefix_tree.mcore.seam.hybrid_layers import HAS_HYBRID_MODEL, NEEDS_NEWER, check_pattern
from mcore_prefix_tree.plan.model_shape import has_experts


def hybrid_pattern(args: argparse.Namespace) -> str | None:
    """Return the pattern of a ``HybridModel``'s layers, None for a GPT."""
    # Megatron's validation renames an argument of the older name.
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        found: str | None = getattr(args, name, None)
        if found is not None:
            return found
    return None


def check_layers(args: argparse.Namespace) -> None:
    """Reject a pattern that cannot be trained; the arguments may be validated by Megatron-LM or not yet.

    Raises:
        NotImplementedError: a layer cannot follow a tree; see :func:`check_pattern`.
        ValueError: this Megatron-Core has no ``HybridModel``, or other arguments do not fit the pattern.
    """
    pattern = hybrid_pattern(args)
    if pattern is None:
        return
    if not HAS_HYBRID_MODEL:
        raise ValueError(f"--hybrid-override-pattern: {NEEDS_NEWER}; check out core_v0.19.0")
    check_pattern(pattern)
    if has_experts(pattern) and args.num_experts is None:
        raise ValueError(f"--hybrid-layer-pattern {pattern} has layers of experts, E, but no --num-experts")
