"""Hugging Face tokenizer folders, with the chat template they carry."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from mcore_prefix_tree.data.chat import DummySpace, EncodedTurn, Spelling, Vocabulary, continuation
from mcore_prefix_tree.data.chat_template import ChatTemplates, TurnEnds
from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.data.messages import ChatMessage, Tool
from mcore_prefix_tree.data.stopping import with_end
from mcore_prefix_tree.data.text_parts import Triple, common_length, cut_texts
from mcore_prefix_tree.data.turn_texts import TurnTexts
from mcore_prefix_tree.sample import INT32_MAX
from mcore_prefix_tree.utils.inputs import is_utf8

Ids = npt.NDArray[np.int32]


class HuggingFaceChatTokenizer:
    """Encodes with ``apply_chat_template`` of a local folder; rejects the templates that ChatTemplates rejects.

    A turn is one assistant message: the template renders the history with its generation prompt (the model's input) and
    the history with the message (its continuation). Text that the template writes after the token that stopped the
    model is not part of the turn; see :class:`~mcore_prefix_tree.data.chat_template.TurnEnds`.
    """

    def __init__(self, folder: str, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Load a folder written by ``save_pretrained``; see :func:`mcore_prefix_tree.data.load_tokenizer`."""
        self._tokenizer: Any = _loaded(folder)
        self.name = folder
        self.vocab_size = len(self._tokenizer)
        self._templates = ChatTemplates(self._tokenizer, folder, chat_template_kwargs or {})
        self._texts = TurnTexts(self._templates)
        added = self._tokenizer.added_tokens_decoder
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Tokenizers look for these before anything else, so the text between two of them is encoded by itself.
        self._raw_ids = {token.content: token_id for token_id, token in added.items() if not token.normalized}
        raw = sorted(self._raw_ids, key=len, reverse=True)
        self._separator = re.compile(f"({'|'.join(map(re.escape, raw))})") if raw else None
        self._fast = _fast_backend(self._tokenizer)
        # Neighbouring added tokens between which this tokenizer is known to encode text by itself.
        self._known_borders: set[tuple[str, str]] = set()

    @cached_property
    def _ends(self) -> TurnEnds:
        return TurnEnds(self._templates, lambda text: self._token_ids([text])[0])

    @property
    def end(self) -> str:
        """Text of the end-of-sequence token; empty without one."""
        return self._tokenizer.eos_token or ""

    def reads(self, key: str) -> bool:
        """Return whether the chat template may write a key of messages."""
        return key in self._templates.words

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``ChatTokenizer.decode``."""
        return str(self._tokenizer.decode(list(tokens)))

    def encode_turns(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[EncodedTurn]:
        """See ``ChatTokenizer.encode_turns``."""
        texts = self._texts.of(messages, tools)
        encoded = self._encode([one for text in texts for one in text])
        given, whole = encoded[::2], encoded[1::2]
        indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
        turns = []
        for index, text, asked, tokens, later in zip(indices, texts, given, whole, [*given[1:], None], strict=True):
            if not _begins(tokens, asked) and text.answered.startswith(text.prompt):
                # The tokenizer joins the prompt's last characters with the answer's first, as in two line breaks. The
                # model was given the one and wrote the other.
                behind = self._written_behind(asked.tolist(), text.answered[len(text.prompt) :], tokens.tolist())
                if behind is None:
                    raise ChatError(
                        f"field 'messages[{index}]' begins with characters that tokenizer '{self.name}' joins with its "
                        "generation prompt, and cannot write apart from it; change how the chat template ends its "
                        "prompt, for example without a space, or use another tokenizer"
                    )
                tokens = np.append(asked, np.array(behind, dtype=np.int32))
            if not _begins(tokens, asked):
                way_out = "write it as the template does, or give the 'tokens' that the engine used"
                if index and messages[index - 1].role == "assistant":
                    way_out = "join it with the assistant message before it"
                raise ChatError(
                    f"field 'messages[{index}]' does not continue its generation prompt in the chat template of "
                    f"tokenizer '{self.name}'; {way_out}"
                )
            turns.append(self._turn(messages, index, tokens, len(asked), later))
        return turns

    def _turn(
        self, messages: Sequence[ChatMessage], index: int, tokens: Ids, start: int, later: Ids | None
    ) -> EncodedTurn:
        """Return a turn up to the token that stopped the model; ``later`` holds the next turn's prompt, if any."""
        message = messages[index]

        def is_cut(ending: Ids | list[int]) -> bool:
            return message.is_cut and not (message.stopped_by and self._ends.text(ending) == message.stopped_by)

        stop = self._ends.stop(tokens, start)
        if stop is not None:
            text_end, at = stop
            tokens, end = tokens[: at + 1], text_end if is_cut(tokens[at : at + 1]) else at + 1
        else:
            end = self._ends.text_end(tokens, start) if is_cut([]) else len(tokens)
            after = "tool" if message.tool_calls else "user"
            role = messages[index + 1].role if index + 1 < len(messages) else after
            following = later[end : end + 1].tolist() if later is not None and _begins(later, tokens) else []
            opener = self._ends.opener(role, following)
            if opener is not None and not is_cut([opener]):
                tokens, end = np.append(tokens, np.int32(opener)), len(tokens) + 1
            elif not message.is_cut and index + 1 == len(messages):
                self._ends.warn_unended()
        return EncodedTurn(tokens=tokens, start=start, end=end)

    def encode_completion(self, prompt: str, completion: str, *, ended: bool = True) -> EncodedTurn:
        """See ``ChatTokenizer.encode_completion``; control tokens in the text are control tokens."""
        end = self._tokenizer.eos_token
        if end is None and ended:
            raise ChatError(f"tokenizer '{self.name}' has no eos_token to end a completion with; set one")
        written = completion if end is None else with_end(completion, end, ended=ended)
        before, whole = self._token_ids([prompt, prompt + written])
        opening = self._opening
        # To some tokenizers one token begins and ends a text: the end is not taken for a beginning.
        if whole[: len(whole) - ended][: len(opening)] == opening:
            opening = []
        return continuation([*opening, *before], [*opening, *whole], ended=ended)

    @cached_property
    def _opening(self) -> list[int]:
        """Return the token ids that the tokenizer writes before a text; those that it writes after one are not used."""
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
        model = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "model", None)
        merges = [] if model is None else json.loads(model.__getstate__()).get("merges", [])
        unknown = {self._tokenizer.unk_token_id} - {None}
        return Vocabulary(
            pieces=pieces,
            spelling=_detect_spelling(self._tokenizer, self.name),
            special=self._special_ids | unknown,
            verbatim=frozenset(added) - self._special_ids,
            dummy_space=self._dummy_space(),
            bos=self._tokenizer.bos_token_id,
            eos=self._tokenizer.eos_token_id,
            # Pairs are lists or, in older files, joined by a space.
            merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        )

    def _dummy_space(self) -> DummySpace:
        """Encode a digit by itself and after a control token, and return which of them gets a space."""

        def has_space(text: str, at: int) -> bool:
            pieces = self._tokenizer.convert_ids_to_tokens(self._token_ids([text])[0])
            return "".join(pieces[at:]).startswith(("\u2581", "\u0120"))  # a digit may have no token

        if not has_space("0", 0):
            return "never"
        special = next(iter(self._special_ids), None)
        if special is None:
            return "first"
        return "always" if has_space(self._tokenizer.convert_ids_to_tokens(special) + "0", 1) else "first"

    def _encode(self, texts: list[str]) -> list[Ids]:
        """Return the token ids of each text. The last text is the longest rendering of the conversation."""
        # The texts of one conversation repeat each other, so each part between added tokens is encoded once, together
        # with the two added tokens (or the border of the text) next to it: a token may absorb whitespace of its
        # neighbours or not be recognised next to a letter, and some encodings put a space before a text.
        cuts = [] if self._separator is None else list(cut_texts(texts, self._separator))
        ids_of = self._ids_of_triples(list(dict.fromkeys(chain.from_iterable(own for _, own in cuts))))
        encoded, triples, counts = [np.zeros(0, dtype=np.int32)], list[Triple](), [0]
        for kept, own in cuts if ids_of else []:
            new = [ids_of[one] for one in own]
            triples[kept:] = own
            counts[kept:] = accumulate(map(len, new), initial=counts[kept])
            encoded.append(np.concatenate([encoded[-1][: counts[kept]], *new]))
        borders = {(before, after) for before, _, after in triples} - self._known_borders
        if triples and (not borders or encoded[-1].tolist() == self._token_ids(texts[-1:])[0]):
            self._known_borders |= borders
            return encoded[1:]
        # This tokenizer does not split texts at added tokens.
        return [np.array(ids, dtype=np.int32) for ids in self._token_ids(texts)]

    def _ids_of_triples(self, triples: list[Triple]) -> dict[Triple, Ids]:
        """Return the ids of the text in each triple and of the token behind it; none if an added token is not one."""
        ids_of: dict[Triple, Ids] = {}
        for triple, ids in zip(triples, self._token_ids(["".join(triple) for triple in triples]), strict=True):
            before, _, after = triple
            first = [self._raw_ids[before]] if before else []
            last = [self._raw_ids[after]] if after else []
            if ids[: len(first)] != first or ids[max(len(ids) - len(last), len(first)) :] != last:
                return {}
            ids_of[triple] = np.array(ids[len(first) :], dtype=np.int32)
        return ids_of

    def _written_behind(self, prompt: list[int], text: str, joined: list[int]) -> list[int] | None:
        """Return the token ids of ``text`` as the model wrote it after a prompt, or None if the tokenizer has none."""
        if self._separator is not None and self._separator.match(text):
            return self._token_ids([text])[0]  # no token is put before an added one
        kept = max(common_length(prompt, joined) - 1, 0)
        expected = self._ends.text(joined[kept:])
        for before in ("", next(iter(self._raw_ids), ""), "\n", ":"):
            ids, skipped = self._token_ids([before + text, before])
            written = ids[len(skipped) :]
            if ids[: len(skipped)] == skipped and self._ends.text(prompt[kept:] + written) == expected:
                return written
        return None

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        if self._fast is not None:
            self._fast.encode_special_tokens = False
            return [one.ids for one in self._fast.encode_batch_fast(texts, add_special_tokens=False)]
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids


