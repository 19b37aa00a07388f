"""Records by format: each model has the keys that are read of it, and makes its examples.

One key decides the format of a record, its mark: :data:`FORMATS`. The keys of all formats are :class:`Record`'s. Known
keys of other names are in :mod:`mcore_prefix_tree.data.keys`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, WrapValidator, create_model

from mcore_prefix_tree.data.examples import (
    Conversation,
    Example,
    Text,
    TokenIds,
    count_repeated,
    count_shared,
    from_sharegpt,
    is_assistant,
    said_by,
)
from mcore_prefix_tree.data.json_fields import ChatError, shorten_json
from mcore_prefix_tree.data.keys import mapping_beside, shown, suggest_fields
from mcore_prefix_tree.data.stopping import STOP_NAMES, read_cut, read_cuts
from mcore_prefix_tree.data.token_rows import TOKEN_FIELDS, TOKEN_MARKS, read_token_row
from mcore_prefix_tree.sample import MIN_TEMPERATURE, SampleError
from mcore_prefix_tree.signals import Signals

SIGNALS = tuple(one.name for one in fields(Signals))


Row = Mapping[str, Any]


def _checked(says: str, is_valid: Any) -> WrapValidator:
    def check(value: Any, _: Any) -> Any:
        if not is_valid(value):
            raise ValueError(says.format(shorten_json(value)))
        return value

    return WrapValidator(check)


def _is_key(value: Any) -> bool:
    return isinstance(value, (str, int, float, type(None))) and not (
        isinstance(value, float) and not math.isfinite(value)
    )


def _is_temperature(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or (is_number and MIN_TEMPERATURE <= value <= sys.float_info.max)


_MergeKey = Annotated[Any, _checked("must be a string, a finite number, a boolean or null", _is_key)]
_Temperature = Annotated[Any, _checked(f"is {{}}; it must be a number of at least {MIN_TEMPERATURE}", _is_temperature)]


class _Common(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)
    # Keys that are refused, with the way out.
    refused: ClassVar[Mapping[str, str]] = {}

    merge_key: _MergeKey = None
    temperature: _Temperature = None
    exclude: Any = None

    def examples(self, source: str) -> list[Example]:
        """Return the examples of the record; raise ChatError for a malformed one."""
        raise NotImplementedError


_OPTIONAL: Any = (Any, None)
# Keys of all formats, with those of Signals.
Record: Any = create_model("Record", __base__=_Common, **dict.fromkeys(SIGNALS, _OPTIONAL))


class _TokenRecord(Record):  # type: ignore[misc]
    def examples(self, source: str) -> list[Example]:
        found = read_token_row({name: one for name, one in self if one is not None})
        return [Example(content=TokenIds(ids=found.ids, loss_mask=found.loss_mask), signals=found.signals)]


TokenRecord: Any = create_model(
    "TokenRecord",
    __base__=_TokenRecord,
    **dict.fromkeys((*TOKEN_MARKS, "loss_mask", *TOKEN_FIELDS), _OPTIONAL),
)


class _ChatRecord(Record):  # type: ignore[misc]
    """Keys of conversations and texts; a reason for the end of a generation is one value, or a list for several."""

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text can be trained on"),
        **dict.fromkeys(("documents",), "write them into a message"),
        **dict.fromkeys(("chat_template_kwargs", "template_kwargs"), "set data.chat_template_kwargs, for all records"),
    }

    tools: Any = None
    finish_reason: Any = None
    stop_reason: Any = None

    @property
    def reasons(self) -> dict[str, Any]:
        """The reasons for the end of a generation."""
        return {name: one for name, one in self if name.startswith(("finish", "stop")) and one is not None}

    def conversation(self, value: Any, name: str) -> Conversation:
        if not isinstance(value, list) or not value:
            raise ChatError(f"field '{name}' must be a list of at least one chat message")
        names = [f"{name}[{place}]" for place in range(len(value))]
        return Conversation(messages=value, names=names, tools=self.tools)

    def continued(
        self, prompt: Any, completion: Any, name: str, *, rival: Any = None, cut: str | None = None
    ) -> Conversation | Text:
        if prompt is None:
            raise ChatError("field 'prompt' is missing")
        if isinstance(prompt, str) and isinstance(completion, str):
            if self.tools:
                raise ChatError("field 'tools' goes with messages, but the prompt is text")
            if len(prompt.split()) > 1 and completion.startswith(prompt):
                raise ChatError(f"field '{name}' begins with the text of 'prompt', which would be twice; remove it")
            return Text(prompt=prompt, completion=completion, rival=rival, cut=cut)
        if isinstance(prompt, str) or not isinstance(completion, (str, list)):
            wanted = "text" if isinstance(prompt, str) else "text or a list of messages"
            raise ChatError(f"field '{name}' must be {wanted}, as the prompt is")
        before = self.conversation(prompt, "prompt")
        if isinstance(completion, str):
            said, names = [{"role": "assistant", "content": completion}], [name]
        else:
            names = [f"{name}[{place}]" for place in range(len(completion))]
            again = count_repeated(before.messages, completion)
            said, names = completion[again:], names[again:]
            first = next((place for place, one in enumerate(said) if is_assistant(one)), len(said))
            if any(said_by(one) in map(said_by, before.messages) for one in said[:first] if said_by(one)[0] == "user"):
                raise ChatError(f"field '{name}' has a question of 'prompt' again; give it in one of them")
        if not any(is_assistant(message) for message in said):
            raise ChatError(f"field '{name}' has no assistant message, so no token of it would be scored")
        if before.messages and is_assistant(before.messages[-1]) and is_assistant(said[0]):
            raise ChatError(
                f"field 'prompt' ends with an assistant message, which '{name}' would continue; join the two"
            )
        return replace(
            before, messages=[*before.messages, *said], names=[*before.names, *names], prompt=len(prompt), cut=cut
        )


class _WholeRecord(_ChatRecord):
    """A conversation, with the system message that may be beside it."""

    system: Any = None

    def whole(self, conversation: Conversation) -> Conversation:
        messages, names = conversation.messages, conversation.names
        if self.system:
            first = messages[0] if isinstance(messages[0], dict) else {}
            if first.get("role") != "system":
                messages, names = [{"role": "system", "content": self.system}, *messages], ["system", *names]
            elif first.get("content") != self.system:
                raise ChatError(f"fields 'system' and '{names[0]}' are different system messages; give one of them")
        return replace(conversation, messages=messages, names=names, cut=read_cut(self.reasons, of_harness=True))


class MessagesRecord(_WholeRecord):
    """A conversation; with the last answer that was rejected, a pair, as ms-swift has it."""

    messages: Any
    rejected_response: Any = None
    rejected_messages: Any = None

    def examples(self, source: str) -> list[Example]:
        whole = self.whole(self.conversation(self.messages, "messages"))
        rejected = self.rejected_messages
        if self.rejected_response is not None:
            if not isinstance(self.rejected_response, str) or not is_assistant(whole.messages[-1]):
                raise ChatError("field 'rejected_response' must be text in place of the last message, an assistant's")
            rejected = [*whole.messages[:-1], {"role": "assistant", "content": self.rejected_response}]
        if rejected is None:
            return [Example(content=whole)]
        given = {name: one for name, one in self if name in PairRecord.model_fields and name != "chosen"}
        pair = PairRecord(**given, chosen=whole.messages, rejected=rejected)
        return pair.examples(source)


class ShareGptRecord(_WholeRecord):
    """A conversation in ShareGPT's shape."""

    conversations: Any

    def examples(self, source: str) -> list[Example]:
        given = self.conversation(self.conversations, "conversations")
        messages = [from_sharegpt(entry, name) for entry, name in zip(given.messages, given.names, strict=True)]
        return [Example(content=self.whole(replace(given, messages=messages)))]


