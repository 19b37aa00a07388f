"""Objectives by the names that people know them by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import ValidationError

from mcore_prefix_tree.objectives import policy, preference
from mcore_prefix_tree.objectives.cross_tokenizer import CrossTokenizer
from mcore_prefix_tree.objectives.distill import Distillation
from mcore_prefix_tree.objectives.kto import KTO
from mcore_prefix_tree.objectives.objective import Objective
from mcore_prefix_tree.objectives.policy import PolicyGradient
from mcore_prefix_tree.objectives.preference import Preference
from mcore_prefix_tree.objectives.scalar_head import Critic, RewardModel
from mcore_prefix_tree.objectives.sft import SupervisedFineTuning
from mcore_prefix_tree.utils.gone import explain_gone

# Per name: the class, and the fields that differ from the class's defaults.
OBJECTIVES: dict[str, tuple[type[Objective], Mapping[str, Any]]] = {
    "sft": (SupervisedFineTuning, {}),
    **{name: (PolicyGradient, settings) for name, settings in policy.PRESETS.items()},
    **{name: (Preference, settings) for name, settings in preference.PRESETS.items()},
    "kto": (KTO, {}),
    "critic": (Critic, {}),
    "reward_model": (RewardModel, {}),
    "distill": (Distillation, {}),
    "xtoken": (CrossTokenizer, {}),
}


def make_objective(name: str, options: Mapping[str, Any] | None = None) -> Objective:
    """Return an objective with some of its settings changed.

    Raises:
        ValueError: there is no such objective; pydantic's ``ValidationError``, which is one, for an option that it does
            not have or that is out of range.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"there is no objective {name!r}; there are {', '.join(sorted(OBJECTIVES))}")
    made, settings = OBJECTIVES[name]
    return made(**{**settings, **(options or {})})


def option_faults(name: str, error: ValidationError, setting: str) -> list[str]:
    """Return a sentence per option at fault in an error of :func:`make_objective`; ``setting`` gave the options."""
    faults = []
    for fault in error.errors():
        option = ".".join([setting, *map(str, fault["loc"])])
        if fault["type"] == "unexpected_keyword_argument":
            made: Any = OBJECTIVES[name][0]
            known = ", ".join(field.name for field in fields(made))
            faults.append(explain_gone(option) or f"{option}: {name} has no such option; it has {known}")
        elif fault["loc"]:
            message = f"{option}: {fault['msg'][0].lower()}{fault['msg'][1:]} (given {fault['input']!r})"
            faults.append(explain_gone(str(fault["input"])) or message)
        else:
            faults.append(f"{setting}: {fault['ctx']['error']}")
    return faults
