"""Hugging Face tokenizer folders, with the chat template they carry."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import jinja2
import numpy as np
from transformers import AutoTokenizer

from mcore_prefix_tree.data.chat import ChatError, ChatMessage, EncodedTurn, Tool, continuation
from mcore_prefix_tree.data.stopping import with_end
from mcore_prefix_tree.data.vocabulary import DummySpace, Spelling, Vocabulary

# What a template can ask that is answered differently the next time.
_CLOCK = "strftime_now"
_UNSTEADY = (_CLOCK, "lipsum")
# What a clock may be asked for, of a date at midnight.
_DATE_LETTERS = "aAbBcdFHIjmMpSTuUVwWxXyY"
_UNSTEADY_FILTER = "random"
# A template is a program of its author's, so any of these says that this conversation does not suit it. What speaks of
# the machine instead passes through: a package that is missing, a file, memory.
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


class HuggingFaceChatTokenizer:
    """Encodes with ``apply_chat_template`` of a local folder.

    A turn is one assistant message: the template renders the history with its generation prompt (what the model is
    given) and the history with the message (what it must continue to). Whitespace that the template writes behind the
    end-of-turn token is not part of the turn, because the model does not generate it.

    A template that reads the clock or draws at random is rejected: a line would have other tokens on another rank, on
    another day and when it is read again. ``chat_template_kwargs`` can set the date.
    """

    def __init__(self, folder: str, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Load what ``save_pretrained`` of a tokenizer wrote; see :func:`mcore_prefix_tree.data.load_tokenizer`."""
        self._tokenizer: Any = _loaded(folder)
        self._folder = folder
        given = dict(chat_template_kwargs or {})
        templates = _templates_of(self._tokenizer, folder)
        _refuse_unsteady(templates, folder, has_date=bool({_CLOCK, "date_string"} & given.keys()))
        known = inspect.signature(self._tokenizer.apply_chat_template).parameters
        for name in given.keys() & known.keys():
            raise ValueError(f"chat_template_kwargs has '{name}', which is not for the template to read; leave it out")
        shown = _date_of(given.pop(_CLOCK, None))
        self._tokenizer.chat_template = {name: _with_clock(template, shown) for name, template in templates.items()}
        self._template_kwargs = given
        added = self._tokenizer.added_tokens_decoder
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Tokenizers look for these before anything else, so the text between two of them is encoded by itself.
        self._raw_ids = {token.content: token_id for token_id, token in added.items() if not token.normalized}
        raw = sorted(self._raw_ids, key=len, reverse=True)
        self._separator = re.compile(f"({'|'.join(map(re.escape, raw))})") if raw else None

    @property
    def name(self) -> str:
        """Argument of ``load_tokenizer``."""
        return self._folder

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the token ids."""
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
                written = self._written_behind(prompt, answered[number][len(prompts[number]) :], whole)
                if written is None:
                    raise ChatError(
                        f"field 'messages[{turn_indices[number]}]' begins with characters that tokenizer "
                        f"'{self._folder}' joins with its generation prompt, and cannot write apart from it; change "
                        "how the chat template ends its prompt, for example without a space, or use another tokenizer"
                    )
                whole = prompt + written
            if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
                raise ChatError(
                    f"field 'messages[{turn_indices[number]}]' does not continue its generation prompt in the chat "
                    f"template of tokenizer '{self._folder}'; use another tokenizer"
                )
            end = self._generated_end(whole, len(prompt))
            turns.append(EncodedTurn(tokens=np.array(whole[:end], dtype=np.int32), start=len(prompt)))
        return turns

    def encode_completion(self, prompt: str, completion: str, *, ended: bool = True) -> EncodedTurn:
        """See ``ChatTokenizer.encode_completion``; control tokens in the text are control tokens."""
        end = self._tokenizer.eos_token
        if end is None and ended:
            raise ChatError(f"tokenizer '{self._folder}' has no eos_token to end a completion with; set one")
        written = completion if end is None else with_end(completion, end, ended=ended)
        before, whole = self._token_ids([prompt, prompt + written])
        opening = self._opening
        # To some tokenizers one token begins and ends a text: the end is not taken for a beginning.
        if whole[: len(whole) - ended][: len(opening)] == opening:
            opening = []
        return continuation([*opening, *before], [*opening, *whole], ended=ended)

    @cached_property
    def _opening(self) -> list[int]:
        """Token ids that the tokenizer writes before a text, mostly the one that begins a sequence.

        What it writes behind a text belongs to no prompt, and ends no completion that the model did not end.
        """
        for text in ("0", "a", "."):
            ids, bare = self._tokenizer(text)["input_ids"], self._token_ids([text])[0]
            places = [at for at in range(len(ids)) if bare and ids[at : at + len(bare)] == bare]
            if places:
                return list(ids[: places[0]])
        return []

    def encode_text(self, text: str) -> list[int]:
        """See ``ChatTokenizer.encode_text``."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def vocabulary(self) -> Vocabulary:
        """See ``ChatTokenizer.vocabulary``."""
        added = self._tokenizer.added_tokens_decoder
        pieces = self._tokenizer.convert_ids_to_tokens(list(range(self.vocab_size)))
        unknown = {self._tokenizer.unk_token_id} - {None}
        return Vocabulary(
            pieces=pieces,
            spelling=_spelling_of(self._tokenizer, self._folder),
            special=self._special_ids | unknown,
            verbatim=frozenset(added) - self._special_ids,
            dummy_space=self._dummy_space(),
            bos=self._tokenizer.bos_token_id,
            eos=self._tokenizer.eos_token_id,
            merges=_merges_of(self._tokenizer),
        )

    def _dummy_space(self) -> DummySpace:
        """Encode a digit alone and behind a control token, and see which of them gets a space."""

        def has_space(text: str, at: int) -> bool:
            piece: str = self._tokenizer.convert_ids_to_tokens(self._token_ids([text])[0])[at]
            return piece.startswith(("\u2581", "\u0120"))

        if not has_space("0", 0):
            return "never"
        special = next(iter(self._special_ids), None)
        if special is None:
            return "first"
        return "always" if has_space(self._tokenizer.convert_ids_to_tokens(special) + "0", 1) else "first"

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
            )
        except _TEMPLATE_FAULTS as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise ChatError(
                f"field 'messages' does not fit the chat template of tokenizer '{self._folder}': "
                f"{kind}{' '.join(str(error).split())[:200]}"
            ) from error
        return str(rendered)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text. The last text is the longest rendering of the conversation.

        The texts of one conversation repeat each other, so what lies between added tokens is encoded once. It is
        encoded between the two that are beside it (or the border of the text), because that decides: a token may take
        whitespace of its neighbours or be none beside a letter, and some encodings put a space before a text.
        """
        if self._separator is None:
            return self._token_ids(texts)
        split = [["", *self._separator.split(text), ""] for text in texts]
        triples = [[tuple(parts[at : at + 3]) for at in range(0, len(parts) - 2, 2)] for parts in split]
        ids_of = self._ids_of_triples(list(dict.fromkeys(chain.from_iterable(triples))))
        if ids_of is not None:
            encoded = [[i for triple in of_text for i in ids_of[triple]] for of_text in triples]
            if encoded[-1] == self._token_ids(texts[-1:])[0]:
                return encoded
        return self._token_ids(texts)  # this tokenizer does not split texts at added tokens

    def _ids_of_triples(self, triples: list[tuple[str, ...]]) -> dict[tuple[str, ...], list[int]] | None:
        """Return the ids of the text in each triple and of the token behind it; None if an added token is not one."""
        ids_of = {}
        for triple, ids in zip(triples, self._token_ids(["".join(triple) for triple in triples]), strict=True):
            before, _, after = triple
            first = [self._raw_ids[before]] if before else []
            last = [self._raw_ids[after]] if after else []
            if ids[: len(first)] != first or ids[max(len(ids) - len(last), len(first)) :] != last:
                return None
            ids_of[triple] = ids[len(first) :]
        return ids_of

    def _written_behind(self, prompt: list[int], text: str, joined: list[int]) -> list[int] | None:
        """Return the token ids of ``text`` as the model wrote it behind a prompt, or None if the tokenizer has none.

        Some tokenizers put a space before a text, but not behind something that the text is not joined with. The ids
        are right if they decode as ``joined`` does, the ids of prompt and text as one text.
        """
        if self._separator is not None and self._separator.match(text):
            return self._token_ids([text])[0]  # no token is put before an added one
        kept = 0
        while kept < min(len(prompt), len(joined)) and prompt[kept] == joined[kept]:
            kept += 1
        kept = max(kept - 1, 0)
        expected = self._text(joined[kept:])
        for before in ("", next(iter(self._raw_ids), ""), "\n", ":"):
            ids, skipped = self._token_ids([before + text, before])
            written = ids[len(skipped) :]
            if ids[: len(skipped)] == skipped and self._text(prompt[kept:] + written) == expected:
                return written
        return None

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    def _generated_end(self, tokens: list[int], start: int) -> int:
        for end in range(len(tokens), start, -1):
            if tokens[end - 1] in self._special_ids:
                tail = self._tokenizer.decode(tokens[end:])
                return len(tokens) if tail.strip() else end
        return len(tokens)


def _loaded(folder: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes transformers and tokenizers raise nearly anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"tokenizer '{folder}': transformers cannot load this folder: {reason}") from error


def _spelling_of(tokenizer: Any, folder: str) -> Spelling:
    """Return how a tokenizer spells its tokens, which its decoder undoes."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    parts = [] if decoder is None else [json.loads(decoder.__getstate__())]
    kinds: set[str] = set()
    while parts:
        part = parts.pop()
        kinds.add("Metaspace" if part.get("pattern") == {"String": "\u2581"} else part["type"])
        parts += part.get("decoders", ())
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"}:
        return "sentencepiece"
    raise ValueError(
        f"tokenizer '{folder}' does not tell the bytes of its tokens (its decoder is "
        f"{', '.join(sorted(kinds)) or 'missing'}); use a byte-level, SentencePiece or Tekken tokenizer"
    )


def _merges_of(tokenizer: Any) -> list[str]:
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    merges = [] if model is None else json.loads(model.__getstate__()).get("merges", [])
    # Pairs are lists or, in older files, joined by a space.
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]


def _templates_of(tokenizer: Any, folder: str) -> dict[str, str]:
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


def _date_of(given: object) -> date | None:
    try:
        return None if given is None else date.fromisoformat(str(given))
    except ValueError:
        raise ValueError(f"chat_template_kwargs: {_CLOCK} is {given!r}; give a date as 2026-11-20") from None


def _with_clock(template: str, shown: date | None) -> str:
    """Return a template whose ``strftime_now`` is a macro that shows a fixed date, or raises if none is given.

    Transformers hands a template plain data and no functions. The line break belongs to the macro's end.
    """
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
                        else "write what the model was given in its place into the chat template of the folder"
                    )
                )


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
    """Return arguments as the object that templates write with ``tojson``; text that is no object stays text."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text
