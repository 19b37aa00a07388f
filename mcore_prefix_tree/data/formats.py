"""Records by format: a model with the keys that are read of each, and the examples that it makes.

One key decides the format of a record, its mark: :data:`FORMATS`. Known keys of other names are in
:mod:`mcore_prefix_tree.data.keys`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from mcore_prefix_tree.data.json_fields import ChatError, check_once, fault_of, shorten_json
from mcore_prefix_tree.data.keys import has_entries, shown, suggest_fields
from mcore_prefix_tree.data.stopping import STOP_KEYS, STOP_LISTS, STOP_NAMES, check_names, read_cut, read_cuts
from mcore_prefix_tree.data.text_parts import common_length
from mcore_prefix_tree.data.token_rows import SIGNALS, TOKEN_FIELDS, TOKEN_MARKS, read_token_row
from mcore_prefix_tree.sample import MIN_TEMPERATURE, SampleError, Tempered

Row = Mapping[str, Any]
# Keys of all conversations and texts; a reason for the end of a generation is one value, or a list for several.
_CHAT = ("tools", *STOP_KEYS)
# Keys that are refused, with the way out.
_REFUSED = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text can be trained on"),
    "documents": "write them into a message",
    **dict.fromkeys(("chat_template_kwargs", "template_kwargs"), "set data.chat_template_kwargs, for all records"),
}


# ShareGPT's names of roles, as LLaMA-Factory reads them.
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """Unchecked token ids of a sample, and the weight of each token; a ``loss_mask`` of None scores all."""

    ids: Any
    loss_mask: Any = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Unchecked messages with names for errors; the first ``prompt`` ones are unscored; ``cut`` as in read_cut."""

    messages: list[Any]
    names: list[str]
    tools: Any = None
    prompt: int = 0
    cut: str | None = None


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and its continuation, without a chat format; ``cut`` as :func:`read_cut` returns it.

    ``prompt`` is not scored; ``completion``, and a ``rival`` to compare it with, are scored from the same token on.
    """

    prompt: str
    completion: str
    rival: str | None = None
    cut: str | None = None


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example of a record, its ``part`` ("" for the entire record), with signals that only it has."""

    content: TokenIds | Conversation | Text
    signals: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""


def _tokens(row: Row, source: str) -> list[Example]:
    ids, mask, signals = read_token_row({name: one for name, one in row.items() if one is not None})
    return [Example(content=TokenIds(ids=ids, loss_mask=mask), signals=signals)]


def _messages(row: Row, source: str) -> list[Example]:
    """A conversation; with the last answer that was rejected, a pair, as ms-swift has it."""
    whole = _with_system(row, _conversation(row, row["messages"], "messages"))
    rejected, answer = row.get("rejected_messages"), row.get("rejected_response")
    if answer is not None:
        if not isinstance(answer, str) or not _is_assistant(whole.messages[-1]):
            raise ChatError("field 'rejected_response' must be text in place of the last message, an assistant's")
        rejected = [*whole.messages[:-1], {"role": "assistant", "content": answer}]
    return [Example(content=whole)] if rejected is None else _sides(row, source, None, whole.messages, rejected)


def _sharegpt(row: Row, source: str) -> list[Example]:
    """A conversation in ShareGPT's shape."""
    given = _conversation(row, row["conversations"], "conversations")
    messages = [_from_sharegpt(entry, name) for entry, name in zip(given.messages, given.names, strict=True)]
    return [Example(content=_with_system(row, replace(given, messages=messages)))]


def _answer(row: Row, source: str) -> list[Example]:
    """An answer to a prompt."""
    return [Example(content=_continued(row, row.get("prompt"), row["completion"], "completion", cut=read_cut(row)))]


def _answers(row: Row, source: str) -> list[Example]:
    """Several answers to a prompt: a group."""
    name = "responses" if row.get("completions") is None else "completions"
    many, rewards = row.get(name), row.get("rewards")
    if not isinstance(many, list) or not many:
        raise ChatError(f"field '{name}' must be a list of at least one completion")
    if rewards is not None and row.get("reward") is not None:
        raise ChatError("fields 'reward' and 'rewards' are both given; give one of them")
    if rewards is not None and (not isinstance(rewards, list) or len(rewards) != len(many)):
        raise ChatError(f"field 'rewards' must be a list of {len(many)} numbers, one for each of '{name}'")
    group = source if row.get("group") is None else row["group"]
    cuts = read_cuts(row, len(many), name)
    return [
        Example(
            content=_continued(row, row.get("prompt"), one, f"{name}[{place}]", cut=cuts[place]),
            signals={"group": group} | ({} if rewards is None else {"reward": rewards[place]}),
            part=f"completion {place}",
        )
        for place, one in enumerate(many)
    ]


