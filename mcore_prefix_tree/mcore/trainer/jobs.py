"""What a recipe can be asked to do: train, verify, compare. Session, data, model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from torch.nn import Module

from mcore_prefix_tree.attention.auto import check_setting
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.engine.backend import resolve_backend
from mcore_prefix_tree.mcore.engine.calibrate import Calibration
from mcore_prefix_tree.mcore.engine.compare import Comparison
from mcore_prefix_tree.mcore.engine.held_out import HeldOut
from mcore_prefix_tree.mcore.engine.verify import VerifyReport, verify
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.trainer import checkpoint
from mcore_prefix_tree.mcore.trainer.claim import claimed
from mcore_prefix_tree.mcore.trainer.logs import check_logs
from mcore_prefix_tree.mcore.trainer.model import build_chunks
from mcore_prefix_tree.mcore.trainer.reading import Data, read_data, read_held_out
from mcore_prefix_tree.mcore.trainer.retention import check_not_overwritten
from mcore_prefix_tree.mcore.trainer.session import Session, on_main_rank, session
from mcore_prefix_tree.mcore.trainer.teacher import load_teacher, read_teacher_recipe
from mcore_prefix_tree.mcore.trainer.trainer import Reporter, Trainer
from mcore_prefix_tree.recipe import Recipe, RecipeError
from mcore_prefix_tree.recipe.objective import objective_of

logger = logging.getLogger(__name__)


class VerificationError(RuntimeError):
    """Folded and unfolded runs differ by more than the tolerance."""


def run_verify(recipe: Recipe) -> tuple[VerifyReport, bool]:
    """``mcore-prefix-tree verify``: compare the recipe's first batch, and say whether this is the main rank."""
    check_setting(recipe.attention_backend)
    objective = objective_of(recipe)
    with session(recipe) as place:
        data = read_data(recipe, objective, place)
        recipe = with_vocabulary(recipe, data.vocab_size)
        recipe = with_backend(recipe, place, data.order)
        chunks = _starting_model(recipe, place, data.vocab_size)
        samples = data.order.take(0, recipe.batch.per_step)
        return verify(chunks, samples, recipe, place), place.is_main


def run_compare(recipe: Recipe, *, repeats: int) -> tuple[Comparison, bool]:
    """Measure the recipe's first batch folded and unfolded; for benchmarks. Also says whether this is the main rank."""
    with _measuring(recipe) as (trainer, is_main):
        return trainer.compare(1, repeats=repeats), is_main


def run_calibrate(recipe: Recipe, *, repeats: int) -> tuple[Calibration, bool]:
    """``mcore-prefix-tree calibrate``: time micro-batches. Also says whether this is the main rank."""
    with _measuring(recipe) as (trainer, is_main):
        return trainer.calibrate(repeats=repeats), is_main


@contextmanager
def _measuring(recipe: Recipe) -> Iterator[tuple[Trainer, bool]]:
    """A trainer of new weights that trains nothing, and whether this is the main rank."""
    check_setting(recipe.attention_backend)
    objective = objective_of(recipe)
    _check_trainable(recipe)
    with session(recipe) as place:
        data = read_data(recipe, objective, place)
        recipe = with_vocabulary(recipe, data.vocab_size)
        recipe = with_backend(recipe, place, data.order)
        chunks = build_chunks(recipe, place.config, vocab_size=data.vocab_size, device=place.device)
        yield Trainer(recipe, objective, place, data.order, chunks), place.is_main


