"""Build a projection by writing each vocabulary's tokens in the other's.

Legend: V_s and V_t tokens of the student's and the teacher's vocabulary, E entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

import numpy as np

from mcore_prefix_tree.data.chat import ChatTokenizer
from mcore_prefix_tree.xtoken.projection import Entries, Projection, from_entries, with_exact_map
from mcore_prefix_tree.xtoken.reencode import TextEncoder
from mcore_prefix_tree.xtoken.token_bytes import token_bytes

# Weights of the tokens that write another: 0.9, then a tenth of the previous weight each.
_FIRST, _DECAY = 0.9, 0.1
# Similarity of names: this much by characters, the rest by words; and the weight of a mapping by name.
_BY_CHARACTERS, _BY_NAME = 0.6, 0.8
_PART = 4096


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """Settings of the building of a projection."""

    top_k: int = 32  # largest number of entries of a row
    tokens_kept: int = 4  # largest number of the other vocabulary's tokens that a token is written as
    reverse: bool = True  # whether to write the teacher's tokens in the student's, too
    # Least similarity of the names of two special tokens that are mapped; more than 1 maps none.
    special_similarity: float = 0.3

    def __post_init__(self) -> None:
        for name in ("top_k", "tokens_kept"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.special_similarity >= 0:
            raise ValueError(f"special_similarity={self.special_similarity} must be at least 0")


class Vocabularies:
    """Both tokenizers of a projection."""

    def __init__(self, student: ChatTokenizer, teacher: ChatTokenizer) -> None:
        """Read both vocabularies; raises ValueError for a tokenizer that does not give its bytes."""
        self.student, self.teacher = token_bytes(student), token_bytes(teacher)
        self._encoders = TextEncoder(student, self.student), TextEncoder(teacher, self.teacher)

    def build(
        self, settings: BuildSettings | None = None, *, progress: Callable[[int, int], None] | None = None
    ) -> Projection:
        """Build the projection; the same bits each time.

        A student's token is written in the teacher's tokens, the i-th of which gets a weight proportional to 0.9 *
        0.1**i; then the teacher's in the student's, and both add up. Special tokens are mapped by the similarity of
        their names. A token whose bytes are a part of a character has no text; only the exact map finds it.

        ``progress`` receives the tokens done and their total.
        """
        settings = settings or BuildSettings()
        found = []
        total = self.student.vocab_size + (self.teacher.vocab_size if settings.reverse else 0)
        done = 0
        for reverse, start, end in self._work(settings):
            found.append(self._written(start, end, settings.tokens_kept, reverse=reverse))
            done += end - start
            if progress is not None:
                progress(done, total)
        found.append(self._specials(settings))
        shape = self.student.vocab_size, self.teacher.vocab_size
        built = from_entries(Entries(*map(np.concatenate, zip(*found, strict=True))), shape, settings.top_k)
        return replace(built, student_hash=self.student.hash, teacher_hash=self.teacher.hash)

    def exact_map(self, projection: Projection) -> Projection:
        """Give each student's token that the teacher's vocabulary has as well the full weight of its row.

        The two have the same bytes, or are special tokens of the same name, or of the same role (begin of text, end of
        turn). If several of the teacher's tokens have the same bytes, it is the one that its tokenizer writes.

        Raises:
            ValueError: the projection belongs to other vocabularies.
        """
        if projection.columns.shape[0] != self.student.vocab_size:
            raise ValueError(
                f"the projection has {projection.columns.shape[0]} rows, but the student's tokenizer "
                f"'{self.student.name}' has {self.student.vocab_size} tokens"
            )
        teacher = self._teacher_by_bytes()
        pairs = {
            token: teacher[text]
            for token in np.flatnonzero(~self.student.is_special).tolist()
            if (text := self.student.of(token)) in teacher
        }
        names = {name: token for token, name in self.teacher.special_names.items()}
        pairs |= {token: names[name] for token, name in self.student.special_names.items() if name in names}
        for ours, theirs in ((self.student.bos, self.teacher.bos), (self.student.eos, self.teacher.eos)):
            if ours is not None and theirs is not None:
                pairs[ours] = theirs
        return with_exact_map(
            projection, np.array([*pairs], dtype=np.int64), np.array([*pairs.values()], dtype=np.int64)
        )

    def _teacher_by_bytes(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        several = set()
        for token in np.flatnonzero(~self.teacher.is_special).tolist():
            text = self.teacher.of(token)
            if found.setdefault(text, token) != token:
                several.add(text)
        for text in several:
            written = _behind(self._encoders[1], text)
            if written is not None and len(written) == 1:
                found[text] = written[0]
        return found

    def _work(self, settings: BuildSettings) -> Iterator[tuple[bool, int, int]]:
        for reverse in (False, True) if settings.reverse else (False,):
            size = (self.teacher if reverse else self.student).vocab_size
            for start in range(0, size, _PART):
                yield reverse, start, min(start + _PART, size)

    def _written(self, start: int, end: int, kept: int, *, reverse: bool) -> Entries:
        """Write the tokens ``start`` to ``end`` of one vocabulary in the other's."""
        source, target = (self.teacher, 0) if reverse else (self.student, 1)
        tokens: list[int] = []
        others: list[int] = []
        weights: list[float] = []
        for token in range(start, end):
            written = None if source.is_special[token] else _behind(self._encoders[target], source.of(token))
            if not written or self._encoders[target].table.is_special[written].any():
                continue
            written = written[:kept]
            tokens += [token] * len(written)
            others += written
            weights += shares(len(written))
        rows, columns = (others, tokens) if reverse else (tokens, others)
        return Entries(
            rows=np.array(rows, dtype=np.int32),
            columns=np.array(columns, dtype=np.int32),
            weights=np.array(weights, dtype=np.float64),
        )

    def _specials(self, settings: BuildSettings) -> Entries:
        found = similar_names(
            self.student.special_names, self.teacher.special_names, settings.special_similarity, settings.top_k
        )
        return Entries(
            rows=np.array([row for row, _, _ in found], dtype=np.int32),
            columns=np.array([column for _, column, _ in found], dtype=np.int32),
            weights=np.array([_BY_NAME * similarity for _, _, similarity in found], dtype=np.float64),
        )


