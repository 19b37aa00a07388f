"""Rows of a teacher that the samples bring with them, in place of the teacher's model.

Rows of one path may differ: a teacher that was run in two batches can differ in its last digits. So samples are also
folded by the content of their rows: a path is shared as far as the teacher's tokens and all rows on it are equal.

Legend: m teacher tokens of a sample, M of all samples of a micro-batch, L labels, A different rows, k tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import Teacher
from mcore_prefix_tree.xtoken.fold import Chunks, unique_rows
from mcore_prefix_tree.xtoken.pairs import Pair
from mcore_prefix_tree.xtoken.token_bytes import Int64Array, TokenBytes

EXPORT = "`mcore-prefix-tree xtoken export-teacher` writes them"


def make_teacher_rows(pair: Pair, table: TokenBytes) -> Teacher | None:
    """Return a sample's rows, None for a sample without chunks; ``table`` has the bytes of the teacher's vocabulary.

    Raises:
        SampleError: rows are missing, or belong to another tokenizer or another text; the message names the sample.
    """
    teacher, source = pair.student.signals.teacher, pair.student.source
    if not len(pair):
        return None
    if teacher is None:
        raise SampleError(f"{source}: field 'teacher' is missing, whose rows teacher=top_k reads; {EXPORT}")
    if teacher.tokens is None or teacher.realised is None:
        raise SampleError(f"{source}: field 'teacher' has rows only for the sample's own tokens; {EXPORT}")
    if teacher.tokenizer != table.hash:
        raise SampleError(
            f"{source}: field 'teacher' was exported with another tokenizer (hash {str(teacher.tokenizer)[:12]}) than "
            f"'{table.name}' ({table.hash[:12]}), which the teacher's recipe names; export the rows again"
        )
    own = pair.teacher.tokens
    size = min(len(own), len(teacher.tokens))
    differ = np.flatnonzero(own[:size] != teacher.tokens[:size])
    if len(differ) or len(own) != len(teacher.tokens):
        at = int(differ[0]) if len(differ) else size
        raise SampleError(
            f"{source}: field 'teacher' was exported for another text: it differs from the sample's in the teacher's "
            f"tokens first at token {at}; export the rows of these samples"
        )
    scored = pair.teacher.loss_mask != 0
    scored[:1] = False
    missing = np.flatnonzero(scored & ~np.isfinite(teacher.realised))
    if len(missing):
        raise SampleError(
            f"{source}: field 'teacher' has no row for the teacher's token {missing[0]}, which is in a chunk; export "
            "the rows again, with this loss mask and aligner"
        )
    beyond = np.flatnonzero(scored & (teacher.token_ids >= table.vocab_size).any(axis=1))
    if len(beyond):
        raise SampleError(
            f"{source}: field 'teacher' has a token at index {beyond[0]} outside the {table.vocab_size} tokens of "
            f"'{table.name}'; export the rows again"
        )
    return teacher


@dataclass(frozen=True, kw_only=True, eq=False)
class Labelled:
    """The teacher's samples of a micro-batch with labels in place of tokens.

    A label stands for a token, its log-probability and the row that predicts the next token. Layouts of the labelled
    samples so share paths with equal rows, and their flat indices name rows.
    """

    samples: list[Sample]
    token: Int64Array  # int64 [L], the token that each label stands for
    realised: npt.NDArray[np.float64]  # float64 [L], its log-probability; NaN if it is in no chunk
    row: Int64Array  # int64 [L], index of the row that predicts the next token; -1 for none
    token_ids: npt.NDArray[np.int32]  # int32 [A, k], token ids of the different rows
    logprobs: npt.NDArray[np.floating]  # [A, k], their log-probabilities

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Labelled:
        """Label the samples of some pairs, whose rows :func:`make_teacher_rows` has checked; all have the same k."""
        known: dict[tuple[bytes, bytes], tuple[int, Teacher, int]] = {}
        tokens, realised, following = [], [], []
        for pair in pairs:
            teacher, length = pair.student.signals.teacher, len(pair.teacher)
            said, after = np.full(length, np.nan), np.full(length, -1, dtype=np.int64)
            if len(pair):
                assert teacher is not None, "checked with the step"
                assert teacher.realised is not None, "checked with the step"
                scored = np.flatnonzero(pair.teacher.loss_mask[1:]) + 1
                said[scored] = teacher.realised[scored]
                for at in scored.tolist():
                    answer = teacher.token_ids[at].tobytes(), teacher.logprobs[at].tobytes()
                    after[at - 1] = known.setdefault(answer, (len(known), teacher, at))[0]
            tokens.append(pair.teacher.tokens)
            realised.append(said)
            following.append(after)
        token: Int64Array = np.concatenate([np.empty(0, dtype=np.int64), *tokens])
        logprob = np.concatenate([np.empty(0), *realised])
        row: Int64Array = np.concatenate([np.empty(0, dtype=np.int64), *following])
        # NaN is equal to itself here.
        first, label, _ = unique_rows([token, np.unique(logprob, return_inverse=True)[1], row + 1])
        starts = np.cumsum([0, *(len(pair.teacher) for pair in pairs)]).tolist()
        answers = [(teacher.token_ids[at], teacher.logprobs[at]) for _, teacher, at in known.values()]
        return cls(
            samples=[
                replace(pair.teacher, tokens=label[start:stop].astype(np.int32))
                for pair, (start, stop) in zip(pairs, pairwise(starts), strict=True)
            ],
            token=token[first],
            realised=logprob[first],
            row=row[first],
            token_ids=np.stack([ids for ids, _ in answers]) if answers else np.empty((0, 1), dtype=np.int32),
            logprobs=np.stack([logprobs for _, logprobs in answers]) if answers else np.empty((0, 1)),
        )

    def spelled(self, chunks: Chunks) -> Chunks:
        """Return chunks with the teacher's tokens and their log-probabilities in place of labels."""
        labels = chunks.teacher.tokens
        side = replace(chunks.teacher, tokens=self.token[labels].astype(np.int32), realised=self.realised[labels])
        return replace(chunks, teacher=side)
