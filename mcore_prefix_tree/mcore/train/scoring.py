"""What a recipe's checkpoints say of its data: ``mcore-prefix-tree score``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_prefix_tree.attention.auto import check_setting
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.write import numbers, row_of, whole_file
from mcore_prefix_tree.mcore.score import Scores, ScoringStep
from mcore_prefix_tree.mcore.train import checkpoint
from mcore_prefix_tree.mcore.train.jobs import read_data, with_backend, with_vocabulary
from mcore_prefix_tree.mcore.train.model import build_chunks
from mcore_prefix_tree.mcore.train.schedule import folding_of
from mcore_prefix_tree.mcore.train.session import everyone, session
from mcore_prefix_tree.recipe import ObjectiveConfig, Recipe, RecipeError
from mcore_prefix_tree.sample import Sample

# Columns of the file, which training reads.
POLICY, REFERENCE = "old_logprobs", "ref_logprobs"


@dataclass(frozen=True, kw_only=True)
class ScoreReport:
    """What was written.

    Attributes:
        iteration: of the policy's checkpoint.
        reference_iteration: of the reference's.
        skipped: bad samples, in words; empty if there are none.
        samples: lines of the file.
        tokens: scored, of all samples.
        logical_tokens: of the samples.
        physical_tokens: computed by each model, without padding.
    """

    iteration: int
    reference_iteration: int | None
    skipped: str
    samples: int = 0
    tokens: int = 0
    logical_tokens: int = 0
    physical_tokens: int = 0

    def with_step(self, step: ScoringStep, scores: Sequence[Scores]) -> ScoreReport:
        """After some more samples."""
        return replace(
            self,
            samples=self.samples + len(step.samples),
            tokens=self.tokens + sum(int(one.scored.sum()) for one in scores),
            logical_tokens=self.logical_tokens + sum(map(len, step.samples)),
            physical_tokens=self.physical_tokens + step.physical_tokens,
        )


def run_score(
    recipe: Recipe,
    output: str | Path,
    *,
    reference: str | Path | None = None,
    all_tokens: bool = False,
    entropy: bool = True,
) -> tuple[ScoreReport, bool]:
    """Score a recipe's data under its last checkpoint and write the samples with their scores, in the data's order.

    ``batch.global_batch_size`` samples at a time are planned together. A job that takes samples one by one and does not
    shuffle plans the steps of its first epoch in the same way.

    Args:
        recipe: the job's; ``checkpoint.save`` is where its checkpoints are.
        output: JSON Lines that ``data.path`` can name: each sample with ``old_logprobs``, ``entropy`` and
            ``ref_logprobs``, null for tokens that are not scored. The file appears once it is complete.
        reference: folder of another run's checkpoints of the same model; gives ``ref_logprobs``.
        all_tokens: score all tokens, not only those with a non-zero loss mask.
        entropy: write it too.

    Returns:
        The report, and whether this is the main rank, which writes.

    Raises:
        RecipeError: there is no such checkpoint or it does not fit.
        ScoreError: a score is NaN or infinite; nothing is written.
        SampleError, OSError, NotImplementedError: see what raises them.
    """
    check_setting(recipe.attention_backend)
    if not Path(output).absolute().parent.is_dir():
        raise RecipeError(f"--output {output}: its folder does not exist; create it")
    policy = recipe.checkpoint.save
    if policy is None:
        raise RecipeError("scoring needs checkpoint.save, the folder of the checkpoints to score with")
    # All samples, whatever an objective would take of them: it may need these very scores.
    recipe = replace(recipe, data=replace(recipe.data, shuffle=False), objective=ObjectiveConfig())
    folders: dict[str, str | Path] = {POLICY: policy}
    if reference is not None:
        folders[REFERENCE] = reference
    found = {column: checkpoint.latest_iteration(folder) for column, folder in folders.items()}
    with session(recipe) as place:
        # A network folder shows another machine's last checkpoint late: all take the main rank's.
        iterations = {column: _existing(folders[column], last) for column, last in everyone(found)[0].items()}
        data = read_data(recipe, place)
        recipe = with_vocabulary(recipe, data.vocab_size)
        recipe = with_backend(recipe, place, data.order)
        models = {}
        for column, iteration in iterations.items():
            models[column] = build_chunks(recipe, place.config, vocab_size=data.vocab_size, device=place.device)
            checkpoint.load_weights(folders[column], iteration, models[column])
        folding = folding_of(recipe, place)
        report = ScoreReport(
            iteration=iterations[POLICY],
            reference_iteration=iterations.get(REFERENCE),
            skipped=str(data.skipped) if data.skipped.count else "",
        )
        with whole_file(output) if place.is_main else nullcontext() as stream:
            for samples in _batches(data.order, recipe.batch.global_batch_size):
                step = ScoringStep.plan(samples, folding, all_tokens=all_tokens)
                scores = {
                    column: step.score(chunks, entropy=entropy and column == POLICY)
                    for column, chunks in models.items()
                }
                report = report.with_step(step, scores[POLICY])
                if stream is not None:
                    for index, sample in enumerate(samples):
                        row = _row(sample, {column: of_all[index] for column, of_all in scores.items()})
                        stream.write(json.dumps(row, allow_nan=False) + "\n")
        return report, place.is_main


def _batches(order: SampleOrder, size: int) -> Iterator[list[Sample]]:
    """The samples of one epoch, so many at a time."""
    with order.stream(0) as stream:
        for start in range(0, order.samples_per_epoch, size):
            yield stream.take(min(size, order.samples_per_epoch - start))


def _existing(folder: str | Path, iteration: int | None) -> int:
    if iteration is None:
        raise RecipeError(f"{folder} holds no checkpoint; train first, or name the folder of a run that did")
    return iteration


def _row(sample: Sample, scores: dict[str, Scores]) -> dict[str, Any]:
    row = row_of(sample)
    for column, one in scores.items():
        row[column] = numbers(one.logprobs)
        if one.entropy is not None:
            row["entropy"] = numbers(one.entropy)
    return row
