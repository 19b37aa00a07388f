"""Forward-only scoring: every sample's log-probabilities and entropies, or values, folded, by the code that trains.

Old-policy and reference scores come from the same plan, back-end and head as the training step that reads them, so on
one machine and one set of weights they are equal to what that step computes: the first importance ratios are exactly 1
on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.mcore.folding import Folding
from mcore_prefix_tree.mcore.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.output_layer import Output
from mcore_prefix_tree.mcore.outputs import tree_logprobs, tree_logprobs_and_entropy, tree_top_logprobs, tree_values
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.train.schedule import forward_only
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import Teacher

FloatArray = npt.NDArray[np.floating]
T = TypeVar("T")


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
class Values:
    """Of one sample, from a model with a scalar head.

    Attributes:
        scored: bool ``[n]``, which tokens are.
        values: ``[n]``, entry t of the state that token t is chosen in, as in ``Signals.values``: a critic's. float32,
            or the model's dtype if that is wider; NaN for tokens that are not scored.
        last: after the last token: a reward model's reward.
    """

    scored: npt.NDArray[np.bool_]
    values: FloatArray
    last: float


@dataclass(frozen=True, kw_only=True, eq=False)
class TopTokens:
    """Of one sample: the k likeliest tokens of every prediction, for another model to be distilled from.

    Attributes:
        scored: bool ``[n]``, which predictions are.
        teacher: ``[n, k]`` each, the likeliest first; ids from 0 and NaN where nothing is scored.
    """

    scored: npt.NDArray[np.bool_]
    teacher: Teacher


@dataclass(frozen=True, kw_only=True, eq=False)
class _FlatTop:
    """Of one micro-batch, ``[P, k]`` each, at the predictors that are asked about."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


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
        for_main_rank: give what is found to the main rank alone, and nothing to the others: on GPUs each rank would
            hold everyone's while they are sent.
    """

    samples: Sequence[Sample]
    sample_index: tuple[tuple[int, ...], ...]
    micro_batches: list[MicroBatch]
    physical_tokens: int
    all_tokens: bool
    for_main_rank: bool = False

    @classmethod
    def plan(
        cls, samples: Sequence[Sample], folding: Folding, *, all_tokens: bool = False, for_main_rank: bool = False
    ) -> ScoringStep:
        """Plan and fold.

        Args:
            samples: the same on every rank. A training step's own, in its order, are planned as that step is.
            folding: of that step; its ``output`` says whether the head is fused.
            all_tokens: as above.
            for_main_rank: as above.

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
            for_main_rank=for_main_rank,
        )

    def score(self, chunks: Sequence[Any], *, entropy: bool = True) -> list[Scores]:
        """Score under the weights that ``chunks`` have now; all ranks together.

        Args:
            chunks: this rank's model chunks, with or without Megatron's DDP.
            entropy: compute it too.

        Returns:
            A :class:`Scores` for each sample, in the order of ``samples``, on every rank; or where ``for_main_rank``
            says so, on others nothing.

        Raises:
            ScoreError: a score is NaN or infinite; names the sample. On every rank.
        """

        def fault_of(scores: Scores, sample: Sample) -> str | None:
            fault = _not_finite("log-probability", scores.logprobs, scores.scored, sample)
            if fault is None and scores.entropy is not None:
                fault = _not_finite("entropy", scores.entropy, scores.scored, sample)
            return fault

        found = score_micro_batches(chunks, self.micro_batches, entropy=entropy)
        return self._of_samples(found, _of_sample, fault_of)

    def values(self, chunks: Sequence[Any]) -> list[Values]:
        """As :meth:`score`, of a model with a scalar head.

        Raises:
            ScoreError: a value is NaN or infinite; names the sample. On every rank.
        """

        def read(output: torch.Tensor, batch: MicroBatch) -> FloatArray:
            values: FloatArray = tree_values(output, batch).cpu().numpy()
            return values

        def fault_of(values: Values, sample: Sample) -> str | None:
            last = np.arange(len(sample)) == len(sample) - 1
            return _not_finite("value", values.values, values.scored, sample) or _not_finite(
                "value after", np.full(len(sample), values.last), last, sample
            )

        return self._of_samples(forward_only(chunks, self.micro_batches, read), _values_of_sample, fault_of)

    def teacher(self, chunks: Sequence[Any], k: int, *, vocab_size: int | None = None) -> list[TopTokens]:
        """The k likeliest tokens of every prediction, of a model with a vocabulary. Keeps the logits of a micro-batch.

        Args:
            chunks: as of :meth:`score`.
            k: at most the vocabulary.
            vocab_size: before padding; None takes the padding for tokens too.

        Raises:
            ScoreError: a log-probability is NaN or infinite; names the sample. On every rank.
            ValueError: k is more than the vocabulary.
        """

        def read(output: torch.Tensor, batch: MicroBatch) -> _FlatTop:
            ids, logprobs = tree_top_logprobs(output, batch, k, vocab_size=vocab_size)
            size = (batch.layout.padded_size, k)
            flat = _FlatTop(
                token_ids=np.tile(np.arange(k, dtype=np.int32), (size[0], 1)),
                logprobs=np.full(size, np.nan, dtype=np.float32),
            )
            flat.token_ids[batch.edges.host_row] = ids.cpu().numpy()
            flat.logprobs[batch.edges.host_row] = logprobs.float().cpu().numpy()
            return flat

        def fault_of(top: TopTokens, sample: Sample) -> str | None:
            return _not_finite("teacher's log-probability", top.teacher.logprobs.min(axis=1), top.scored, sample)

        asked = [replace(batch, output="logits") for batch in self.micro_batches]
        return self._of_samples(forward_only(chunks, asked, read), _top_of_sample, fault_of)

    def _of_samples(
        self,
        found: Sequence[Any],
        of_sample: Callable[[Any, npt.NDArray[np.int32], npt.NDArray[np.bool_]], T],
        fault_of: Callable[[T, Sample], str | None],
    ) -> list[T]:
        """What is found of this rank's micro-batches, sample by sample, from all ranks and on all that want it.

        Raises:
            ScoreError: what ``fault_of`` says of the first sample that it faults; on every rank.
        """
        own: dict[int, T] = {}
        for number, flat in enumerate(found):
            layout = self.micro_batches[number].layout
            for place, index in enumerate(self.sample_index[number]):
                tokens = layout.sample_tokens(place)
                scored = layout.predictor[tokens] >= 0
                if not self.all_tokens:
                    scored &= self.samples[index].loss_mask != 0
                own[index] = of_sample(flat, tokens, scored)
        faults = ((index, fault_of(own[index], self.samples[index])) for index in sorted(own))
        of_each = everyone(next(((index, fault) for index, fault in faults if fault is not None), None))
        first = min((fault for fault in of_each if fault is not None), default=None)
        if first is not None:
            raise ScoreError(first[1])
        # Tensor-parallel ranks all know the scores of their replica; one of them speaks for it.
        spoken = own if parallel_state.get_tensor_model_parallel_rank() == 0 else {}
        of_all = _on_main_rank(spoken) if self.for_main_rank else everyone(spoken)
        if of_all is None:
            return []
        together: dict[int, T] = {index: one for part in of_all for index, one in part.items()}
        return [together[index] for index in range(len(self.samples))]


