"""Folded training inside Megatron-LM's own ``pretrain``, through the seams that it offers.

A site's own ``pretrain_*.py`` becomes a folding one with three lines: the import, the providers and the arguments::

    from mcore_prefix_tree.mcore.pretrain import add_prefix_tree_args, prefix_tree_providers

    datasets, model, step = prefix_tree_providers(train_valid_test_datasets_provider, model_provider, forward_step)
    pretrain(datasets, model, ModelType.encoder_or_decoder, step, extra_args_provider=add_prefix_tree_args)

Without ``--prefix-tree`` the script's own three are called. ``python -m mcore_prefix_tree.pretrain_gpt`` is this with
Megatron-LM's ``pretrain_gpt.py``.
"""

from mcore_prefix_tree.mcore.arguments import add_prefix_tree_args
from mcore_prefix_tree.mcore.pretrain.providers import prefix_tree_providers

__all__ = ["add_prefix_tree_args", "prefix_tree_providers"]
