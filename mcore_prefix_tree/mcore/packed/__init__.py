"""Folding inside a model, for trainers that pass it packed rows and read an answer for each of their tokens."""

from mcore_prefix_tree.mcore.packed.answers import RowLogprobs
from mcore_prefix_tree.mcore.packed.fold_check import FoldCheckError
from mcore_prefix_tree.mcore.packed.folding_model import Folding, Inside, fold_inside, folding_model
from mcore_prefix_tree.mcore.packed.packed_rows import (
    FoldReport,
    PicturePackedSeqParams,
    RoutedPackedSeqParams,
)

__all__ = [
    "FoldCheckError",
    "FoldReport",
    "Folding",
    "Inside",
    "PicturePackedSeqParams",
    "RoutedPackedSeqParams",
    "RowLogprobs",
    "fold_inside",
    "folding_model",
]
