"""Checks of a folded ``train_rl.py``: of its command line, and of the validated arguments of its model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mcore_prefix_tree.arguments.flags import add_rl_argument_group
from mcore_prefix_tree.arguments.refusals import ArgumentError, check_rl_arguments
from mcore_prefix_tree.mcore.megatron_lm.argument_checks import as_config, check_machine, config_for_folding
from mcore_prefix_tree.mcore.megatron_lm.command_line import CheckedParser
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import check_backend
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import check_layers, check_megatron_lm
from mcore_prefix_tree.mcore.megatron_lm.rl.rl_objective import load_script
from mcore_prefix_tree.mcore.seam.validation import check_config


def check_command_line(args: argparse.Namespace) -> None:
    """Check a job before Megatron-LM starts anything.

    Raises:
        ArgumentError: the arguments cannot be used together, or not on this machine or with this checkout.
        MegatronCoreError: a name that the package relies on is missing.
        NotImplementedError: folding cannot do the model exactly.
        ValueError: there is no such attention back-end, or there are fewer GPUs than ranks.
    """
    check_megatron_lm()
    check_rl_arguments(args)
    check_layers(args)
    if args.fp8:
        raise ArgumentError(
            f"--fp8-format {args.fp8}: train_rl.py wraps TransformerEngine's layers for inference, which is not proven "
            "exact with folding yet; remove it"
        )
    check_config(as_config(args))
    check_machine(args)
    load_script()


def checked_config(args: argparse.Namespace) -> Any:
    """Return the ``TransformerConfig`` of validated arguments, which gain the values that folding needs."""
    check_rl_arguments(args)
    check_layers(args)
    # The size of the loop's micro-batches without folding. So a step always fits, and needs no more memory.
    args.prefix_tree_max_tokens = args.micro_batch_size * args.seq_length
    config = config_for_folding(args)
    check_backend(args, config)
    return config


def add_rl_arguments(
    parser: argparse.ArgumentParser, args_defaults: Mapping[str, Any] | None = None
) -> argparse.ArgumentParser:
    """Add the arguments of ``train_rl.py`` and of ``--prefix-tree``; return a parser that checks the job too.

    Raises:
        ArgumentError: the checkout is older than core_v0.19.0.
    """
    try:
        from megatron.inference.utils import add_inference_args
    except ImportError as error:
        raise ArgumentError(
            "the train_rl.py of this checkout is older than that of core_v0.19.0, which --prefix-tree trains: "
            f"{error}; check out core_v0.19.0"
        ) from error
    return CheckedParser(
        add_inference_args(parser),
        add_rl_argument_group,
        lambda parsed, _: check_command_line(parsed),
        script="train_rl.py",
    )