def _on_main_rank(value: T) -> list[T] | None:
    """By rank; None on other ranks than the first."""
    of_all: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, of_all, dst=0)
    return of_all


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


def score_values(
    chunks: Sequence[Any], samples: Sequence[Sample], folding: Folding, *, all_tokens: bool = False
) -> list[Values]:
    """:meth:`ScoringStep.plan` and :meth:`ScoringStep.values`; arguments and errors are theirs."""
    return ScoringStep.plan(samples, folding, all_tokens=all_tokens).values(chunks)


def score_micro_batches(chunks: Sequence[Any], batches: Sequence[MicroBatch], *, entropy: bool) -> list[FlatScores]:
    """Score micro-batches that are folded already, by the edges that they have; no gradients.

    Returns:
        The scores of each micro-batch on the last pipeline stage; nothing elsewhere.
    """
    output: Output = "logprobs_and_entropy" if entropy else "logprobs"
    asked = [batch if batch.output == "logits" else replace(batch, output=output) for batch in batches]
    return forward_only(chunks, asked, lambda output, batch: _read(output, batch, entropy))


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


def _values_of_sample(flat: FloatArray, tokens: npt.NDArray[np.int32], scored: npt.NDArray[np.bool_]) -> Values:
    own = flat[tokens]
    before = np.concatenate([own[:1], own[:-1]])  # nothing comes before the first, and it is not scored
    return Values(scored=scored, values=np.where(scored, before, own.dtype.type("nan")), last=float(own[-1]))


def _top_of_sample(flat: _FlatTop, tokens: npt.NDArray[np.int32], scored: npt.NDArray[np.bool_]) -> TopTokens:
    before = np.concatenate([tokens[:1], tokens[:-1]])  # nothing comes before the first, and it is not scored
    nothing = np.arange(flat.token_ids.shape[1], dtype=np.int32)
    teacher = Teacher(
        token_ids=np.where(scored[:, None], flat.token_ids[before], nothing),
        logprobs=np.where(scored[:, None], flat.logprobs[before], np.float32("nan")),
    )
    return TopTokens(scored=scored, teacher=teacher)


def _not_finite(name: str, values: FloatArray, scored: npt.NDArray[np.bool_], sample: Sample) -> str | None:
    bad = scored & ~np.isfinite(values)
    if not bad.any():
        return None
    at = int(np.argmax(bad))
    return f"{sample.source}: the {name} of token {at} is {values[at]}; the model's weights are bad"
