"""Arguments that Megatron-LM's ``pretrain_*.py`` scripts and its ``train_rl.py`` gain.

The former take them with ``extra_args_provider=add_prefix_tree_args``, which also checks the job; see
:mod:`mcore_prefix_tree.mcore.megatron_lm`.
"""

from __future__ import annotations

import argparse
from typing import Any

from mcore_prefix_tree.arguments.flags import FILES, FOLDING, PREFIX, SCORING, add_flags


class _Enable(argparse.Action):
    """``--prefix-tree``, which also sets the arguments that folding always needs before Megatron validates them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.prefix_tree = True
        # Micro-batches hold different numbers of scored tokens: the step has one denominator.
        namespace.calculate_per_token_loss = True
        if namespace.dataloader_type is None:  # another one, before or after the flag, is refused
            namespace.dataloader_type = "external"


def add_argument_group(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "prefix-tree" and return the parser."""
    group = parser.add_argument_group(
        title="prefix-tree",
        description="Fold samples that begin with the same tokens and compute every unique token once. "
        "--global-batch-size, --train-samples and the schedules count samples as they are before folding. "
        "--micro-batch-size sets how many of them are folded into one micro-batch on average: a step always has "
        "global-batch-size / (micro-batch-size * data-parallel-size) micro-batches per rank, and samples that share "
        "their beginning are dealt to the same one. --prefix-tree-dry-run finds the size that fills "
        "--prefix-tree-max-tokens.",
    )
    group.add_argument(
        PREFIX,
        action=_Enable,
        nargs=0,
        default=False,
        help="Train folded. Implies --calculate-per-token-loss and --dataloader-type external.",
    )
    add_checkout_argument(group, "core_v0.16.1, core_v0.19.0 or main")
    add_flags(group, (*FILES, *FOLDING))
    group.add_argument(
        f"{PREFIX}-new-data",
        action="store_true",
        help="Resume with other samples than the checkpoint was trained on, and begin with the first of them; "
        "otherwise "
        "they are rejected. With the same samples training continues after the last that was trained on.",
    )
    group.add_argument(
        f"{PREFIX}-dry-run",
        action="store_true",
        help="Print the plan of the first step, its expected speed-up and an estimate of each rank's memory, and stop. "
        "Needs no GPU and starts no job; set WORLD_SIZE to the ranks of the job to plan for. Finds --micro-batch-size "
        "and --seq-length in the data if they are omitted.",
    )
    add_flags(group, SCORING)
    return parser


def add_checkout_argument(group: argparse._ArgumentGroup, versions: str) -> None:
    """Add the argument that names the checkout of Megatron-LM."""
    group.add_argument(
        "--megatron-lm-path",
        metavar="DIR",
        help=f"Checkout of Megatron-LM, {versions}; its own megatron.core is used. Default: the environment's "
        "MEGATRON_LM_PATH, else the megatron.training that Python finds.",
    )


def add_rl_argument_group(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "prefix-tree" of ``train_rl.py`` and return the parser."""
    group = parser.add_argument_group(
        title="prefix-tree",
        description="Fold trajectories that begin with the same tokens and compute every unique token once. All "
        "arguments of train_rl.py keep their meaning. --micro-batch-size sets how many trajectories are folded into "
        "one micro-batch on average, and how many may share in the passes that compute log-probabilities; "
        "--micro-batch-size times --seq-length bounds the tokens of a micro-batch, as without folding.",
    )
    group.add_argument(PREFIX, action="store_true", help="Train folded. Needs --perform-rl-step.")
    add_checkout_argument(group, "core_v0.19.0 or main")
    add_flags(group, FOLDING)
    return parser
