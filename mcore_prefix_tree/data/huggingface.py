"""Hugging Face tokenizer folders, with the chat template they carry."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from transformers import AutoTokenizer

from mcore_prefix_tree.data.chat import ChatError, ChatMessage, EncodedTurn, Tool


class HuggingFaceChatTokenizer:
    """Encodes with ``apply_chat_template`` of a local folder.

    A turn is one assistant message: the template renders the history with its generation prompt (what the model is
    given) and the history with the message (what it must continue to). Whitespace that the template writes behind the
    end-of-turn token is not part of the turn, because the model does not generate it.
    """

    def __init__(self, folder: str) -> None:
        """``folder``: holds what ``save_pretrained`` of a tokenizer writes.

        Raises:
            ValueError: if transformers cannot load the folder, or the tokenizer has no chat template.
        """
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"tokenizer '{folder}': transformers cannot load this folder: {reason}") from error
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"tokenizer '{folder}' has no chat template; add chat_template.jinja to the folder or choose another"
            )
        self._folder = folder
        special = [token for token in self._tokenizer.added_tokens_decoder.items() if token[1].special]
        self._special_ids = frozenset(token_id for token_id, _ in special)
        self._special_texts = sorted((token.content for _, token in special), key=len, reverse=True)

    @property
    def name(self) -> str:
        """What ``load_tokenizer`` was given."""
        return self._folder

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return len(self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``ChatTokenizer.decode``."""
        return str(self._tokenizer.decode(list(tokens)))

    def encode_turns(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[EncodedTurn]:
        """See ``ChatTokenizer.encode_turns``."""
        told = [tool.definition for tool in tools] or None
        converted = [_convert(message) for message in messages]
        turn_indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
        prompts = [self._render(converted[:index], told, add_generation_prompt=True) for index in turn_indices]
        answered = [self._render(converted[: index + 1], told, add_generation_prompt=False) for index in turn_indices]
        encoded = self._encode(prompts + answered)
        turns = []
        for number, prompt in enumerate(encoded[: len(prompts)]):
            whole = encoded[len(prompts) + number]
            if whole[: len(prompt)] != prompt and answered[number].startswith(prompts[number]):
                # The tokenizer joins the prompt's last characters with the answer's first, such as two line breaks. The
                # model was given the one and wrote the other.
                whole = prompt + self._token_ids([answered[number][len(prompts[number]) :]])[0]
            if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
                raise ChatError(
                    f"field 'messages[{turn_indices[number]}]' does not continue its generation prompt in the chat "
                    f"template of tokenizer '{self._folder}'; use another tokenizer"
                )
            end = self._generated_end(whole, len(prompt))
            turns.append(EncodedTurn(tokens=np.array(whole[:end], dtype=np.int32), start=len(prompt)))
        return turns

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ChatError(
                f"field 'messages' does not fit the chat template of tokenizer '{self._folder}': {error}"
            ) from error
        return str(rendered)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, ``[n]`` each. The last text is the longest rendering of the conversation.

        The texts of one conversation repeat each other, so the pieces between special tokens are encoded once. That is
        exact unless a special token changes how its neighbours are encoded (it strips whitespace, or the encoding
        depends on being first); the last text, encoded whole, tells.
        """
        present = [re.escape(text) for text in self._special_texts if text in texts[-1]]
        if not present:
            return self._token_ids(texts)
        separator = re.compile(f"({'|'.join(present)})")
        pieces = [separator.split(text) for text in texts]
        distinct = list(dict.fromkeys(piece for text_pieces in pieces for piece in text_pieces if piece))
        ids_of = dict(zip(distinct, self._token_ids(distinct), strict=True))
        encoded = [[i for piece in text_pieces if piece for i in ids_of[piece]] for text_pieces in pieces]
        if encoded[-1] != self._token_ids(texts[-1:])[0]:
            return self._token_ids(texts)
        return encoded

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    def _generated_end(self, tokens: list[int], start: int) -> int:
        for end in range(len(tokens), start, -1):
            if tokens[end - 1] in self._special_ids:
                tail = self._tokenizer.decode(tokens[end:])
                return len(tokens) if tail.strip() else end
        return len(tokens)


def _convert(message: ChatMessage) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        converted["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            converted["name"] = message.name
    return converted


def _arguments(text: str) -> Any:
    """Templates write arguments with ``tojson``, so they want the object; text that is none stays text."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text
