"""Objectives over folded micro-batches, each normalised over the whole step."""

from mcore_prefix_tree.objectives.distill import Distillation, TeacherRows
from mcore_prefix_tree.objectives.divergence import vocabulary_divergence
from mcore_prefix_tree.objectives.kto import KTO, mismatched
from mcore_prefix_tree.objectives.metrics import LossOutput, add_means, check_outputs, divided
from mcore_prefix_tree.objectives.policy import PolicyGradient
from mcore_prefix_tree.objectives.preference import Preference, together
from mcore_prefix_tree.objectives.registry import OBJECTIVES, Objective, make_objective
from mcore_prefix_tree.objectives.rows import Rows, Targets
from mcore_prefix_tree.objectives.scalar_head import Critic, RewardModel
from mcore_prefix_tree.objectives.sft import SupervisedFineTuning, sft_loss

__all__ = [
    "KTO",
    "OBJECTIVES",
    "Critic",
    "Distillation",
    "LossOutput",
    "Objective",
    "PolicyGradient",
    "Preference",
    "RewardModel",
    "Rows",
    "SupervisedFineTuning",
    "Targets",
    "TeacherRows",
    "add_means",
    "check_outputs",
    "divided",
    "make_objective",
    "mismatched",
    "sft_loss",
    "together",
    "vocabulary_divergence",
]
