"""Samples from JSONL, Parquet and Arrow files: tokens as they are, chat messages through a tokenizer's chat format."""

from mcore_prefix_tree.data.chat import (
    DEFAULT_TOKENIZER,
    ChatTokenizer,
    EncodedTurn,
    check_tokenizer_named,
    load_tokenizer,
)
from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.data.files import resolve_paths
from mcore_prefix_tree.data.fingerprint import check_same_samples
from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.data.messages import ChatMessage, Tool, ToolCall, parse_messages, parse_tools
from mcore_prefix_tree.data.read import iter_sample_groups, read_samples
from mcore_prefix_tree.data.records import LineOptions
from mcore_prefix_tree.data.skipped import Skipped
from mcore_prefix_tree.data.stream import StreamedGroups

__all__ = [
    "DEFAULT_TOKENIZER",
    "ChatError",
    "ChatMessage",
    "ChatTokenizer",
    "EncodedTurn",
    "FieldNames",
    "LineOptions",
    "Skipped",
    "StreamedGroups",
    "Tool",
    "ToolCall",
    "check_same_samples",
    "check_tokenizer_named",
    "iter_sample_groups",
    "load_tokenizer",
    "parse_messages",
    "parse_tools",
    "read_samples",
    "resolve_paths",
]
