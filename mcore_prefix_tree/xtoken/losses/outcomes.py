"""Outcomes of a chunk of several tokens for partition-KL, found by the bytes of tokens on the host.

Legend: C chunks of a block, D of these of one token on both sides, O outcomes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mcore_prefix_tree.utils.upload import upload
from mcore_prefix_tree.xtoken.fold import Chunks

TokenBytes = Sequence[bytes | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcomes:
    """The outcomes of a block's chunks that have several tokens on a side.

    Attributes:
        single: int64 ``[D]``, the chunks of one token on both sides.
        chunk: int64 ``[O]``, chunk that each outcome belongs to.
        student: int64 ``[O]``, the student's last token.
        teacher: int64 ``[O]``, the teacher's last token.
    """

    single: torch.Tensor
    chunk: torch.Tensor
    student: torch.Tensor
    teacher: torch.Tensor


class Endings:
    """Finds outcomes by the exact bytes of both vocabularies' tokens by id, None for special tokens; on the host."""

    def __init__(self, student: TokenBytes, teacher: TokenBytes) -> None:
        self._bytes = student, teacher
        # Of tokens with the same bytes, the lowest id.
        self._id = tuple(
            {text: token for token, text in reversed(list(enumerate(side))) if text} for side in self._bytes
        )
        self._sorted = tuple(sorted(side) for side in self._id)
        self._known: dict[tuple[int, bytes], list[tuple[int, int]]] = {}

    def of_block(self, chunks: Chunks, part: slice, device: torch.device | str = "cpu") -> Outcomes:
        """Return the outcomes of some of a micro-batch's chunks."""
        single, chunk, pairs = [], [], []
        for number, at in enumerate(range(part.start, part.stop)):
            tokens = [
                side.tokens[side.starts[at] : side.starts[at + 1]].tolist() for side in (chunks.student, chunks.teacher)
            ]
            if len(tokens[0]) == len(tokens[1]) == 1:
                single.append(number)
                continue
            ends = self._ends(*tokens)
            chunk += [number] * len(ends)
            pairs += ends
        found = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        return Outcomes(
            single=upload(np.asarray(single, dtype=np.int64), device),
            chunk=upload(np.asarray(chunk, dtype=np.int64), device),
            student=upload(found[:, 0], device),
            teacher=upload(found[:, 1], device),
        )

    def _ends(self, student: list[int], teacher: list[int]) -> list[tuple[int, int]]:
        if len(student) > 1 and len(teacher) > 1:
            return [(student[-1], teacher[-1])]
        long = 0 if len(student) > 1 else 1
        texts = [self._bytes[long][token] for token in (student, teacher)[long][:-1]]
        assert None not in texts, "tokens of a chunk have bytes"
        prefix = b"".join(text for text in texts if text is not None)
        if (long, prefix) not in self._known:
            self._known[long, prefix] = self._ends_after(prefix, long)
        return self._known[long, prefix]

    def _ends_after(self, prefix: bytes, long: int) -> list[tuple[int, int]]:
        """Return pairs (student, teacher) of a token of the other side that begins with a prefix, and the rest."""
        other, found = 1 - long, []
        for text in self._sorted[other][bisect_left(self._sorted[other], prefix) :]:
            if not text.startswith(prefix):
                break
            end = self._id[long].get(text[len(prefix) :])
            if end is not None:
                whole = self._id[other][text]
                found.append((end, whole) if long == 0 else (whole, end))
        return found
