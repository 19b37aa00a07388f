"""Objectives over folded micro-batches, each normalised over the whole step."""

from mcore_prefix_tree.objectives.sft import sft_loss

__all__ = ["sft_loss"]
