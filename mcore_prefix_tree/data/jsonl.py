"""Samples from JSON Lines: one JSON object a line, holding tokens or chat messages."""

from __future__ import annotations

import glob
import gzip
import json
import math
import os
import sys
import warnings
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.chat import ChatError, ChatTokenizer, parse_messages
from mcore_prefix_tree.data.signal_fields import signals_of_conversation, signals_of_tokens, signals_of_turns
from mcore_prefix_tree.data.skipped import OnError, Skipped, check_on_error
from mcore_prefix_tree.sample import INT32_MAX, Sample, SampleError, Tempered

STDIN = "-"

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """What a line's samples depend on beside the line.

    Attributes:
        tokenizer: encodes ``messages``; data that is all ``tokens`` needs none.
        expand_turns: a sample for every assistant turn, with its whole history as prefix and only that turn scored,
            instead of one sample a conversation with every turn scored. They are the turns of one rollout: its reward
            counts once.
        vocab_size: token ids have to be below; that of the model.
        limits: most tokens that a sample may have, by the name of the setting that says so (``batch.max_tokens``).
    """

    tokenizer: ChatTokenizer | None = None
    expand_turns: bool = False
    vocab_size: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict)


def read_samples(
    paths: PathLike | Iterable[PathLike],
    *,
    tokenizer: ChatTokenizer | None = None,
    expand_turns: bool = False,
    vocab_size: int | None = None,
    limits: Mapping[str, int] | None = None,
    on_error: OnError = "raise",
    skipped: Skipped | None = None,
) -> list[Sample]:
    """All samples of all files, in order. See ``iter_sample_groups``."""
    groups = iter_sample_groups(
        paths,
        tokenizer=tokenizer,
        expand_turns=expand_turns,
        vocab_size=vocab_size,
        limits=limits,
        on_error=on_error,
        skipped=skipped,
    )
    return list(chain.from_iterable(groups))


def iter_sample_groups(
    paths: PathLike | Iterable[PathLike],
    *,
    tokenizer: ChatTokenizer | None = None,
    expand_turns: bool = False,
    vocab_size: int | None = None,
    limits: Mapping[str, int] | None = None,
    on_error: OnError = "raise",
    skipped: Skipped | None = None,
) -> Iterator[list[Sample]]:
    """The samples of one line after another. Whoever shuffles, shuffles these lists: a line's turns share its prefix.

    A line is ``{"tokens": [...]}`` with an optional ``loss_mask``, or ``{"messages": [...]}`` in the shape that
    ``parse_messages`` describes; either with an optional ``merge_key`` (string, number, boolean or null) and the fields
    of :class:`~mcore_prefix_tree.signals.Signals` under their own names (``reward``, ``group``, ``old_logprobs``, ...;
    those with an entry for each token go with ``tokens``). Other keys are ignored and blank lines are skipped.

    Of a conversation, the tokens that the assistant generated have mask 1 (text, tool calls, end of turn), all others
    0. What follows the last assistant turn is left out: nothing scored depends on it. ``tokens`` lines always are one
    sample.

    Args:
        paths: one or several of: a file (``.gz`` is unpacked), a glob (sorted), ``-`` for standard input.
        tokenizer: as in :class:`LineOptions`, like the next three.
        expand_turns: the same.
        vocab_size: the same.
        limits: the same.
        on_error: ``"raise"`` ends at the first bad line. ``"skip"`` leaves out what cannot be used and nothing else:
            a line that cannot be read or encoded, or a single turn of one that is too long.
        skipped: counts what was left out; without it, a warning at the end says so.

    Yields:
        lists of at least one sample; ``source`` is ``path:line``, or ``path:line turn k`` (from 0) if expanded.

    Raises:
        SampleError: for bad data; one sentence with file, line, field and the way out. Also under ``"skip"``, if a file
            cannot be read or nothing is left.
        ValueError: for another ``on_error``.
    """
    check_on_error(on_error)
    options = LineOptions(tokenizer=tokenizer, expand_turns=expand_turns, vocab_size=vocab_size, limits=limits or {})
    left_out = Skipped()
    resolved = resolve_paths(paths)
    empty = True
    for path in resolved:
        for source, line in _lines(path):
            samples = samples_of_line(line, source, options, left_out if on_error == "skip" else None)
            if samples:
                yield samples
                empty = False
    if empty:
        raise no_samples(resolved, left_out)
    if skipped is not None:
        skipped.merge(left_out)
    elif left_out.count:
        warnings.warn(str(left_out), stacklevel=2)


