"""``--prefix-tree-attention-backend``: checked with the arguments, chosen with the data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.training import print_rank_0
from megatron.training.arguments import core_transformer_config_from_args

from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.backend import cases_of, resolve_backend
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.sample import Sample


def check_backend(args: argparse.Namespace, config: Any) -> None:
    """Refuse a back-end that the job cannot have, before there is a model or data; ``auto`` has to find one.

    Args:
        args: validated.
        config: their ``TransformerConfig``.

    Raises:
        ValueError: the back-end does not support the run; names those that do.
    """
    _backend_of(args, config, lambda: [Sample(tokens=[0])], device=device_of_this_rank(), say=lambda text: None)


def with_backend(folding: Folding, args: argparse.Namespace, order: SampleOrder) -> Folding:
    """Folding with the back-end that its setting stands for: the same on every rank, and after a restart.

    Raises:
        ValueError: the back-end does not support the run; names those that do.
    """
    config = core_transformer_config_from_args(args)
    backend = _backend_of(
        args, config, lambda: order.take(0, args.global_batch_size), device=folding.device, say=print_rank_0
    )
    cases = cases_of(config, device=folding.device, deterministic=args.prefix_tree_deterministic_attention)
    return replace(folding, attention_backend=backend, attention_cases=cases)


def _backend_of(
    args: argparse.Namespace,
    config: Any,
    first_step: Callable[[], Sequence[Sample]],
    *,
    device: torch.device,
    say: Callable[[str], None],
) -> str:
    return resolve_backend(
        args.prefix_tree_attention_backend,
        config,
        first_step,
        device=device,
        deterministic=args.prefix_tree_deterministic_attention,
        any_order="--prefix-tree-no-deterministic-attention",
        say=say,
    )


def device_of_this_rank() -> torch.device:
    """Where its tensors are."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
