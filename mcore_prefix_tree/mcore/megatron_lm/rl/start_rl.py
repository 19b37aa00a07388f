"""Start a folded job of ``train_rl.py``."""

from __future__ import annotations

from pathlib import Path

from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import run_pretrain
from mcore_prefix_tree.mcore.megatron_lm.rl.policy_model import rl_model_provider
from mcore_prefix_tree.mcore.megatron_lm.rl.rl_checks import add_rl_arguments
from mcore_prefix_tree.mcore.megatron_lm.rl.rl_forward_step import FoldedForwardStep
from mcore_prefix_tree.mcore.megatron_lm.start import say_which_megatron_core
from mcore_prefix_tree.utils.errors import naming_memory


def run(root: Path) -> None:
    """Train with the ``pretrain`` of the checkout at ``root``; exit with status 2 if the job cannot run."""
    say_which_megatron_core(root)
    with naming_memory(lambda: "the job does not fit; lower --micro-batch-size or --seq-length"):
        # The loop brings its own data.
        run_pretrain(None, rl_model_provider, FoldedForwardStep(), args_defaults={}, add_arguments=add_rl_arguments)
