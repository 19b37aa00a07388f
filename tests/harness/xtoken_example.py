"""The worked example of cross-tokenizer distillation: two vocabularies, one text, both models' rows.

The student has the tokens a, b, 12 and eos; the teacher a, b, 1, 2 and eos. The text is "a12b".
"""

from __future__ import annotations

import torch

from harness.xtoken_reference import Chunk

STUDENT_BYTES: list[bytes | None] = [b"a", b"b", b"12", None]
TEACHER_BYTES: list[bytes | None] = [b"a", b"b", b"1", b"2", None]
W = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 10 / 11, 1 / 11, 0], [0, 0, 0, 0, 1]], dtype=torch.float64)
STUDENT = torch.tensor(
    [[0.1, 0.2, 0.6, 0.1], [0.2, 0.5, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64
).log()
TEACHER = torch.tensor(
    [[0.1, 0.2, 0.5, 0.1, 0.1], [0.05, 0.05, 0.1, 0.7, 0.1], [0.1, 0.6, 0.1, 0.1, 0.1], [0.2] * 5],
    dtype=torch.float64,
).log()
# The first token has no predictor, so neither has its chunk.
CHUNKS = (
    Chunk(student=(0,), teacher=(0, 1), student_tokens=(2,), teacher_tokens=(2, 3)),
    Chunk(student=(1,), teacher=(2,), student_tokens=(1,), teacher_tokens=(1,)),
)
