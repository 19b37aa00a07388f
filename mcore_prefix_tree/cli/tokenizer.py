"""The tokenizer of a command that may not need one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_prefix_tree.data import ChatMessage, ChatTokenizer, EncodedTurn


class TokenizerOnDemand:
    """Loads a tokenizer when the first chat message comes: files of tokens need none, and some are slow to load."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loaded: ChatTokenizer | None = None

    def load(self) -> ChatTokenizer:
        """The tokenizer, from now on at least."""
        from mcore_prefix_tree.data import load_tokenizer

        if self.loaded is None:
            self.loaded = load_tokenizer(self.name)
        return self.loaded

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer."""
        return self.load().vocab_size

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return self.load().decode(tokens)

    def encode_turns(self, messages: Sequence[ChatMessage]) -> list[EncodedTurn]:
        """See ``ChatTokenizer``."""
        return self.load().encode_turns(messages)
