"""Assistant turns as a chat template writes them: the text that the model was given, and how it continued."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from mcore_prefix_tree.data.chat_template import CALLING, QUESTION, ChatTemplates, calling
from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.data.messages import THINKING, ChatMessage, Tool, check_said

# An empty block of thinking, for example <think></think> or [THINK][/THINK], with whitespace in and around it.
_EMPTY_THINKING = re.compile(
    r"\s*(?P<opens>[<\[◁]\|?)(?P<tag>[\w:]*(?:think|thought|reason)\w*)(?P<closes>\|?[>\]▷])\s*"
    r"(?P=opens)/(?P=tag)(?P=closes)\s*",
    re.IGNORECASE,
)
# Its first tag at the end of a prompt.
_OPENED_THINKING = re.compile(r"[<\[◁]\|?[\w:]*(?:think|thought|reason)\w*\|?[>\]▷]\s*\Z", re.IGNORECASE)
# Variables with which chat templates turn thinking off.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_LONGEST_TAG = 64
# A message as templates read it.
Turn = dict[str, Any]
# A text that a rendering can be searched for; and characters that mark the end of a message's text, one for each.
_PROBE = "7q1Zx"
_FIRST_MARK = 0xF0000
_MARKS = re.compile("([\U000f0000-\U000ffffd])")
# So many turns are rendered with their whole history.
_FEW = 8


class TurnText(NamedTuple):
    """Text of an assistant turn: its prompt, and the rendered conversation up to its end."""

    prompt: str
    answered: str


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """An assistant turn behind its history, which ``render`` writes."""

    message: ChatMessage
    index: int
    history: list[Turn]
    turn: Turn
    render: Callable[..., str]

    def prompt(self, **switches: bool) -> str:
        """Return the text that the model is given."""
        return self.render(self.history, add_generation_prompt=True, **switches)

    def answered(self, **changes: Any) -> str:
        """Return the text up to the end of the turn, with changes of it."""
        return self.render([*self.history, self.turn | changes])


class TurnTexts:
    """Renders turns, and rejects content that a template would silently drop."""

    def __init__(self, templates: ChatTemplates) -> None:
        """Take the templates of a folder."""
        self._templates = templates
        self._format = f"the chat template of tokenizer '{templates.folder}'"
        # Roles that the templates write, and parts of a turn, by the parts that it has.
        self._roles_written: dict[str, bool] = {}
        self._parts_written: dict[tuple[str, frozenset[str], bool], bool] = {}
        # What prompts without thinking have more than others, by the last role and the block of thinking in the answer.
        self._inserted: dict[tuple[str, str], str] = {}

    def of(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[TurnText]:
        """Return the texts of every assistant turn; raises ChatError if the template does not write all of it.

        A turn's text depends on the messages before it, so rendering each turn costs the square of their number.
        Templates are local, though: they write a message by itself, its neighbours and the last question. So the turns
        are taken from renderings of a few messages each, behind text of one rendering of all. The last turn, and one in
        the middle, are compared with their own renderings; if they differ, each turn is rendered with its history.
        """
        render = partial(self._templates.render, tools=[tool.definition for tool in tools] or None)
        converted = [self._convert(message, f"messages[{index}]") for index, message in enumerate(messages)]
        asked = [
            _Asked(message=message, index=index, history=converted[:index], turn=converted[index], render=render)
            for index, message in enumerate(messages)
            if message.role == "assistant"
        ]
        if len(asked) > _FEW:
            texts = self._spliced(asked, [message.role for message in messages])
            middle = len(asked) // 2
            if texts is not None and texts[middle] == self._turn(asked[middle]):
                return texts
        return [self._turn(one) for one in asked]

    def _turn(self, one: _Asked) -> TurnText:
        try:
            prompt = one.prompt()
        except ChatError as error:
            if one.history:
                raise
            raise ChatError(
                f"field 'messages[0]' is an assistant message with no message before it, and {self._format} needs one; "
                "begin with a system or user message"
            ) from error
        answered = one.answered()
        if one.message.weight:
            self._check_written(one, answered)
        adapt = self._with_empty_thinking if answered.startswith(prompt) else _with_or_without_thinking
        return TurnText(adapt(one, prompt, answered), answered)

    def _spliced(self, turns: Sequence[_Asked], roles: Sequence[str]) -> list[TurnText] | None:
        """Return the texts of the turns from renderings of a few messages; None if the template's text is not local."""
        last = turns[-1]
        marked = [one if one["role"] == "assistant" else _marked(one, at) for at, one in enumerate(last.history)]
        whole = last.answered()
        found, places = _unmarked(replace(last, history=marked).answered())
        if found != whole or _MARKS.search(whole):
            return None
        texts: list[TurnText] = []
        before, asked = "", -1  # the text up to the end of the last message before a turn that is not the assistant's
        for one in turns:
            index = one.index
            known, asked = asked, next((at for at in range(index - 1, -1, -1) if roles[at] != "assistant"), -1)
            near = _near(roles, known, index)
            text = self._turn(replace(one, history=[marked[at] for at in near]))
            (prompt, given), (answered, written) = map(_unmarked, text)
            end = given.get(asked, -1)
            if written.get(asked, -1) != end or answered[: max(end, 0)] != prompt[: max(end, 0)]:
                return None
            if len(near) == index:
                before = prompt[: max(end, 0)]
            elif known not in given or end < given[known] or known not in places:
                return None
            else:  # a new question may change the text before it, as if it were all history
                is_new = "user" in roles[known + 1 : asked + 1]
                before = (whole[: places[known]] if is_new else before) + prompt[given[known] : end]
            end = max(end, 0)
            texts.append(TurnText(before + prompt[end:], before + answered[end:]))
        return texts if texts[-1].answered == whole else None

    def _check_written(self, one: _Asked, answered: str) -> None:
        """Reject a scored turn of which the template drops a part: it would be trained on as if that were not there."""
        message, turn, field = one.message, one.turn, f"messages[{one.index}]"

        def is_read(name: str) -> bool:
            return one.render([*one.history, {key: kept for key, kept in turn.items() if key != name}]) != answered

        check_said(message.others, field, has_thinking=_has_thinking(message), is_read=is_read)
        parts: dict[str, dict[str, Any]] = {}
        if message.thinking:
            parts["thinking"] = dict.fromkeys(THINKING, message.thinking + _PROBE)
        elif _has_thinking(message):
            parts["thinking"] = {"content": message.content.replace("</think>", f"{_PROBE}</think>", 1)}
        if message.tool_calls:
            first, *others = turn["tool_calls"]
            # Some templates write a call by its id, others by its name.
            renamed = first | {"id": "call99999", "function": first["function"] | {"name": _PROBE}}
            parts["tool_calls"] = {"tool_calls": [renamed, *others]}
            if message.content:
                parts["content"] = {"content": message.content + _PROBE}
        for part, changes in parts.items():
            shape = part, frozenset(parts), bool(message.thinking)
            if shape not in self._parts_written:
                self._parts_written[shape] = one.answered(**changes) != answered
            if not self._parts_written[shape]:
                named = f"thinking ({', '.join(THINKING)})" if part == "thinking" else part
                raise ChatError(
                    f"field '{field}' has {named} that {self._format} does not write, so that the model would not be "
                    "trained on it; use a template that writes it, or remove it from the data"
                )

    def _with_empty_thinking(self, one: _Asked, prompt: str, answered: str) -> str:
        """Return a turn's prompt with the empty block of thinking, if any, that the template gives the model."""
        block = _EMPTY_THINKING.match(answered, len(_unopened(prompt)))
        if block is None or one.message.thinking or _EMPTY_THINKING.match(one.message.content):
            return prompt
        key = one.history[-1]["role"] if one.history else "", block[0]
        if key not in self._inserted:
            opens, opens_without = (
                one.prompt(**off)[len(one.render(one.history, **off)) :]
                for off in ({}, dict.fromkeys(_THINKING_SWITCHES, False))
            )
            self._inserted[key] = opens_without[len(opens) :] if opens_without.startswith(opens) else ""
        inserted = self._inserted[key]
        if inserted.strip() and answered.startswith(prompt + inserted):
            return prompt + inserted
        # The block's last whitespace may be the text's own.
        other = one.answered(content=f"b{one.message.content}")
        end = len(prompt)
        while end < block.end() and answered[end] == other[end]:
            end += 1
        return answered[:end]

    def _convert(self, message: ChatMessage, field: str) -> Turn:
        """Return a message as the chat template reads it."""
        role = message.role
        if not self._writes(role):
            if role != "developer":
                raise ChatError(
                    f"field '{field}' has role '{role}', which {self._format} does not write; remove it, or use a "
                    "template that does"
                )
            role = "system"
        converted = {key: one for key, one in message.others.items() if key in self._templates.words}
        converted |= {"role": role, "content": message.content}
        if message.thinking:
            converted |= dict.fromkeys(THINKING, message.thinking)
        if message.tool_calls:
            read = str if self._joins_arguments else json.loads
            calls = [(call.id, call.name, read(call.arguments)) for call in message.tool_calls]
            converted |= calling(*calls, content=message.content)
        named = {"tool_call_id": message.tool_call_id, "name": message.name}
        return converted | {key: one for key, one in named.items() if one is not None}

    @cached_property
    def _joins_arguments(self) -> bool:
        """Return whether the chat template joins arguments with other text, and so takes their JSON text."""
        forms: tuple[Any, ...] = {}, "{}"
        of_object, of_text = (self._templates.text_of(QUESTION, calling(("call00001", "c", one))) for one in forms)
        return bool(of_text) and not of_object

    def _writes(self, role: str) -> bool:
        """Return whether the chat template writes messages of a role, rather than drop them in silence."""
        if role not in self._roles_written:
            probe: Turn = {"role": role, "content": _PROBE}
            conversation = [QUESTION, CALLING, probe] if role == "tool" else [probe, QUESTION, CALLING]
            found = self._templates.text_of(*conversation)
            # A template that refuses the role says so with the record's own messages.
            self._roles_written[role] = role != "developer" if found is None else _PROBE in found
        return self._roles_written[role]


