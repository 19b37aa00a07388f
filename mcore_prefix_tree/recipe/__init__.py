"""Recipes: all settings of a training job, from a YAML file and ``key=value`` overrides.

Its keys are in :mod:`mcore_prefix_tree.recipe.sections`, :mod:`mcore_prefix_tree.recipe.model` and
:mod:`mcore_prefix_tree.recipe.monitoring`.
"""

from mcore_prefix_tree.recipe.load import load_recipe
from mcore_prefix_tree.recipe.model import LoraConfig, ModelConfig, YarnConfig
from mcore_prefix_tree.recipe.monitoring import LogConfig, ValidationConfig, VerifyConfig
from mcore_prefix_tree.recipe.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    RecipeError,
)
from mcore_prefix_tree.recipe.values import Dtype

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "Dtype",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Recipe",
    "RecipeError",
    "ValidationConfig",
    "VerifyConfig",
    "YarnConfig",
    "load_recipe",
]
