"""Options for the samples that a command reads, and the samples read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from mcore_prefix_tree.cli.boundary import quiet_upstream
from mcore_prefix_tree.cli.options import SEEDS, accept_count, accept_path, local_data
from mcore_prefix_tree.utils.choices import DataFormat, OnError, Order, OverBudget, Share
from mcore_prefix_tree.utils.errors import naming, naming_memory, spell
from mcore_prefix_tree.utils.inputs import parse_json

if TYPE_CHECKING:
    from mcore_prefix_tree.data import ChatMessage, ChatTokenizer, EncodedTurn, Skipped, Tool
    from mcore_prefix_tree.data.batches import SampleOrder
    from mcore_prefix_tree.data.source import Source
    from mcore_prefix_tree.objectives import Objective
    from mcore_prefix_tree.plan import ModelWork
    from mcore_prefix_tree.sample import Sample
    from mcore_prefix_tree.settings import Recipe
    from mcore_prefix_tree.settings.sections import DataConfig
    from mcore_prefix_tree.trie import Sharing


class TokenizerOnDemand:
    """Loads a tokenizer at the first chat message: files of tokens need none, and some are slow to load."""

    def __init__(self, name: str, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._kwargs = chat_template_kwargs
        self.loaded: ChatTokenizer | None = None
        self.conversations = 0  # encoded so far

    def load(self) -> ChatTokenizer:
        from mcore_prefix_tree.data import load_tokenizer

        if self.loaded is None:
            self.loaded = load_tokenizer(self.name, self._kwargs)
        return self.loaded

    def try_decode(self, tokens: Sequence[int]) -> str | None:
        """Return the text of some tokens; None if the tokenizer is not loaded, or does not know all of them."""
        if self.loaded is None or max(tokens, default=0) >= self.loaded.vocab_size:
            return None
        return self.loaded.decode(tokens)

    def encode_turns(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[EncodedTurn]:
        self.conversations += 1
        return self.load().encode_turns(messages, tools)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.load(), name)


def parse_json_object(given: str | None, option: str = "--chat-template-kwargs") -> dict[str, Any] | None:
    """Return the value of an option; raises ValueError if it is not a JSON object."""
    with naming(f"{option}: "):
        found = None if given is None else parse_json(given)
        if not isinstance(found, dict | None):
            raise ValueError(f"{given!r} is not a JSON object")
    return found


_SPELLINGS = {
    "data.tokenizer": "--tokenizer",
    "data.chat_template_kwargs": "--chat-template-kwargs",
    "data.format": "--format",
    "data.fields": "--fields",
    "data.expand_turns": "--expand-turns",
    "data.expand_turns=false": "no --expand-turns",
    "batch.max_tokens": "--max-tokens",
    "set data.streaming=true": "give fewer files",
}


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Samples to read, and their treatment in training. An option wins over the recipe."""

    files: Annotated[
        list[str],
        typer.Argument(
            parser=local_data,
            metavar="FILE...",
            help="JSON Lines (.gz too), Parquet or Arrow files, or globs; '-' is JSON Lines on standard input.",
        ),
    ]
    model: Annotated[
        str | None, accept_path("RECIPE", "Read, order and fold samples as this recipe does, except its data.path.")
    ] = None
    global_batch_size: Annotated[
        int | None, accept_count("N", "Samples of a training step; report the fold ratio of steps.")
    ] = None
    order: Annotated[
        Order | None,
        typer.Option(help="Order in which steps take samples. Default: the recipe's data.order, or shuffled."),
    ] = None
    seed: Annotated[int | None, accept_count("N", "Seed of that order.", least=0, most=SEEDS)] = None
    tokenizer: Annotated[
        str | None,
        accept_path(
            "NAME",
            "Tokenizer of chat messages: mistral-v7 (default), mistral-v3, mistral-v3-tekken, or a folder with a "
            "Hugging Face tokenizer.",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Variables of a Hugging Face tokenizer's chat template, for example '{\"enable_thinking\": false}'. "
            "strftime_now, a date (for example 2026-11-20), sets the template's clock.",
        ),
    ] = None
    format: Annotated[
        DataFormat | None, typer.Option(help="Trainer or engine whose names of fields the files have.")
    ] = None
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='The files\' names of our fields, for example \'{"group": "task_id", "tokens": "input_ids"}\'.',
        ),
    ] = None
    expand_turns: Annotated[
        bool, typer.Option("--expand-turns", help="One sample per assistant turn, its complete history as prefix.")
    ] = False
    on_error: Annotated[
        OnError | None,
        typer.Option(help="raise: stop at the first bad sample (default). skip: skip bad samples and count them."),
    ] = None
    share: Annotated[
        Share | None,
        typer.Option(help="all: share every common prefix (default). prompt: only before the first scored token."),
    ] = None
    min_shared_tokens: Annotated[
        int | None, accept_count("N", "Do not share common prefixes of fewer tokens. Default: 0.", least=0)
    ] = None

    @property
    def spellings(self) -> dict[str, str]:
        """Return the options by the keys of the settings that they set; a recipe has the keys themselves."""
        return {} if self.model is not None else _SPELLINGS

    @property
    def inputs(self) -> list[str]:
        """Return the files, globs and folders that are read, of which no output may replace a file."""
        named = [*self.files, *([] if self.tokenizer is None else [self.tokenizer])]
        if self.model is None:
            return named
        from mcore_prefix_tree.settings import load_recipe
        from mcore_prefix_tree.settings.teachers import list_teacher_inputs

        recipe = load_recipe(self.model)
        return [*named, self.model, *recipe.inputs, *list_teacher_inputs(recipe.objective)]

    @cached_property
    def data(self) -> DataConfig:
        from mcore_prefix_tree.data.fields import check_names
        from mcore_prefix_tree.settings.sections import DataConfig

        given: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "chat_template_kwargs": parse_json_object(self.chat_template_kwargs),
            "expand_turns": self.expand_turns or None,
            "format": self.format,
            "fields": parse_json_object(self.fields, "--fields"),
            "on_error": self.on_error,
            "order": self.order,
        }
        with naming("--fields: "):
            check_names(given["fields"] or {})
        base = DataConfig(path=self.files) if self._file is None else self._file.data
        known = {name: value for name, value in given.items() if value is not None}
        return replace(base, path=self.files, streaming=False, **known)

    @cached_property
    def recipe(self) -> Recipe | None:
        """Return the recipe, with the options in place of its settings."""
        if self._file is None:
            return None
        batch: dict[str, Any] = {"share": self.share, "min_shared_tokens": self.min_shared_tokens}
        given = {name: value for name, value in batch.items() if value is not None}
        if self.global_batch_size is not None:
            given |= {"global_batch_size": self.global_batch_size, "groups_per_step": None}
        seed = self._file.seed if self.seed is None else self.seed
        return replace(self._file, data=self.data, batch=replace(self._file.batch, **given), seed=seed)

    @cached_property
    def _file(self) -> Recipe | None:
        from mcore_prefix_tree.settings import ParallelConfig, load_recipe

        if self.model is None:
            return None
        recipe = load_recipe(self.model)
        if recipe.model.hf is None and not recipe.model.transformer and recipe.parallel == ParallelConfig():
            return recipe  # Megatron has no rules about it
        quiet_upstream()
        try:
            from mcore_prefix_tree.mcore.models.bridge import described
            from mcore_prefix_tree.mcore.models.build_gpt import transformer_config
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "megatron":
                raise
            if recipe.model.hf is not None:
                raise ValueError(
                    f"--model {self.model}: megatron-core and Megatron-Bridge are not installed, and only they know "
                    f"the cost of model.hf={recipe.model.hf}; see docs/huggingface.md"
                ) from None
            typer.echo("megatron-core is not installed, so the model's settings are checked only by train", err=True)
        else:
            # Rejects settings that Megatron would not train.
            config = transformer_config(recipe.model, recipe.parallel, on_gpu=False)
            recipe = replace(recipe, model=described(recipe.model, config))
        return recipe

    @property
    def sharing(self) -> Sharing:
        if self.recipe is not None:
            return self.recipe.batch.sharing
        from mcore_prefix_tree.trie import Sharing

        return Sharing(share=self.share or "all", min_shared_tokens=self.min_shared_tokens or 0)

    @cached_property
    def objective(self) -> Objective | None:
        if self.recipe is None:
            return None
        from mcore_prefix_tree.settings.bind_objective import make_bound_objective

        return make_bound_objective(self.recipe)

    @property
    def cutting(self) -> tuple[OverBudget, bool]:
        """Return how trees above the budget are cut, and whether that needs a scoring pass; see ``choose_cutting``."""
        if self.recipe is None:
            return "repeat", False
        from mcore_prefix_tree.settings.sample_source import choose_cutting

        return choose_cutting(self.recipe.batch.over_budget, self.objective)[:2]

    def read(self, limits: Mapping[str, int] | None = None) -> Samples:
        """Read the files; report skipped samples on standard error.

        ``limits`` are the largest numbers of tokens of a sample, by the name of the setting. Raises SampleError for bad
        data, ValueError for an unknown tokenizer, or an ``order`` or ``seed`` without the size of a step.
        """
        from rich.console import Console

        from mcore_prefix_tree.cli.console import ConsoleReporter
        from mcore_prefix_tree.data import DEFAULT_TOKENIZER, FieldNames, LineOptions, Skipped, iter_sample_groups
        from mcore_prefix_tree.data.on_disk import hold_on_disk

        for name in ("order", "seed"):
            if getattr(self, name) is not None and self.model is None and self.global_batch_size is None:
                raise ValueError(f"--{name} needs the size of a training step; give --global-batch-size too")
        data = self.data
        name = DEFAULT_TOKENIZER if data.tokenizer is None else data.tokenizer
        tokenizer: Any = TokenizerOnDemand(name, data.chat_template_kwargs)
        if data.tokenizer is not None:
            tokenizer.load()  # a wrong name is an error for any files
        skipped = Skipped()
        with naming_memory(lambda: "the samples do not fit; give fewer files"):
            options = LineOptions(
                tokenizer=cast("ChatTokenizer", tokenizer),
                expand_turns=data.expand_turns,
                limits=limits or {},
                names=FieldNames(given=data.fields, format=data.format),
            )
            with closing(ConsoleReporter(Console(stderr=True))) as reporter:
                read = iter_sample_groups(
                    data.path, options, on_error=data.on_error, skipped=skipped, progress=reporter.reading
                )
                lines = hold_on_disk(read)
        for told in filter(None, (str(skipped), skipped.not_read)):
            typer.echo(spell(told, self.spellings), err=True)
        return Samples(lines=lines, tokenizer=tokenizer, skipped=skipped, options=self)


