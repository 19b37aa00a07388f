"""Scores of a recipe's data under its checkpoints: ``mcore-prefix-tree score``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.engine.score_files import ScoreReport, make_readouts, write_scores
from mcore_prefix_tree.mcore.loop.resolve_recipe import cuts_samples, read_data, resolve
from mcore_prefix_tree.mcore.loop.session import session
from mcore_prefix_tree.mcore.models.bridge import load_folder
from mcore_prefix_tree.mcore.models.lora import load_start
from mcore_prefix_tree.mcore.ranks import everyone, is_main_rank
from mcore_prefix_tree.settings import CheckpointConfig, ModelConfig, ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.settings.bind_objective import make_bound_objective
from mcore_prefix_tree.settings.hf_folder import CONFIG, HuggingFaceFolder
from mcore_prefix_tree.settings.score_section import REFERENCE, ScoreConfig


def run_score(recipe: Recipe, options: ScoreConfig) -> tuple[ScoreReport, bool]:
    """Score a recipe's data under its last checkpoint and write the samples with their scores, in the data's order.

    ``batch.global_batch_size`` samples, or ``batch.groups_per_step`` groups, at a time are planned together. A job with
    ``data.order: file`` plans the steps of its first epoch in the same way. Fields that are not read are kept as they
    are, and the columns have the names that ``data.fields`` gives them; of tokens that are not scored they hold null.

    Returns:
        The report of the written file, and whether this is the main rank, which writes.

    Raises:
        RecipeError: the checkpoint is missing or does not fit.
        ScoreError: a score is NaN or infinite; nothing is written.
    """
    recipe = replace(recipe, data=replace(recipe.data, order="file"))
    kind = recipe.objective.kind
    try:
        options.check(kind, setting=f"objective.name={recipe.objective.name}", vocab_size=recipe.model.vocab_size)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    main = options.column(kind)
    weights = {main: _policy(recipe.checkpoint, recipe.model, recipe.objective)}
    if options.reference is not None:
        weights[REFERENCE] = _reference(options.reference, recipe.model)
    with session(recipe) as joined:
        names = {column: one.named() for column, one in weights.items()}
        objective = make_bound_objective(recipe)
        # The objective's fields are not checked: it may need these very scores.
        grouping = None if recipe.batch.groups_per_step is None else objective
        cut = cuts_samples(joined, None)
        data = read_data(
            joined,
            grouping,
            every_sample=True,
            keeps_others=True,
            is_scored=options.reads_mask(kind),
            whole_samples=not cut,
        )
        run = resolve(joined, objective, data)
        over_budget = recipe.batch.over_budget if cut else "repeat"
        models = {column: run.new_model() for column in weights}
        for column, one in weights.items():
            one.fill(models[column], names[column], run.recipe.model)
        report = ScoreReport(
            iteration=names[main],
            reference_iteration=names.get(REFERENCE),
            skipped=str(data.skipped) if data.skipped else "",
        )
        report = write_scores(
            options.output,
            data.order,
            models,
            make_readouts(options, kind, vocab_size=run.recipe.model.vocab_size, fused_head=recipe.fused_head),
            report,
            per_step=recipe.batch.per_step,
            folding=replace(run.job.folding, over_budget=over_budget),
            names=FieldNames(given=recipe.data.fields),
            options=options,
        )
        return report, is_main_rank()


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """Weights to score with: a folder of a run's checkpoints, or (``is_hf``) of a Hugging Face model."""

    folder: str
    is_hf: bool = False

    def named(self) -> int | str:
        """Return the last iteration, or the name of the model's folder; raise RecipeError without a checkpoint."""
        if self.is_hf:
            return self.folder
        # A network folder shows another machine's last checkpoint late: all take the main rank's.
        last: int | str | None = everyone(checkpoint.latest_weights(self.folder))[0]
        if last is None and (Path(self.folder) / "metadata.json").is_file():
            raise RecipeError(
                f"{self.folder} is a checkpoint itself; name the folder that it is in, whose last one is taken"
            )
        if last is None:
            raise RecipeError(f"{self.folder} holds no checkpoint; train first, or name the folder of a run that did")
        return last

    def fill(self, chunks: list[torch.nn.Module], name: int | str, model: ModelConfig) -> None:
        """Fill a model with the weights that :meth:`named` named."""
        if self.is_hf and self.folder == model.hf:
            load_start(model, chunks)
        elif self.is_hf:
            load_folder(self.folder, chunks)
        else:
            checkpoint.load_weights(self.folder, name, chunks, model=model)


def _policy(checkpoints: CheckpointConfig, model: ModelConfig, objective: ObjectiveConfig) -> _Weights:
    save, hf = checkpoints.save, model.hf
    if save is not None:
        return _Weights(folder=save)
    assert hf is not None, "check_scored looks"
    if objective.has_scalar_head and not HuggingFaceFolder.read(hf).has_scalar_head:
        raise RecipeError(f"model.hf={hf} has no scalar head to score with; set checkpoint.save")
    return _Weights(folder=hf, is_hf=True)


def _reference(folder: str, model: ModelConfig) -> _Weights:
    """Return a run's checkpoints, or a Hugging Face folder; raise RecipeError if its architecture differs."""
    if not (Path(folder) / CONFIG).is_file():
        return _Weights(folder=folder)
    if model.hf is None:
        raise RecipeError(f"score.reference={folder} is a Hugging Face folder; set model.hf, whose architecture it has")
    try:
        difference = HuggingFaceFolder.read(model.hf).difference(HuggingFaceFolder.read(folder))
    except ValueError as error:
        raise RecipeError(f"score.reference: {error}") from None
    if difference:
        raise RecipeError(
            f"score.reference={folder} is another model than model.hf={model.hf}: config.json has another "
            f"'{difference}'; score it in a separate run, with --hf"
        )
    return _Weights(folder=folder, is_hf=True)