def _has_thinking(message: ChatMessage) -> bool:
    return bool(message.thinking) or "</think>" in message.content


def _marked(turn: Turn, at: int) -> Turn:
    """Return a message with a mark behind its text, ahead of whitespace that a template may trim."""
    content = turn["content"]
    end = len(content.rstrip())
    return turn | {"content": f"{content[:end]}{chr(_FIRST_MARK + at)}{content[end:]}"}


def _unmarked(text: str) -> tuple[str, dict[int, int]]:
    """Return a text without marks, and the place of the last mark of each message."""
    parts, places, length = _MARKS.split(text), {}, 0
    for part, mark in zip(parts[::2], [*parts[1::2], ""], strict=True):
        length += len(part)
        if mark:
            places[ord(mark) - _FIRST_MARK] = length
    return "".join(parts[::2]), places


def _near(roles: Sequence[str], asked: int, index: int) -> list[int]:
    """Return the messages before a turn that its text depends on: system, last question, and all since ``asked``.

    ``asked`` is the last message before the turn before that is not the assistant's. A tool's answer comes with the
    calls before it.
    """
    head = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), 0)
    start = asked
    while start > head and roles[start] not in ("user", "assistant"):
        start -= 1
    while start > head and roles[start] == roles[start - 1] == "assistant":
        start -= 1
    question = next((at for at in range(start, -1, -1) if roles[at] == "user"), -1)
    if start < head or question < head:
        return list(range(index))
    near = [*range(head), *([] if question == start else [question]), *range(start, index)]
    return near if len(near) < index else list(range(index))


def _with_or_without_thinking(one: _Asked, prompt: str, answered: str) -> str:
    """Return the prompt that a turn continues, if the usual one turns thinking on for a turn without, or off."""
    thinks = _has_thinking(one.message)
    switched = one.prompt(**dict.fromkeys(_THINKING_SWITCHES, thinks))
    others = (switched,) if thinks else (switched, _unopened(prompt))
    return next((other for other in others if answered.startswith(other)), prompt)


def _unopened(prompt: str) -> str:
    """Return a prompt without the tag of thinking that it may end with."""
    opened = _OPENED_THINKING.search(prompt[-_LONGEST_TAG:])
    return prompt if opened is None else prompt[: -len(opened[0])]
