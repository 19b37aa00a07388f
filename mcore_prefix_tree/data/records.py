"""Samples of one record of a data file: a JSON line or a row of a table."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from mcore_prefix_tree.data.chat import ChatTokenizer, EncodedTurn
from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.data.formats import (
    READ,
    Conversation,
    Example,
    Text,
    TokenIds,
    find_mark,
    is_excluded,
    make_examples,
    read_excluded,
)
from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.data.keys import fault_of_unread
from mcore_prefix_tree.data.messages import ChatMessage, parse_messages, parse_tools, unread_keys
from mcore_prefix_tree.data.skipped import Kind, Skipped
from mcore_prefix_tree.data.token_rows import (
    SIGNALS,
    TOKEN_MARKS,
    signals_of_conversation,
    signals_of_tokens,
    signals_of_turns,
    warn_placeholder,
)
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import Signals


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """Settings that a record's samples depend on."""

    tokenizer: ChatTokenizer | None = None  # encodes ``messages``; data that is all ``tokens`` needs none
    # Whether to make a sample of every assistant turn, with its full history as prefix and only that turn scored,
    # instead of one sample per conversation. They are turns of one rollout: its reward counts once.
    expand_turns: bool = False
    vocab_size: int | None = None  # vocabulary size of the model; token ids have to be below it
    limits: Mapping[str, int] = field(default_factory=dict)  # most tokens of a sample, by setting (batch.max_tokens)
    renderings: Sequence[ChatTokenizer] = ()  # for other models' chat formats; see ``Sample.renderings``
    names: FieldNames = field(default_factory=FieldNames)

    def __post_init__(self) -> None:
        for name, given in [("tokenizer", self.tokenizer), *(("renderings", one) for one in self.renderings)]:
            if isinstance(given, str):
                raise TypeError(f"{name} is the string {given!r}; give load_tokenizer({given!r})")
        if not isinstance(self.names, FieldNames):
            raise TypeError(f"names is a {type(self.names).__name__}; give FieldNames(given={{...}})")

    def lenient(self) -> LineOptions:
        """Return the options for other files than training's, which may lack some of the fields that are named."""
        return replace(self, names=replace(self.names, may_lack=True))


class Record(Protocol):
    """A line or a row, not looked into yet."""

    @property
    def source(self) -> str:
        """Its file and place in it, for messages."""

    @property
    def size(self) -> int:
        """Its bytes in the file, about."""

    def fields(self, names: FieldNames) -> tuple[Mapping[str, Any], list[str]] | None:
        """Return the content by our names, and the names of other fields; None for a blank line.

        A list of numbers may be an array.
        """

    def others(self, read: Collection[str]) -> dict[str, Any]:
        """Return the file's other fields than those that are read, as they are, for a writer to write."""


def samples_of_record(
    record: Record,
    options: LineOptions,
    skipped: Skipped | None,
    seen: set[str] | None = None,
    left_out: Skipped | None = None,
) -> list[Sample]:
    """Return a record's samples, none for a blank or excluded one; raise SampleError for bad data without ``skipped``.

    ``left_out`` counts excluded records, and ``seen`` takes the names of ``options.names`` that the record has.
    """
    kind: Kind = "unreadable"
    try:
        found = record.fields(options.names)
        kind = "malformed"
        samples = []
        if found is not None:
            samples = _parse(*found, record, options, set() if seen is None else seen, left_out)
    except SampleError as error:
        if skipped is None:
            raise
        skipped.add(error, kind)
        return []
    kept = []
    for sample in samples:
        beyond = _beyond_limits(sample, options)
        if beyond is None:
            kept.append(sample)
        elif skipped is None:
            raise beyond[0]
        else:
            skipped.add(*beyond)
            kind = beyond[1]
    if skipped is not None and len(kept) < len(samples) and all(one.signals.chosen is not None for one in samples):
        for sample in kept:  # one side of a pair
            skipped.add(SampleError(f"{sample.source}: the other side of its pair is skipped"), kind)
        return []
    return kept


