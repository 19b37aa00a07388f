"""Recipes: all settings of a training job, from a YAML file and ``key=value`` overrides.

Its keys are in :mod:`mcore_prefix_tree.settings.sections`, :mod:`mcore_prefix_tree.settings.model_section` and
:mod:`mcore_prefix_tree.settings.monitoring`.
"""

from mcore_prefix_tree.settings.load import load_recipe
from mcore_prefix_tree.settings.model_section import LoraConfig, ModelConfig, YarnConfig
from mcore_prefix_tree.settings.monitoring import LogConfig, ValidationConfig, VerifyConfig
from mcore_prefix_tree.settings.section import Dtype
from mcore_prefix_tree.settings.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    RecipeError,
)
