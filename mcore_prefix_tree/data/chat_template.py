"""Chat templates of a Hugging Face folder: their faults, the text that they render, and the tokens that end a turn."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from transformers.utils.chat_template_utils import _compile_jinja_template

from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.data.text_parts import common_length
from mcore_prefix_tree.utils.ranks import is_first_rank

logger = logging.getLogger(__name__)

# Calls of a template whose answer differs the next time.
_CLOCK = "strftime_now"
_UNSTEADY = (_CLOCK, "lipsum")
_UNSTEADY_FILTER = "random"
# A template is a program of its author's, so any of these means that this conversation does not suit it. Errors of the
# machine pass through, for example a missing package, a file or memory.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,  # RecursionError, NotImplementedError
    TypeError,
    ValueError,
)


class ChatTemplates:
    """Renders conversations as ``apply_chat_template`` of a tokenizer does, in transformers' sandbox.

    Rejects templates with a clock, unless ``given`` sets the date, or a random draw: ranks and days would differ.
    """

    def __init__(self, tokenizer: Any, folder: str, given: Mapping[str, Any]) -> None:
        """Check the templates of a tokenizer, their variables and that output is constant; raise ValueError if not."""
        variables = dict(given)
        templates = _read_templates(tokenizer, folder)
        _refuse_unsteady(templates, folder, has_date=bool({_CLOCK, "date_string"} & variables.keys()))
        known = inspect.signature(tokenizer.apply_chat_template).parameters
        for name in variables.keys() & known.keys():
            raise ValueError(f"chat_template_kwargs has '{name}', which is not a template variable; remove it")
        self.tokenizer, self.folder = tokenizer, folder
        self._variables = variables | {_CLOCK: partial(_show, _parse_date(variables.get(_CLOCK)))}
        # Keys of messages that no template names need not be given to one.
        self.words = frozenset(word for one in templates.values() for word in re.findall(r"\w+", one))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **switches: bool,
    ) -> str:
        """Return a conversation's text with further template variables ``switches``; raise ChatError if unsuitable."""
        try:
            template = _compile_jinja_template(self.tokenizer.get_chat_template(None, tools))
            # The variables that apply_chat_template gives a template.
            variables = {
                **self.tokenizer.special_tokens_map,
                **switches,
                **self._variables,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            return str(template.render(variables))
        except _TEMPLATE_FAULTS as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise ChatError(
                f"field 'messages' does not fit the chat template of tokenizer '{self.folder}': "
                f"{kind}{' '.join(str(error).split())[:200]}"
            ) from error

    def text_of(self, *messages: Mapping[str, Any]) -> str | None:
        """Return the text of a conversation, or None if it does not suit the template."""
        try:
            return self.render(messages)
        except ChatError:
            return None


def _read_templates(tokenizer: Any, folder: str) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name."""
    found = tokenizer.chat_template
    if not found:
        raise ValueError(
            f"tokenizer '{folder}' has no chat template; add chat_template.jinja to the folder or choose another"
        )
    templates = {"default": found} if isinstance(found, str) else found
    if not isinstance(templates, dict) or not all(isinstance(one, str) for one in templates.values()):
        raise ValueError(f"tokenizer '{folder}' has a chat template that is not text; write it as Jinja")
    return templates


def _parse_date(given: object) -> date | None:
    try:
        return None if given is None else date.fromisoformat(str(given))
    except ValueError:
        raise ValueError(f"chat_template_kwargs: {_CLOCK} is {given!r}; give a date as 2026-11-20") from None


def _show(shown: date | None, form: str) -> str:
    """Return a date at midnight as a template's clock shows it."""
    if shown is None:
        raise jinja2.TemplateError(f"it reads the clock: chat_template_kwargs has no {_CLOCK}, as 2026-11-20")
    return shown.strftime(form)


def _refuse_unsteady(templates: dict[str, str], folder: str, *, has_date: bool) -> None:
    for name in {"default", "tool_use"} & set(templates):  # those that are rendered
        try:
            parts = [part for part in jinja2.Environment().lex(templates[name]) if part[1] != "whitespace"]
        except jinja2.TemplateError as error:
            raise ValueError(f"tokenizer '{folder}' has a chat template that cannot be parsed: {error}") from error
        for (_, _, before), (_, kind, word) in pairwise(parts):
            if kind != "name" or (word == _CLOCK and has_date):
                continue
            if (word in _UNSTEADY and before != ".") or (word == _UNSTEADY_FILTER and before == "|"):
                raise ValueError(
                    f"tokenizer '{folder}' has a chat template that uses '{word}', which makes other tokens of the "
                    "same line each time it is read; "
                    + (
                        "say which date the model was given: chat_template_kwargs with strftime_now, as 2026-11-20"
                        if word == _CLOCK
                        else "replace it in the folder's chat template with the text that the model was given"
                    )
                )


# A conversation that every chat template takes.
QUESTION: dict[str, Any] = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b."}  # no letter: some tokens are not recognised next to one


def calling(*calls: tuple[str, str, Any], content: str = "") -> dict[str, Any]:
    """Return an assistant's message with calls, as id, name and arguments."""
    shown = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": shown}


CALLING = calling(("call00001", "c", {}))


class TurnEnds:
    """Finds the end of assistant turns in their tokens.

    Three sources define the tokens that stop the model: ``eos_token_id`` of the folder's generation config, the
    tokenizer's end-of-sequence token, and the token with which the chat template ends an answer. If the template ends
    an answer with no token, as GLM's does, the model stops with the token that opens the next message.
    """

    def __init__(self, templates: ChatTemplates, encode: Callable[[str], list[int]]) -> None:
        """Read the generation config of the templates' folder, if any, and render an answer; raise ValueError."""
        self._templates, self._encode = templates, encode
        added = templates.tokenizer.added_tokens_decoder
        self._added, self._special = frozenset(added), {token_id for token_id, one in added.items() if one.special}
        self._declared = declared_stops(templates.folder)
        stops = {*self._declared, templates.tokenizer.eos_token_id} - {None}
        # The tokens with which the template ends an answer, and the index of the one that stops the model.
        self._ending: list[int] = []
        self._at: int | None = None
        answer, later = self._ids(QUESTION, _ANSWER), self._ids(QUESTION, _ANSWER, QUESTION)
        self._is_ended = answer is None or later is None  # a template for other conversations
        if answer is not None and later is not None:
            self._ending, self._at = self._answer_end(answer, later, stops)
            self._is_ended = self._at is not None
            stops |= set() if self._at is None else {self._ending[self._at]}
        self._stops = frozenset(stops)
        self._openers: dict[str, int | None] = {}
        self._has_warned = False

    def _ids(self, *messages: Mapping[str, Any]) -> list[int] | None:
        text = self._templates.text_of(*messages)
        return None if text is None else self._encode(text)

    def text(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
        """Return the text of token ids as they are."""
        return str(self._templates.tokenizer.decode([int(one) for one in ids], clean_up_tokenization_spaces=False))

    def _answer_end(self, answer: list[int], later: list[int], stops: set[int]) -> tuple[list[int], int | None]:
        """Return the tokens that end an answer, which ``later`` may lack, and the index of the one that stops."""
        start = self._tail(answer, 0, stops | self._added)
        ending = answer[start:]
        behind = later[len(later) - later[::-1].index(answer[start - 1]) :] if answer[start - 1] in later else []
        for tokens in (ending[: common_length(ending, behind)], ending):
            known = [at for at, token in enumerate(tokens) if token in stops]
            added = [at for at, token in enumerate(tokens) if token in self._added]
            if known or added:
                return ending, known[0] if known else added[-1]
        return ending, None

    def stop(self, tokens: npt.NDArray[np.int32], start: int) -> tuple[int, int] | None:
        """Return the end of a turn's text, from ``start`` to the end of ``tokens``, and its end token's index."""
        text_end = len(tokens) - len(self._ending)
        at = text_end + (self._at or 0)
        if self._at is None or text_end < start or tokens[text_end:].tolist() != self._ending:
            # A turn of another kind, for example a call, may end differently; and text may end with the token itself.
            text_end = at = self._tail(tokens, start, frozenset()) - 1
            if at < start or tokens[at] not in (self._stops | self._special if self._is_ended else self._stops):
                return None
        while at > start and tokens[at - 1] == tokens[at]:  # the text ends with the token, and the template repeats it
            at -= 1
        return min(text_end, at), at

    def text_end(self, tokens: npt.NDArray[np.int32], start: int) -> int:
        """Return where the text of a turn ends that no token ends: ahead of what the template writes behind answers."""
        end = len(tokens) - len(self._ending)
        return end if end >= start and tokens[end:].tolist() == self._ending else len(tokens)

    def opener(self, role: str, following: Sequence[int]) -> int | None:
        """Return the token that opens the message after a turn, given known ``following`` tokens; None without one."""
        if self._is_ended or role == "assistant":
            return None
        token = following[0] if following else self._opener(role)
        if token is None or not (token in self._declared if self._declared else token in self._added):
            return None
        return token

    def warn_unended(self) -> None:
        """Warn once that a turn ends with no token that stops the model."""
        if not self._has_warned and is_first_rank():
            logger.warning(
                "tokenizer '%s': its chat template ends an assistant turn with no token, so that nothing trains the "
                "model to stop; add the end-of-turn token to the template",
                self._templates.folder,
            )
        self._has_warned = True

    def _tail(self, tokens: Sequence[int] | npt.NDArray[np.int32], start: int, controls: Collection[int]) -> int:
        """Return the index of the first of the control tokens and the whitespace that end a turn."""
        at = len(tokens)
        while at > start and (tokens[at - 1] in controls or not self.text(tokens[at - 1 : at]).strip()):
            at -= 1
        return at

    def _opener(self, role: str) -> int | None:
        if role not in self._openers:
            found: list[int] = []
            for turn in [CALLING, _ANSWER] if role == "tool" else [_ANSWER]:
                before, after = self._ids(QUESTION, turn), self._ids(QUESTION, turn, {"role": role, "content": "d"})
                if before is not None and after is not None and after[: len(before)] == before:
                    found += after[len(before) :][:1]
            self._openers[role] = next(iter(found), None)
        return self._openers[role]


def declared_stops(folder: str) -> frozenset[int]:
    """Return ``eos_token_id`` of a folder's generation config, or nothing; raise ValueError if it is malformed."""
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return frozenset()
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not valid JSON; restore it from the model's folder") from None
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not isinstance(config, dict) or not all(type(token) is int for token in ids):
        raise ValueError(f"{path}: eos_token_id must be a token id or a list of token ids")
    return frozenset(ids)