def _pair(row: Row, source: str) -> list[Example]:
    """A chosen and a rejected answer to a prompt."""
    if row.get("chosen") is None:
        raise ChatError("field 'rejected' needs field 'chosen', which is missing")
    return _sides(row, source, row.get("prompt"), row["chosen"], row["rejected"])


def _sides(row: Row, source: str, prompt: Any, chosen: Any, rejected: Any) -> list[Example]:
    """Return both sides of a pair; without a prompt, it is their common beginning."""
    if not isinstance(chosen, (str, list)) or type(chosen) is not type(rejected):
        raise ChatError("fields 'chosen' and 'rejected' must both be texts or both be lists of messages")
    if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
        shared = _count_shared(chosen, rejected)
        said = [message.get("content") for message in chosen[:shared] if isinstance(message, dict)]
        if isinstance(chosen, list) and isinstance(prompt, str) and prompt not in said:
            raise ChatError(
                "field 'prompt' is text that 'chosen' and 'rejected', which are messages, do not begin with; give it "
                "as messages too"
            )
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not (chosen and rejected) or (isinstance(prompt, list) and not prompt):
            raise ChatError(
                "fields 'chosen' and 'rejected' do not begin alike and then differ, so that no prompt can be told "
                "apart; give 'prompt'"
            )
    pair = source if row.get("pair") is None else row["pair"]
    cuts = read_cuts(row, 2, "chosen and rejected")
    sides = ("chosen", chosen, rejected, cuts[0]), ("rejected", rejected, chosen, cuts[1])
    return [
        Example(
            content=_continued(row, prompt, one, name, rival=rival, cut=cut),
            signals={"pair": pair, "chosen": name == "chosen"},
            part=name,
        )
        for name, one, rival, cut in sides
    ]


def _conversation(row: Row, value: Any, name: str) -> Conversation:
    if not isinstance(value, list) or not value:
        raise ChatError(f"field '{name}' must be a list of at least one chat message")
    names = [f"{name}[{place}]" for place in range(len(value))]
    return Conversation(messages=value, names=names, tools=row.get("tools"))


def _with_system(row: Row, conversation: Conversation) -> Conversation:
    """Return a whole conversation with the system message that may be beside it."""
    messages, names, system = conversation.messages, conversation.names, row.get("system")
    if system:
        first = messages[0] if isinstance(messages[0], dict) else {}
        if first.get("role") != "system":
            messages, names = [{"role": "system", "content": system}, *messages], ["system", *names]
        elif first.get("content") != system:
            raise ChatError(f"fields 'system' and '{names[0]}' are different system messages; give one of them")
    return replace(conversation, messages=messages, names=names, cut=read_cut(row, of_harness=True))


def _continued(
    row: Row, prompt: Any, completion: Any, name: str, *, rival: Any = None, cut: str | None = None
) -> Conversation | Text:
    """Return a prompt and the answer to it: two texts, or messages behind messages, the last of which may be text."""
    if prompt is None:
        raise ChatError("field 'prompt' is missing")
    if isinstance(prompt, str) and isinstance(completion, str):
        if row.get("tools"):
            raise ChatError("field 'tools' goes with messages, but the prompt is text")
        if len(prompt.split()) > 1 and completion.startswith(prompt):
            raise ChatError(f"field '{name}' begins with the text of 'prompt', which would be twice; remove it")
        return Text(prompt=prompt, completion=completion, rival=rival, cut=cut)
    if isinstance(prompt, str) or not isinstance(completion, (str, list)):
        wanted = "text" if isinstance(prompt, str) else "text or a list of messages"
        raise ChatError(f"field '{name}' must be {wanted}, as the prompt is")
    before = _conversation(row, prompt, "prompt")
    said, names = [{"role": "assistant", "content": completion}], [name]
    if isinstance(completion, list):
        names = [f"{name}[{place}]" for place in range(len(completion))]
        again = _count_repeated(prompt, completion)
        said, names = completion[again:], names[again:]
        # A question that the prompt has too would be asked twice.
        asked = list(map(_said_by, said[: next((at for at, one in enumerate(said) if _is_assistant(one)), len(said))]))
        if any(one in map(_said_by, prompt) for one in asked if one[0] == "user"):
            raise ChatError(f"field '{name}' has a question of 'prompt' again; give it in one of them")
    if not any(map(_is_assistant, said)):
        raise ChatError(f"field '{name}' has no assistant message, so no token of it would be scored")
    if _is_assistant(prompt[-1]) and _is_assistant(said[0]):
        raise ChatError(f"field 'prompt' ends with an assistant message, which '{name}' would continue; join the two")
    return replace(before, messages=[*prompt, *said], names=[*before.names, *names], prompt=len(prompt), cut=cut)


