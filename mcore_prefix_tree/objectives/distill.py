"""Distillation from a teacher of the same vocabulary, once per unique token.

The distribution that predicts a token depends only on the tokens before it, so all samples that score a token with one
predictor read the same row of the student, and of the teacher too. The divergence D of that row is computed once and
weighted by the sum of their weights. A teacher that was run on each sample separately may give different answers for
the same path, if only in the last digits: each distinct answer then is a row. With p the teacher's distribution and q
the student's,

    forward_kl  sum_v p (log p - log q)
    reverse_kl  sum_v q (log q - log p)
    jsd         b KL(p || m) + (1 - b) KL(q || m),  m = b p + (1 - b) q       generalized JSD (Agarwal et al., 2024,
                                                                              arXiv:2306.13649, eq. 1), b = jsd_beta

``top_k`` knows the teacher's k likeliest tokens (:class:`~mcore_prefix_tree.signals.Teacher`). v ranges over them and
one more outcome, "any other token", which has the remaining probability on both sides. By the data-processing
inequality this D is never above that of the full vocabulary. With k = V there is no other token, and D is that one.

``full`` reads the teacher's logits of the same predictors, vocabulary-parallel as the student's.

Legend: P padded tokens, K' scored tokens of a micro-batch, R unique predictors with a scored token (and answers of the
teacher), k teacher's tokens, Vl vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.objectives.metrics import LossOutput, first_bad_sample, weighted_mean
from mcore_prefix_tree.objectives.objective import STRICT, Output, SecondModels, SummedObjective, refuse_unused
from mcore_prefix_tree.objectives.scored import By, Int64Array, ScoredTokens, normalise, refuse_sampling_masks
from mcore_prefix_tree.objectives.scored_rows import LossRows, Targets
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import SampleError
from mcore_prefix_tree.utils.choices import Divergence
from mcore_prefix_tree.utils.lazy_torch import dist, torch
from mcore_prefix_tree.utils.upload import upload

if TYPE_CHECKING:
    from mcore_prefix_tree.logprob import Edges


@plain_dataclass(frozen=True, kw_only=True, eq=False)
class TeacherRows(LossRows):
    """The unique predictors of a micro-batch's scored tokens, on the device."""

    predictor: torch.Tensor  # int64 [R], flat indices, ascending
    weight: torch.Tensor  # float64 [R], the weights of all scored tokens that each predicts, added up
    multiplicity: torch.Tensor  # float64 [R], number of those tokens
    first_sample: torch.Tensor  # int64 [R], the first sample of the micro-batch that scores one, for messages
    logprobs: torch.Tensor  # float32 [R, k], the teacher's log-probabilities; k is 0 if its logits are read instead
    edges: Edges  # edges from the predictors to the teacher's tokens, row by row

    def scored(self, edges: Edges) -> Edges:
        """Return the edges to the teacher's tokens in place of the layout's own."""
        return self.edges


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Distillation(SummedObjective):
    """A divergence between teacher and student at every scored token; see the formulas above.

    Attributes:
        divergence: divergence, see above.
        jsd_beta: b of ``jsd``; towards 0 the divergence is b times the forward, towards 1 it is 1 - b times the reverse
            KL.
        teacher: source of the teacher's distributions.
        normalise: unit that the mean is over; see :func:`~mcore_prefix_tree.objectives.scored.normalise`.
    """

    divergence: Divergence = "forward_kl"
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    teacher: Literal["top_k", "full"] = "top_k"
    normalise: By = "token"

    def __post_init__(self) -> None:
        refuse_unused(self, [("jsd_beta", self.divergence == "jsd", "divergence=jsd")])

    @property
    def output(self) -> Output:
        return "divergences" if self.teacher == "full" else "logprobs"

    @property
    def second_models(self) -> SecondModels | None:
        return SecondModels(asked=True, same_vocabulary=True) if self.teacher == "full" else None

    def targets(self, samples: Sequence[Sample]) -> Targets:
        """Compute the weights of a step, on the host; raises SampleError for a missing teacher, or one of another k."""
        refuse_sampling_masks(samples, "objective.name=distill")
        scored = ScoredTokens.of(samples)
        normalised = normalise(scored, self.normalise)
        if self.teacher == "top_k":
            sizes: dict[int, int] = {}
            for index in np.flatnonzero(scored.lens).tolist():
                teacher = scored.required(index, "teacher", "teacher=top_k")
                if teacher.tokens is not None:
                    raise SampleError(
                        f"{samples[index].source}: field 'teacher' comes from a teacher with another tokenizer; set "
                        "objective.name=xtoken"
                    )
                sizes.setdefault(teacher.token_ids.shape[1], index)
            if len(sizes) > 1:
                (one, first), (other, second) = list(sizes.items())[:2]
                raise SampleError(
                    f"{samples[second].source}: field 'teacher' has rows of {other}, but those of "
                    f"{samples[first].source} have {one}; all samples of a step need the same"
                )
        return Targets(scored=scored, weight=normalised.weight, count=normalised.count)

    def rows(
        self, targets: Targets, layout: FlatLayout, indices: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> TeacherRows:
        """Return the part of one micro-batch; arguments as in :meth:`Targets.rows`."""
        from mcore_prefix_tree.logprob import Edges

        entries, local, of_token = targets.located(layout, indices)
        token_ids, logprobs = np.empty((len(entries), 0), dtype=np.int32), np.empty((len(entries), 0), dtype=np.float32)
        if self.teacher == "top_k" and len(entries):
            token_ids, logprobs = _answers(targets.scored, indices, entries)
        first, inverse = _unique_rows(of_token, token_ids, logprobs)
        predictor, token_ids, logprobs = of_token[first], token_ids[first], logprobs[first]
        weight = np.bincount(inverse, weights=targets.weight[entries], minlength=len(predictor))
        return TeacherRows(
            predictor=upload(predictor, device),
            weight=upload(weight, device),
            multiplicity=upload(np.bincount(inverse, minlength=len(predictor)).astype(np.float64), device),
            first_sample=upload(local[first], device),
            logprobs=upload(logprobs, device),
            edges=Edges.of_candidates(predictor, token_ids, padded_size=layout.padded_size, device=device),
            count=targets.count_in(layout, indices),
        )

    def loss(self, scores: torch.Tensor, entropy: torch.Tensor | None, rows: TeacherRows) -> LossOutput:
        """Return the weighted sum over a micro-batch, of ``top_k``; ``scores`` is ``[E]``, the student's."""
        logprobs = scores.view(rows.logprobs.shape)
        return self.weighed(self.of_rows(rows.logprobs.to(logprobs.dtype), logprobs, rows.vocab_size), rows)

    def of_rows(self, teacher: torch.Tensor, student: torch.Tensor, vocab_size: int | None = None) -> torch.Tensor:
        """Return ``[R]`` divergences of ``top_k``, from both sides' log-probabilities of the same tokens, ``[R, k]``.

        With ``k = vocab_size`` there is no other token: the difference of the probabilities' sum from 1 is rounding.
        """
        if teacher.shape[1] != vocab_size:
            teacher, student = _with_rest(teacher), _with_rest(student)
        from mcore_prefix_tree.objectives.divergence import divergence

        return divergence(teacher, student, self.divergence, self.jsd_beta)

    def of_logits_(
        self,
        student: torch.Tensor,
        teacher: Callable[[slice], torch.Tensor],
        weight: torch.Tensor,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Return ``[C]`` divergences of ``full``; turn the student's logits into the gradient of their weighted sum.

        ``weight`` is ``[C]``; for the others see :func:`~mcore_prefix_tree.objectives.divergence.divergence_gradient_`.
        """
        from mcore_prefix_tree.objectives.divergence import divergence_gradient_

        of_row = divergence_gradient_(student, teacher, self.divergence, jsd_beta=self.jsd_beta, group=group)
        student.mul_(weight.to(student.dtype)[:, None])
        return of_row

    def weighed(self, of_row: torch.Tensor, rows: TeacherRows) -> LossOutput:
        """Return the loss from divergences ``[R]``."""
        return LossOutput(
            loss=torch.dot(of_row, rows.weight.to(of_row.dtype)),
            metrics={self.divergence: weighted_mean(of_row, rows.multiplicity)},
            bad_sample=first_bad_sample(of_row, rows.first_sample),
        )


def _answers(scored: ScoredTokens, indices: Sequence[int], entries: Int64Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the teacher's tokens and their log-probabilities at a micro-batch's scored tokens, ``[K', k]`` each."""
    # entries, int64 [K'], are scored tokens of the samples at indices, in their order.
    lens = np.bincount(scored.sample[entries], minlength=len(scored.samples))[np.asarray(indices)].tolist()
    owned = [slice(end - size, end) for size, end in zip(lens, np.cumsum(lens).tolist(), strict=True)]
    fields = []
    for name in ("token_ids", "logprobs"):
        parts = [
            getattr(scored.samples[index].signals.teacher, name)[scored.position[entries[own]]]
            for index, own in zip(indices, owned, strict=True)
            if own.stop > own.start
        ]
        fields.append(np.concatenate(parts))
    return fields[0], fields[1]


def _unique_rows(predictor: Int64Array, token_ids: np.ndarray, logprobs: np.ndarray) -> tuple[Int64Array, Int64Array]:
    """Return int64 ``[R]``, a scored token of each distinct row, and int64 ``[K']``, the row of each token."""
    _, first, inverse = np.unique(predictor, return_index=True, return_inverse=True)
    same = (token_ids == token_ids[first][inverse]).all(axis=1) & (logprobs == logprobs[first][inverse]).all(axis=1)
    others: dict[tuple[int, bytes, bytes], int] = {}
    for at in np.flatnonzero(~same).tolist():
        answer = int(predictor[at]), token_ids[at].tobytes(), logprobs[at].tobytes()
        inverse[at] = len(first) + others.setdefault(answer, len(others))
    if not others:
        return first, inverse
    _, first, inverse = np.unique(inverse, return_index=True, return_inverse=True)
    order = np.argsort(predictor[first], kind="stable")
    return first[order], np.argsort(order)[inverse]


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Append the remaining probability to ``[R, k]``, at least the dtype's epsilon; no gradient below it."""
    from mcore_prefix_tree.logprob.softmax import log1mexp

    together = torch.logsumexp(logprobs, dim=1, keepdim=True).clamp(max=-torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, log1mexp(together)], dim=1)