class CompletionRecord(_ChatRecord):
    """An answer to a prompt."""

    prompt: Any = None
    completion: Any

    def examples(self, source: str) -> list[Example]:
        content = self.continued(self.prompt, self.completion, "completion", cut=read_cut(self.reasons))
        return [Example(content=content)]


class AnswersRecord(_ChatRecord):
    """Several answers to a prompt: a group."""

    refused: ClassVar[Mapping[str, str]] = {**_ChatRecord.refused, "labels": "it scores the steps of one answer"}

    prompt: Any = None
    completions: Any = None
    responses: Any = None
    rewards: Any = None
    finish_reasons: Any = None
    stop_reasons: Any = None

    def examples(self, source: str) -> list[Example]:
        name = "responses" if self.completions is None else "completions"
        many, rewards = getattr(self, name), self.rewards
        if not isinstance(many, list) or not many:
            raise ChatError(f"field '{name}' must be a list of at least one completion")
        if rewards is not None and self.reward is not None:
            raise ChatError("fields 'reward' and 'rewards' are both given; give one of them")
        if rewards is not None and (not isinstance(rewards, list) or len(rewards) != len(many)):
            raise ChatError(f"field 'rewards' must be a list of {len(many)} numbers, one for each of '{name}'")
        group = source if self.group is None else self.group
        cuts = read_cuts(self.reasons, len(many), name)
        return [
            Example(
                content=self.continued(self.prompt, one, f"{name}[{place}]", cut=cuts[place]),
                signals={"group": group} | ({} if rewards is None else {"reward": rewards[place]}),
                part=f"completion {place}",
            )
            for place, one in enumerate(many)
        ]


