"""Distillation from teachers with another tokenizer: losses of chunks, once per unique chunk.

A chunk is a run of the student's tokens and a run of the teacher's that have the same text. Student and teacher are
each folded by their own tokens, and a chunk is read at its predictors in both layouts: chunks of several samples that
have the same predictors are computed once, with the sum of their weights. The losses are in
:mod:`mcore_prefix_tree.xtoken.losses`. With KD the sum of the terms over the chunks of the step, and CE the mean
negative log-likelihood of its scored tokens, the loss is ``kd_weight KD + ce_weight CE``. Both are divided by
the counts of the full step, so neither depends on how it is cut into micro-batches.

Legend: C unique chunks of a micro-batch, E scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat
from pydantic.dataclasses import dataclass

from mcore_prefix_tree.layout import FlatLayout, fold
from mcore_prefix_tree.layout.tree_chunks import ChunkLayout, find_stack
from mcore_prefix_tree.objectives.cross_tokenizer_rows import (
    ChunkRows,
    ChunkTargets,
    FoldedTeacher,
    TaughtChunks,
    TeacherSide,
    kd_metric,
    refuse_temperatures,
)
from mcore_prefix_tree.objectives.metrics import LossOutput, first_bad_sample
from mcore_prefix_tree.objectives.objective import STRICT, Objective, Output, SecondModels, refuse_unused
from mcore_prefix_tree.objectives.scored import Int64Array, ScoredTokens, refuse_sampling_masks
from mcore_prefix_tree.objectives.scored_rows import Targets
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.trie import SHARE_ALL, Sharing, build_trie
from mcore_prefix_tree.utils.choices import Aligner
from mcore_prefix_tree.utils.lazy_torch import torch
from mcore_prefix_tree.utils.upload import upload
from mcore_prefix_tree.xtoken.exported import Labelled, make_teacher_rows
from mcore_prefix_tree.xtoken.fold import Chunks, fold_chunks
from mcore_prefix_tree.xtoken.modes import MODES, LossSettings, Mode
from mcore_prefix_tree.xtoken.pairs import Pair

# Upper bound on the logits of a block: some temporaries of this size exist at a time.
_LOGITS = 2**24
_LEAST_ROWS = 256


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CrossTokenizer(Objective):
    """Settings of a distillation from teachers with another tokenizer; see the formulas above.

    :class:`BoundCrossTokenizer` is the objective that a job trains with.

    Attributes:
        mode: loss of chunks, see docs/xtoken.md.
        temperature: divisor of both models' logits, for ``p_kl``, ``gold`` and ``h_kl``; terms are multiplied by its
            square.
        top_k: number of columns of the teacher's vocabulary that ``p_kl`` compares, those with the largest logits
            anywhere in the step; None takes all.
        reverse: whether to take the KL of the student's distribution from the teacher's, for ``p_kl``, ``gold`` and
            ``h_kl``.
        tail: largest number of tokens without a counterpart that ``gold`` and ``h_kl`` compare.
        theta: temperature of the likelihoods of ``alm``.
        projection: file of the projection matrix, for ``p_kl``, ``gold`` and ``h_kl``; one per teacher.
        teacher: source of the teacher's rows. ``full`` runs the teachers' models in every step. ``top_k`` reads the
            rows that the samples bring (:class:`~mcore_prefix_tree.signals.Teacher`), of one teacher: P-KL compares the
            tokens that they name, ALM the likelihoods of the tokens, and the other modes need rows of the full
            vocabulary.
        rendering: text that the teacher reads. ``student`` gives it the text that the student reads; ``own`` encodes
            ``messages`` with the teacher's own chat format, in which the scored text must be the same.
        aligner: name of the aligner: ``bytes`` is exact; ``dynamic`` also aligns text that the two tokenizers write
            differently.
        kd_weight: weight of KD.
        ce_weight: weight of CE.
        teacher_weights: weight of each teacher's KD; None is 1 each.
    """

    mode: Mode = "p_kl"
    temperature: float = Field(default=1.0, gt=0)
    top_k: int | None = Field(default=None, gt=0)
    reverse: bool = False
    tail: int = Field(default=8192, gt=0)
    theta: float = Field(default=1.0, gt=0)
    projection: str | list[str] | None = None
    teacher: Literal["full", "top_k"] = "full"
    rendering: Literal["student", "own"] = "student"
    aligner: Aligner = "bytes"
    kd_weight: float = Field(default=1.0, ge=0)
    ce_weight: float = Field(default=0.0, ge=0)
    teacher_weights: list[NonNegativeFloat] | None = None
    output: ClassVar[Output] = "chunks"

    def __post_init__(self) -> None:
        reads, asks = MODES[self.mode], self.teacher == "full"
        refuse_unused(
            self,
            [
                ("temperature", reads.temperature, "mode=p_kl, gold or h_kl"),
                ("top_k", self.mode == "p_kl" and asks, "mode=p_kl and teacher=full"),
                ("reverse", reads.reverse, "mode=p_kl, gold or h_kl"),
                ("tail", self.mode in ("gold", "h_kl"), "mode=gold or h_kl"),
                ("theta", self.mode == "alm", "mode=alm"),
                ("projection", reads.projection, "mode=p_kl, gold or h_kl"),
                ("rendering", asks, "teacher=full, because exported rows belong to the student's text"),
            ],
        )
        if not (self.kd_weight or self.ce_weight):
            raise ValueError("kd_weight=0 and ce_weight=0 leave no loss; set one of them above 0")

    @property
    def second_models(self) -> SecondModels:
        return SecondModels(asked=self.teacher == "full", same_vocabulary=False)

    @property
    def sums_edges(self) -> bool:
        return True

    @property
    def losses(self) -> LossSettings:
        given = {name: getattr(self, name) for name in LossSettings.__dataclass_fields__ if name != "exported"}
        return LossSettings(**given, exported=self.teacher == "top_k")

    @property
    def reads_ce(self) -> bool:
        """Return whether the cross-entropy of the step is part of the loss."""
        return self.ce_weight > 0

    def targets(self, samples: Sequence[Sample]) -> Targets:
        raise ValueError("a distillation across tokenizers reads both tokenizers; bind the settings to them first")


@plain_dataclass(frozen=True, kw_only=True, eq=False)
class BoundCrossTokenizer(Objective):
    """A distillation from teachers with another tokenizer; raises ValueError if they do not fit the settings."""

    settings: CrossTokenizer
    sides: tuple[TeacherSide, ...]
    sharing: Sharing = SHARE_ALL  # common prefixes that the teachers' layouts share
    pad_to_multiple_of: int = 1  # number whose multiples these layouts' sizes are padded to
    block_rows: int | None = None  # largest number of predictors of a block; None bounds its logits
    output: ClassVar[Output] = "chunks"

    def __post_init__(self) -> None:
        settings = self.settings
        weights = settings.teacher_weights
        if weights is not None and len(weights) != len(self.sides):
            raise ValueError(f"teacher_weights has {len(weights)} numbers, but there are {len(self.sides)} teachers")
        if settings.teacher == "top_k" and len(self.sides) > 1:
            raise ValueError(f"teacher=top_k reads the rows of one teacher, but there are {len(self.sides)}; name one")

    @property
    def second_models(self) -> SecondModels:
        return self.settings.second_models

    @property
    def sums_edges(self) -> bool:
        return True

    @property
    def renderings(self) -> list[Any]:
        if self.settings.rendering == "student":
            return []
        return [side.pairing.teacher_tokenizer for side in self.sides]

    def targets(self, samples: Sequence[Sample]) -> ChunkTargets:
        """Pair a step's samples with every teacher's; raises SampleError for misaligned text or a temperature."""
        refuse_temperatures(samples)
        refuse_sampling_masks(samples, "objective.name=xtoken")
        scored = ScoredTokens.of(samples)
        paired = tuple(
            tuple(side.pairing.of(sample, number) for sample in samples) for number, side in enumerate(self.sides)
        )
        if not self.second_models.asked:
            self._check_rows(paired[0])
        return ChunkTargets(scored=scored, weight=scored.mask, count=scored.lens, paired=paired)

    def _check_rows(self, pairs: Sequence[Pair]) -> None:
        """Check the rows that the samples of a step bring; raises SampleError."""
        table = self.sides[0].pairing.teacher
        sizes: dict[int, str] = {}
        for pair in pairs:
            rows = make_teacher_rows(pair, table)
            if rows is not None:
                sizes.setdefault(rows.token_ids.shape[1], pair.student.source)
        if len(sizes) > 1:
            (one, first), (other, second) = list(sizes.items())[:2]
            raise SampleError(
                f"{second}: field 'teacher' has rows of {other} tokens, but those of {first} have {one}; all samples "
                "of a step need the same"
            )
        for size, source in sizes.items():
            if self.settings.losses.reads.whole and size < table.vocab_size:
                raise SampleError(
                    f"{source}: field 'teacher' has rows of {size} tokens, and mode={self.settings.mode} compares all "
                    f"{table.vocab_size} of the teacher; set mode=p_kl or alm, or teacher=full"
                )

    def rows(
        self, targets: Targets, layout: FlatLayout, indices: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> ChunkRows:
        """Fold the teachers' samples of one micro-batch, and its chunks; arguments as in :meth:`Targets.rows`.

        A part of a tree has the chunks whose last predictor it has; others of their predictors may be above it.
        """
        from mcore_prefix_tree.logprob import Edges
        from mcore_prefix_tree.xtoken.losses import take_ending

        assert isinstance(targets, ChunkTargets), "made by targets()"
        whole, start = (layout.whole, layout.start) if isinstance(layout, ChunkLayout) else (layout, 0)
        if whole not in targets.folded:
            numbers = range(len(self.sides))
            targets.folded[whole] = tuple(self._fold(number, targets, whole, indices) for number in numbers)
        folded, end = targets.folded[whole], start + layout.physical_tokens
        ending = [take_ending(of_teacher.chunks, start, end) for of_teacher in folded]
        before = [chunks.student.rows[chunks.student.rows < 0] for chunks in ending]
        above, size = np.unique(np.concatenate(before)), layout.padded_size
        edges = Edges.from_layout(layout, needed=layout.edge_weight != 0, device=device)
        assert edges.token is not None
        student_rows = np.append(edges.host_row, size + np.arange(len(above)))
        taught = []
        for side, of_teacher, chunks in zip(self.sides, folded, ending, strict=True):
            rows = chunks.student.rows
            rows = np.where(rows < 0, size + np.searchsorted(above, rows), rows)
            own = replace(chunks, student=replace(chunks.student, rows=rows))
            taught.append(self._taught(side, of_teacher, own, student_rows, device))
        return ChunkRows(
            edges=edges,
            token_weight=upload(layout.edge_weight, device)[edges.token],
            taught=tuple(taught),
            count=targets.count_in(layout, indices),
            above=np.searchsorted(find_stack(whole, start), start + above),
        )

    def _fold(self, number: int, targets: ChunkTargets, layout: FlatLayout, indices: Sequence[int]) -> FoldedTeacher:
        """Fold a teacher's samples of a layout of whole samples, and the chunks of both."""
        from mcore_prefix_tree.xtoken.losses import ordered

        pairs = [targets.paired[number][index] for index in indices]
        exported = None if self.second_models.asked else Labelled.of(pairs)
        samples = [pair.teacher for pair in pairs] if exported is None else exported.samples
        of_teacher = fold(samples, trie=build_trie(samples, self.sharing), pad_to_multiple_of=self.pad_to_multiple_of)
        reads = self.settings.losses.reads
        chunks = ordered(fold_chunks(layout, of_teacher, pairs, keyed_by_tokens=reads.tokens))
        return FoldedTeacher(
            layout=of_teacher,
            rows=np.unique(of_teacher.predictor[of_teacher.loss_weight != 0]),
            chunks=chunks if exported is None else exported.spelled(chunks),
            per_chunk=targets.per_chunk(number),
            exported=exported,
        )

    def _taught(
        self,
        side: TeacherSide,
        folded: FoldedTeacher,
        chunks: Chunks,
        student_rows: Int64Array,
        device: torch.device | str,
    ) -> TaughtChunks:
        """Return a micro-batch's chunks; ``student_rows``, int64 ``[R + m]``, are the rows that the head is given."""
        from mcore_prefix_tree.xtoken.losses import KnownRows, cut_blocks

        exported, teacher_rows, known = folded.exported, folded.rows, None
        if exported is not None:
            teacher_rows = np.unique(chunks.teacher.rows)
            row = exported.row[folded.layout.input_ids[teacher_rows]]
            known = KnownRows(
                token_ids=upload(exported.token_ids[row].astype(np.int64), device),
                logprobs=upload(exported.logprobs[row], device),
            )
        blocks = cut_blocks(
            chunks,
            student_rows=student_rows,
            teacher_rows=teacher_rows,
            student_limit=self.block_rows or max(_LEAST_ROWS, _LOGITS // side.student_size),
            teacher_limit=self.block_rows or max(_LEAST_ROWS, _LOGITS // side.teacher_size),
            device=device,
        )
        return TaughtChunks(
            layout=folded.layout,
            blocks=tuple(blocks),
            weight=upload(chunks.weight, device),
            multiplicity=upload(chunks.multiplicity, device),
            first_sample=upload(chunks.first_sample, device),
            per_chunk=folded.per_chunk,
            known=known,
        )

    def value(
        self,
        lessons: Sequence[tuple[int, float]],
        terms: Sequence[torch.Tensor],
        logprob: torch.Tensor | None,
        rows: ChunkRows,
    ) -> LossOutput:
        """Return the weighted sum over a micro-batch.

        Args:
            lessons: each teacher's number, and the factor of the weighted sum of its terms.
            terms: ``[C]``, terms of each lesson.
            logprob: ``[E]``, log-probabilities of the scored tokens; None if CE is not part of the loss.
        """
        loss = terms[0].new_zeros(())
        metrics, bad = {}, []
        for (number, factor), of_teacher in zip(lessons, terms, strict=True):
            taught = rows.taught[number]
            total = torch.dot(of_teacher, taught.weight.to(of_teacher.dtype))
            loss = loss + factor * total
            name = kd_metric(number, len(lessons))
            metrics[name] = torch.stack([total.detach().double(), taught.multiplicity.sum()])
            bad.append(first_bad_sample(of_teacher, taught.first_sample))
        if logprob is not None:
            total = -torch.dot(logprob, rows.token_weight.to(logprob.dtype))
            loss = loss + self.settings.ce_weight * total
            count = torch.full((), rows.count, dtype=torch.float64, device=total.device)
            metrics["ce"] = torch.stack([total.detach().double(), count])
        return LossOutput(loss=loss, metrics=metrics, bad_sample=torch.stack(bad).amin())
