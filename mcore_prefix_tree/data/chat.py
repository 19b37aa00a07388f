"""Chat conversations: messages, tools, and the protocol of tokenizers that encode them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.chat_error import ChatError
from mcore_prefix_tree.data.vocabulary import Vocabulary

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call the assistant made.

    Attributes:
        id: id that pairs the call with the ``tool`` message that answers it.
        name: name of the function called.
        arguments: JSON text (or whatever text the model produced in its place).
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model could call.

    Attributes:
        definition: ``{"type": "function", "function": {"name": ..., ...}}``, with the keys, the values and the order
            that the record has. Some chat formats write all of it, so that nothing may be added or lost.
    """

    definition: dict[str, Any]

    @property
    def function(self) -> dict[str, Any]:
        """``name`` and the record's other fields: mostly ``description`` and ``parameters``, a JSON schema."""
        function: dict[str, Any] = self.definition["function"]
        return function

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.function["name"])


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """One message.

    Attributes:
        role: one of ``ROLES``.
        content: text of the message; empty for an assistant message that only calls tools.
        tool_calls: calls of an assistant message.
        tool_call_id: id of the call that a ``tool`` message answers; None if that call is raw text without an id.
        name: name of the function that answered, for a ``tool`` message, if the data names it.
        thinking: thinking that an assistant message keeps apart from its content.
        weight: weight of an assistant message's tokens in the loss; 0 leaves them unscored.
        is_cut: whether the model was stopped at a limit, so that it did not write the token that ends the turn.
        others: the record's other keys, for chat templates that read them.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    thinking: str = ""
    weight: float = 1.0
    is_cut: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedTurn:
    """An assistant turn behind its whole history, as the model saw and continued it.

    Attributes:
        tokens: int32 ``[n]``. ``tokens[:start]`` is what the model was given; ``tokens[start:end]`` is what it
            generated: its text, its tool calls and the token that stopped it.
        start: index of the first generated token, ``0 < start <= n``; 0 for text without a prompt.
        end: index behind the last generated token. Below n for a turn that was cut: the chat format ends it with
            tokens that the model did not write. None: n.
    """

    tokens: npt.NDArray[np.int32]
    start: int
    end: int | None = None


class ChatTokenizer(Protocol):
    """A tokenizer together with its chat format."""

    @property
    def name(self) -> str:
        """Argument of ``load_tokenizer``; for messages."""

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the token ids."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, control tokens included, for people to read."""

    def encode_turns(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[EncodedTurn]:
        """Encode every assistant turn, in order; messages after the last one are not encoded.

        A turn's span is what the model wrote, from its first token to the token that stopped it, even if that is the
        token that opens the next message. What the chat format puts in front of a turn that has no thinking, an empty
        block of thinking, is what the model was given.

        The turns of one conversation usually are prefixes of each other, but need not be: some chat formats rewrite
        the history as the conversation goes on. Messages and tools are those of ``parse_messages`` and ``parse_tools``.

        Raises:
            ChatError: the chat format cannot express the conversation or the tools.
        """

    def encode_completion(self, prompt: str, completion: str, *, ended: bool = True) -> EncodedTurn:
        """Encode a text and its continuation as one text, without a chat format, as TRL does.

        The tokens that the tokenizer writes before a text come once, also if the text begins with them. The
        end-of-sequence token comes once behind the continuation, and nowhere else. The continuation starts at the first
        token that the prompt by itself does not have.

        Args:
            prompt: text that the model was given.
            completion: text that it wrote, with or without the end-of-sequence token.
            ended: whether the model wrote the end-of-sequence token; without it, the continuation may be empty.

        Raises:
            ChatError: the continuation has no token, or the tokenizer has no end-of-sequence token.
        """

    def encode_text(self, text: str) -> list[int]:
        """Encode text without a chat format; no part of it becomes a control token."""

    def vocabulary(self) -> Vocabulary:
        """Return how each token is spelled.

        Raises:
            ValueError: the tokenizer does not expose the bytes of its tokens.
        """


def continuation(prompt: Sequence[int], whole: Sequence[int], *, ended: bool = True) -> EncodedTurn:
    """Return a text that starts where its tokens depart from those of its prompt; it may be empty if it did not end.

    The rule is that of ``common_prefix_length`` in TRL's ``data_utils.py``: tokens may merge across the border.
    """
    pairs = enumerate(zip(prompt, whole, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), min(len(prompt), len(whole)))
    if not whole or (ended and start == len(whole)):
        raise ChatError("the completion has no token of its own; leave the record out")
    return EncodedTurn(tokens=np.array(whole, dtype=np.int32), start=start)
