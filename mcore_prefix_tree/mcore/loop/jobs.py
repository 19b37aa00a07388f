"""Commands on a recipe: train, verify, compare."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.checkpoints.checkpoint import exclusive_save
from mcore_prefix_tree.mcore.checkpoints.retention import check_not_overwritten
from mcore_prefix_tree.mcore.engine.comparison import Comparison
from mcore_prefix_tree.mcore.engine.evaluation import HeldOut
from mcore_prefix_tree.mcore.engine.resolve import check_samples
from mcore_prefix_tree.mcore.engine.verification import VerifyReport
from mcore_prefix_tree.mcore.loop.export_folder import export_model, make_parent
from mcore_prefix_tree.mcore.loop.resolve_recipe import Data, Resolved, read_data, resolve
from mcore_prefix_tree.mcore.loop.session import EndRequest, session
from mcore_prefix_tree.mcore.loop.trainer import Reporter, Trainer
from mcore_prefix_tree.mcore.models.lora import load_frozen
from mcore_prefix_tree.mcore.ranks import everyone, is_main_rank, on_main_rank
from mcore_prefix_tree.mcore.teachers.load_teachers import HookLoader
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.settings import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    RecipeError,
    ValidationConfig,
)
from mcore_prefix_tree.settings.bind_objective import make_bound_objective

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Receives how much is done, and of how much.
Progress = Callable[[int, int], None]


class VerificationError(RuntimeError):
    """Folded and unfolded runs differ by more than the tolerance."""


def run_once(
    recipe: Recipe, work: Callable[[Resolved], T], *, is_trained: bool = False, reporter: Reporter | None = None
) -> tuple[T, bool]:
    """Join a recipe's job; return ``work``'s result on what it resolves to, and whether this is the main rank.

    ``is_trained`` says that ``work`` runs the optimizer; ``reporter`` shows the reading of data on the main rank.
    """
    objective = make_bound_objective(recipe)
    if is_trained:
        _check_optimizer(recipe.optimizer, recipe.model, recipe.checkpoint)
    with session(recipe) as joined:
        data = read_data(joined, objective, progress=reporter.reading if reporter and is_main_rank() else None)
        if reporter and is_main_rank() and data.skipped.not_read:
            reporter.message(data.skipped.not_read)
        return work(resolve(joined, objective, data)), is_main_rank()


def verify_first(run: Resolved, *, progress: Progress | None = None) -> VerifyReport:
    """Compare folded and unfolded runs of the first batch; ``progress`` is called on the main rank."""
    return run.verified(run.starting_model(logger.info), progress if is_main_rank() else None)


def compare_first(run: Resolved, *, repeats: int, progress: Progress | None = None) -> Comparison:
    """Measure the first batch folded and unfolded; ``progress`` is called on the main rank."""
    told = progress if is_main_rank() else None
    return Trainer(run, run.new_model()).compare(1, repeats=repeats, progress=told)


def run_train(recipe: Recipe, reporter: Reporter, *, resume: bool = False, new_data: bool = False) -> None:
    """Run ``mcore-prefix-tree train``.

    With ``resume`` it continues from the last complete checkpoint in ``checkpoint.save``, if there is one; with
    ``new_data`` too, data that are not the checkpoint's start from their beginning.

    Raises:
        VerificationError: folded and unfolded differ on the first batch; nothing was trained.
        RecipeError, SampleError, NotImplementedError: a setting, the data or the model cannot be trained.
    """
    objective = make_bound_objective(recipe)
    _check_optimizer(recipe.optimizer, recipe.model, recipe.checkpoint)
    target = recipe.checkpoint.export_hf
    if target is not None:
        make_parent(target, f"checkpoint.export_hf={target}")
    saved = _last_checkpoint(recipe.checkpoint, resume=resume, new_data=new_data)
    with session(recipe) as joined, ExitStack() as until_the_end:
        say = reporter.message if is_main_rank() else logger.debug
        # A network folder shows another machine's last checkpoint late: all continue from the main rank's.
        saved = everyone(saved)[0]
        if recipe.checkpoint.save is not None:
            on_main_rank(partial(check_not_overwritten, recipe.checkpoint.save, saved))
        progress = reporter.reading if is_main_rank() else None
        data = read_data(joined, objective, checked=True, progress=progress)
        for told in filter(None, (str(data.skipped), data.skipped.not_read)):
            say(told)
        held_out = _read_held_out(recipe.validation, objective, data, say)
        _report_order(data, say)
        if recipe.checkpoint.save is not None:
            # A folder that cannot be written to is reported now, not after the last step.
            checkpoint.make_folder(recipe.checkpoint.save)
            until_the_end.enter_context(exclusive_save(recipe.checkpoint.save))
        run = resolve(joined, objective, data, say=reporter.message)
        chunks = run.starting_model(say) if saved is None else run.new_model()
        if saved is not None:
            load_frozen(recipe.model, chunks)
        loader = HookLoader(
            student=recipe,
            job=run.job,
            first_step=run.first_step,
            vocab_size=run.vocab_size,
            padded_vocab_size=run.padded_vocab_size,
            say=say,
        )
        run = replace(run, job=replace(run.job, hook=loader.hook()))
        if recipe.verify.enabled and saved is None:
            _verify(run, chunks, reporter)
        evaluated = None
        if held_out is not None:
            evaluated = HeldOut(
                held_out,
                run.job,
                per_step=recipe.batch.per_step,
                by_group=recipe.batch.groups_per_step is not None,
                in_trie_order=recipe.data.order == "folded",
            )
        Trainer(run, chunks, held_out=evaluated).train(saved, reporter, new_data=new_data)
        if target is not None:
            # Like a step, it is finished first: a signal would leave half a folder, and no other copy without a save.
            with EndRequest():
                export_model(recipe.model, chunks, target)
            say(f"the {'weights are' if recipe.model.lora is None else 'adapter is'} exported to {target}")
        if data.skipped:
            say(f"not trained on: {data.skipped}")
        if is_main_rank():
            folder = recipe.checkpoint.save
            last = None if folder is None else checkpoint.iteration_folder(folder, max(recipe.train_iters, saved or 0))
            reporter.finished(None if last is None else str(last))


def _last_checkpoint(options: CheckpointConfig, *, resume: bool, new_data: bool) -> int | None:
    """Return the iteration to resume from; None if the run begins."""
    saved = None if options.save is None else checkpoint.latest_iteration(options.save)
    if resume and options.save is None:
        raise RecipeError("--resume needs checkpoint.save, the folder to resume from")
    if new_data and not resume:
        raise RecipeError("--new-data goes with --resume: a run that begins has no other data")
    if saved is not None and not resume:
        raise RecipeError(
            f"checkpoint.save={options.save} already holds iteration {saved}; continue it with --resume or choose "
            "another folder"
        )
    return saved


def _read_held_out(
    options: ValidationConfig, objective: Objective, data: Data, say: Callable[[str], None]
) -> Sequence[Sequence[Sample]] | None:
    """Return the samples of ``validation.path`` by line, or by the unit that the objective needs complete."""
    if options.path is None:
        return None
    paths = [options.path] if isinstance(options.path, str) else options.path
    groups, skipped = data.source.held_out(
        paths, objective.grouped_by, partial(check_samples, objective), setting="validation.path"
    )
    for told in filter(None, (str(skipped), skipped.not_read)):
        say(f"of validation.path: {told}")
    return groups


def _verify(run: Resolved, chunks: list[torch.nn.Module], reporter: Reporter) -> None:
    report = run.verified(chunks, partial(reporter.comparing, "verify") if is_main_rank() else None)
    if is_main_rank():
        reporter.verified(report)
    if not report.passed:
        raise VerificationError(
            "folded and unfolded runs differ by more than rounding, of the gradients most in "
            f"{report.worst_parameter}; nothing was trained"
        )


def _report_order(data: Data, say: Callable[[str], None]) -> None:
    """Report the samples that steps skip in an epoch, or take more than once."""
    order, source = data.order, data.source
    if order.left_out:
        left_out = f"{order.left_out} {source.grouped_by if order.by_line else 'sample'}"
        say(
            f"each epoch skips {left_out}{'' if order.left_out == 1 else 's'}: steps take complete "
            f"{source.grouped_by}s, and a step of {source.step} does not divide all there are"
        )
    if order.per_epoch < source.step:
        say(
            f"a step of {source.step} samples takes the {order.per_epoch} there are more than once; its fold ratio "
            "counts the repeats, which other samples would not give"
        )


def _check_optimizer(options: OptimizerConfig, model: ModelConfig, checkpoints: CheckpointConfig) -> None:
    """Reject settings that Megatron's optimizer, with the installed kernels, would reject after the model is built."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    if not HAVE_APEX_OR_TE:
        if options.use_distributed_optimizer and checkpoints.save is not None:
            raise RecipeError(
                "optimizer.use_distributed_optimizer: without the FusedAdam of TransformerEngine or Apex, Megatron "
                "cannot read back the checkpoints that its distributed optimizer writes; turn it off or set "
                "checkpoint.save=null"
            )
    elif model.dtype == "float64":
        raise RecipeError(
            "model.dtype=float64: Megatron takes the FusedAdam of TransformerEngine or Apex if it is installed, "
            "which has no float64; set model.dtype=float32, or device=cpu"
        )