def run_train(recipe: Recipe, reporter: Reporter, *, resume: bool = False, new_data: bool = False) -> None:
    """``mcore-prefix-tree train``.

    Args:
        recipe: the job's.
        reporter: is told on the main rank.
        resume: continue from the last complete checkpoint in ``checkpoint.save``, if there is one.
        new_data: with ``resume``: data that are not the checkpoint's are taken from their beginning.

    Raises:
        VerificationError: folded and unfolded differ on the first batch; nothing was trained.
        RecipeError, SampleError, NotImplementedError: see what raises them.
    """
    check_setting(recipe.attention_backend)
    check_logs(recipe.log, recipe.inputs)
    objective = objective_of(recipe)
    _check_trainable(recipe)
    teacher_recipe = read_teacher_recipe(recipe)
    saved = None if recipe.checkpoint.save is None else checkpoint.latest_iteration(recipe.checkpoint.save)
    if resume and recipe.checkpoint.save is None:
        raise RecipeError("--resume needs checkpoint.save, the folder to resume from")
    if new_data and not resume:
        raise RecipeError("--new-data goes with --resume: a run that begins has no other data")
    if saved is not None and not resume:
        raise RecipeError(
            f"checkpoint.save={recipe.checkpoint.save} already holds iteration {saved}; continue it with --resume or "
            "choose another folder"
        )
    with session(recipe) as place, ExitStack() as until_the_end:
        # A network folder shows another machine's last checkpoint late: all go on from the main rank's.
        saved = everyone(saved)[0]
        if recipe.checkpoint.save is not None:
            on_main_rank(partial(check_not_overwritten, recipe.checkpoint.save, saved))
        progress = reporter.reading if place.is_main else None
        data = read_data(recipe, objective, place, checked=True, progress=progress)
        recipe = with_vocabulary(recipe, data.vocab_size)
        if data.skipped.count and place.is_main:
            reporter.message(str(data.skipped))
        held_out_groups = None
        if recipe.validation.path is not None:
            held_out_groups, skipped = read_held_out(recipe, objective, data.options, place)
            if skipped.count and place.is_main:
                reporter.message(f"of validation.path: {skipped}")
        if place.is_main:
            _report_order(recipe, data, reporter)
        if recipe.checkpoint.save is not None:
            # Where nothing can be written is better known now than after the last step.
            checkpoint.make_folder(recipe.checkpoint.save)
            until_the_end.enter_context(claimed(recipe.checkpoint.save))
        recipe = with_backend(recipe, place, data.order, say=reporter.message)
        say = reporter.message if place.is_main else logger.debug
        chunks = (
            _starting_model(recipe, place, data.vocab_size, say=say)
            if saved is None
            else build_chunks(recipe, place.config, vocab_size=data.vocab_size, device=place.device)
        )
        teacher = None
        if teacher_recipe is not None:
            teacher = load_teacher(
                teacher_recipe,
                place,
                vocab_size=data.vocab_size,
                first_step=lambda: data.order.take(0, recipe.batch.per_step),
                say=say,
            )
        if recipe.verify.enabled and saved is None:
            report = verify(chunks, data.order.take(0, recipe.batch.per_step), recipe, place)
            if place.is_main:
                reporter.verified(report)
            if not report.passed:
                raise VerificationError(
                    "folded and unfolded runs differ by more than rounding, of the gradients most in "
                    f"{report.worst_parameter}; nothing was trained"
                )
        held_out = None if held_out_groups is None else HeldOut(held_out_groups, recipe, objective, place)
        trainer = Trainer(recipe, objective, place, data.order, chunks, teacher=teacher, held_out=held_out)
        trainer.train(saved, reporter, new_data=new_data)
        if data.skipped.count and place.is_main:
            reporter.message(f"not trained on: {data.skipped}")


def _report_order(recipe: Recipe, data: Data, reporter: Reporter) -> None:
    """Report what steps leave out of an epoch, or take more than once."""
    order, step = data.order, recipe.batch.per_step
    if order.left_out:
        left_out = f"{order.left_out} {data.grouped_by if order.by_line else 'sample'}"
        reporter.message(
            f"each epoch leaves out {left_out}{'' if order.left_out == 1 else 's'}: steps take whole "
            f"{data.grouped_by}s, and a step of {step} does not divide all there are"
        )
    if order.per_epoch < step:
        reporter.message(f"a step of {step} samples takes the {order.per_epoch} there are more than once")


