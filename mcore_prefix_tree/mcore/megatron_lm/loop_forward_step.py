"""The ``forward_step_func`` for Megatron-LM's ``pretrain``, and the figures that it logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector
from megatron.training import get_args, get_timers

from mcore_prefix_tree.arguments.flags import readable_arguments
from mcore_prefix_tree.mcore.engine.forward_step import divisor_part, for_model, tree_forward
from mcore_prefix_tree.mcore.megatron_lm.step_batches import StepMicroBatch
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.validation import check_step
from mcore_prefix_tree.utils.upload import upload

# What Megatron's schedule takes of a loss function: the loss, its divisor, and logged values.
Reported = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


@readable_arguments()
def tree_forward_step(
    data_iterator: Iterator[StepMicroBatch], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Reported]]:
    """Run one pipeline stage's forward of the next folded micro-batch; return its output and loss function."""
    check_step(model)
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with straggler_timers(data=True):
        micro_batch = next(data_iterator)
    timers("batch-generator").stop()
    with straggler_timers():
        batch = for_model(micro_batch.take(model), model)
        output = tree_forward(model, batch, micro_batch.readout)
    return output, partial(_loss, micro_batch, batch)


def straggler_timers(*, data: bool = False) -> AbstractContextManager[Any]:
    """Return the timers of ``--log-straggler``, which nothing starts without it; ``data`` marks a block that fetches.

    Megatron's context logs the stack of any error that ends it early, for example Ctrl-C or a mistake reported in one
    sentence.
    """
    return StragglerDetector()(bdata=data) if get_args().log_straggler else nullcontext()


def _loss(micro_batch: StepMicroBatch, batch: MicroBatch, output: torch.Tensor) -> Reported:
    """Return the loss of the stage's output, local logits ``[1, P, V / tp]`` by default."""
    found = micro_batch.readout.read(output, batch)
    loss = found.loss
    num_tokens = torch.full((), divisor_part(batch), dtype=torch.int, device=output.device)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda loss: ~torch.isfinite(loss),
            message="found NaN or Inf in the loss of a folded micro-batch",
            tolerance=0.0,
            fatal=True,
        )
    report = {"lm loss": torch.stack([loss.detach().float(), num_tokens.float()])}
    report |= {name: pair.float() for name, pair in found.metrics.items()}
    figures = micro_batch.figures
    if figures:
        pairs = upload(np.array(list(figures.values()), dtype=np.float32), output.device)
        report |= dict(zip(figures, pairs.unbind(), strict=True))
    return loss, num_tokens, report
