"""Mistral's chat formats, with the tokenizers that the ``mistral-common`` wheel carries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import numpy.typing as npt
from mistral_common.exceptions import InvalidToolException, InvalidToolSchemaException, MistralCommonException
from mistral_common.protocol.instruct import messages as mistral
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall
from mistral_common.protocol.instruct.tool_calls import Tool as MistralTool
from mistral_common.protocol.instruct.tool_calls import ToolCall as MistralToolCall
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy, SpecialTokens, TokenizerVersion
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from mcore_prefix_tree.data.chat import FILES, EncodedTurn, Vocabulary, continuation
from mcore_prefix_tree.data.json_fields import ChatError, check_json_depth, fault_of
from mcore_prefix_tree.data.messages import ChatMessage, Tool, check_said
from mcore_prefix_tree.data.stopping import with_end

_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
# mistral-common takes no answer without text; the tokens of this one are removed again.
_STAND_IN = "."


def _is_empty(message: ChatMessage) -> bool:
    return message.role == "assistant" and not message.content and not message.tool_calls


class MistralChatTokenizer:
    """Encodes with mistral-common's ``encode_chat_completion`` in its fine-tuning mode.

    A turn is a run of consecutive assistant messages, because the format merges such a run into one message. A line
    that mistral-common's validator rejects (for example a call that nobody answered in the middle of a conversation) is
    rejected here with its words: a model served through that format cannot have seen it. Call ids that are not nine
    alphanumerics are replaced by ordinals, as the format requires.

    v7 writes each message independently of the others, so one encoding of the conversation holds every turn. v3 moves
    the system prompt into the last user message, and both put tools before it, so the history changes with every user
    message, and one encoding holds the turns between it and the next.
    """

    def __init__(self, name: str) -> None:
        """``name``: a key of ``FILES``."""
        self.name = name
        with as_file(files("mistral_common") / "data" / FILES[name]) as path:
            self._tokenizer: Any = MistralTokenizer.from_file(str(path), mode=ValidationMode.finetuning)
        text_tokenizer = self._tokenizer.instruct_tokenizer.tokenizer
        self._text_tokenizer: Any = text_tokenizer
        self.vocab_size = int(text_tokenizer.n_words)
        self._end_of_turn = int(text_tokenizer.eos_id)
        self._history_is_stable = bool(text_tokenizer.version >= TokenizerVersion.v7)
        before_turn = [SpecialTokens.bos, SpecialTokens.end_inst, SpecialTokens.end_tool_results]
        if self._history_is_stable:  # earlier vocabularies lack the token and would answer with <unk>
            before_turn.append(SpecialTokens.end_system)
        self._before_turn = [int(text_tokenizer.get_special_token(token.value)) for token in before_turn]

    @property
    def end(self) -> str:
        """Text of the end-of-sequence token."""
        return str(self._text_tokenizer.id_to_piece(self._end_of_turn))

    def reads(self, key: str) -> bool:
        """Return whether the chat format may write a key of messages."""
        return False

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``ChatTokenizer.decode``."""
        text: str = self._text_tokenizer.decode(list(tokens), special_token_policy=SpecialTokenPolicy.KEEP)
        return text.replace("\u2581", " ")  # SentencePiece's mark for a space

    def encode_turns(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[EncodedTurn]:
        """See ``ChatTokenizer.encode_turns``."""
        is_assistant = [message.role == "assistant" for message in messages] + [False]
        turn_ends = [i + 1 for i in range(len(messages)) if is_assistant[i] and not is_assistant[i + 1]]
        empty = [_is_empty(messages[end - 1]) for end in turn_ends]
        if not self._history_is_stable:  # v3 decodes the answers of tools that are JSON
            for index, message in enumerate(messages[: turn_ends[-1]]):
                if message.role == "tool":
                    try:
                        check_json_depth(message.content)
                    except ValueError as error:
                        raise fault_of(error, f"messages[{index}].content") from None
        converted = self._convert(messages)
        told = [self._told(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None
        turns: list[EncodedTurn] = []
        for ends in self._encoded_together(messages, turn_ends, told is not None):
            turns += self._turns(self._encode(converted[: ends[-1]], told), empty[: turn_ends.index(ends[-1]) + 1])[
                -len(ends) :
            ]
        assert len(turns) == len(turn_ends)
        return [
            replace(turn, end=len(turn.tokens) - 1)
            if messages[end - 1].is_cut and messages[end - 1].stopped_by != self.end
            else turn
            for turn, end in zip(turns, turn_ends, strict=True)
        ]

    def encode_completion(self, prompt: str, completion: str, *, ended: bool = True) -> EncodedTurn:
        """See ``ChatTokenizer.encode_completion``; no other part of the text becomes a control token."""
        encode, piece = self._text_tokenizer.encode, self._text_tokenizer.id_to_piece
        begin = str(piece(self._text_tokenizer.bos_id))
        written = with_end(completion, self.end, ended=False)
        whole = (prompt + written).removeprefix(begin)
        before = encode(prompt.removeprefix(begin), bos=True, eos=False)
        return continuation(before, encode(whole, bos=True, eos=ended), ended=ended)

    def encode_text(self, text: str) -> list[int]:
        """See ``ChatTokenizer.encode_text``."""
        tokens: list[int] = self._text_tokenizer.encode(text, bos=False, eos=False)
        return tokens

    def vocabulary(self) -> Vocabulary:
        """See ``ChatTokenizer.vocabulary``."""
        tokens = self._text_tokenizer
        is_tekken = isinstance(tokens, Tekkenizer)
        special = frozenset(map(int, tokens.special_ids))
        # To Tekken, a part of a character has no text, so its piece is its bytes; a control token's piece is its name.
        is_bytes = [is_tekken and token not in special for token in range(self.vocab_size)]
        pieces = [(tokens.id_to_byte_piece if own else tokens.id_to_piece)(i) for i, own in enumerate(is_bytes)]
        has_space = not is_tekken and pieces[self.encode_text("0")[0]].startswith("\u2581")
        return Vocabulary(
            pieces=pieces,
            spelling="bytes" if is_tekken else "sentencepiece",
            special=special if is_tekken else special | {int(tokens.unk_id)},
            dummy_space="always" if has_space else "never",  # each text between control tokens is encoded by itself
            bos=int(tokens.bos_id),
            eos=self._end_of_turn,
        )

    def _encoded_together(
        self, messages: Sequence[ChatMessage], turn_ends: Sequence[int], told: bool
    ) -> list[list[int]]:
        """Return the ends of the turns in groups; the history of a group's last turn begins with the others'."""
        if self._history_is_stable and not told:
            return [list(turn_ends)]
        together: dict[tuple[int, bool], list[int]] = {}
        last_user, ends = -1, set(turn_ends)
        for end, message in enumerate(messages, start=1):
            if message.role == "user":
                last_user = end
            if end in ends:
                # A conversation of one message is refused, so an answer to nothing is not encoded with the next.
                together.setdefault((last_user, end == 1), []).append(end)
        return list(together.values())

    def _turns(self, tokens: npt.NDArray[np.int32], empty: Sequence[bool] = ()) -> list[EncodedTurn]:
        """Cut tokens, int32 ``[n]``, at control tokens, which text cannot forge; drop stand-ins for empty turns."""
        ends = np.flatnonzero(tokens == self._end_of_turn) + 1
        openings = np.flatnonzero(np.isin(tokens, self._before_turn)) + 1
        starts = openings[np.searchsorted(openings, ends) - 1]
        if any(empty):
            kept = np.ones(len(tokens), dtype=bool)
            for start, end, is_empty in zip(starts, ends, empty, strict=True):
                kept[start : end - 1] = not is_empty
            before = np.concatenate([[0], np.cumsum(kept)])
            tokens, starts, ends = tokens[kept], before[starts], before[ends]
        return [EncodedTurn(tokens=tokens[:end], start=int(start)) for start, end in zip(starts, ends, strict=True)]

    def _check(self, messages: Sequence[ChatMessage], index: int) -> None:
        """Reject a message that the format cannot write."""
        message, field = messages[index], f"messages[{index}]"
        beside = (messages[at] for at in (index - 1, index + 1) if 0 <= at < len(messages))
        if _is_empty(message) and any(other.role == "assistant" for other in beside):
            raise ChatError(
                f"field '{field}' is an empty assistant message next to another one, which the chat format of "
                f"tokenizer '{self.name}' writes as one turn; join them"
            )
        if message.role == "assistant" and message.weight:
            check_said(message.others, field, has_thinking=False)
        if message.thinking:
            raise ChatError(
                f"field '{field}' has thinking apart from its content, which the chat format of tokenizer "
                f"'{self.name}' does not write; write it into content, as the model did"
            )

    def _told(self, tool: Tool, field: str) -> MistralTool:
        """Return a tool in mistral-common's form of OpenAI's shape; keys that it would drop are rejected."""
        for given, model in ((tool.definition, MistralTool), (tool.function, Function)):
            for name in given:
                if name not in model.model_fields:
                    raise ChatError(
                        f"field '{field}' has the key '{name}', which the chat format of tokenizer '{self.name}' "
                        f"cannot write, only {', '.join(model.model_fields)}; remove it if the model did not read it"
                    )
        said = {name: one for name, one in tool.function.items() if one is not None}
        try:
            return MistralTool(**tool.definition | {"function": Function(**{"parameters": {}} | said)})
        except ValueError as error:
            raise self._misfit(field, error) from error

    def _misfit(self, field: str, error: Exception) -> ChatError:
        reason = " ".join(str(error).split())[:200]
        return ChatError(f"field '{field}' does not fit the chat format of tokenizer '{self.name}': {reason}")

    def _encode(self, messages: list[Any], tools: list[MistralTool] | None) -> npt.NDArray[np.int32]:
        try:
            encoded = self._tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages, tools=tools))
        except (MistralCommonException, ValueError, RecursionError) as error:
            of_tools = isinstance(error, (InvalidToolException, InvalidToolSchemaException))
            raise self._misfit("tools" if of_tools else "messages", error) from error
        return np.array(encoded.tokens, dtype=np.int32)

    def _convert(self, messages: Sequence[ChatMessage]) -> list[Any]:
        for index in range(len(messages)):
            self._check(messages, index)
        keep_ids = all(_CALL_ID.fullmatch(call.id) for message in messages for call in message.tool_calls)
        renamed: dict[str, str] = {}
        calls_seen = 0
        converted: list[Any] = []
        for index, message in enumerate(messages):
            calls = []
            for call in message.tool_calls:
                calls_seen += 1
                renamed[call.id] = call.id if keep_ids else f"call{calls_seen:05d}"
                function = FunctionCall(name=call.name, arguments=call.arguments)
                calls.append(MistralToolCall(id=renamed[call.id], function=function))
            if message.role in ("system", "developer"):
                converted.append(mistral.SystemMessage(content=message.content))
            elif message.role == "user":
                converted.append(mistral.UserMessage(content=message.content))
            elif message.role == "assistant":
                content = _STAND_IN if _is_empty(message) else message.content or None
                converted.append(mistral.AssistantMessage(content=content, tool_calls=calls or None))
            else:
                answered = message.tool_call_id
                if answered is None or answered not in renamed:
                    raise ChatError(
                        f"field 'messages[{index}]' answers a call that is text, and the chat format of tokenizer "
                        f"'{self.name}' pairs each tool result with a call; give the call as tool_calls"
                    )
                call_id = renamed[answered]
                converted.append(mistral.ToolMessage(content=message.content, tool_call_id=call_id, name=message.name))
        return converted
