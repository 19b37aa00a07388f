"""The files that commands read samples from, and the options that say how."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from mcore_prefix_tree.data import ChatMessage, ChatTokenizer, EncodedTurn, Skipped, Tool
    from mcore_prefix_tree.sample import Sample

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE...",
        help="JSON Lines (.gz too), Parquet or Arrow files, or globs; '-' is JSON Lines on standard input.",
    ),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of chat messages: mistral-v7 (if none is given), mistral-v3, mistral-v3-tekken, or a folder with a "
        "Hugging Face tokenizer.",
    ),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="What the chat template of a Hugging Face tokenizer is given besides, as '{\"enable_thinking\": false}'; "
        "with strftime_now, a date as 2026-11-20, its clock shows that date.",
    ),
]
ExpandTurns = Annotated[
    bool, typer.Option("--expand-turns", help="One sample per assistant turn, its whole history as prefix.")
]


class OnError(str, Enum):
    """What becomes of bad samples; see :func:`mcore_prefix_tree.data.iter_sample_groups`."""

    raise_ = "raise"
    skip = "skip"


OnErrorOption = Annotated[
    OnError | None,
    typer.Option(
        "--on-error",
        help="raise: end at the first bad sample (if none is given). skip: leave bad ones out and say so.",
    ),
]


class Share(str, Enum):
    """Which common prefixes are shared; see :func:`mcore_prefix_tree.trie.build_trie`."""

    all = "all"
    prompt = "prompt"


ShareOption = Annotated[
    Share | None,
    typer.Option(
        "--share", help="all: every common prefix (if none is given). prompt: those before the first scored token."
    ),
]
MinSharedTokens = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Common prefixes of fewer tokens are not shared; 0 if not given.")
]


class TokenizerOnDemand:
    """Loads a tokenizer when the first chat message comes: files of tokens need none, and some are slow to load."""

    def __init__(self, name: str, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._kwargs = chat_template_kwargs
        self.loaded: ChatTokenizer | None = None

    def load(self) -> ChatTokenizer:
        """The tokenizer, from now on at least."""
        from mcore_prefix_tree.data import load_tokenizer

        if self.loaded is None:
            self.loaded = load_tokenizer(self.name, self._kwargs)
        return self.loaded

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer."""
        return self.load().vocab_size

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return self.load().decode(tokens)

    def encode_turns(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[EncodedTurn]:
        """See ``ChatTokenizer``."""
        return self.load().encode_turns(messages, tools)


def object_of(option: str | None) -> dict[str, Any] | None:
    """``--chat-template-kwargs``.

    Raises:
        ValueError: it is not an object in JSON.
    """
    try:
        found = None if option is None else json.loads(option)
    except ValueError as error:
        raise ValueError(f"--chat-template-kwargs: {option!r} is not JSON ({error})") from None
    if not isinstance(found, dict | None):
        raise ValueError(f"--chat-template-kwargs: {option!r} is not a JSON object")
    return found


def read_files(
    files: list[str],
    *,
    tokenizer: str | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    expand_turns: bool,
    on_error: Literal["raise", "skip"] = "raise",
    limits: dict[str, int] | None = None,
) -> tuple[list[Sample], TokenizerOnDemand, Skipped]:
    """The samples of the files, the tokenizer, which is loaded if a line or the caller named one, and what was skipped.

    Says on standard error what was skipped, if anything.

    Raises:
        SampleError: bad data; names file, line and field.
        ValueError: there is no such tokenizer.
    """
    from mcore_prefix_tree.data import DEFAULT_TOKENIZER, Skipped, read_samples

    on_demand = TokenizerOnDemand(tokenizer or DEFAULT_TOKENIZER, chat_template_kwargs)
    if tokenizer is not None:
        on_demand.load()  # a wrong name is an error whatever the files hold
    skipped = Skipped()
    samples = read_samples(
        files,
        tokenizer=on_demand,
        expand_turns=expand_turns,
        limits=limits,
        on_error=on_error,
        skipped=skipped,
    )
    if skipped.count:
        typer.echo(str(skipped), err=True)
    return samples, on_demand, skipped