class PairRecord(_ChatRecord):
    """A chosen and a rejected answer to a prompt; without it, to the common beginning of both."""

    prompt: Any = None
    chosen: Any = None
    rejected: Any
    finish_reasons: Any = None
    stop_reasons: Any = None

    def examples(self, source: str) -> list[Example]:
        if self.chosen is None:
            raise ChatError("field 'rejected' needs field 'chosen', which is missing")
        prompt, chosen, rejected = self.prompt, self.chosen, self.rejected
        if not isinstance(chosen, (str, list)) or type(chosen) is not type(rejected):
            raise ChatError("fields 'chosen' and 'rejected' must both be texts or both be lists of messages")
        if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
            shared = count_shared(chosen, rejected)
            said = [message.get("content") for message in chosen[:shared] if isinstance(message, dict)]
            if isinstance(chosen, list) and isinstance(prompt, str) and prompt not in said:
                raise ChatError(
                    "field 'prompt' is text that 'chosen' and 'rejected', which are messages, do not begin with; give "
                    "it as messages too"
                )
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
            if not (chosen and rejected) or (isinstance(prompt, list) and not prompt):
                raise ChatError(
                    "fields 'chosen' and 'rejected' do not begin alike and then differ, so that no prompt can be told "
                    "apart; give 'prompt'"
                )
        pair = source if self.pair is None else self.pair
        sides = ("chosen", chosen, rejected), ("rejected", rejected, chosen)
        cuts = read_cuts(self.reasons, 2, "chosen and rejected")
        return [
            Example(
                content=self.continued(prompt, one, name, rival=rival, cut=cut),
                signals={"pair": pair, "chosen": name == "chosen"},
                part=name,
            )
            for (name, one, rival), cut in zip(sides, cuts, strict=True)
        ]


FORMATS: Mapping[str, Any] = {
    "tokens": TokenRecord,
    "messages": MessagesRecord,
    "conversations": ShareGptRecord,
    "completion": CompletionRecord,
    "completions": AnswersRecord,
    "responses": AnswersRecord,
    "rejected": PairRecord,
    "response_tokens": TokenRecord,
}
# Formats of records that are a group.
_LISTS = ("completions", "responses")
# All that is read of a record, by its mark.
READ = {mark: frozenset(model.model_fields) - (FORMATS.keys() - {mark}) for mark, model in FORMATS.items()}
# All fields that samples have, under any mark, without other names of them; those that few records have come last.
_LAST = frozenset((*TOKEN_FIELDS, "finish_reason", "stop_reason", "finish_reasons", "stop_reasons"))
FIELDS = tuple(
    sorted(
        dict.fromkeys(
            ["tokens", "loss_mask", *FORMATS, *(name for model in FORMATS.values() for name in model.model_fields)]
        ),
        key=lambda name: (name in _LAST, name in SIGNALS),
    )
)
# All that are looked at, and those of them that tables give as JSON Lines would.
KNOWN = frozenset((*FIELDS, *STOP_NAMES, *(name for model in FORMATS.values() for name in model.refused)))
JSON_FIELDS = KNOWN - {*TokenRecord.model_fields} | {"chosen", "exclude"}


def make_examples(row: Row, source: str, mark: str) -> tuple[Any, list[Example]]:
    """Return a record of a mark's format and its examples; raises SampleError for a malformed one."""
    model = FORMATS[mark]
    try:
        for name, why in model.refused.items():
            value = row.get(name)
            if value is not None and (len(value) if hasattr(value, "__len__") else value):
                raise ChatError(f"field '{name}' is not supported with '{mark}': {why}")
        if mark not in TOKEN_MARKS:
            if "loss_mask" in row:
                raise ChatError(f"field 'loss_mask' goes with 'tokens'; with '{mark}' it follows from the answers")
            read_cut({name: row[name] for name in STOP_NAMES if name in row})
        try:
            record = model.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            raise ChatError(f"field '{first['loc'][0]}' {first['msg'].removeprefix('Value error, ')}") from None
        return record, record.examples(source)
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
            way_out = f"add {shown(mapping_beside(mark, row, FIELDS))} to data.fields"
            raise SampleError(f"{source}: field '{mark}' holds token ids; {way_out}")
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
