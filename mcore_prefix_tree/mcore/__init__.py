"""The only folder that imports megatron: the seam between folded micro-batches and stock Megatron-Core."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore_prefix_tree.mcore import release

# Before anything of megatron-core is imported by name.
release.check_version()

from mcore_prefix_tree.mcore.packed import (  # noqa: E402
    PicturePackedSeqParams,
    RoutedPackedSeqParams,
    RowLogprobs,
    fold_inside,
    folding_model,
)
from mcore_prefix_tree.mcore.seam import native_backends  # noqa: E402
from mcore_prefix_tree.mcore.seam.layer_specs import local_layer_spec, te_layer_spec, with_prefix_tree  # noqa: E402
from mcore_prefix_tree.mcore.seam.multi_token import with_multi_token  # noqa: E402
from mcore_prefix_tree.mcore.seam.output_layer import with_edge_head, with_vocab_size  # noqa: E402
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams  # noqa: E402
from mcore_prefix_tree.mcore.seam.scalar_output_layer import with_scalar_head  # noqa: E402
from mcore_prefix_tree.mcore.seam.tree_layers import follow_trees  # noqa: E402

if TYPE_CHECKING:
    from mcore_prefix_tree.cpu.emulation import single_process
    from mcore_prefix_tree.logprob import restore
    from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
    from mcore_prefix_tree.mcore.outputs import Logprobs, Values
    from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
    from mcore_prefix_tree.plan import plan_step

__all__ = [
    "Logprobs",
    "MicroBatch",
    "PicturePackedSeqParams",
    "RoutedPackedSeqParams",
    "RowLogprobs",
    "TreePackedSeqParams",
    "Values",
    "fold_inside",
    "folding_model",
    "follow_trees",
    "local_layer_spec",
    "plan_step",
    "restore",
    "single_process",
    "te_layer_spec",
    "tree_forward",
    "with_edge_head",
    "with_multi_token",
    "with_prefix_tree",
    "with_scalar_head",
    "with_vocab_size",
]

# Trainers that only fold inside the model need none of these, and the objectives behind them.
_HOMES = {
    "Logprobs": "mcore.outputs",
    "MicroBatch": "mcore.seam.micro_batch",
    "Values": "mcore.outputs",
    "plan_step": "plan",
    "restore": "logprob",
    "single_process": "cpu.emulation",
    "tree_forward": "mcore.engine.forward_step",
}

# A patched Megatron-Core lets micro-batches name the attention back-ends of this package.
native_backends.register()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mcore_prefix_tree.{_HOMES[name]}"), name)
