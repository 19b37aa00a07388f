"""Export of a teacher's rows with the samples of a student with another tokenizer: ``xtoken export-teacher``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

from megatron.core import parallel_state

from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.data.write import make_row, rows_file
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.score_files import ScoreReport, batches
from mcore_prefix_tree.mcore.engine.scoring import ScoringStep
from mcore_prefix_tree.mcore.loop.resolve_recipe import read_data
from mcore_prefix_tree.mcore.loop.session import Session, session
from mcore_prefix_tree.mcore.outputs import ExportedRows, TopLogprobs
from mcore_prefix_tree.mcore.ranks import is_main_rank
from mcore_prefix_tree.mcore.teachers.load_teachers import find_teacher_vocab_size, load_model
from mcore_prefix_tree.mcore.teachers.teacher_model import TeacherModel
from mcore_prefix_tree.objectives import CrossTokenizer
from mcore_prefix_tree.objectives.cross_tokenizer_rows import refuse_temperatures
from mcore_prefix_tree.objectives.objective import SecondModels
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.settings import ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.settings.bind_objective import load_named_tokenizer, make_pairing, make_settings
from mcore_prefix_tree.settings.over_budget import choose_cutting
from mcore_prefix_tree.settings.score_section import TEACHER
from mcore_prefix_tree.settings.teachers import check_asked_teachers, teacher_recipes
from mcore_prefix_tree.trie import Sharing
from mcore_prefix_tree.utils.errors import spelled
from mcore_prefix_tree.xtoken.pairs import Pair

logger = logging.getLogger(__name__)


def run_export(recipe: Recipe, output: str | Path, *, top_k: int) -> tuple[ScoreReport, bool]:
    """Ask the teacher of a student's recipe about its data, and write the samples with the teacher's rows.

    The teacher runs in the parallel layout of its own recipe. ``batch.global_batch_size`` samples of the student's
    recipe are planned together. The file, JSON Lines or a table by its name, appears once it is complete; each sample
    has ``teacher`` (:class:`~mcore_prefix_tree.signals.Teacher`) with the ``top_k`` likeliest tokens in a row.

    Returns:
        The report of the written file, and whether this is the main rank, which writes.

    Raises:
        RecipeError: the recipe has no teacher with another tokenizer, or there is no such checkpoint.
        ScoreError: a log-probability is NaN or infinite; nothing is written.
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
        folding = _folding(joined, model, recipe.batch.sharing)
        readout = ExportedRows(top=TopLogprobs(k=top_k, vocab_size=tokens))
        names = FieldNames(given=recipe.data.fields)
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


def _folding(joined: Session, model: TeacherModel, sharing: Sharing) -> Folding:
    recipe = joined.recipe
    cutting = choose_cutting(recipe.batch.over_budget, None)
    return Folding(
        **cutting._asdict(),
        max_tokens=recipe.batch.max_tokens,
        dp_size=parallel_state.get_data_parallel_world_size(),
        cost_model=None,
        device=joined.device,
        micro_batch_multiple=recipe.parallel.micro_batch_multiple,
        sharing=sharing,
        padding=recipe.padding,
        attention_backend=model.attention_backend,
        attention_cases=tuple(model.attention_cases),
        deterministic_attention=recipe.deterministic_attention,
    )
