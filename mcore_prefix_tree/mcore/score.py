"""Forward-only scoring: every sample's log-probabilities and entropies, folded, by the code that trains.

Old-policy and reference scores come from the same plan, back-end and head as the training step that reads them, so on
one machine and one set of weights they are equal to what that step computes: the first importance ratios are exactly 1
on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.mcore.folding import Folding
from mcore_prefix_tree.mcore.forward_step import tree_forward, tree_logprobs, tree_logprobs_and_entropy
from mcore_prefix_tree.mcore.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.output_layer import Output
from mcore_prefix_tree.mcore.train.schedule import run_schedule
from mcore_prefix_tree.sample import Sample

FloatArray = npt.NDArray[np.floating]


class ScoreError(ValueError):
    """A sample whose scores are not numbers. The message names it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Of one sample; entry t is of the prediction of token t, as in ``loss_mask``.

    Attributes:
        scored: bool ``[n]``, which tokens are.
        logprobs: ``[n]`` in nats, float32 or the model's dtype if that is wider; NaN for tokens that are not scored.
        entropy: ``[n]`` of the distribution that token t is predicted from, or None if it was not asked for.
    """

    scored: npt.NDArray[np.bool_]
    logprobs: FloatArray
    entropy: FloatArray | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatScores:
    """Of one micro-batch: ``[P]``, 0 for tokens that are not scored; the entropy at the token that is predicted."""

    logprobs: FloatArray
    entropy: FloatArray | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoringStep:
    """Samples planned and folded, to be scored under any weights of the model: the policy's, a reference's.

    Attributes:
        samples: of all ranks.
        sample_index: for each of this rank's micro-batches, the indices of its samples.
        micro_batches: on the device.
        physical_tokens: unique tokens of the micro-batches of all ranks, without padding.
        all_tokens: score every token that has a predictor, not only those with a non-zero loss mask.
    """

    samples: Sequence[Sample]
    sample_index: tuple[tuple[int, ...], ...]
    micro_batches: list[MicroBatch]
    physical_tokens: int
    all_tokens: bool

    @classmethod
    def plan(cls, samples: Sequence[Sample], folding: Folding, *, all_tokens: bool = False) -> ScoringStep:
        """Plan and fold.

        Args:
            samples: the same on every rank. A training step's own, in its order, are planned as that step is.
            folding: of that step; its ``output`` says whether the head is fused.
            all_tokens: as above.

        Raises:
            BudgetError: see :func:`mcore_prefix_tree.plan.plan_step`.
        """
        folding = replace(folding, only_supervised=not all_tokens)
        plan = folding.plan(samples)
        mine = plan.micro_batches[parallel_state.get_data_parallel_rank()]
        return cls(
            samples=samples,
            sample_index=mine,
            micro_batches=[folding.micro_batch([samples[index] for index in indices]) for indices in mine],
            physical_tokens=sum(map(sum, plan.physical_tokens)),
            all_tokens=all_tokens,
        )

    def score(self, chunks: Sequence[Any], *, entropy: bool = True) -> list[Scores]:
        """Score under the weights that ``chunks`` have now; all ranks together.

        Args:
            chunks: this rank's model chunks, with or without Megatron's DDP.
            entropy: compute it too.

        Returns:
            A :class:`Scores` for each sample, in the order of ``samples``, on every rank.

        Raises:
            ScoreError: a score is NaN or infinite; names the sample. On every rank.
        """
        found: dict[int, Scores] = {}
        for number, flat in enumerate(score_micro_batches(chunks, self.micro_batches, entropy=entropy)):
            layout = self.micro_batches[number].layout
            for place, index in enumerate(self.sample_index[number]):
                tokens = layout.sample_tokens(place)
                scored = layout.predictor[tokens] >= 0
                if not self.all_tokens:
                    scored &= self.samples[index].loss_mask != 0
                found[index] = _of_sample(flat, tokens, scored)
        # Tensor-parallel ranks all know the scores of their replica; one of them speaks for it.
        speaks = parallel_state.get_tensor_model_parallel_rank() == 0
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, found if speaks else {})
        together = {index: scores for part in of_all for index, scores in part.items()}
        for index, sample in enumerate(self.samples):
            _check_finite(together[index], sample)
        return [together[index] for index in range(len(self.samples))]


def score(
    chunks: Sequence[Any],
    samples: Sequence[Sample],
    folding: Folding,
    *,
    all_tokens: bool = False,
    entropy: bool = True,
) -> list[Scores]:
    """:meth:`ScoringStep.plan` and :meth:`ScoringStep.score`; arguments and errors are theirs."""
    return ScoringStep.plan(samples, folding, all_tokens=all_tokens).score(chunks, entropy=entropy)


def score_micro_batches(chunks: Sequence[Any], batches: Sequence[MicroBatch], *, entropy: bool) -> list[FlatScores]:
    """Score micro-batches that are folded already, by the edges that they have; no gradients.

    Returns:
        The scores of each micro-batch on the last pipeline stage; nothing elsewhere.
    """
    output: Output = "logprobs_and_entropy" if entropy else "logprobs"
    asked = [batch if batch.output == "logits" else replace(batch, output=output) for batch in batches]

    def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., FlatScores]]:
        batch = next(data_iterator)

        def read(output: torch.Tensor, *, non_loss_data: bool) -> FlatScores:
            assert non_loss_data
            return _read(output, batch, entropy)

        return tree_forward(model, batch), read

    with torch.no_grad():
        return run_schedule(chunks, asked, forward_step, forward_only=True, collect_non_loss_data=True)


def _read(output: torch.Tensor, batch: MicroBatch, entropy: bool) -> FlatScores:
    if not entropy:
        return FlatScores(logprobs=tree_logprobs(output, batch).cpu().numpy(), entropy=None)
    logprob, spread = tree_logprobs_and_entropy(output, batch)
    at_token = batch.edges.at_tokens(spread[batch.edges.predictor])
    return FlatScores(logprobs=logprob.cpu().numpy(), entropy=at_token.cpu().numpy())


def _of_sample(flat: FlatScores, tokens: npt.NDArray[np.int32], scored: npt.NDArray[np.bool_]) -> Scores:
    def row(values: FloatArray) -> FloatArray:
        return np.where(scored, values[tokens], values.dtype.type("nan"))

    return Scores(
        scored=scored, logprobs=row(flat.logprobs), entropy=None if flat.entropy is None else row(flat.entropy)
    )


def _check_finite(scores: Scores, sample: Sample) -> None:
    for name, values in (("log-probability", scores.logprobs), ("entropy", scores.entropy)):
        bad = scores.scored & ~np.isfinite(values) if values is not None else np.zeros(1, dtype=np.bool_)
        if bad.any():
            at = int(np.argmax(bad))
            assert values is not None
            raise ScoreError(f"{sample.source}: the {name} of token {at} is {values[at]}; the model's weights are bad")
