"""Assistant turns as a chat template writes them: the text that the model was given, and how it continued."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from mcore_prefix_tree.data.chat import ChatMessage, Tool
from mcore_prefix_tree.data.chat_template import ChatTemplates
from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.data.turn_ends import CALLING, QUESTION
from mcore_prefix_tree.data.turns import THINKING, check_said

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
# A message as templates read it, and a template's function from messages and switches to text.
Turn = dict[str, Any]
Render = Callable[..., str]
# A text that a rendering can be searched for.
_PROBE = "7q1Zx"


@dataclass(frozen=True, kw_only=True)
class TurnText:
    """Text of the assistant turn at message ``index``: its prompt, and the rendered conversation up to its end."""

    index: int
    prompt: str
    answered: str


class TurnTexts:
    """Renders turns, and rejects content that a template would silently drop."""

    def __init__(self, templates: ChatTemplates, folder: str) -> None:
        """``folder`` is the tokenizer's, for messages."""
        self._templates = templates
        self._folder = folder
        # Roles that the templates write, and parts of a turn, by the parts that it has.
        self._roles_written: dict[str, bool] = {}
        self._parts_written: dict[tuple[str, tuple[frozenset[str], bool]], bool] = {}

    def of(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[TurnText]:
        """Return the texts of every assistant turn; raises ChatError if the template does not write all of it."""
        render = partial(self._templates.render, tools=[tool.definition for tool in tools] or None)
        converted = [self._convert(message, f"messages[{index}]") for index, message in enumerate(messages)]
        texts = []
        for index, message in enumerate(messages):
            if message.role == "assistant":
                history, turn = converted[:index], converted[index]
                prompt = render(history, add_generation_prompt=True) if history else self._opening(render)
                answered = render([*history, turn])
                self._check_written(message, f"messages[{index}]", answered, history, turn, render)
                is_continued = answered.startswith(prompt)
                adapt = _with_empty_thinking if is_continued else _with_or_without_thinking
                prompt = adapt(prompt, answered, message, history, turn, render)
                texts.append(TurnText(index=index, prompt=prompt, answered=answered))
        return texts

    def _opening(self, render: Render) -> str:
        """Return the prompt of a conversation that the assistant begins."""
        try:
            return render([], add_generation_prompt=True)
        except ChatError as error:
            raise ChatError(
                "field 'messages[0]' is an assistant message with no message before it, and the chat template of "
                f"tokenizer '{self._folder}' needs one; begin with a system or user message"
            ) from error

    def _check_written(
        self,
        message: ChatMessage,
        field: str,
        answered: str,
        history: list[Turn],
        turn: Turn,
        render: Render,
    ) -> None:
        """Reject a scored turn of which the template drops a part: it would be trained on as if that were not there."""

        def is_read(name: str) -> bool:
            without = {key: one for key, one in turn.items() if key != name}
            return render([*history, without]) != answered

        if message.weight:
            has_thinking = bool(message.thinking) or "</think>" in message.content
            check_said(message.others, field, has_thinking=has_thinking, is_read=is_read)
        parts = {}
        if message.thinking:
            parts["thinking"] = turn | dict.fromkeys(THINKING, message.thinking + _PROBE)
        elif "</think>" in message.content:
            parts["thinking"] = turn | {"content": message.content.replace("</think>", f"{_PROBE}</think>", 1)}
        if message.tool_calls:
            first, *others = turn["tool_calls"]
            # Some templates write a call by its id, others by its name.
            renamed = first | {"id": "call99999", "function": first["function"] | {"name": _PROBE}}
            parts["tool_calls"] = turn | {"tool_calls": [renamed, *others]}
            if message.content:
                parts["content"] = turn | {"content": message.content + _PROBE}
        shape = frozenset(parts), bool(message.thinking)
        for part, changed in parts.items():
            if (part, shape) not in self._parts_written:
                self._parts_written[part, shape] = render([*history, changed]) != answered
            if not self._parts_written[part, shape] and message.weight:
                named = f"thinking ({', '.join(THINKING)})" if part == "thinking" else part
                raise ChatError(
                    f"field '{field}' has {named} that the chat template of tokenizer '{self._folder}' does not write, "
                    "so that the model would not be trained on it; use a template that writes it, or remove it from "
                    "the data"
                )

    def _convert(self, message: ChatMessage, field: str) -> dict[str, Any]:
        """Return a message as the chat template reads it."""
        role = message.role
        if not self._writes(role):
            if role != "developer":
                raise ChatError(
                    f"field '{field}' has role '{role}', which the chat template of tokenizer '{self._folder}' does "
                    "not write; remove it, or use a template that does"
                )
            role = "system"
        converted = {key: one for key, one in message.others.items() if key in self._templates.words}
        converted |= {"role": role, "content": message.content}
        if message.thinking:
            converted |= dict.fromkeys(THINKING, message.thinking)
        if message.tool_calls:
            converted["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if self._joins_arguments else _arguments(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            converted["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            converted["name"] = message.name
        return converted

    @cached_property
    def _joins_arguments(self) -> bool:
        """Return whether the chat template joins arguments with other text, and so takes their JSON text."""
        (call,) = CALLING["tool_calls"]
        texts = []
        object_and_text: tuple[Any, str] = ({}, "{}")
        for arguments in object_and_text:
            changed = call | {"function": call["function"] | {"arguments": arguments}}
            try:
                texts.append(self._templates.render([QUESTION, CALLING | {"tool_calls": [changed]}]))
            except ChatError:
                texts.append("")
        return not texts[0] and bool(texts[1])

    def _writes(self, role: str) -> bool:
        """Return whether the chat template writes messages of a role, rather than drop them in silence."""
        if role not in self._roles_written:
            probe: dict[str, Any] = {"role": role, "content": _PROBE}
            conversation = [QUESTION, CALLING, probe] if role == "tool" else [probe, QUESTION, CALLING]
            try:
                found = self._templates.render(conversation)
                self._roles_written[role] = _PROBE in found
            except ChatError:  # a template that refuses the role says so with the record's own messages
                self._roles_written[role] = role != "developer"
        return self._roles_written[role]


def _with_or_without_thinking(
    prompt: str, answered: str, message: ChatMessage, history: list[Turn], turn: Turn, render: Render
) -> str:
    """Return the prompt that a turn continues, if the usual one turns thinking on for a turn without, or off."""
    thinks = bool(message.thinking) or "</think>" in message.content
    switched = render(history, add_generation_prompt=True, **dict.fromkeys(_THINKING_SWITCHES, thinks))
    others = (switched,) if thinks else (switched, _unopened(prompt))
    return next((other for other in others if answered.startswith(other)), prompt)


def _with_empty_thinking(
    prompt: str, answered: str, message: ChatMessage, history: list[Turn], turn: Turn, render: Render
) -> str:
    """Return a turn's prompt with the empty block of thinking, if any, that the template gives the model."""
    block = _EMPTY_THINKING.match(answered, len(_unopened(prompt)))
    if block is None or message.thinking or _EMPTY_THINKING.match(message.content):
        return prompt
    opens, opens_without = (
        render(history, add_generation_prompt=True, **off)[len(render(history, **off)) :]
        for off in ({}, dict.fromkeys(_THINKING_SWITCHES, False))
    )
    inserted = opens_without.removeprefix(opens)
    if inserted != opens_without and inserted.strip() and answered.startswith(prompt + inserted):
        return prompt + inserted
    # The block's last whitespace may be the text's own.
    other = render([*history, turn | {"content": f"b{message.content}"}])
    end = len(prompt)
    while end < block.end() and answered[end] == other[end]:
        end += 1
    return answered[:end]


def _unopened(prompt: str) -> str:
    """Return a prompt without the tag of thinking that it may end with."""
    opened = _OPENED_THINKING.search(prompt[-_LONGEST_TAG:])
    return prompt if opened is None else prompt[: -len(opened[0])]


def _arguments(text: str) -> Any:
    """Return arguments as the object that templates write with ``tojson``; text that is no object stays text."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text