def make_order(source: Source, lines: Sequence[Sequence[Sample]]) -> SampleOrder:
    """Return a source's order, with steps no larger than all samples; raises as :meth:`Source.of_lines`."""
    if source.grouped_by is None:
        source = replace(source, step=min(source.step, sum(map(len, lines))))
    return source.of_lines(lines)


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Samples of each line, bad samples, and the options by which they were read."""

    lines: list[list[Sample]]
    tokenizer: TokenizerOnDemand
    skipped: Skipped
    options: SampleOptions

    @cached_property
    def all(self) -> list[Sample]:
        return [sample for line in self.lines for sample in line]

    @cached_property
    def work(self) -> ModelWork | None:
        """Return the FLOPs of the recipe's model, None without a recipe; raise ValueError if they cannot be counted."""
        from mcore_prefix_tree.plan import ModelWork

        recipe = self.options.recipe
        if recipe is None:
            return None
        vocab_size = None if recipe.model.vocab_size else self.tokenizer.vocab_size
        try:
            return ModelWork.from_model(
                recipe.model,
                vocab_size=vocab_size,
                fused_head=recipe.fused_head,
                scalar_head=recipe.objective.has_scalar_head,
            )
        except (TypeError, ArithmeticError, LookupError) as error:
            raise ValueError(f"model.transformer: cannot count FLOPs with these settings ({error})") from error

    @cached_property
    def source(self) -> Source | None:
        """Return the source of training's samples, None for an unknown step size; raises as ``make_source``."""
        from mcore_prefix_tree.data import LineOptions
        from mcore_prefix_tree.data.source import Source
        from mcore_prefix_tree.settings import Recipe
        from mcore_prefix_tree.settings.sample_source import check_units, make_source
        from mcore_prefix_tree.utils.ranks import ALONE

        options = self.options
        if options.recipe is not None and options.objective is not None:
            check_units(options.objective, options.recipe.batch, options.recipe.objective)
            return make_source(options.recipe, options.objective, ranks=ALONE, options=LineOptions())
        if options.global_batch_size is None:
            return None
        return Source(
            paths=options.files,
            options=LineOptions(),
            seed=Recipe.seed if options.seed is None else options.seed,
            order=options.data.order,
            step=options.global_batch_size,
        )

    @cached_property
    def order(self) -> SampleOrder | None:
        """Return the order in which training takes the samples; None if the size of a step is not known.

        Raises SampleError or RecipeError if training with the recipe rejects the groups or their number.
        """
        return None if self.source is None else make_order(self.source, self.lines)

    @property
    def turns(self) -> list[int]:
        """Return tokens of each assistant turn with its history, if conversations are one sample each; else none."""
        import numpy as np

        if self.options.data.expand_turns or self.tokenizer.conversations < len(self.all):
            return []  # expanded, or tokens without messages
        scored = [np.append(sample.loss_mask != 0, False) for sample in self.all]
        return [int(end) for one in scored for end in np.flatnonzero(one[:-1] & ~one[1:]) + 1]
