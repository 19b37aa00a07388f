"""The error of a conversation or a text that cannot be encoded."""

from __future__ import annotations


class ChatError(ValueError):
    """A conversation that cannot be parsed or encoded. The message names the field; the reader adds file and line."""
