"""The recipe's own trainer: a recipe in, a trained Megatron-Core GPT out."""

from mcore_prefix_tree.mcore import compat

compat.check(compat.LOOP)
