"""The models that recipes describe: built from megatron-core's pieces, filled with weights, and saved."""

from mcore_prefix_tree.mcore import compat

compat.check(compat.MODELS)