def _from_sharegpt(entry: Any, name: str) -> Any:
    """Return a message in OpenAI's shape from one in ShareGPT's."""
    check_once(entry, name)
    if not isinstance(entry, dict) or "role" in entry:
        return entry
    rest = {key: value for key, value in entry.items() if key not in ("from", "value")}
    sender, value = entry.get("from"), entry.get("value")
    if not isinstance(sender, str) or sender not in _SHAREGPT_ROLES:
        raise ChatError(
            f"field '{name}.from' is {shorten_json(sender)}; it must be one of {', '.join(_SHAREGPT_ROLES)}"
        )
    if sender != "function_call":
        return rest | {"role": _SHAREGPT_ROLES[sender], "content": value}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ChatError(f"field '{name}.value' is a function call that is not valid JSON") from None
    return rest | {"role": "assistant", "tool_calls": value if isinstance(value, list) else [value]}


def _count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of messages, or characters, that two completions begin with: TRL's implicit prompt."""
    shared = common_length(one, other)
    return shared - 1 if shared and one[shared - 1] == " " else shared


def _count_repeated(prompt: Sequence[Any], completion: Sequence[Any]) -> int:
    """Return how many messages at the end of a prompt a completion begins with: a question that both have."""
    before, after = [_said_by(one) for one in prompt], [_said_by(one) for one in completion]
    return next(
        (
            most
            for most in range(min(len(before), len(after)), 0, -1)
            if before[-most:] == after[:most] and not _is_assistant(completion[most - 1])
        ),
        0,
    )


def _said_by(message: Any) -> tuple[Any, Any]:
    """Return role and text of a message, whose content may be a list of parts."""
    if not isinstance(message, dict):
        return None, message
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text")) if isinstance(part, dict) else str(part) for part in content)
    return message.get("role"), content


def _is_assistant(message: Any) -> bool:
    """Return whether a message is the assistant's."""
    return isinstance(message, dict) and message.get("role") == "assistant"


def _check_key(value: Any) -> Any:
    if not isinstance(value, (str, int, float, type(None))) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("must be a string, a finite number or a boolean")
    return value


_Key = Annotated[Any, BeforeValidator(_check_key)]


class Record(BaseModel):
    """Keys of all formats, in addition to those of :class:`~mcore_prefix_tree.signals.Signals`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    merge_key: _Key = None
    group: _Key = None
    rollout: _Key = None
    pair: _Key = None
    temperature: float | None = Field(None, strict=True, ge=MIN_TEMPERATURE, allow_inf_nan=False)
    exclude: Any = None

    @property
    def tempered_key(self) -> Hashable:
        """The merge key of the record's samples: those of another temperature are never folded together."""
        key: Hashable = self.merge_key
        if self.temperature is None or self.temperature == 1:
            return key
        return Tempered(temperature=float(self.temperature), key=key)


class Format:
    """A model of a format's records, the function that makes their examples, and keys that are refused."""

    def __init__(
        self, examples: Callable[[Row, str], list[Example]], keys: Sequence[str], refused: Mapping[str, str] = _REFUSED
    ) -> None:
        own: Any = {name: (Any, None) for name in (*SIGNALS, *keys) if name not in Record.model_fields}
        self.record: type[Record] = create_model("Record", __base__=Record, **own)
        self.examples, self.refused = examples, refused


_TOKEN_RECORD = Format(_tokens, (*TOKEN_MARKS, "loss_mask", *TOKEN_FIELDS), {})
_ANSWERS = Format(
    _answers,
    (*_CHAT, "prompt", "completions", "responses", "rewards", *STOP_LISTS),
    _REFUSED | {"labels": "it scores the steps of one answer"},
)
FORMATS: Mapping[str, Format] = {
    "tokens": _TOKEN_RECORD,
    "messages": Format(_messages, (*_CHAT, "system", "messages", "rejected_response", "rejected_messages")),
    "conversations": Format(_sharegpt, (*_CHAT, "system", "conversations")),
    "completion": Format(_answer, (*_CHAT, "prompt", "completion")),
    "completions": _ANSWERS,
    "responses": _ANSWERS,
    "rejected": Format(_pair, (*_CHAT, "prompt", "chosen", "rejected", *STOP_LISTS)),
    "response_tokens": _TOKEN_RECORD,
}
# Formats of records that are a group.
_LISTS = ("completions", "responses")
# All that is read of a record, by its mark.
READ = {mark: frozenset(one.record.model_fields) - (FORMATS.keys() - {mark}) for mark, one in FORMATS.items()}
# All fields that samples have, under any mark, without other names of them; those that few records have come last.
_LAST = frozenset((*TOKEN_FIELDS, *STOP_KEYS, *STOP_LISTS))
FIELDS = tuple(
    sorted(
        dict.fromkeys(
            [
                "tokens",
                "loss_mask",
                *FORMATS,
                *SIGNALS,
                *(name for one in FORMATS.values() for name in one.record.model_fields),
            ]
        ),
        key=lambda name: (name in _LAST, name in SIGNALS),
    )
)
# All that are looked at, and those of them that tables give as JSON Lines would.
KNOWN = frozenset((*FIELDS, *STOP_NAMES, *_ANSWERS.refused))
JSON_FIELDS = KNOWN - {*_TOKEN_RECORD.record.model_fields} | {"chosen", "exclude"}