def _starting_model(
    recipe: Recipe, place: Session, vocab_size: int, *, say: Callable[[str], None] = logger.info
) -> list[Module]:
    """The model with the weights that training begins with.

    Raises:
        RecipeError: ``checkpoint.pretrained_checkpoint`` holds no checkpoint, or it does not fit.
    """
    chunks = build_chunks(recipe, place.config, vocab_size=vocab_size, device=place.device)
    folder = recipe.checkpoint.pretrained_checkpoint
    if folder is None:
        hint = ""
        if recipe.objective.kind.improves_policy:
            name = recipe.objective.name
            hint = f"; objective.name={name} improves a policy, which checkpoint.pretrained_checkpoint would name"
        say(f"the weights are new, drawn with seed={recipe.seed}{hint}")
        return chunks
    iteration = everyone(checkpoint.latest_weights(folder))[0]
    if iteration is None:
        raise RecipeError(f"checkpoint.pretrained_checkpoint={folder} holds no checkpoint; name the folder of a run")
    has_head = checkpoint.load_pretrained(folder, iteration, chunks, model=recipe.model)
    new = ", with a new scalar head" if recipe.objective.has_scalar_head and not has_head else ""
    say(f"the weights start from {checkpoint.iteration_folder(folder, iteration)}{new}")
    return chunks


def with_backend(
    recipe: Recipe, place: Session, order: SampleOrder, *, say: Callable[[str], None] = logger.info
) -> Recipe:
    """The recipe with the back-end that ``attention_backend`` stands for, the same on every rank and after a resume.

    The main rank says what ``auto`` chose.

    Raises:
        ValueError: the back-end does not support the run; names those that do.
    """
    backend = resolve_backend(
        recipe.attention_backend,
        place.config,
        lambda: order.take(0, recipe.batch.per_step),
        device=place.device,
        deterministic=recipe.deterministic_attention,
        say=say if place.is_main else logger.debug,
    )
    return replace(recipe, attention_backend=backend)


def with_vocabulary(recipe: Recipe, vocab_size: int) -> Recipe:
    """The recipe with what it leaves to the tokenizer: the cost of a plan depends on it."""
    return replace(recipe, model=replace(recipe.model, vocab_size=recipe.model.vocab_size or vocab_size))


def _check_trainable(recipe: Recipe) -> None:
    """What Megatron's optimizer would refuse after the model is built."""
    if recipe.model.dtype == "float64":
        if recipe.optimizer.clip_grad > 0:
            raise RecipeError(
                "optimizer.clip_grad: Megatron clips fp32 gradients; set it to 0 with model.dtype=float64"
            )
        if recipe.optimizer.use_distributed_optimizer:
            raise RecipeError(
                "optimizer.use_distributed_optimizer: Megatron's takes no model.dtype=float64; turn it off"
            )
        if _fused_adam():
            raise RecipeError(
                "model.dtype=float64: Megatron takes the FusedAdam of TransformerEngine or Apex where it is installed, "
                "which has no float64; set model.dtype=float32, or device=cpu"
            )
    if recipe.optimizer.use_distributed_optimizer and recipe.checkpoint.save is not None and not _fused_adam():
        raise RecipeError(
            "optimizer.use_distributed_optimizer: without the FusedAdam of TransformerEngine or Apex, Megatron cannot "
            "read back the checkpoints that its distributed optimizer writes; turn it off or set checkpoint.save=null"
        )
    if recipe.optimizer.lr_warmup_steps >= recipe.train_iters:
        raise RecipeError(
            f"optimizer.lr_warmup_steps={recipe.optimizer.lr_warmup_steps} must be below "
            f"train_iters={recipe.train_iters}"
        )
    if recipe.optimizer.min_lr > recipe.optimizer.lr:
        raise RecipeError(f"optimizer.min_lr={recipe.optimizer.min_lr} is above optimizer.lr={recipe.optimizer.lr}")


def _fused_adam() -> bool:
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return bool(HAVE_APEX_OR_TE)
