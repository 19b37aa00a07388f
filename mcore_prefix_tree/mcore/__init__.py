"""The only folder that imports megatron: the seam between folded micro-batches and stock Megatron-Core."""

from mcore_prefix_tree.mcore.layer_specs import local_layer_spec, te_layer_spec, with_prefix_tree
from mcore_prefix_tree.mcore.packed_seq_params import TreePackedSeqParams

__all__ = ["TreePackedSeqParams", "local_layer_spec", "te_layer_spec", "with_prefix_tree"]
