"""Objectives over folded micro-batches, each normalised over the entire step."""

from mcore_prefix_tree.objectives.cross_tokenizer import BoundCrossTokenizer, CrossTokenizer
from mcore_prefix_tree.objectives.cross_tokenizer_rows import ChunkRows, TeacherSide
from mcore_prefix_tree.objectives.distill import Distillation, TeacherRows
from mcore_prefix_tree.objectives.kto import KTO
from mcore_prefix_tree.objectives.metrics import LossOutput, add_means
from mcore_prefix_tree.objectives.objective import Objective, TokenObjective
from mcore_prefix_tree.objectives.policy import PolicyGradient
from mcore_prefix_tree.objectives.preference import Preference
from mcore_prefix_tree.objectives.registry import OBJECTIVES, make_objective, option_faults
from mcore_prefix_tree.objectives.scalar_head import Critic, RewardModel
from mcore_prefix_tree.objectives.scored_rows import LossRows, Rows, Targets
from mcore_prefix_tree.objectives.sft import SupervisedFineTuning, sft_loss
