"""The only folder that imports megatron: the seam between folded micro-batches and stock Megatron-Core."""

from mcore_prefix_tree.mcore import compat

# Before anything of megatron-core is imported by name: one sentence names what has moved.
compat.check_version()
compat.check(compat.SEAM)

from mcore_prefix_tree.mcore.inside import fold_inside, folding_model  # noqa: E402
from mcore_prefix_tree.mcore.seam import native  # noqa: E402
from mcore_prefix_tree.mcore.seam.layer_specs import local_layer_spec, te_layer_spec, with_prefix_tree  # noqa: E402
from mcore_prefix_tree.mcore.seam.output_layer import with_edge_head  # noqa: E402
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams  # noqa: E402
from mcore_prefix_tree.mcore.seam.scalar_head import with_scalar_head  # noqa: E402
from mcore_prefix_tree.mcore.seam.vocabulary import with_vocab_size  # noqa: E402

__all__ = [
    "TreePackedSeqParams",
    "fold_inside",
    "folding_model",
    "local_layer_spec",
    "te_layer_spec",
    "with_edge_head",
    "with_prefix_tree",
    "with_scalar_head",
    "with_vocab_size",
]

# A patched Megatron-Core lets micro-batches name the attention back-ends of this package.
native.register()
