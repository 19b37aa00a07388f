"""Two toy tokenizers, samples in the student's tokens, and everything else that a distillation across them reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from harness.xtoken_problems import projection_of
from harness.xtoken_reference import Chunk
from xtoken_toys import Toy

from mcore_prefix_tree import Sample
from mcore_prefix_tree.objectives import TeacherSide
from mcore_prefix_tree.xtoken.losses import LossSettings
from mcore_prefix_tree.xtoken.pairs import Pair, Pairing

LETTERS = "abcdef"
BOTH = ["ab", "cd", "ef"]
ONLY_STUDENT = [a + b for a in "abc" for b in "abcdef" if a + b not in BOTH] + ["abc", "def", "fed"]
ONLY_TEACHER = [a + b for a in "def" for b in "abcdef" if a + b not in BOTH] + ["abcd", "cde", "faf"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """Tokenizers of a student and a teacher."""

    student: Any
    teacher: Any

    @cached_property
    def pairing(self) -> Pairing:
        """Makes pairs."""
        return Pairing(self.student, self.teacher)

    @cached_property
    def w(self) -> torch.Tensor:
        """W ``[V_s, V_t]``: the teacher's tokens of each student's token, the first the heavier."""
        found = torch.zeros(self.student.vocab_size, self.teacher.vocab_size, dtype=torch.float64)
        for token, piece in enumerate(self.student.pieces):
            ids = [token] if token < 2 else self.teacher.encode_text(piece)
            # Numbers that single precision has.
            for other, weight in zip(ids, {1: [1.0], 2: [0.75, 0.25], 3: [0.5, 0.25, 0.25]}[len(ids)], strict=True):
                found[token, other] += weight
        return found

    def side(self, settings: LossSettings) -> TeacherSide:
        """Return an objective's description of the teacher."""
        reads = settings.reads
        return TeacherSide(
            pairing=self.pairing,
            student_size=self.student.vocab_size,
            teacher_size=self.teacher.vocab_size,
            projection=projection_of(self.w) if reads.projection else None,
        )

    @cached_property
    def token_bytes(self) -> tuple[list[bytes | None], list[bytes | None]]:
        """Bytes of both vocabularies."""
        sides = [[None, None, *(piece.encode() for piece in toy.pieces[2:])] for toy in (self.student, self.teacher)]
        return sides[0], sides[1]


def texts() -> Texts:
    """Return two tokenizers that share letters and a few pairs."""
    return Texts(
        student=Toy([*LETTERS, *BOTH, *ONLY_STUDENT], name="student"),
        teacher=Toy([*LETTERS, *BOTH, *ONLY_TEACHER], name="teacher"),
    )


def samples(seed: int = 0) -> list[Sample]:
    """Branching texts in the student's tokens, with a duplicate, a strict prefix, masks, and a single token."""
    rng, toy = np.random.default_rng(seed), texts().student
    found: list[Sample] = []

    def grow(prefix: list[int], level: int) -> None:
        path = prefix + toy.encode_text("".join(rng.choice(list(LETTERS), size=int(rng.integers(4, 12)))))
        if level == 0 or rng.random() < 0.3:
            tokens = [0, *path, 1]
            mask = rng.choice([0.0, 0.5, 1.0], size=len(tokens), p=[0.15, 0.2, 0.65])
            found.append(Sample(tokens=tokens, loss_mask=mask, source=f"sample {len(found)}"))
        if level:
            for _ in range(2):
                grow(path, level - 1)

    grow([], 3)
    found.append(Sample(tokens=found[0].tokens, source="duplicate"))
    found.append(Sample(tokens=found[1].tokens[:6], source="strict prefix"))
    found.append(Sample(tokens=[0], source="one token"))
    found.append(Sample(tokens=found[3].tokens[:9], source="another prefix"))
    found.append(Sample(tokens=found[2].tokens, loss_mask=np.zeros(len(found[2])), source="nothing scored"))
    return found


def chunks_of_pairs(pairs: Sequence[Pair]) -> list[Chunk]:
    """Return the chunks of pairs whose samples follow each other, as the oracle takes them."""
    found, starts = [], [0, 0]
    for pair in pairs:
        found += [
            replace(
                chunk,
                student=tuple(row + starts[0] for row in chunk.student),
                teacher=tuple(row + starts[1] for row in chunk.teacher),
            )
            for chunk in chunks_of_pair(pair)
        ]
        starts = [starts[0] + len(pair.student), starts[1] + len(pair.teacher)]
    return found


def chunks_of_pair(pair: Pair) -> list[Chunk]:
    """Return a pair's chunks as the oracle takes them; rows are positions of the sample by itself."""
    found = []
    for ranges in zip(pair.alignment.student.tolist(), pair.alignment.teacher.tolist(), strict=True):
        tokens = [range(max(start, 1), stop) for start, stop in ranges]
        found.append(
            Chunk(
                student=tuple(t - 1 for t in tokens[0]),
                teacher=tuple(t - 1 for t in tokens[1]),
                student_tokens=tuple(pair.student.tokens[list(tokens[0])].tolist()),
                teacher_tokens=tuple(pair.teacher.tokens[list(tokens[1])].tolist()),
            )
        )
    return found
