"""Savings by folding, in the log of Megatron-Bridge's own training loop; see docs/trainers.md.

A user adds only ``pretrain(config, forward_step, callbacks=[LogFolding()])`` to :func:`fold_inside`.
"""

from __future__ import annotations

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from mcore_prefix_tree.mcore.packed import FoldReport


class LogFolding(Callback):  # type: ignore[misc]
    """Adds the report of each training step to the losses that Megatron-Bridge logs.

    They reach every target of its logger. The console shows their means over ``log_interval`` steps.
    """

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Drop the counts of an evaluation."""
        _report(context)

    def on_train_step_end(self, context: CallbackContext) -> None:
        report = _report(context)
        assert report is not None
        device = next(context.model[-1].parameters()).device
        report = report.over_ranks(parallel_state.get_data_parallel_group(), device)
        if context.loss_dict:  # only the last stage, which logs
            context.loss_dict |= {
                name: torch.tensor(float(value), device=device) for name, value in report.to_log().items()
            }


def _report(context: CallbackContext) -> FoldReport | None:
    report: FoldReport | None = unwrap_model(context.model[-1]).folding.report()
    return report
