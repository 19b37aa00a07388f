"""Text of one tokenizer in the tokens of another."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.chat import ChatTokenizer
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.xtoken.token_bytes import Spelled, TokenBytes

# Texts after which a tokenizer does not put its dummy space, tried in order.
_CONTEXTS = ("\n", ":", "0")
# Turns of one conversation repeat their history.
_TEXTS_KEPT = 4096


class TextEncoder:
    """Encodes separate text, and text that continues another."""

    def __init__(self, tokenizer: ChatTokenizer, table: TokenBytes) -> None:
        """Take a tokenizer and ``table``, the bytes of its tokens."""
        self._tokenizer, self.table = tokenizer, table
        self._contexts = [(context, tokenizer.encode_text(context)) for context in _CONTEXTS if self._has_dummy]

    @property
    def _has_dummy(self) -> bool:
        return self.table.dummy_space != "never"

    def alone(self, text: str) -> list[int]:
        """Return the token ids of a text that follows a control token or nothing."""
        return self._tokenizer.encode_text(text)

    def behind(self, text: str) -> list[int] | None:
        """Return a continuation's token ids, without a dummy space; None if they depend on the text before."""
        if not self._has_dummy:
            return self._tokenizer.encode_text(text)
        for context, before in self._contexts:
            ids = self._tokenizer.encode_text(context + text)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return None


class Reencoder:
    """Writes a student's samples in a teacher's tokens."""

    def __init__(self, student: TokenBytes, tokenizer: ChatTokenizer, teacher: TokenBytes) -> None:
        """Take the student's token bytes, and the teacher's tokenizer and token bytes."""
        self._encoder = TextEncoder(tokenizer, teacher)
        ids = {name: token for token, name in teacher.special_names.items()}
        self._specials = {token: ids[name] for token, name in student.special_names.items() if name in ids}
        for ours, theirs in ((student.bos, teacher.bos), (student.eos, teacher.eos)):
            if ours is not None and theirs is not None:
                self._specials[ours] = theirs
        self._encode_text = lru_cache(maxsize=_TEXTS_KEPT)(self._encoded)

    def encode(self, sample: Sample, spelled: Spelled) -> tuple[npt.NDArray[np.int32], list[tuple[int, int]]]:
        """Return the teacher's tokens of a student's sample, int32 ``[m]``, and index pairs of common special tokens.

        Raises:
            SampleError: some text is not UTF-8, or nothing is left; the message names the sample and the token.
        """
        tokens: list[int] = []
        specials: list[tuple[int, int]] = []
        start = 0
        for at in [*np.flatnonzero(spelled.is_special).tolist(), len(sample)]:
            special = None if at == len(sample) else self._specials.get(int(sample.tokens[at]))
            # A special token that the teacher lacks leaves the text around it in one piece.
            if special is None and at < len(sample):
                continue
            tokens += self._piece(sample, spelled, start, at, is_first=not tokens)
            start = at + 1
            if special is not None:
                specials.append((at, len(tokens)))
                tokens.append(special)
        if not tokens:
            raise SampleError(f"{sample.source}: has no text and no special token that the teacher's tokenizer knows")
        return np.array(tokens, dtype=np.int32), specials

    def _piece(self, sample: Sample, spelled: Spelled, start: int, end: int, *, is_first: bool) -> tuple[int, ...]:
        raw = spelled.text(start, end)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = int(spelled.starts[start]) + error.start
            at = int(np.searchsorted(spelled.ends, byte, side="right"))
            raise SampleError(
                f"{sample.source}: token {at} (id {int(sample.tokens[at])}) has bytes that are not UTF-8 "
                f"({raw[error.start : error.end]!r}), which the teacher's tokenizer cannot encode; drop the sample"
            ) from None
        found = self._encode_text(text, is_first or self._encoder.table.dummy_space == "always")
        if found is None:
            raise SampleError(
                f"{sample.source}: the teacher's tokenizer '{self._encoder.table.name}' cannot continue a "
                f"sequence with the text at token {start}; drop the sample"
            )
        return found

    def _encoded(self, text: str, is_by_itself: bool) -> tuple[int, ...] | None:
        if not text:
            return ()
        ids = self._encoder.alone(text) if is_by_itself else self._encoder.behind(text)
        return None if ids is None else tuple(ids)
