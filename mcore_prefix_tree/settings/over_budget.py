"""The way to cut trees above ``batch.max_tokens``, as far as model and objective allow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.plan.model_shape import RECURRENT, layer_parts, trained_depths
from mcore_prefix_tree.settings.sections import RecipeError
from mcore_prefix_tree.utils.choices import OverBudget


def why_not_carried(settings: Mapping[str, Any], pattern: str | None, objective: Objective | None) -> str | None:
    """Return why the samples of a job are not cut, None if they can be.

    Args:
        settings: fields of the model's ``TransformerConfig``; one that is missing has upstream's default.
        pattern: layers of a ``HybridModel``.
        objective: None if samples are only scored.
    """
    if objective is not None and not (objective.sums_edges or objective.reads_scores):
        return "the objective reads more of whole samples than scores of tokens"
    has_others = "D" in (pattern or "") or not RECURRENT.keys().isdisjoint(layer_parts(pattern) or ())
    if settings.get("experimental_attention_variant") is not None or has_others:
        return "layers of the model read more of a path than keys and values"
    if objective is not None and trained_depths(settings):
        return "multi-token prediction reads tokens before a chunk"
    if settings.get("num_moe_experts") is not None:
        balances = np.any(settings.get("moe_aux_loss_coeff", 0)) and (
            settings.get("moe_router_load_balancing_type") != "none"
        )
        if balances or settings.get("moe_z_loss_coeff") or settings.get("moe_router_enable_expert_bias"):
            return "the model's routers balance experts by whole samples"
    return None


def choose_over_budget(asked: OverBudget, why_not: str | None) -> OverBudget:
    """Return the way to cut; ``why_not`` is the reason not to carry. Raise RecipeError if just that is asked for."""
    if asked == "carry" and why_not is not None:
        raise RecipeError(f"batch.over_budget=carry is not possible: {why_not}; set batch.over_budget=repeat")
    return asked if why_not is None else "repeat"