def _parse(
    row: Mapping[str, Any],
    rest: list[str],
    record: Record,
    options: LineOptions,
    seen: set[str],
    left_out: Skipped | None,
) -> list[Sample]:
    left_out = Skipped() if left_out is None else left_out
    source, names = record.source, options.names
    seen.update(theirs for mine, theirs in names.given.items() if theirs is not None and mine in row)
    if is_excluded(row, source) and not names.keeps_others:
        left_out.excluded += 1
        return []  # nothing else of it is looked into: it may be a rollout that has crashed
    mark = find_mark(row, source, names.given)
    of_tokens, read = mark in TOKEN_MARKS, READ[mark]
    fault = fault_of_unread(row, read, names.given, of_tokens=of_tokens)
    if fault is None and not of_tokens and options.tokenizer is None:
        fault = f"field '{mark}' needs a tokenizer; set data.tokenizer, or give 'tokens'"
    if fault is not None:
        raise SampleError(f"{source}: {fault}")
    merge_key, examples = make_examples(row, source, mark)
    carried = record.others(names.files_of(read)) if names.keeps_others else {}
    signals = {name: row[name] for name in SIGNALS if name in row}
    unread = {*rest, *(name for name in row if name not in read)}
    samples = []
    for example, excluded in zip(examples, read_excluded(row, source, mark, len(examples)), strict=True):
        if excluded and not names.keeps_others:
            left_out.excluded += 1
            continue
        own = {**carried, names.theirs("exclude"): True} if excluded else carried
        made = _samples(example, signals | dict(example.signals), merge_key, source, options, unread)
        samples += [sample.carrying(own) for sample in made] if own else made
    left_out.note(unread)
    return samples


def _samples(
    example: Example, given: Mapping[str, Any], merge_key: Hashable, record: str, options: LineOptions, unread: set[str]
) -> list[Sample]:
    """Return the samples of an example, one unless turns are expanded; ``unread`` takes keys of its messages."""
    content, source, parts = example.content, f"{record} {example.part}".rstrip(), [example.part]
    signals: Sequence[Signals | None]
    try:
        if isinstance(content, TokenIds):
            encoded, signals = [[(content.ids, content.loss_mask)]], [signals_of_tokens(given)]
        else:
            encoded, signals = _encode(content, options, unread), [signals_of_conversation(given)]
            if options.expand_turns:
                parts = [f"{example.part} turn {number}".lstrip() for number in range(len(encoded[0]))]
                signals = signals_of_turns(signals[0] or Signals(), source, len(parts))
    except ChatError as error:
        raise SampleError(f"{source}: {error}") from error
    samples = []
    for part, signal, ((tokens, mask), *others) in zip(parts, signals, zip(*encoded, strict=True), strict=True):
        place: dict[str, Any] = {"merge_key": merge_key, "source": f"{record} {part}".rstrip(), "part": part}
        renderings = tuple(Sample(ids, loss_mask=weights, **place) for ids, weights in others)
        samples.append(Sample(tokens, loss_mask=mask, signals=signal, renderings=renderings, **place))
        warn_placeholder(samples[-1])
    return samples


# Token ids and loss mask of a sample.
Part = tuple[Any, Any]


def _encode(content: Conversation | Text, options: LineOptions, unread: set[str]) -> list[list[Part]]:
    """Return the samples of a conversation or a text, for each tokenizer."""
    assert options.tokenizer is not None
    tokenizers = options.tokenizer, *options.renderings
    if isinstance(content, Text):
        return [[_text_part(one, content)] for one in tokenizers]
    tools = parse_tools(content.tools)
    renamed = [options.names.of_message(message) for message in content.messages]
    messages = parse_messages(renamed, content.names, tools)
    if content.cut is not None:
        last = max(index for index, message in enumerate(messages) if message.role == "assistant")
        messages[last] = messages[last].model_copy(update={"is_cut": True, "stopped_by": content.cut})
    unread |= unread_keys(messages, getattr(tokenizers[0], "reads", lambda key: False))
    encoded = []
    for tokenizer in tokenizers:
        turns = _weighted(tokenizer.encode_turns(messages, tools), messages, content.prompt)
        if not options.expand_turns:  # one sample: every turn has to continue the scored ones before it
            turns = [one for one in turns if one.weight and one.turn.end != one.turn.start] or turns[-1:]
        groups = [[one] for one in turns] if options.expand_turns else [turns]
        encoded.append([_joined(tokenizer, group) for group in groups])
        if len(encoded[-1]) != len(encoded[0]):
            raise ChatError(
                f"field 'messages' has {len(encoded[0])} assistant turns in the chat format of tokenizer "
                f"'{tokenizers[0].name}' and {len(encoded[-1])} in that of '{tokenizer.name}'; join consecutive "
                "assistant messages"
            )
    return encoded


