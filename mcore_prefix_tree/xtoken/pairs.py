"""Pairs: a sample in the student's tokens, the same text in the teacher's, and the chunks that both have.

Legend: n student tokens, m teacher tokens, C chunks of a pair, R runs of selected tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.chat import ChatTokenizer
from mcore_prefix_tree.data.files import PathLike, no_samples, read_records, resolve_paths
from mcore_prefix_tree.data.records import LineOptions, samples_of_record
from mcore_prefix_tree.data.skipped import Skipped, check_on_error
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.utils.choices import Aligner, OnError, Rendering
from mcore_prefix_tree.xtoken.align import Alignment, align_ends, first_difference, merged_ranges
from mcore_prefix_tree.xtoken.dynamic import align_dynamic
from mcore_prefix_tree.xtoken.reencode import Reencoder
from mcore_prefix_tree.xtoken.token_bytes import BoolArray, Int64Array, Spelled, TokenBytes, token_bytes

_MISFIT = "render both with the student's chat format, or choose tokenizers whose formats write the same text"


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One sample for both models."""

    student: Sample
    # Sample in the teacher's tokens, with the student's merge key; its loss mask is 1 for the tokens of chunks.
    teacher: Sample
    alignment: Alignment  # valid chunks: all student tokens are scored, and both sides have a token with a predictor
    weight: npt.NDArray[np.float64]  # float64 [C], the mean loss mask of each chunk's student tokens

    def __len__(self) -> int:
        return len(self.alignment)