def make_examples(row: Row, source: str, mark: str) -> tuple[Hashable, list[Example]]:
    """Return a record's merge key, and its examples by a mark's format; raises SampleError for a malformed one."""
    one = FORMATS[mark]
    try:
        for name, why in one.refused.items():
            if has_entries(row.get(name)):
                raise ChatError(f"field '{name}' is not supported with '{mark}': {why}")
        if mark not in TOKEN_MARKS:
            if "loss_mask" in row:
                raise ChatError(f"field 'loss_mask' goes with 'tokens'; with '{mark}' it follows from the answers")
            check_names(row, "")
        record = one.record.model_validate(row)
        return record.tempered_key, one.examples(dict(record), source)
    except ValidationError as error:
        raise SampleError(f"{source}: {fault_of(error)}") from None
    except ChatError as error:
        raise SampleError(f"{source}: {error}") from error


def is_excluded(row: Row, source: str) -> bool:
    """Return whether a record of any format is excluded as a whole; raises as :func:`read_excluded`."""
    value = row.get("exclude", False)
    return not isinstance(value, list) and _is_true(value, source)


def read_excluded(row: Row, source: str, mark: str, count: int) -> list[bool]:
    """Return for each of a record's ``count`` examples whether it is excluded; raise SampleError for other values."""
    value = row.get("exclude", False)
    if isinstance(value, list) and mark in _LISTS and len(value) == count:
        return [_is_true(one, source) for one in value]
    return [_is_true(value, source)] * count


def _is_true(value: Any, source: str) -> bool:
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise SampleError(
            f"{source}: field 'exclude' is {shorten_json(value)}; it must be true or false, or with "
            f"{' and '.join(map(repr, _LISTS))} a list of one for each; data.fields={{exclude: null}} leaves it unread"
        )
    return bool(value)


# Error for the data that an engine samples from.
PROMPT_ALONE = (
    "has a 'prompt' and nothing to train on; sample from it, and add 'responses', 'completion', or 'chosen' and "
    "'rejected'"
)


def find_mark(row: Row, source: str, names: Mapping[str, str | None]) -> str:
    """Return the one mark that a record has; raise SampleError, with the file's ``names``, for none or several."""
    found = [mark for mark in FORMATS if mark in row]
    if len(found) == 1:
        (mark,) = found
        if mark not in TOKEN_MARKS and isinstance(row[mark], list) and row[mark] and isinstance(row[mark][0], int):
            beside: dict[str, str | None] = {**suggest_fields([*row, "completion_ids"], FIELDS)}
            beside |= {"response_tokens": mark} if "response_tokens" in beside else {mark: None}
            raise SampleError(f"{source}: field '{mark}' holds token ids; add {shown(beside)} to data.fields")
        return mark
    if found:
        raise SampleError(
            f"{source}: has the fields {_listed(found)}, and each of them is a sample by itself; give exactly one, or "
            f"leave '{found[-1]}' unread: data.fields={{{found[-1]}: null}}"
        )
    missing = [(mark, names[mark]) for mark in FORMATS if names.get(mark)]
    if missing:
        mark, theirs = missing[0]
        raise SampleError(f"{source}: does not have the field '{theirs}', which data.fields reads as '{mark}'")
    mapping = suggest_fields(row, FIELDS)
    if "prompt" in row and not mapping:
        raise SampleError(f"{source}: {PROMPT_ALONE}")
    yours = f"yours in data.fields: {shown(mapping)}" if mapping else "yours in data.fields"
    raise SampleError(f"{source}: has none of the fields {_listed(list(FORMATS))}; give one of them, or name {yours}")


def _listed(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