def _text_part(tokenizer: ChatTokenizer, text: Text) -> Part:
    """Return tokens and loss mask of a text and its continuation."""
    ended = text.cut is None or (text.cut != "" and text.cut == getattr(tokenizer, "end", ""))
    whole = tokenizer.encode_completion(text.prompt, text.completion, ended=ended)
    start = whole.start
    if text.rival is not None:
        start = min(start, tokenizer.encode_completion(text.prompt, text.rival).start)
    return _joined(tokenizer, [_Weighted(0, replace(whole, start=start), 1.0)])


class _Weighted(NamedTuple):
    """A turn, its number in the conversation and its weight."""

    number: int
    turn: EncodedTurn
    weight: float


def _weighted(turns: Sequence[EncodedTurn], messages: Sequence[ChatMessage], prompt: int) -> list[_Weighted]:
    """Return the turns of a conversation that its first ``prompt`` messages do not have."""
    said = [message.role == "assistant" for message in messages]
    # A turn is one message, or a run of them if the chat format joins them.
    joins = len(turns) < sum(said)
    starts = [at for at, is_said in enumerate(said) if is_said and not (joins and at and said[at - 1])]
    found = []
    for number, (turn, start, end) in enumerate(zip(turns, starts, [*starts[1:], len(said)], strict=True)):
        weight, *others = {message.weight for message in messages[start:end] if message.role == "assistant"}
        if others:
            raise ChatError(
                f"field 'messages[{start}]' is one turn with the assistant messages behind it in this chat format, but "
                "only a part of it is trained on; join them or give them the same weight"
            )
        if start >= prompt:
            found.append(_Weighted(number, turn, weight))
    return found


def _joined(tokenizer: ChatTokenizer, turns: Sequence[_Weighted]) -> Part:
    """Return tokens and loss mask of a sample that scores some turns."""
    whole = turns[-1].turn.tokens
    mask = np.zeros(len(whole), dtype=np.float32)
    for number, turn, weight in turns:
        written = turn.tokens[: turn.end]
        if not np.array_equal(whole[: len(written)], written):
            departs = f"the chat format of tokenizer '{tokenizer.name}' rewrites the history"
            if tokenizer.decode(whole.tolist()).startswith(tokenizer.decode(turn.tokens.tolist())):
                departs = f"tokenizer '{tokenizer.name}' writes the same text of the history in other tokens"
            raise ChatError(
                f"field 'messages' cannot be one sample, because {departs} after turn {number}; set "
                "data.expand_turns, or use a tokenizer that keeps it, such as mistral-v7"
            )
        mask[turn.start : len(turn.tokens) if turn.end is None else turn.end] = weight
    return whole, mask


def _beyond_limits(sample: Sample, options: LineOptions) -> tuple[SampleError, Kind] | None:
    """Return the error, and its kind, of a sample that is longer than allowed or outside a model's vocabulary."""
    for name, limit in options.limits.items():
        if len(sample) > limit:
            fault = f"the sample has {len(sample)} tokens, but {name} is {limit}; raise {name} or shorten the sample"
            return SampleError(f"{sample.source}: {fault}"), "too long"
    if options.vocab_size is None:
        return None
    size, teacher, mask = options.vocab_size, sample.signals.teacher, sample.signals.sampling_mask
    found = np.flatnonzero(sample.tokens >= size)
    beyond = {"tokens": (found, sample.tokens[found], "use the model's tokenizer or a larger vocabulary")}
    if teacher is not None and teacher.tokens is None:
        scored = (sample.loss_mask != 0) & (np.arange(len(sample)) > 0)  # nothing predicts the first token
        found = np.flatnonzero((teacher.token_ids >= size).any(axis=1) & scored)
        beyond["teacher"] = (
            found,
            teacher.token_ids[found].max(axis=1, initial=0),
            "distil from a teacher of the same vocabulary",
        )
    if mask is not None:
        kept = np.flatnonzero(mask.token_ids >= size)
        found = np.searchsorted(mask.offsets, kept, side="right") - 1
        beyond["sampling_mask"] = found, mask.token_ids[kept], "use the model that drew the tokens"
    for name, (indices, ids, way_out) in beyond.items():
        if len(ids):
            fault = f"field '{name}' has {ids[0]} at index {indices[0]}, outside the model's vocabulary of {size}"
            return SampleError(f"{sample.source}: {fault}; {way_out}"), "outside the vocabulary"
    return None
