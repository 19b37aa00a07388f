"""Arguments that ``train_rl.py`` gains, and those that it rejects when it trains folded."""

from __future__ import annotations

import argparse

from mcore_prefix_tree.arguments.flags import FOLDING, PREFIX, add_flags
from mcore_prefix_tree.arguments.group import add_checkout_argument
from mcore_prefix_tree.arguments.refusals import ArgumentError, Rule, refuse
from mcore_prefix_tree.attention.api import check_setting

# Rejected if the data are files; here they are the loop's own, or nothing reads them.
_ALLOWED = {
    "perform_rl_step",
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
    "valid_data_path",
    "test_data_path",
    "eod_mask_loss",
    "full_validation",
    "log_throughput",
    "log_progress",
}
_VIRTUAL = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)
_AT_ODDS: tuple[Rule, ...] = (
    (
        lambda args: any(getattr(args, name, None) is not None for name in _VIRTUAL),
        "virtual pipeline stages: Megatron-LM's log-probabilities take only the first model chunk of a rank; remove "
        "them",
    ),
    (
        lambda args: args.rl_training_cuda_graphs,
        "--rl-training-cuda-graphs: the shape of a tree changes with every micro-batch; remove it",
    ),
    (
        lambda args: bool(getattr(args, "mtp_num_layers", None)) and args.mtp_loss_scaling_factor != 0,
        "--mtp-num-layers: Megatron-LM's RL loop trains them on prompts and padding too, in micro-batches that folding "
        "cuts differently; set --mtp-loss-scaling-factor 0, which keeps them as they are, or remove it",
    ),
    (
        lambda args: getattr(args, "batch_invariant_mode", False),
        "--batch-invariant-mode: attention along a tree is computed in other blocks than that of a row; remove it",
    ),
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


def check_rl_arguments(args: argparse.Namespace) -> None:
    """Reject arguments of ``train_rl.py`` that ``--prefix-tree`` cannot have, as :func:`check_arguments` does."""
    if not args.perform_rl_step:
        raise ArgumentError(
            "--prefix-tree needs --perform-rl-step here; -m mcore_prefix_tree.pretrain_gpt trains on files"
        )
    refuse(args, at_odds=_AT_ODDS, allowed=_ALLOWED)
    check_setting(args.prefix_tree_attention_backend)
