"""The way to cut trees above ``batch.max_tokens``, as far as the objective allows it."""

from __future__ import annotations

from typing import NamedTuple

from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.settings.sections import RecipeError
from mcore_prefix_tree.utils.choices import OverBudget


class Cutting(NamedTuple):
    """Way to cut trees above the budget; see :class:`~mcore_prefix_tree.mcore.engine.folding.Folding`."""

    over_budget: OverBudget = "repeat"
    scores_first: bool = False
    why_repeat: str = ""


def choose_cutting(asked: OverBudget, objective: Objective | None, *, runs_ahead: bool = True) -> Cutting:
    """Return the way to cut, see :func:`why_not_carried`; without an objective, samples are only scored.

    Raises RecipeError if training cannot ``carry``.
    """
    if asked == "repeat":
        return Cutting(why_repeat="batch.over_budget=repeat")
    if objective is None:
        return Cutting(asked)
    why = why_not_carried(objective, runs_ahead=runs_ahead)
    if why is None:
        return Cutting(asked, scores_first=not objective.sums_edges)
    if asked == "carry":
        raise RecipeError(f"batch.over_budget=carry is not possible: {why}; set batch.over_budget=repeat")
    return Cutting(why_repeat=why)


def why_not_carried(objective: Objective, *, runs_ahead: bool = True) -> str | None:
    """Return why the samples of training are not cut, None if they can be.

    ``runs_ahead`` is whether the training loop can run a pass before a step.
    """
    if not (objective.sums_edges or objective.reads_scores):
        return "the objective reads more of whole samples than scores of tokens"
    if not (objective.sums_edges or runs_ahead):
        return (
            "the objective's loss needs a pass before the step, which pipeline stages run under "
            "mcore_prefix_tree.pretrain_gpt with Megatron-LM core_v0.19.0 or later, and virtual ones without "
            "--microbatch-group-size-per-virtual-pipeline-stage"
        )
    return None
