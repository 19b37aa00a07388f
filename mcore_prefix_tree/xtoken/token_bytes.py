"""The exact bytes that each token of a vocabulary stands for.

Legend: V tokens of the vocabulary, n tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.chat import ChatTokenizer, DummySpace, Vocabulary

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

_SPACE = 0x20
_MARK = "\u2581"  # SentencePiece's mark for a space
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True, eq=False)
class Spelled:
    """The text of a token sequence."""

    data: Bytes  # uint8, the bytes of all tokens, one after another
    ends: Int64Array  # int64 [n]; token t ends before byte ends[t], and begins at the end of the previous token
    is_special: BoolArray  # bool [n], tokens that stand for no text

    @cached_property
    def starts(self) -> Int64Array:
        """Return int64 ``[n]``, the byte with which each token begins."""
        return np.concatenate([np.zeros(1, dtype=np.int64), self.ends[:-1]]) if len(self.ends) else self.ends

    def text(self, start: int, end: int) -> bytes:
        """Return the bytes of tokens ``start`` to ``end``, exclusive."""
        if start >= end:
            return b""
        return self.data[int(self.starts[start]) : int(self.ends[end - 1])].tobytes()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBytes:
    """Bytes that each token stands for."""

    name: str
    data: Bytes  # uint8, the bytes of all tokens in the order of their ids
    starts: Int64Array  # int64 [V + 1]; token i has data[starts[i]:starts[i + 1]]
    is_special: BoolArray  # bool [V], tokens that stand for no text
    special_names: dict[int, str]
    dummy_space: DummySpace = "never"  # position at which the tokenizer puts a space that is not in the text
    # bos, eos: ids of the tokens that begin a text and end a turn; None without one.
    bos: int | None = None
    eos: int | None = None
    merges: Sequence[str] = ()

    @property
    def vocab_size(self) -> int:
        """Return V."""
        return len(self.is_special)

    @cached_property
    def hash(self) -> str:
        """Return the SHA-256 of all bytes, special names and merges, in hexadecimal, equal wherever the files load."""
        digest = hashlib.sha256(b"mcore-prefix-tree vocabulary 1\n")
        digest.update(self.starts.astype("<i8").tobytes())
        digest.update(self.data.tobytes())
        for token, name in sorted(self.special_names.items()):
            digest.update(f"\n{token} {name}".encode())
        for pair in self.merges:
            digest.update(f"\nmerge {pair}".encode())
        return digest.hexdigest()

    def of(self, token: int) -> bytes:
        """Return the bytes of one token, a dummy space included; none for a special token."""
        return self.data[int(self.starts[token]) : int(self.starts[token + 1])].tobytes()

    def spell(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> Spelled:
        """Return the text of a token sequence, without the spaces that the tokenizer has put in front of texts.

        A token's bytes depend only on itself and on the token before it, so sequences that begin with the same tokens
        have texts that begin with the same bytes. ``tokens`` are ids ``[n]`` below V, from the beginning of a sequence
        on.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            at = int(np.argmax((ids < 0) | (ids >= self.vocab_size)))
            raise ValueError(
                f"token {ids[at]} at index {at} is not in the vocabulary of tokenizer '{self.name}', which has "
                f"{self.vocab_size} tokens"
            )
        is_special = self.is_special[ids]
        first = self.starts[ids]
        lengths = self.starts[ids + 1] - first
        dummy = self._dummies(first, lengths, is_special)
        first, lengths = first + dummy, lengths - dummy
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        return Spelled(
            data=self.data[np.repeat(first - (ends - lengths), lengths) + np.arange(total)],
            ends=ends,
            is_special=is_special,
        )

    def _dummies(self, first: Int64Array, lengths: Int64Array, is_special: BoolArray) -> Int64Array:
        """Return int64 ``[n]``, 1 for each token whose first byte is a space that is not in the text."""
        dummy = np.zeros(len(first), dtype=np.int64)
        if self.dummy_space == "never" or not len(first):
            return dummy
        begins = np.zeros(len(first), dtype=np.bool_)
        begins[0] = True
        if self.dummy_space == "always":
            begins[1:] = is_special[:-1]
        begins &= lengths > 0
        dummy[begins] = self.data[first[begins]] == _SPACE
        return dummy


def token_bytes(tokenizer: ChatTokenizer) -> TokenBytes:
    """Return the bytes that each token of a tokenizer stands for.

    Byte-level BPE writes bytes as the characters of GPT-2's table, SentencePiece writes text with U+2581 for a space
    and ``<0xNN>`` for a byte, and Tekken has the bytes themselves.

    Raises:
        ValueError: the tokenizer does not give its bytes; the message names the first token without them.
    """
    vocabulary = tokenizer.vocabulary()
    spelled = [_read_token_bytes(vocabulary, token, tokenizer.name) for token in range(len(vocabulary.pieces))]
    is_special = np.array([one is None for one in spelled], dtype=np.bool_)
    lengths = np.array([len(one or b"") for one in spelled], dtype=np.int64)
    names = {
        token: str(piece) for token, piece in enumerate(vocabulary.pieces) if is_special[token] and piece is not None
    }
    return TokenBytes(
        name=tokenizer.name,
        data=np.frombuffer(b"".join(one or b"" for one in spelled), dtype=np.uint8),
        starts=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]),
        is_special=is_special,
        special_names=names,
        dummy_space=vocabulary.dummy_space,
        bos=vocabulary.bos,
        eos=vocabulary.eos,
        merges=vocabulary.merges,
    )


def _read_token_bytes(vocabulary: Vocabulary, token: int, name: str) -> bytes | None:
    piece = vocabulary.pieces[token]
    if token in vocabulary.special or piece is None:
        return None
    if isinstance(piece, bytes):
        return piece
    if token in vocabulary.verbatim:
        return piece.encode()
    if vocabulary.spelling == "byte_level":
        table = _byte_of_character()
        try:
            return bytes(table[character] for character in piece)
        except KeyError as error:
            raise ValueError(
                f"tokenizer '{name}': token {token} ({piece!r}) has no bytes: {error.args[0]!r} is not in the byte "
                "table of byte-level BPE"
            ) from None
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_MARK, " ").encode()


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 characters are themselves, the other bytes follow from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
