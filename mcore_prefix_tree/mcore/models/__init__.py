"""The models that recipes describe: built from megatron-core's pieces, and filled with the weights of folders."""

from mcore_prefix_tree.mcore import compat

compat.check(compat.MODELS)
