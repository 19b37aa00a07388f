"""Formats of records, each with one mark: the field that decides it. Register new formats in :data:`FORMATS`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mcore_prefix_tree.data.foreign_names import mapping_beside, shown, suggest_fields
from mcore_prefix_tree.data.json_fields import ChatError, check_once, shorten_json
from mcore_prefix_tree.data.stopping import STOP_ALIASES, STOP_KEYS, STOP_LISTS, was_cut, were_cut
from mcore_prefix_tree.data.token_rows import TOKEN_FIELDS, TOKEN_MARKS, read_token_row
from mcore_prefix_tree.data.turns import SWITCHES, check_record
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.signals import Signals

SIGNALS = tuple(one.name for one in fields(Signals))

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
    """Unchecked messages with names for errors; the first ``prompt`` ones are unscored; cut unless ``ended``."""

    messages: list[Any]
    names: list[str]
    tools: Any = None
    prompt: int = 0
    ended: bool = True


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and its continuation, without a chat format; cut unless ``ended``.

    ``prompt`` is not scored; ``completion``, and a ``rival`` to compare it with, are scored from the same token on.
    """

    prompt: str
    completion: str
    rival: str | None = None
    ended: bool = True


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example of a record, its ``part`` ("" for the entire record), with signals that only it has."""

    content: TokenIds | Conversation | Text
    signals: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""


Row = Mapping[str, Any]


# Of all formats but tokens.
_UNSUPPORTED = {
    "images": "only text can be trained on",
    "chat_template_kwargs": "set data.chat_template_kwargs, for all records",
}


@dataclass(frozen=True, kw_only=True)
class Format:
    """A shape of records: other fields than its mark, refused ones with the way out, and the maker of its examples."""

    others: tuple[str, ...]
    examples: Callable[[Row, str], list[Example]]
    refused: Mapping[str, str] = field(default_factory=lambda: _UNSUPPORTED)


def _tokens(row: Row, source: str) -> list[Example]:
    found = read_token_row(row)
    return [Example(content=TokenIds(ids=found.ids, loss_mask=found.loss_mask), signals=found.signals)]


def _messages(row: Row, source: str) -> list[Example]:
    return [Example(content=replace(_conversation(row["messages"], "messages", row), ended=not was_cut(row)))]


def _sharegpt(row: Row, source: str) -> list[Example]:
    whole = _conversation(row["conversations"], "conversations", row)
    messages = [_from_sharegpt(entry, name) for entry, name in zip(whole.messages, whole.names, strict=True)]
    names, system = whole.names, row.get("system")
    if system:
        messages, names = [{"role": "system", "content": system}, *messages], ["system", *names]
    return [Example(content=replace(whole, messages=messages, names=names, ended=not was_cut(row)))]


def _from_sharegpt(entry: Any, name: str) -> Any:
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


def _completion(row: Row, source: str) -> list[Example]:
    return [Example(content=_continued(_read_prompt(row), row["completion"], "completion", row, cut=was_cut(row)))]


def _completions(name: str) -> Callable[[Row, str], list[Example]]:
    def examples(row: Row, source: str) -> list[Example]:
        many, rewards = row[name], row.get("rewards")
        if not isinstance(many, list) or not many:
            raise ChatError(f"field '{name}' must be a list of at least one completion")
        if rewards is not None and "reward" in row:
            raise ChatError("fields 'reward' and 'rewards' are both given; give one of them")
        if rewards is not None and (not isinstance(rewards, list) or len(rewards) != len(many)):
            raise ChatError(f"field 'rewards' must be a list of {len(many)} numbers, one for each of '{name}'")
        prompt, group = _read_prompt(row), row.get("group", source)
        cut = were_cut(row, len(many), name)
        return [
            Example(
                content=_continued(prompt, one, f"{name}[{place}]", row, cut=cut[place]),
                signals={"group": group} | ({} if rewards is None else {"reward": rewards[place]}),
                part=f"completion {place}",
            )
            for place, one in enumerate(many)
        ]

    return examples


def _preference(row: Row, source: str) -> list[Example]:
    if "chosen" not in row:
        raise ChatError("field 'rejected' needs field 'chosen', which is missing")
    chosen, rejected = row["chosen"], row["rejected"]
    if not isinstance(chosen, (str, list)) or type(chosen) is not type(rejected):
        raise ChatError("fields 'chosen' and 'rejected' must both be texts or both be lists of messages")
    prompt = row.get("prompt")
    if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
        shared = _shared(chosen, rejected)
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
    pair = row.get("pair", source)
    sides = ("chosen", chosen, rejected), ("rejected", rejected, chosen)
    return [
        Example(
            content=_continued(prompt, one, name, row, rival=rival, cut=cut),
            signals={"pair": pair, "chosen": name == "chosen"},
            part=name,
        )
        for (name, one, rival), cut in zip(sides, were_cut(row, 2, "chosen and rejected"), strict=True)
    ]


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of messages, or characters, that two completions begin with: TRL's implicit prompt."""
    pairs = enumerate(zip(one, other, strict=False))
    shared = next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
    return shared - 1 if shared and one[shared - 1] == " " else shared


