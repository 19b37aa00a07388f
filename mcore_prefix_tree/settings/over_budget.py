"""The way to cut trees above ``batch.max_tokens``, as far as model and objective allow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.plan.model_shape import RECURRENT, layer_parts, trained_depths
from mcore_prefix_tree.settings.sections import RecipeError
from mcore_prefix_tree.utils.choices import OverBudget


class Cutting(NamedTuple):
    """Way to cut trees above the budget; see :class:`~mcore_prefix_tree.mcore.engine.folding.Folding`."""

    over_budget: OverBudget = "repeat"
    scores_first: bool = False
    why_repeat: str = ""


def choose_cutting(
    asked: OverBudget,
    settings: Mapping[str, Any],
    pattern: str | None,
    objective: Objective | None,
    *,
    runs_ahead: bool = True,
) -> Cutting:
    """Return the way to cut, see :func:`why_not_carried`; raises RecipeError if training cannot ``carry``."""
    if asked == "repeat":
        return Cutting(why_repeat="batch.over_budget=repeat")
    why = why_not_carried(settings, pattern, objective, runs_ahead=runs_ahead)
    if why is None:
        return Cutting(asked, scores_first=objective is not None and not objective.sums_edges)
    if asked == "carry" and objective is not None:
        raise RecipeError(f"batch.over_budget=carry is not possible: {why}; set batch.over_budget=repeat")
    return Cutting(why_repeat=why)


def why_not_carried(
    settings: Mapping[str, Any], pattern: str | None, objective: Objective | None, *, runs_ahead: bool = True
) -> str | None:
    """Return why the samples of a job are not cut, None if they can be.

    Args:
        settings: fields of the model's ``TransformerConfig``; one that is missing has upstream's default.
        pattern: layers of a ``HybridModel``.
        objective: None if samples are only scored.
        runs_ahead: whether the training loop can run a pass before a step.
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
    if objective is not None and not (objective.sums_edges or runs_ahead):
        return (
            "the objective's loss needs a pass before the step, which pipeline stages run under "
            "mcore_prefix_tree.pretrain_gpt with Megatron-LM core_v0.19.0 or later, and virtual ones without "
            "--microbatch-group-size-per-virtual-pipeline-stage"
        )
    return None