def _behind(encoder: TextEncoder, raw: bytes) -> list[int] | None:
    try:
        return encoder.behind(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return None


def shares(count: int) -> list[float]:
    """Return the weights of ``count`` tokens that write one, which add up to 1."""
    weights = [_FIRST * _DECAY**i for i in range(count)]
    return [weight / sum(weights) for weight in weights]


def similar_names(
    student: Mapping[int, str], teacher: Mapping[int, str], least: float, top_k: int
) -> list[tuple[int, int, float]]:
    """Map special tokens (names by id) to those of similar names: token, token, and similarity from ``least`` to 1.

    The similarity is 0.6 times difflib's ratio of the characters plus 0.4 times the share of common words of more than
    two letters. A student's token has ``top_k`` mappings at most; among equal similarities, the lower ids.
    """
    of_token: dict[int, list[tuple[int, int, float]]] = {token: [] for token in student}
    words = {token: _words(name) for token, name in student.items()}
    matcher = SequenceMatcher()
    for other, other_name in teacher.items():
        theirs = _words(other_name)
        matcher.set_seq2(other_name)  # the costly one of the two
        for token, name in student.items():
            both = words[token] | theirs
            by_words = (1 - _BY_CHARACTERS) * (len(words[token] & theirs) / len(both) if both else 0.0)
            matcher.set_seq1(name)
            if by_words + _BY_CHARACTERS * matcher.quick_ratio() < least:
                continue
            similarity = by_words + _BY_CHARACTERS * matcher.ratio()
            if similarity >= least:
                of_token[token].append((token, other, similarity))
    return [
        mapping
        for mappings in of_token.values()
        for mapping in sorted(mappings, key=lambda one: (-one[2], one[1]))[:top_k]
    ]


def _words(name: str) -> frozenset[str]:
    return frozenset(word for word in re.sub("[<>|_]", " ", name.lower()).split() if len(word) > 2)
