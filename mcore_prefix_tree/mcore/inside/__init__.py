"""Folding inside a model, for trainers that pass it packed rows and read an answer for each of their tokens."""

from mcore_prefix_tree.mcore import compat

compat.check(compat.INSIDE)

from mcore_prefix_tree.mcore.inside.answers import RowLogprobs  # noqa: E402
from mcore_prefix_tree.mcore.inside.check import FoldCheckError  # noqa: E402
from mcore_prefix_tree.mcore.inside.model import Folding, Inside, fold_inside, folding_model  # noqa: E402
from mcore_prefix_tree.mcore.inside.report import FoldReport  # noqa: E402

__all__ = ["FoldCheckError", "FoldReport", "Folding", "Inside", "RowLogprobs", "fold_inside", "folding_model"]
