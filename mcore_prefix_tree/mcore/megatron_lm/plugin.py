"""The flag in a ``pretrain_gpt.py`` with the patches of ``patches/megatron-lm``, found by an entry point."""

from __future__ import annotations

import argparse
from typing import Any

from mcore_prefix_tree.mcore.megatron_lm.command_line import add_prefix_tree_args
from mcore_prefix_tree.mcore.megatron_lm.providers import prefix_tree_providers

__all__ = ["add_args", "providers"]

add_args = add_prefix_tree_args


def providers(
    args: argparse.Namespace, datasets_provider: Any, model_provider: Any, forward_step: Any
) -> tuple[Any, Any, Any] | None:
    """Return the providers of folded training if ``--prefix-tree`` is given, else None."""
    return prefix_tree_providers(datasets_provider, model_provider, forward_step) if args.prefix_tree else None
