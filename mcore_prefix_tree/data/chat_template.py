"""Chat templates of a Hugging Face folder: their faults, and the text that they render for a conversation."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import pairwise
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

from mcore_prefix_tree.data.json_fields import ChatError

# Calls of a template whose answer differs the next time.
_CLOCK = "strftime_now"
_UNSTEADY = (_CLOCK, "lipsum")
# Date formats that a clock fixed at midnight can answer.
_DATE_LETTERS = "aAbBcdFHIjmMpSTuUVwWxXyY"
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
        shown = _parse_date(variables.pop(_CLOCK, None))
        tokenizer.chat_template = {name: _with_clock(template, shown) for name, template in templates.items()}
        self._tokenizer = tokenizer
        self._folder = folder
        self._variables = variables
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
            template = _compile_jinja_template(self._tokenizer.get_chat_template(None, tools))
            # The variables that apply_chat_template gives a template.
            variables = {
                **self._tokenizer.special_tokens_map,
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
                f"field 'messages' does not fit the chat template of tokenizer '{self._folder}': "
                f"{kind}{' '.join(str(error).split())[:200]}"
            ) from error


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


def _with_clock(template: str, shown: date | None) -> str:
    """Return a template whose ``strftime_now`` is a macro, line break included, for a date; raise without one."""
    if _CLOCK not in template:
        return template
    if shown is None:
        body = "{{ raise_exception('it reads the clock: chat_template_kwargs has no strftime_now, as 2026-11-20') }}"
    else:
        forms = [f"%{letter}" for letter in _DATE_LETTERS] + ["%-d", "%-m"]
        shows = "".join(f".replace('{form}', {json.dumps(shown.strftime(form))})" for form in forms)
        body = f"{{{{ format{shows} }}}}"
    return f"{{% macro {_CLOCK}(format) %}}{body}{{% endmacro %}}\n{template}"


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
