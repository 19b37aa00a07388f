"""Checkpoints in Megatron's distributed format: written, checked, read, kept and locked."""

from mcore_prefix_tree.mcore import compat

compat.check(compat.MODELS)
