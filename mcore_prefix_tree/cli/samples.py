"""The files that commands read samples from, and the options that say how."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mcore_prefix_tree.data import ChatMessage, ChatTokenizer, EncodedTurn, Skipped, Tool
    from mcore_prefix_tree.plan import ModelWork
    from mcore_prefix_tree.recipe import Recipe
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


def work_of(recipe: Recipe, vocab_size: int | None) -> ModelWork:
    """Return the FLOPs of a recipe's model; ``vocab_size`` is the tokenizer's, where the recipe leaves it to that.

    Raises:
        ValueError: neither gives a vocabulary size.
    """
    from mcore_prefix_tree.plan import ModelWork

    return ModelWork.from_model(
        recipe.model,
        vocab_size=vocab_size,
        fused_head=recipe.fused_head,
        scalar_head=recipe.objective.has_scalar_head,
    )


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
    on_error: OnError | None = None,
    limits: dict[str, int] | None = None,
    recipe: Recipe | None = None,
) -> tuple[list[Sample], TokenizerOnDemand, Skipped]:
    """Read files as options say and, where these say nothing, as a recipe reads its own.

    Reports on standard error what was skipped, if anything.

    Returns:
        The samples; the tokenizer, which is loaded if a line, an option or the recipe names one; and what was skipped.

    Raises:
        SampleError: bad data; names file, line and field.
        ValueError: there is no such tokenizer.
    """
    from mcore_prefix_tree.data import DEFAULT_TOKENIZER, Skipped, read_samples

    if recipe is not None:
        tokenizer = recipe.data.tokenizer if tokenizer is None else tokenizer
        chat_template_kwargs = chat_template_kwargs or recipe.data.chat_template_kwargs
        expand_turns |= recipe.data.expand_turns
        on_error = on_error or OnError(recipe.data.on_error)
    on_demand = TokenizerOnDemand(tokenizer or DEFAULT_TOKENIZER, chat_template_kwargs)
    if tokenizer is not None:
        on_demand.load()  # a wrong name is an error whatever the files hold
    skipped = Skipped()
    samples = read_samples(
        files,
        tokenizer=on_demand,
        expand_turns=expand_turns,
        limits=limits,
        on_error=(on_error or OnError.raise_).value,
        skipped=skipped,
    )
    if skipped.count:
        typer.echo(str(skipped), err=True)
    return samples, on_demand, skipped
