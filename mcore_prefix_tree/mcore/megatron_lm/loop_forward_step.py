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

LossOutput = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


@readable_arguments()
def tree_forward_step(
    data_iterator: Iterator[StepMicroBatch], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossOutput]]:
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


def _loss(micro_batch: StepMicroBatch, batch: MicroBatch, output: torch.Tensor) -> LossOutput:
    """Return the loss of the stage's output, local logits ``[1, P, V / tp]`` by default."""
    found = micro_batch.readout.read(output, batch)
    loss = found.loss
    num_tokens = torch.full((), divisor_part(batch), dtype=torch.int, device=output.device)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=_is_not_finite,
            message="found NaN or Inf in the loss of a folded micro-batch",
            tolerance=0.0,
            fatal=True,
        )
    report = {"lm loss": torch.stack([loss.detach().float(), num_tokens.float()])}
    report |= {name: pair.float() for name, pair in found.metrics.items()}
    figures = log_figures(micro_batch)
    if figures:
        pairs = upload(np.array(list(figures.values()), dtype=np.float32), output.device)
        report |= dict(zip(figures, pairs.unbind(), strict=True))
    return loss, num_tokens, report


def _is_not_finite(loss: torch.Tensor) -> torch.Tensor:
    """Return whether a scalar loss is NaN or infinite."""
    return ~torch.isfinite(loss)


def log_figures(micro_batch: StepMicroBatch) -> dict[str, tuple[float, float]]:
    """Return the figures that the log line, TensorBoard and W&B show with the loss: a numerator and denominator each.

    Megatron sums both over the micro-batches and the data-parallel ranks of a step, divides, and averages over
    ``--log-interval``. Throughput is that of the step before, because a step's end is not known inside it; the first
    step has none. Every micro-batch reports the objective's metrics of the full step alike. In evaluation the step has
    no such figures.
    """
    figures, stats = dict(micro_batch.known), micro_batch.stats
    if stats is None:
        return figures
    figures["fold ratio"] = (stats.logical_tokens, stats.physical_tokens)
    if stats.seconds_before:
        figures["logical tokens/s"] = (stats.logical_before, stats.seconds_before)
        figures["physical tokens/s"] = (stats.physical_before, stats.seconds_before)
    figures["plan time (ms)"] = (1e3 * micro_batch.host_seconds * micro_batch.share, micro_batch.share)
    return figures
