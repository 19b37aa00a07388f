"""Megatron-LM's ``pretrain`` in the forms that it has had, behind one call.

Up to core_v0.17 it parses the command line itself, with what ``extra_args_provider`` adds. Since core_v0.18 its caller
parses, and hands over what the arguments say as a ``PretrainConfigContainer``; that a model comes from a provider
function rather than from a ``ModelConfig`` is still taken.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.arguments import parse_args

from mcore_prefix_tree.mcore import compat
from mcore_prefix_tree.mcore.arguments import ArgumentError, add_prefix_tree_args

_SHARED = {"train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func"}
_PARSES = {"args_defaults", "extra_args_provider"}
_CONTAINER = "cfg_container"


def check_megatron_lm(root: Path) -> None:
    """See that the checkout has what this package calls.

    Raises:
        ArgumentError: its ``pretrain`` takes other arguments than any form that is known here.
        MegatronCoreError: something else that the package relies on has moved; see :func:`compat.check`.
    """
    parameters = set(inspect.signature(pretrain).parameters)
    known = parameters >= _SHARED and (parameters >= _PARSES or _CONTAINER in parameters)
    if not known:
        raise ArgumentError(
            f"{root} is Megatron-LM {compat.installed_version()}, whose pretrain() takes other arguments than those "
            "of core_v0.16.1 and core_v0.19.0, which --prefix-tree calls; check out one of these"
        )
    compat.check(compat.MEGATRON_LM)


def parse_command_line() -> argparse.Namespace:
    """Megatron's arguments and those of ``--prefix-tree``.

    Raises:
        ArgumentError: what the parser refuses, without its usage of hundreds of lines, which every rank would print.
        SystemExit: for ``--help``.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args: argparse.Namespace = parse_args(add_prefix_tree_args)
    except SystemExit as error:
        if not error.code:
            raise
        raise ArgumentError(said.getvalue().strip().rpartition(": error: ")[2]) from error
    except ValueError as error:
        # argparse cannot format one of the help texts of core_v0.19.0: "10%)".
        if not {"-h", "--help"} & set(sys.argv[1:]):
            raise
        usage = "%(prog)s <arguments of pretrain_gpt.py> --prefix-tree ..."
        parser = argparse.ArgumentParser(usage=usage, add_help=False)
        add_prefix_tree_args(parser).print_help()
        print(f"\nMegatron-LM {compat.installed_version()} cannot show its own arguments: {error}")
        raise SystemExit(0) from error
    sys.stderr.write(said.getvalue())
    return args


def run_pretrain(
    datasets_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    *,
    args_defaults: Mapping[str, Any],
) -> None:
    """Train, with the arguments of the command line and of ``--prefix-tree``.

    Args:
        datasets_provider: Megatron's ``train_valid_test_dataset_provider``.
        model_provider: Megatron's.
        forward_step: Megatron's ``forward_step_func``.
        args_defaults: for arguments that the command line leaves out.
    """
    if _CONTAINER in inspect.signature(pretrain).parameters:
        settings: dict[str, Any] = {_CONTAINER: _parsed_here(args_defaults)}
    else:
        settings = {"args_defaults": dict(args_defaults), "extra_args_provider": add_prefix_tree_args}
    pretrain(
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **settings,
    )


def model_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What pretrain_gpt.py of the checkout builds its ``GPTModel`` with, where its versions differ."""
    if _CONTAINER in inspect.signature(pretrain).parameters:
        return {"seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor}
    return {}


def _parsed_here(args_defaults: Mapping[str, Any]) -> Any:
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_prefix_tree_args, args_defaults=dict(args_defaults))
    with warnings.catch_warnings():
        # It recommends a ModelConfig, which has no place for layers other than its own.
        warnings.simplefilter("ignore")
        return pretrain_cfg_container_from_args(args)