def _begins(ids: Ids, start: Ids) -> bool:
    """Return whether token ids, ``[n]``, begin with others, ``[m]``."""
    return np.array_equal(ids[: len(start)], start)


def _fast_backend(tokenizer: Any) -> Any:
    """Return what encodes text for a tokenizer, without the offsets that nobody reads here; None without one."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        return None
    texts = [_TEXT, *tokenizer.added_tokens_encoder]
    right = tokenizer(texts, add_special_tokens=False)["input_ids"]
    backend.no_padding()
    backend.no_truncation()
    same = [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)] == right
    return backend if same else None


def _loaded(folder: str) -> Any:
    if not is_utf8(folder):
        raise ValueError(f"tokenizer '{folder}': transformers opens no path that is not UTF-8; rename the folder")
    own = describe_code(folder)
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes transformers and tokenizers raise nearly anything
        reason = f"transformers cannot load this folder: {next(iter(str(error).splitlines()), type(error).__name__)}"
        if own is not None:
            reason = (
                f"{own}, which is never run, and without it transformers cannot load the folder; give a tokenizer that "
                "transformers itself implements"
            )
        raise ValueError(f"tokenizer '{folder}': {reason}") from error
    if own is not None:
        warnings.warn(
            f"tokenizer '{folder}': {own}, which is not run; it is loaded as {type(loaded).__name__}, and its tokens "
            "may differ from those of its code",
            stacklevel=2,
        )
    check_ids(loaded, folder)
    check_encodes_text(loaded, folder)
    return loaded


def _detect_spelling(tokenizer: Any, folder: str) -> Spelling:
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


# Text of most languages; a tokenizer of another one is tested with text of its tokens.
_TEXT = "the 0 la не 的 の 이 ال"
_TOKENS = 1000


def describe_code(folder: str) -> str | None:
    """Return a sentence about the code that a folder brings for its tokenizer, which is never run; None without any."""
    for name in ("tokenizer_config.json", "config.json"):
        found = _content(folder, name).get("auto_map")
        if isinstance(found, dict):  # by the name of the class that it replaces
            found = found.get("AutoTokenizer")
        if found:
            return f"the 'auto_map' of its {name} names custom code"
    return None


def check_ids(tokenizer: Any, folder: str) -> None:
    """Check that every token's id, also as the files have it, fits its type; raise ValueError with token and folder."""
    ids: dict[Any, Any] = dict(tokenizer.get_vocab())
    listed = _content(folder, "tokenizer.json").get("added_tokens")
    ids |= {one.get("content"): one.get("id") for one in listed or () if isinstance(one, dict)}
    by_id = _content(folder, "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(by_id, dict):
        ids |= {
            one.get("content"): int(token_id)
            for token_id, one in by_id.items()
            if isinstance(one, dict) and token_id.isdecimal()
        }
    for token, token_id in ids.items():
        if isinstance(token_id, int) and token_id > INT32_MAX:
            raise ValueError(
                f"tokenizer '{folder}': its token {str(token)[:40]!r} has the id {token_id}; token ids are 0 to "
                f"{INT32_MAX}"
            )


def _content(folder: str, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder; empty if it cannot be read, since transformers did without it."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_encodes_text(tokenizer: Any, folder: str) -> None:
    """Raise ValueError, naming the folder, if every text becomes only control tokens and the unknown one.

    A folder whose vocabulary is empty, or lost its merges or its pieces, loads, but encodes no text.
    """
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    piece = getattr(model, "unk_token", None)
    silent = {tokenizer.unk_token_id, None if piece is None else model.token_to_id(piece)}
    silent |= {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    if set(_ids(tokenizer, _TEXT)) <= silent and not any(
        set(_ids(tokenizer, tokenizer.decode([token_id]))) - silent
        for token_id in range(min(len(tokenizer), _TOKENS))
        if token_id not in silent
    ):
        what = "nothing" if not _ids(tokenizer, _TEXT) else "unknown or control tokens"
        raise ValueError(
            f"tokenizer '{folder}' makes {what} of every text: its vocabulary of {len(tokenizer)} tokens is empty or "
            "damaged; download the folder again"
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception:  # one without an unknown token raises for words that it does not have
        return []
    return ids
