"""Folding inside a model, for trainers that hand it packed rows and read an answer for every token of every row."""

from mcore_prefix_tree.mcore.inside.answers import RowLogprobs
from mcore_prefix_tree.mcore.inside.check import FoldCheckError
from mcore_prefix_tree.mcore.inside.model import Folding, Inside, fold_inside, folding_model
from mcore_prefix_tree.mcore.inside.report import FoldReport

__all__ = ["FoldCheckError", "FoldReport", "Folding", "Inside", "RowLogprobs", "fold_inside", "folding_model"]