class Pairing:
    """Makes pairs for two tokenizers."""

    def __init__(
        self,
        student: ChatTokenizer,
        teacher: ChatTokenizer,
        *,
        aligner: Aligner = "bytes",
        teacher_limits: Mapping[str, int] | None = None,
    ) -> None:
        """Read both vocabularies.

        ``aligner`` ``bytes`` is exact and prefix-causal; ``dynamic`` also aligns text that the tokenizers normalise
        differently, and omits text that it cannot align. ``teacher_limits`` are limits of the teacher's tokens, by
        setting.

        Raises:
            ValueError: a tokenizer does not give its bytes; or ``aligner`` is neither.
        """
        if aligner not in get_args(Aligner):
            raise ValueError(f"aligner={aligner!r} must be one of {', '.join(map(repr, get_args(Aligner)))}")
        self.aligner, self._teacher_limits = aligner, dict(teacher_limits or {})
        self.student_tokenizer, self.teacher_tokenizer = student, teacher
        self.student: TokenBytes = token_bytes(student)
        self.teacher: TokenBytes = token_bytes(teacher)
        self._reencoder = Reencoder(self.student, teacher, self.teacher)

    def of(self, student: Sample, number: int = 0) -> Pair:
        """Pair a student's sample with its rendering of this number, or with its own text in the teacher's tokens.

        Raises:
            SampleError: see :meth:`pair` and :meth:`reencode`; or the teacher cannot read as many tokens.
        """
        pair = self.pair(student, student.renderings[number]) if student.renderings else self.reencode(student)
        for name, limit in self._teacher_limits.items():
            if len(pair.teacher) > limit:
                raise SampleError(
                    f"{student.source}: the sample has {len(pair.teacher)} of the teacher's tokens, but {name} is "
                    f"{limit}; raise {name} or shorten the sample"
                )
        return pair

    def pair(self, student: Sample, teacher: Sample) -> Pair:
        """Align a conversation that each side has encoded with its own chat format.

        Text between scored tokens may differ; the k-th run of scored tokens must have the same text on both sides. If
        both end with their tokenizer's end of turn, these two tokens are a chunk as well.

        Raises:
            SampleError: the runs differ; the message names the sample and the first token that does.
        """
        sides = _Side.of(student, self.student, "student"), _Side.of(teacher, self.teacher, "teacher")
        counts = [len(side.runs) for side in sides]
        if counts[0] != counts[1]:
            raise SampleError(
                f"{student.source}: has {counts[0]} scored runs in the chat format of the student's tokenizer "
                f"'{self.student.name}' and {counts[1]} in that of the teacher's, '{self.teacher.name}'; {_MISFIT}"
            )
        ends = [
            (int(s_end) - 1, int(t_end) - 1)
            for (_, s_end), (_, t_end) in zip(sides[0].runs, sides[1].runs, strict=True)
            if sides[0].is_eos(s_end - 1) and sides[1].is_eos(t_end - 1)
        ]
        return self._pair(sides[0], sides[1], ends, teacher, _MISFIT)

    def reencode(self, student: Sample) -> Pair:
        """Encode the text of a student's sample with the teacher's tokenizer.

        The teacher reads the text of the student's tokens: the text between special tokens is encoded anew, a special
        token becomes the teacher's of the same name, or of the same role (begin of text, end of turn), and is omitted
        if the teacher has neither.

        Raises:
            SampleError: the text is not UTF-8, or the teacher's tokenizer changes it; the message names the sample and
                the token.
        """
        spelled = _Side.spell(student, self.student, "student")
        tokens, specials = self._reencoder.encode(student, spelled)
        unmasked = Sample(
            tokens=tokens, loss_mask=np.ones(len(tokens)), merge_key=student.merge_key, source=student.source
        )
        everything = np.ones(len(student), dtype=np.bool_)
        sides = (
            _Side(sample=student, table=self.student, spelled=spelled, selected=everything),
            _Side(
                sample=unmasked,
                table=self.teacher,
                spelled=_Side.spell(unmasked, self.teacher, "teacher"),
                selected=np.ones(len(tokens), dtype=np.bool_),
            ),
        )
        ends = [(s, t) for s, t in specials if sides[0].is_eos(s) and sides[1].is_eos(t)]
        return self._pair(sides[0], sides[1], ends, unmasked, "align with the dynamic aligner")

    def _pair(
        self, student: _Side, teacher: _Side, ends: list[tuple[int, int]], teacher_sample: Sample, way_out: str
    ) -> Pair:
        if self.aligner == "bytes":
            _check_texts(student, teacher, way_out)
            found = align_ends(student.ends, teacher.ends, student.has_text, teacher.has_text)
        else:
            found = merged_ranges(
                [
                    _align_run(student, teacher, s_run, t_run)
                    for s_run, t_run in zip(student.runs.tolist(), teacher.runs.tolist(), strict=True)
                ]
            )
        if ends:
            pairs = np.array(ends, dtype=np.int64)
            found = merged_ranges([found, Alignment(student=_single(pairs[:, 0]), teacher=_single(pairs[:, 1]))])
            order = np.argsort(found.student[:, 0], kind="stable")
            found = Alignment(student=found.student[order], teacher=found.teacher[order])
        # Nothing predicts the first token of a sequence.
        found = found.keep((found.student[:, 1] > 1) & (found.teacher[:, 1] > 1))
        mask = student.sample.loss_mask.astype(np.float64)
        scored = _sums(mask != 0, found.student) == found.student[:, 1] - found.student[:, 0]
        found = found.keep(scored)
        teacher_mask = np.zeros(len(teacher_sample) + 1)
        np.add.at(teacher_mask, found.teacher[:, 0], 1.0)
        np.add.at(teacher_mask, found.teacher[:, 1], -1.0)
        return Pair(
            student=student.sample,
            teacher=Sample(
                tokens=teacher_sample.tokens,
                loss_mask=np.cumsum(teacher_mask)[:-1],
                merge_key=student.sample.merge_key,
                source=student.sample.source,
            ),
            alignment=found,
            weight=_sums(mask, found.student) / (found.student[:, 1] - found.student[:, 0]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Side:
    """One model's tokens, and which of them are aligned."""

    sample: Sample
    table: TokenBytes
    spelled: Spelled
    selected: BoolArray

    @classmethod
    def of(cls, sample: Sample, table: TokenBytes, side: str) -> _Side:
        return cls(sample=sample, table=table, spelled=cls.spell(sample, table, side), selected=sample.loss_mask != 0)

    @staticmethod
    def spell(sample: Sample, table: TokenBytes, side: str) -> Spelled:
        try:
            return table.spell(sample.tokens)
        except ValueError as error:
            raise SampleError(f"{sample.source}: {error}; use the {side}'s own tokenizer") from None

    @cached_property
    def has_text(self) -> BoolArray:
        return self.selected & ~self.spelled.is_special

    @cached_property
    def lengths(self) -> Int64Array:
        return (self.spelled.ends - self.spelled.starts) * self.selected

    @cached_property
    def ends(self) -> Int64Array:
        """Return int64 ``[n]``, end of each token in the text of the selected ones."""
        return np.cumsum(self.lengths)

    @cached_property
    def runs(self) -> Int64Array:
        """Return int64 ``[R, 2]``, first token and end of each maximal run of selected tokens."""
        edges = np.flatnonzero(np.diff(self.selected.astype(np.int8), prepend=0, append=0))
        return edges.reshape(-1, 2)

    def is_eos(self, token: int) -> bool:
        return self.table.eos is not None and int(self.sample.tokens[token]) == self.table.eos

    def shown(self, byte: int, run: tuple[int, int]) -> str:
        """Name the token of a run that has a byte of the run's text, for messages."""
        start, end = run
        at = start + int(np.searchsorted(self.spelled.ends[start:end], int(self.spelled.starts[start]) + byte, "right"))
        if at >= end:
            return f"the end of the turn at token {end}"
        text = self.spelled.text(at, at + 1).decode("utf-8", "replace")
        return f"token {at} ({text!r}, id {int(self.sample.tokens[at])})"


def _check_texts(student: _Side, teacher: _Side, way_out: str) -> None:
    """Raise SampleError unless the selected runs have the same texts."""
    for s_run, t_run in zip(student.runs.tolist(), teacher.runs.tolist(), strict=True):
        texts = [
            np.frombuffer(side.spelled.text(*run), dtype=np.uint8) for side, run in ((student, s_run), (teacher, t_run))
        ]
        byte = first_difference(*texts)
        if byte is not None:
            raise SampleError(
                f"{student.sample.source}: the text differs between the student's tokenizer "
                f"'{student.table.name}' and the teacher's, '{teacher.table.name}', first at "
                f"{student.shown(byte, s_run)} and {teacher.shown(byte, t_run)}; {way_out}"
            )


def _align_run(student: _Side, teacher: _Side, s_run: list[int], t_run: list[int]) -> Alignment:
    """Align one run dynamically; a chunk that a token without text interrupts is omitted."""
    index, texts = [], []
    for side, (start, end) in ((student, s_run), (teacher, t_run)):
        tokens = start + np.flatnonzero(side.has_text[start:end])
        index.append(tokens)
        texts.append([side.spelled.text(token, token + 1) for token in tokens.tolist()])
    found = align_dynamic(texts[0], texts[1])
    if not len(found):
        return found
    ranges, whole = [], np.ones(len(found), dtype=np.bool_)
    for tokens, chunks in zip(index, (found.student, found.teacher), strict=True):
        exact = np.stack([tokens[chunks[:, 0]], tokens[chunks[:, 1] - 1] + 1], axis=1)
        whole &= np.diff(exact)[:, 0] == np.diff(chunks)[:, 0]
        ranges.append(exact)
    return Alignment(student=ranges[0], teacher=ranges[1]).keep(whole)


def _single(tokens: Int64Array) -> Int64Array:
    """Return ranges ``[C, 2]`` of single tokens ``[C]``."""
    return np.stack([tokens, tokens + 1], axis=1)


def _sums(values: npt.NDArray[np.float64] | BoolArray, ranges: Int64Array) -> npt.NDArray[np.float64]:
    """Sum ``values [n]`` over each range of ``ranges [C, 2]``; the ranges are in order and do not overlap."""
    if not len(ranges):
        return np.zeros(0)
    # Every second sum covers the values between two ranges.
    sums: npt.NDArray[np.float64] = np.add.reduceat(np.append(values.astype(np.float64), 0.0), ranges.reshape(-1))
    return sums[::2]


# The chat format that the teacher reads: its own, or the student's in its own tokens.


def iter_pairs(
    paths: PathLike | Iterable[PathLike],
    pairing: Pairing,
    *,
    rendering: Rendering = "student",
    expand_turns: bool = False,
    on_error: OnError = "raise",
    skipped: Skipped | None = None,
) -> Iterator[list[Pair]]:
    """Yield the pairs of one record after another; see :func:`mcore_prefix_tree.data.iter_sample_groups`.

    ``rendering`` is the text that the teacher reads: ``student`` gives it the text that the student reads; ``own``
    encodes ``messages`` with each side's own chat format. Records of ``tokens`` always take the first way.

    Raises:
        SampleError: bad data, text that cannot be aligned, or empty files. Under ``skip`` only the last.
        ValueError: ``rendering`` or ``on_error`` is none of the choices.
    """
    check_on_error(on_error)
    if rendering not in get_args(Rendering):
        raise ValueError(f"rendering={rendering!r} must be one of {', '.join(map(repr, get_args(Rendering)))}")
    options = LineOptions(
        tokenizer=pairing.student_tokenizer,
        expand_turns=expand_turns,
        vocab_size=pairing.student.vocab_size,
        renderings=[pairing.teacher_tokenizer] if rendering == "own" else [],
    )
    left_out = Skipped() if skipped is None else skipped
    bad = left_out if on_error == "skip" else None
    resolved = resolve_paths(paths)
    empty = True
    for path in resolved:
        for record in read_records(path):
            samples = samples_of_record(record, options, bad, left_out=left_out)
            pairs = [pair for sample in samples if (pair := _pair_or_skip(pairing, sample, bad)) is not None]
            if pairs:
                yield pairs
                empty = False
    if empty:
        raise no_samples(resolved, left_out)


def _pair_or_skip(pairing: Pairing, sample: Sample, skipped: Skipped | None) -> Pair | None:
    try:
        return pairing.of(sample)
    except SampleError as error:
        if skipped is None:
            raise
        skipped.add(error, "malformed")
        return None
