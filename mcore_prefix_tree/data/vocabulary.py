"""Vocabularies: how a tokenizer spells each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# How pieces are written down: their bytes; GPT-2's characters for bytes; SentencePiece's text with marks.
Spelling = Literal["bytes", "byte_level", "sentencepiece"]

# Place of a space that a tokenizer adds to the text: before a sequence that begins with text, or also before the text
# after each control token.
DummySpace = Literal["never", "first", "always"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The tokens of a tokenizer, as its files write them.

    Attributes:
        pieces: piece of each token id; None for ids without a token.
        special: ids of control tokens, which stand for no text.
        verbatim: ids whose piece is its text, in any spelling (added tokens).
        dummy_space: places of spaces that the tokenizer adds to the text.
        bos, eos: ids of the token that begins a text, and of the one that ends a turn; None without one.
        merges: pairs of pieces that byte-pair encoding joins, in order, unless the pieces determine them.
    """

    pieces: Sequence[str | bytes | None]
    spelling: Spelling
    special: frozenset[int]
    verbatim: frozenset[int] = frozenset()
    dummy_space: DummySpace = "never"
    bos: int | None = None
    eos: int | None = None
    merges: Sequence[str] = ()
