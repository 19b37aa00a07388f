"""Files of a recipe's samples with scores by its checkpoints, or with rows of its teacher.

``mcore-prefix-tree score`` and, of a teacher with another tokenizer, ``xtoken export-teacher`` write them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from megatron.core import parallel_state

from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.data.write import make_row, rows_file
from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.score_files import ScoreReport, batches, make_readouts, write_scores
from mcore_prefix_tree.mcore.engine.scoring import ScoringStep
from mcore_prefix_tree.mcore.loop.resolve_recipe import cuts_samples, read_data, resolve
from mcore_prefix_tree.mcore.loop.session import session
from mcore_prefix_tree.mcore.models.bridge import load_folder
from mcore_prefix_tree.mcore.models.lora import load_start
from mcore_prefix_tree.mcore.outputs import ExportedRows, TopLogprobs
from mcore_prefix_tree.mcore.ranks import everyone, is_main_rank
from mcore_prefix_tree.mcore.teachers.load_teachers import find_teacher_vocab_size, load_model
from mcore_prefix_tree.objectives import CrossTokenizer
from mcore_prefix_tree.objectives.cross_tokenizer_rows import refuse_temperatures
from mcore_prefix_tree.objectives.objective import SecondModels
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.settings import CheckpointConfig, ModelConfig, ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.settings.bind_objective import (
    load_named_tokenizer,
    make_bound_objective,
    make_pairing,
    make_settings,
)
from mcore_prefix_tree.settings.hf_folder import CONFIG, HuggingFaceFolder
from mcore_prefix_tree.settings.sample_source import choose_cutting
from mcore_prefix_tree.settings.score_section import REFERENCE, TEACHER, ScoreConfig
from mcore_prefix_tree.settings.teachers import check_asked_teachers, teacher_recipes
from mcore_prefix_tree.utils.errors import spelled
from mcore_prefix_tree.xtoken.pairs import Pair

logger = logging.getLogger(__name__)


def run_score(recipe: Recipe, options: ScoreConfig) -> tuple[ScoreReport, bool]:
    """Score a recipe's data under its last checkpoint and write the samples with their scores, in the data's order.

    ``batch.global_batch_size`` samples, or ``batch.groups_per_step`` groups, at a time are planned together. A job with
    ``data.order: file`` plans the steps of its first epoch in the same way. Fields that are not read are kept as they
    are, and the columns have the names that ``data.fields`` gives them; of tokens that are not scored they hold null.

    Return the report of the file, and whether this is the main rank, which writes. Raises RecipeError if a checkpoint
    is missing or does not fit, ScoreError for a score that is not finite; nothing is written then.
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
            names=FieldNames(given=recipe.data.fields, format=recipe.data.format),
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


def run_export_teacher(recipe: Recipe, output: str | Path, *, top_k: int) -> tuple[ScoreReport, bool]:
    """Ask the teacher of a student's recipe about its data, and write the samples with the teacher's rows.

    The teacher runs in the parallel layout of its own recipe. ``batch.global_batch_size`` samples of the student's
    recipe are planned together. The file, JSON Lines or a table by its name, appears once it is complete; each sample
    has ``teacher`` (:class:`~mcore_prefix_tree.signals.Teacher`) with the ``top_k`` likeliest tokens in a row.

    Return and raise as :func:`run_score`; RecipeError also if the recipe has no teacher with another tokenizer.
    """
    settings = _check_exportable(recipe.objective)
    ((path, teacher),) = teachers = teacher_recipes(recipe)
    check_asked_teachers(
        SecondModels(asked=True, same_vocabulary=False), teachers, recipe.model, recipe.batch.max_tokens
    )
    student = load_named_tokenizer(recipe.data, "data.tokenizer")
    pairing = make_pairing(settings, student, path, teacher.data, teacher.model)
    if top_k > pairing.teacher.vocab_size:
        raise RecipeError(f"--top-k {top_k} is more than the {pairing.teacher.vocab_size} tokens of the teacher")
    tokens = pairing.teacher.vocab_size
    padded_vocab_size = teacher.parallel.padded_vocab_size(find_teacher_vocab_size(teacher.model, tokens))
    with session(replace(teacher, objective=ObjectiveConfig(), fused_head=True)) as joined:
        read = replace(recipe, data=replace(recipe.data, order="file"))
        data = read_data(replace(joined, recipe=read), None, every_sample=True)

        def paired(samples: Sequence[Sample]) -> list[Pair]:
            refuse_temperatures(samples)
            return [pairing.of(sample) for sample in samples]

        model = load_model(
            joined.recipe,
            tokens,
            padded_vocab_size,
            first_step=lambda: [pair.teacher for pair in paired(data.order.take(0, recipe.batch.per_step))],
            device=joined.device,
            say=logger.info,
        )
        own = joined.recipe
        folding = Folding(
            **choose_cutting(own.batch.over_budget, None)._asdict(),
            max_tokens=own.batch.max_tokens,
            dp_size=parallel_state.get_data_parallel_world_size(),
            cost_model=None,
            device=joined.device,
            micro_batch_multiple=own.parallel.micro_batch_multiple,
            sharing=recipe.batch.sharing,
            padding=own.padding,
            attention_backend=model.attention_backend,
            attention_cases=tuple(model.attention_cases),
            deterministic_attention=own.deterministic_attention,
        )
        readout = ExportedRows(top=TopLogprobs(k=top_k, vocab_size=tokens))
        names = FieldNames(given=recipe.data.fields, format=recipe.data.format)
        report = ScoreReport(
            iteration=str(teacher.checkpoint.save or teacher.model.hf),
            reference_iteration=None,
            skipped=str(data.skipped) if data.skipped else "",
        )
        with rows_file(output) if is_main_rank() else nullcontext() as writer:
            for samples in batches(data.order, recipe.batch.per_step):
                pairs = paired(samples)
                with spelled({"batch.max_tokens": "batch.max_tokens of the teacher's recipe"}):
                    step = ScoringStep.plan([pair.teacher for pair in pairs], folding, for_main_rank=True)
                scores = step.score(model.chunks, readout)
                if writer is None:
                    continue
                report = report.with_step(step, scores)
                rows = []
                for pair, one in zip(pairs, scores, strict=True):
                    row = replace(one.teacher, tokens=pair.teacher.tokens, tokenizer=pairing.teacher.hash)
                    rows.append(make_row(pair.student, names) | {names.theirs(TEACHER): row})
                writer.add(rows)
        return report, is_main_rank()


def _check_exportable(objective: ObjectiveConfig) -> CrossTokenizer:
    """Return the settings of an objective whose only teacher can export rows for the student's text."""
    if objective.name != "xtoken":
        raise RecipeError(
            f"objective.name={objective.name}: export-teacher asks a teacher with another tokenizer, which "
            "xtoken has; `mcore-prefix-tree score --teacher-top-k K` asks one with the same"
        )
    if len(objective.teacher_recipes) != 1:
        raise RecipeError(
            f"objective.teacher_recipe names {len(objective.teacher_recipes)} recipes, but the samples have room for "
            "the rows of one teacher; name one"
        )
    settings = cast("CrossTokenizer", make_settings(objective))
    if settings.rendering == "own":
        raise RecipeError("objective.options.rendering=own: rows are exported for the student's text; remove rendering")
    return settings
