"""A recipe's samples: their conversion from lines, the order in which steps take them, and how trees are cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mcore_prefix_tree.data import FieldNames, LineOptions, load_tokenizer
from mcore_prefix_tree.data.source import Source
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.settings.model_section import ModelConfig
from mcore_prefix_tree.settings.sections import BatchConfig, ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.utils.choices import OverBudget
from mcore_prefix_tree.utils.ranks import Ranks


def make_source(
    recipe: Recipe,
    objective: Objective | None,
    *,
    ranks: Ranks,
    every_sample: bool = False,
    names: FieldNames | None = None,
    limits: Mapping[str, int] | None = None,
    options: LineOptions | None = None,
    whole_samples: bool = True,
) -> Source:
    """Return the source of a recipe's samples.

    Args:
        objective: objective of the recipe; None reads no group, rollout or pair.
        every_sample: whether an epoch takes every sample.
        names: names of the files' fields; those of ``data.fields`` by default.
        limits: further limits of a sample's tokens, by the name of their setting.
        options: settings that the samples of a line depend on, if they are known already; by default the tokenizer is
            loaded for them.
        whole_samples: whether a micro-batch holds whole samples, so that one above ``batch.max_tokens`` is refused.

    Raises:
        RecipeError: the vocabulary is too small for the tokenizer.
    """
    data, batch = recipe.data, recipe.batch
    by = None if objective is None else objective.grouped_by
    setting = f"objective.name={recipe.objective.name}"
    if options is None:
        tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer, data.chat_template_kwargs)
        all_limits = ({"batch.max_tokens": batch.max_tokens} if whole_samples else {}) | dict(limits or {})
        if recipe.model.position_embedding_type == "learned_absolute":
            all_limits["model.max_position_embeddings"] = recipe.model.max_position_embeddings
        options = LineOptions(
            tokenizer=tokenizer,
            expand_turns=data.expand_turns,
            vocab_size=_vocab_size(recipe.model, None if tokenizer is None else tokenizer.vocab_size),
            limits=all_limits,
            renderings=() if objective is None else objective.renderings,
            names=names or FieldNames(given=data.fields),
        )
    return Source(
        paths=[data.path] if isinstance(data.path, str) else data.path,
        options=options,
        seed=recipe.seed,
        order=data.order,
        step=batch.per_step,
        grouped_by=by,
        counts_units=batch.groups_per_step is not None,
        whole_steps=by is not None and not every_sample,
        on_error=data.on_error,
        is_streamed=data.streaming,
        objective=setting,
        ranks=ranks,
    )


def check_units(objective: Objective, batch: BatchConfig, section: ObjectiveConfig) -> None:
    """Check that an objective, which a section names, has the groups that steps are counted in."""
    if objective.grouped_by is None and batch.groups_per_step is not None:
        raise RecipeError(
            f"batch.groups_per_step={batch.groups_per_step}: objective.name={section.name} with its options takes each "
            "sample separately; set batch.global_batch_size instead"
        )


def _vocab_size(model: ModelConfig, tokenizer_size: int | None) -> int:
    """Return the recipe's size, or else the tokenizer's; a command checks that there is one."""
    size = model.vocab_size
    if size is not None and tokenizer_size is not None and size < tokenizer_size:
        if model.hf is not None:
            raise RecipeError(
                f"data.tokenizer has {tokenizer_size} tokens, more than the {size} of model.hf={model.hf}; name the "
                "tokenizer of that model"
            )
        raise RecipeError(
            f"model.vocab_size={size} is smaller than the tokenizer's {tokenizer_size}; raise it or unset it"
        )
    return size or tokenizer_size or 0


class Cutting(NamedTuple):
    """Way to cut trees above the budget; see :class:`~mcore_prefix_tree.mcore.engine.folding.Folding`."""

    over_budget: OverBudget = "repeat"
    scores_first: bool = False
    why_repeat: str = ""


def choose_cutting(asked: OverBudget, objective: Objective | None, *, runs_ahead: bool = True) -> Cutting:
    """Return the way to cut; without an objective, samples are only scored.

    ``runs_ahead`` is whether the loop can run a pass before a step. Raises RecipeError if training cannot ``carry``.
    """
    if asked == "repeat":
        return Cutting(why_repeat="batch.over_budget=repeat")
    if objective is None:
        return Cutting(asked)
    why = why_not_carried(objective, runs_ahead=runs_ahead)
    if why is None:
        return Cutting(asked, scores_first=not objective.sums_edges)
    if asked == "carry":
        raise RecipeError(f"batch.over_budget=carry is not possible: {why}; set batch.over_budget=repeat")
    return Cutting(why_repeat=why)


def why_not_carried(objective: Objective, *, runs_ahead: bool = True) -> str | None:
    """Return why the samples of training are not cut, None if they can be; see :func:`choose_cutting`."""
    if not (objective.sums_edges or objective.reads_scores):
        return "the objective reads more of whole samples than scores of tokens"
    if not (objective.sums_edges or runs_ahead):
        return (
            "the objective's loss needs a pass before the step, which pipeline stages run under "
            "mcore_prefix_tree.pretrain_gpt with Megatron-LM core_v0.19.0 or later, and virtual ones without "
            "--microbatch-group-size-per-virtual-pipeline-stage"
        )
    return None