def _read_prompt(row: Row) -> Any:
    if "prompt" not in row:
        raise ChatError("field 'prompt' is missing")
    return row["prompt"]


def _continued(
    prompt: Any, completion: Any, name: str, row: Row, rival: Any = None, *, cut: bool = False
) -> Conversation | Text:
    if isinstance(prompt, str) and isinstance(completion, str):
        if row.get("tools"):
            raise ChatError("field 'tools' goes with messages, but the prompt is text")
        return Text(prompt=prompt, completion=completion, rival=rival, ended=not cut)
    if isinstance(prompt, str) or not isinstance(completion, (str, list)):
        wanted = "text" if isinstance(prompt, str) else "text or a list of messages"
        raise ChatError(f"field '{name}' must be {wanted}, as the prompt is")
    before = _conversation(prompt, "prompt", row)
    if isinstance(completion, str):
        completion, names = [{"role": "assistant", "content": completion}], [name]
    else:
        names = [f"{name}[{place}]" for place in range(len(completion))]
    if not any(_is_assistant(message) for message in completion):
        raise ChatError(f"field '{name}' has no assistant message, so no token of it would be scored")
    if before.messages and _is_assistant(before.messages[-1]) and _is_assistant(completion[0]):
        raise ChatError(f"field 'prompt' ends with an assistant message, which '{name}' would continue; join the two")
    return Conversation(
        messages=[*before.messages, *completion],
        names=[*before.names, *names],
        tools=before.tools,
        prompt=len(before.messages),
        ended=not cut,
    )


def _is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _conversation(value: Any, name: str, row: Row) -> Conversation:
    if not isinstance(value, list) or not value:
        raise ChatError(f"field '{name}' must be a list of at least one chat message")
    names = [f"{name}[{place}]" for place in range(len(value))]
    return Conversation(messages=value, names=names, tools=row.get("tools"))


_STOP = (*STOP_KEYS, *STOP_ALIASES)
_STOPS = (*_STOP, *STOP_LISTS)
_ROLLOUTS = ("prompt", "rewards", "tools", *_STOPS)
# Formats of records that are a group.
_LISTS = ("completions", "responses")
_STEPS = _UNSUPPORTED | {"labels": "it scores the steps of one answer"}
FORMATS: Mapping[str, Format] = {
    "tokens": Format(others=("loss_mask", *TOKEN_FIELDS), examples=_tokens, refused={}),
    "messages": Format(others=("tools", *_STOP), examples=_messages),
    "conversations": Format(others=("system", "tools", *_STOP), examples=_sharegpt),
    "completion": Format(others=("prompt", "tools", *_STOP), examples=_completion),
    "completions": Format(others=_ROLLOUTS, examples=_completions("completions"), refused=_STEPS),
    "responses": Format(others=_ROLLOUTS, examples=_completions("responses"), refused=_STEPS),
    "rejected": Format(others=("prompt", "chosen", "tools", *_STOPS), examples=_preference),
    "response_tokens": Format(others=("loss_mask", *TOKEN_FIELDS), examples=_tokens, refused={}),
}
# Fields of all formats, in addition to the signals.
COMMON = ("merge_key", "temperature", "exclude")
# All that is read of a record, by its mark.
READ = {mark: frozenset((mark, *one.others, *COMMON, *SIGNALS)) for mark, one in FORMATS.items()}
_OF_TOKENS = {"tokens", "response_tokens", "loss_mask", *TOKEN_FIELDS, *COMMON, *SIGNALS}
# All fields that samples have, under any mark, without other names of them; those that few records have come last.
FIELDS = tuple(
    name
    for name in sorted(
        dict.fromkeys([*(name for mark, one in FORMATS.items() for name in (mark, *one.others)), *COMMON, *SIGNALS]),
        key=(*TOKEN_FIELDS, *_STOPS).__contains__,
    )
    if name not in STOP_ALIASES
)
_REFUSED = tuple(name for one in FORMATS.values() for name in one.refused)
# All that are looked at, and those of them that tables give as JSON Lines would.
KNOWN = frozenset((*FIELDS, *STOP_ALIASES, *_REFUSED, *SWITCHES))
JSON_FIELDS = KNOWN - _OF_TOKENS | {"chosen", "exclude"}


def make_examples(row: Row, source: str, mark: str) -> list[Example]:
    """Return the examples of a record of a mark's format; raises SampleError for a malformed one."""
    try:
        if mark not in TOKEN_MARKS and "loss_mask" in row:
            raise ChatError(f"field 'loss_mask' goes with 'tokens'; with '{mark}' it follows from the answers")
        for name, why in FORMATS[mark].refused.items():
            value = row.get(name)
            if value is not None and (len(value) if hasattr(value, "__len__") else value):
                raise ChatError(f"field '{name}' is not supported with '{mark}': {why}")
        if mark not in TOKEN_MARKS:
            check_record(row, row[mark] if isinstance(row[mark], list) else [])
        return FORMATS[mark].examples(row, source)
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
