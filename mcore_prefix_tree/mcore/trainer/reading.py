"""A recipe's samples, as every rank reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist

from mcore_prefix_tree.data import (
    LineOptions,
    OnError,
    Skipped,
    StreamedGroups,
    check_same_samples,
    iter_sample_groups,
    load_tokenizer,
    resolve_paths,
)
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.grouping import streamed_whole_groups
from mcore_prefix_tree.data.jsonl import STDIN
from mcore_prefix_tree.errors import naming_memory
from mcore_prefix_tree.mcore.engine.objective import check_samples
from mcore_prefix_tree.mcore.ranks import all_ranks
from mcore_prefix_tree.mcore.trainer.model import padded_vocab_size
from mcore_prefix_tree.mcore.trainer.session import Session
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.recipe import Recipe, RecipeError
from mcore_prefix_tree.recipe.order import grouped_by, joined, order_of_groups
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import GroupedBy

_CHECKED_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """What a recipe trains on.

    Attributes:
        order: of the samples.
        grouped_by: the units that it keeps whole, or None for samples.
        options: how lines become samples.
        vocab_size: padded, which they fit into.
        skipped: bad samples, left out under ``data.on_error=skip``.
    """

    order: SampleOrder
    grouped_by: GroupedBy | None
    options: LineOptions
    vocab_size: int
    skipped: Skipped


def read_data(
    recipe: Recipe,
    objective: Objective | None,
    place: Session,
    *,
    every_sample: bool = False,
    checked: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Data:
    """The samples: all of them, or where they are, under ``data.streaming``.

    Standard input reaches one process only: the main rank reads it for all.

    Args:
        recipe: the job's.
        objective: the recipe's; None reads no group, rollout or pair.
        place: this rank's.
        every_sample: an epoch leaves none out.
        checked: check before the first step that no sample lacks what the objective reads.
        progress: under ``data.streaming``, is told how far the files are gone through, in bytes done and in all.

    Raises:
        SampleError: bad data; names file, line and field. Or ranks that read different data; names them.
        RecipeError: the vocabulary is not known or too small, there are fewer samples than a step of whole groups
            takes, or steps are to be so many groups of an objective that has none.
    """
    data = recipe.data
    by = None if objective is None else grouped_by(recipe, objective)
    if data.tokenizer is None and data.chat_template_kwargs:
        raise RecipeError(
            "data.chat_template_kwargs needs data.tokenizer, whose template reads them; set both, or none"
        )
    tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer, data.chat_template_kwargs)
    vocab_size = padded_vocab_size(
        recipe.model,
        None if tokenizer is None else tokenizer.vocab_size,
        recipe.parallel.tensor_model_parallel_size,
    )
    options = LineOptions(
        tokenizer=tokenizer,
        expand_turns=data.expand_turns,
        vocab_size=recipe.model.vocab_size or vocab_size,
        limits=_limits(recipe),
    )
    skipped = Skipped()
    step, setting = recipe.batch.global_batch_size, f"objective.name={recipe.objective.name}"
    groups: Sequence[Sequence[Sample]]
    if data.streaming:
        stream = partial(
            StreamedGroups,
            data.path,
            options,
            on_error=data.on_error,
            skipped=skipped,
            ranks=all_ranks(),
            progress=progress,
            check=partial(check_samples, objective) if checked and objective is not None else None,
        )
        with _naming_what_was_skipped(skipped):
            groups = stream() if by is None else streamed_whole_groups(stream, by, step=step, setting=setting)
        if groups.fault:
            raise SampleError(groups.fault)
    else:
        groups, skipped = _read_whole(recipe, data.path, options, place, by, step=step)
        if checked and objective is not None:
            _check_all(objective, groups)
    order = order_of_groups(recipe, groups, whole_steps=by is not None and not every_sample)
    return Data(order=order, grouped_by=by, options=options, vocab_size=vocab_size, skipped=skipped)


def read_held_out(
    recipe: Recipe, objective: Objective, options: LineOptions, place: Session
) -> tuple[Sequence[Sequence[Sample]], Skipped]:
    """Return the samples of ``validation.path``: of each line, or of each unit that the objective needs whole.

    They are held in memory, also under ``data.streaming``, and checked as those that are trained on.

    Args:
        recipe: the job's, with a ``validation.path``.
        objective: the recipe's.
        options: how its lines become samples.
        place: this rank's.

    Raises:
        SampleError: as of :func:`read_data`; or there are no samples.
    """
    path = recipe.validation.path
    assert path is not None
    groups, skipped = _read_whole(recipe, path, options, place, objective.grouped_by, step=None)
    _check_all(objective, groups)
    return groups, skipped


@contextmanager
def _naming_what_was_skipped(skipped: Skipped) -> Iterator[None]:
    """A group or a pair may be at fault because data.on_error=skip took a part of it away: say so."""
    try:
        yield
    except SampleError as error:
        if skipped.count:
            raise SampleError(f"{error} ({skipped})") from None
        raise


def _limits(recipe: Recipe) -> dict[str, int]:
    """How long a sample may be, by the setting that says so."""
    limits = {"batch.max_tokens": recipe.batch.max_tokens}
    if recipe.model.position_embedding_type == "learned_absolute":
        limits["model.max_position_embeddings"] = recipe.model.max_position_embeddings
    return limits


def _read_whole(
    recipe: Recipe,
    path: str | list[str],
    options: LineOptions,
    place: Session,
    by: GroupedBy | None,
    *,
    step: int | None,
) -> tuple[Sequence[Sequence[Sample]], Skipped]:
    """Return all samples of some files: of each line, or of each group, rollout or pair."""
    lines, skipped = _read_lines([path] if isinstance(path, str) else path, options, recipe.data.on_error, place)
    with _naming_what_was_skipped(skipped):
        return joined(recipe, lines, by, step=step), skipped


def _read_lines(
    paths: list[str], options: LineOptions, on_error: OnError, place: Session
) -> tuple[list[list[Sample]], Skipped]:
    def read() -> tuple[list[list[Sample]], Skipped]:
        skipped = Skipped()
        with naming_memory(lambda: f"the samples of {', '.join(paths)} do not fit; set data.streaming=true"):
            return list(iter_sample_groups(paths, **vars(options), on_error=on_error, skipped=skipped)), skipped

    if STDIN not in paths or dist.get_world_size() == 1:
        lines, skipped = read()
        check_same_samples(lines, resolve_paths(paths), all_ranks())
        return lines, skipped
    outcome: list[Any] = [None]
    if place.is_main:
        try:
            outcome = [read()]
        except (SampleError, MemoryError) as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    lines, skipped = outcome[0]
    return lines, skipped


def _check_all(objective: Objective, groups: Sequence[Sequence[Sample]]) -> None:
    """Check before the first step that no sample lacks what the objective reads; raises SampleError."""
    for start in range(0, len(groups), _CHECKED_AT_ONCE):
        check_samples(objective, list(chain.from_iterable(groups[start : start + _CHECKED_AT_ONCE])))
