"""Stand-ins for objectives in verification and comparison: losses without signals, folded and unfolded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from mcore_prefix_tree.mcore.engine.forward_step import Reported
from mcore_prefix_tree.mcore.engine.job import Job, StepHook
from mcore_prefix_tree.mcore.engine.outcome import Rows
from mcore_prefix_tree.mcore.engine.scoring import score
from mcore_prefix_tree.mcore.engine.unfolded import StockBatch, stock_forward, stock_logprobs
from mcore_prefix_tree.mcore.outputs import Logprobs, Values
from mcore_prefix_tree.objectives import Critic, Objective, SupervisedFineTuning
from mcore_prefix_tree.objectives.scored import refuse_routes
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import Signals


class VocabularyStandIn:
    """The supervised loss, for a model with a vocabulary."""

    # Whether a fused head computes only the tokens that are scored.
    skips_unscored: ClassVar[bool] = True

    def trained_on(self, samples: Sequence[Sample]) -> tuple[Objective, list[Sample]]:
        """Return an objective that reads no signal and compares no sample with another, and samples for it."""
        return SupervisedFineTuning(), list(samples)

    def check(self, samples: Sequence[Sample]) -> None:
        """Check that there is something to compare; raises SampleError."""
        if not any(sample.loss_mask[1:].any() for sample in samples):
            raise SampleError(
                f"{samples[0].source}: neither this nor another sample of the first step has a token to train on after "
                "its first: 'loss_mask' is 0 in all of them"
            )

    def folded_rows(self, chunks: Sequence[torch.nn.Module], samples: Sequence[Sample], job: Job) -> list[Rows]:
        """Return each sample's rows to compare, from the folded model."""
        found: list[Rows] = []
        readout = Logprobs(entropy=True, fused=job.fused_head)
        for scores in score(chunks, samples, job.folding, readout, all_tokens=True):
            assert scores.entropy is not None
            rows = {"logprob": scores.logprobs, "entropy": scores.entropy}
            found.append({name: row[1:].astype(np.float64) for name, row in rows.items()})
        return found

    def stock_rows(self, batch: StockBatch, output: torch.Tensor) -> tuple[torch.Tensor, list[Rows]]:
        """Return the loss and the sample's rows to compare, from the stock forward's logits ``[1, n, V / tp]``."""
        logprob, entropy = stock_logprobs(output, batch)
        scored = max(batch.length - 1, 0)
        rows = {"logprob": _on_host(logprob[:scored]), "entropy": _on_host(entropy[:scored])}
        return -torch.dot(logprob, batch.loss_mask.to(logprob.dtype)), [rows]

    def stock_forward(self, model: Any, batch: StockBatch) -> torch.Tensor:
        """Return the output of the stock forward in training: Megatron's own cross-entropy."""
        return stock_forward(model, batch, batch.labels)

    def stock_loss(self, batch: StockBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the loss from the output of :meth:`stock_forward`, ``[1, n]``."""
        return torch.dot(output.squeeze(0).float(), batch.loss_mask)


class ValuesStandIn(VocabularyStandIn):
    """Half the mean square of the values, for a model with a scalar head: a critic whose returns are all 0."""

    skips_unscored = False

    def trained_on(self, samples: Sequence[Sample]) -> tuple[Objective, list[Sample]]:
        regressed = [replace(sample, signals=Signals(returns=np.zeros(len(sample)))) for sample in samples]
        return Critic(returns="given", clip_eps=None), regressed

    def check(self, samples: Sequence[Sample]) -> None:
        refuse_routes(samples, "a critic or reward model")

    def folded_rows(self, chunks: Sequence[torch.nn.Module], samples: Sequence[Sample], job: Job) -> list[Rows]:
        return [
            {"value": np.append(one.values[1:], one.last).astype(np.float64)}
            for one in score(chunks, samples, job.folding, Values(), all_tokens=True)
        ]

    def stock_rows(self, batch: StockBatch, output: torch.Tensor) -> tuple[torch.Tensor, list[Rows]]:
        """Return the loss and the sample's values to compare, from the output ``[1, n, 1]``."""
        return self.stock_loss(batch, output), [{"value": _on_host(output.flatten()[: batch.length])}]

    def stock_forward(self, model: Any, batch: StockBatch) -> torch.Tensor:
        return stock_forward(model, batch)

    def stock_loss(self, batch: StockBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the loss from the output ``[1, n, 1]``."""
        return torch.dot(output.flatten().square(), batch.loss_mask.to(output.dtype)) / 2


def make_stand_in(job: Job) -> VocabularyStandIn:
    """Return the stand-in for a job's objective."""
    return ValuesStandIn() if job.objective.output == "values" else VocabularyStandIn()


def plain(job: Job, samples: Sequence[Sample]) -> tuple[Job, list[Sample]]:
    """Return stand-ins for a job and its samples in verification and comparison."""
    objective, plain_samples = make_stand_in(job).trained_on(samples)
    return replace(job, objective=objective, hook=StepHook()), plain_samples


def stock_forward_step(
    data_iterator: Iterator[StockBatch], model: Any, *, stand_in: VocabularyStandIn
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Reported]]:
    """Train as ``pretrain_gpt.py`` does; a scalar head by half the square of its values."""
    batch = next(data_iterator)
    return stand_in.stock_forward(model, batch), partial(_reported, stand_in, batch)


def _reported(stand_in: VocabularyStandIn, batch: StockBatch, output: torch.Tensor) -> Reported:
    """Return the loss of a stock output, ``[1, n]``, as Megatron's schedules report it."""
    loss, num_tokens = stand_in.stock_loss(batch, output), batch.loss_mask.count_nonzero().to(torch.int)
    return loss, num_tokens, {"loss_sum": loss.detach(), "num_tokens": num_tokens}


def _on_host(values: torch.Tensor) -> np.ndarray:
    """Return a tensor of any shape as an array on the host."""
    row: np.ndarray = values.detach().double().cpu().numpy()
    return row