def no_samples(paths: Sequence[str], skipped: Skipped) -> SampleError:
    """The error of files that hold nothing to train on."""
    why = f"all are bad: {skipped}" if skipped.count else "every line is blank"
    return SampleError(f"{', '.join(paths)}: no samples; {why}")


def resolve_paths(paths: PathLike | Iterable[PathLike]) -> list[str]:
    """Files in the order given, globs expanded and sorted.

    Raises:
        SampleError: for a path or glob without a file.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise SampleError("no data paths; give data.path at least one file, glob or '-' for standard input")
    resolved: list[str] = []
    for path in [os.fspath(path) for path in given]:
        if os.path.isdir(path):
            raise SampleError(f"{path}: is a folder; name its files, for example '{os.path.join(path, '*.jsonl')}'")
        if path == STDIN or os.path.exists(path):
            resolved.append(path)
        elif glob.has_magic(path):
            matches = sorted(match for match in glob.glob(path, recursive=True) if not os.path.isdir(match))
            if not matches:
                raise SampleError(f"{path}: this glob matches no file in {os.getcwd()}; check the pattern")
            resolved += matches
        else:
            raise SampleError(f"{path}: no such file in {os.getcwd()}; check the path")
    return resolved


def _lines(path: str) -> Iterator[tuple[str, bytes]]:
    """Yields ``(path:line, content)`` of all lines."""
    label = "<stdin>" if path == STDIN else path
    number = 0
    try:
        with _open(path) as stream:
            for number, raw in enumerate(stream, start=1):
                yield f"{label}:{number}", raw
    except (OSError, EOFError, zlib.error) as error:
        raise SampleError(f"{label}: cannot be read after line {number}: {error}") from error


def _open(path: str) -> Any:
    if path == STDIN:
        stdin: BinaryIO = sys.stdin.buffer
        return nullcontext(stdin)
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def samples_of_line(raw: bytes, source: str, options: LineOptions, skipped: Skipped | None) -> list[Sample]:
    """The samples of one line; none of a blank one.

    Args:
        raw: the line.
        source: ``file:line``, for messages.
        options: of the reader.
        skipped: takes note of what is bad and left out; None makes it an error.

    Raises:
        SampleError: for bad data, without ``skipped``.
    """
    try:
        samples = _parse(raw, source, options)
    except SampleError as error:
        if skipped is None:
            raise
        skipped.add(error)
        return []
    kept = []
    for sample in samples:
        beyond = _beyond_limits(sample, options)
        if beyond is None:
            kept.append(sample)
        elif skipped is None:
            raise beyond
        else:
            skipped.add(beyond)
    return kept


def _parse(raw: bytes, source: str, options: LineOptions) -> list[Sample]:
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SampleError(
            f"{source}: byte {error.start + 1} of the line is not UTF-8; convert the file to UTF-8"
        ) from None
    if not line or line.isspace():
        return []
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for an integer of more than 4300 digits
        raise SampleError(f"{source}: not valid JSON ({error}); each line must be one JSON object") from None
    if not isinstance(row, dict):
        raise SampleError(f"{source}: each line must be one JSON object with 'tokens' or 'messages'")
    if ("tokens" in row) == ("messages" in row):
        found = "both" if "tokens" in row else "neither"
        raise SampleError(f"{source}: has {found} of the fields 'tokens' and 'messages'; give exactly one")
    merge_key = _tempered(row.get("temperature"), _merge_key(row.get("merge_key"), source), source)
    if "tokens" in row:
        return [_token_sample(row, merge_key, source)]
    return _chat_samples(row, merge_key, source, options)


def _merge_key(value: object, source: str) -> Hashable:
    if isinstance(value, (dict, list)) or (isinstance(value, float) and math.isnan(value)):
        raise SampleError(f"{source}: field 'merge_key' must be a string, a number, a boolean or null")
    assert isinstance(value, Hashable)
    return value


def _tempered(value: object, key: Hashable, source: str) -> Hashable:
    """The merge key of a line that says its temperature."""
    if value is None:
        return key
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise SampleError(f"{source}: field 'temperature' is {_short(value)}; it must be a number above 0")
    return Tempered(temperature=float(value), key=key)


def _token_sample(row: dict[str, Any], merge_key: Hashable, source: str) -> Sample:
    tokens, mask = row["tokens"], row.get("loss_mask")
    # Sample checks the arrays; booleans, floats and huge integers have to be caught before NumPy converts them.
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise SampleError(f"{source}: field 'tokens' must be a flat list of integers{_first_bad(tokens)}")
    if tokens and not (min(tokens) >= 0 and max(tokens) <= INT32_MAX):
        at = next(i for i, token in enumerate(tokens) if not 0 <= token <= INT32_MAX)
        raise SampleError(
            f"{source}: field 'tokens' has {_short(tokens[at])} at index {at}; token ids are 0 to {INT32_MAX}"
        )
    if mask is not None and not isinstance(mask, list):
        raise SampleError(f"{source}: field 'loss_mask' must be a flat list of numbers")
    return Sample(
        tokens=tokens, loss_mask=mask, merge_key=merge_key, source=source, signals=signals_of_tokens(row, source)
    )


def _first_bad(tokens: object) -> str:
    if not isinstance(tokens, list):
        return ""
    at = next(i for i, token in enumerate(tokens) if type(token) is not int)
    return f", but index {at} is {_short(tokens[at])}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _chat_samples(row: dict[str, Any], merge_key: Hashable, source: str, options: LineOptions) -> list[Sample]:
    if "loss_mask" in row:
        raise SampleError(
            f"{source}: field 'loss_mask' goes with 'tokens'; with 'messages' it follows from the assistant turns"
        )
    if options.tokenizer is None:
        raise SampleError(f"{source}: field 'messages' needs a tokenizer; set data.tokenizer, or give 'tokens'")
    try:
        turns = options.tokenizer.encode_turns(parse_messages(row["messages"]))
    except ChatError as error:
        raise SampleError(f"{source}: {error}") from error
    if options.expand_turns:
        signals = signals_of_turns(row, source, len(turns))
        return [
            Sample(
                tokens=turn.tokens,
                loss_mask=_mask(len(turn.tokens), [(turn.start, len(turn.tokens))]),
                merge_key=merge_key,
                source=f"{source} turn {number}",
                signals=signals[number],
            )
            for number, turn in enumerate(turns)
        ]
    whole = turns[-1].tokens
    for number, turn in enumerate(turns):
        if not np.array_equal(whole[: len(turn.tokens)], turn.tokens):
            raise SampleError(
                f"{source}: field 'messages' is no single sample, because the chat format of tokenizer "
                f"'{options.tokenizer.name}' rewrites the history after turn {number}; set data.expand_turns, or use a "
                "tokenizer that keeps it, such as mistral-v7"
            )
    spans = [(turn.start, len(turn.tokens)) for turn in turns]
    return [
        Sample(
            tokens=whole,
            loss_mask=_mask(len(whole), spans),
            merge_key=merge_key,
            source=source,
            signals=signals_of_conversation(row, source),
        )
    ]


def _mask(length: int, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32]:
    mask = np.zeros(length, dtype=np.float32)
    for start, end in spans:
        mask[start:end] = 1.0
    return mask


def _beyond_limits(sample: Sample, options: LineOptions) -> SampleError | None:
    for name, limit in options.limits.items():
        if len(sample) > limit:
            return SampleError(
                f"{sample.source}: the sample has {len(sample)} tokens, but {name} is {limit}; raise {name} or shorten "
                "the sample"
            )
    if options.vocab_size is not None and int(sample.tokens.max()) >= options.vocab_size:
        at = int(np.argmax(sample.tokens >= options.vocab_size))
        return SampleError(
            f"{sample.source}: field 'tokens' has {sample.tokens[at]} at index {at}, outside the model's vocabulary of "
            f"{options.vocab_size}; use the model's tokenizer or a larger vocabulary"
        )
    return None
