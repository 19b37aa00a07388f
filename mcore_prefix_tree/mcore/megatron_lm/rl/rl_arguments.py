"""Parser of a folded ``train_rl.py``, which checks the job."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.arguments.rl import add_rl_argument_group
from mcore_prefix_tree.mcore.megatron_lm.command_line import CheckedParser


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
    return _CheckedLoop(add_rl_argument_group(add_inference_args(parser)))


class _CheckedLoop(CheckedParser):
    script = "train_rl.py"

    def add_own(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_rl_argument_group(parser)

    def check(self, parsed: argparse.Namespace, words: Sequence[str]) -> None:
        from mcore_prefix_tree.mcore.megatron_lm.rl.rl_checks import check_command_line

        check_command_line(parsed)
