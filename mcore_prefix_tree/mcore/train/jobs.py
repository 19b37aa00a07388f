"""What a recipe can be asked to do: train, verify, compare. Session, data, model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_prefix_tree.attention import check_backend
from mcore_prefix_tree.data import iter_sample_groups, load_tokenizer
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.train import checkpoint
from mcore_prefix_tree.mcore.train.compare import Comparison
from mcore_prefix_tree.mcore.train.model import build_chunks, padded_vocab_size
from mcore_prefix_tree.mcore.train.session import Session, session
from mcore_prefix_tree.mcore.train.trainer import Reporter, Trainer
from mcore_prefix_tree.mcore.train.verify import VerifyReport, verify
from mcore_prefix_tree.recipe import Recipe, RecipeError
from mcore_prefix_tree.sample import Sample, SampleError


class VerificationError(RuntimeError):
    """Folded and unfolded runs differ by more than the tolerance."""


def read_data(recipe: Recipe, place: Session) -> tuple[list[list[Sample]], int]:
    """The samples of every line, and the padded vocabulary they fit into.

    Standard input reaches one process only: the main rank reads it for all.

    Raises:
        SampleError: bad data; names file, line and field.
        RecipeError: the vocabulary is not known or too small.
    """
    data = recipe.data
    tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer)
    vocab_size = padded_vocab_size(
        recipe.model,
        None if tokenizer is None else tokenizer.vocab_size,
        recipe.parallel.tensor_model_parallel_size,
    )

    def read() -> list[list[Sample]]:
        groups = list(
            iter_sample_groups(
                data.path,
                tokenizer=tokenizer,
                expand_turns=data.expand_turns,
                vocab_size=recipe.model.vocab_size or vocab_size,
                max_length=recipe.batch.max_tokens,
            )
        )
        if recipe.model.position_embedding_type == "learned_absolute":
            _check_positions(groups, recipe.model.max_position_embeddings)
        return groups

    paths = [data.path] if isinstance(data.path, str) else data.path
    if "-" not in paths or dist.get_world_size() == 1:
        return read(), vocab_size
    outcome: list[Any] = [None]
    if place.is_main:
        try:
            outcome = [read()]
        except SampleError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], SampleError):
        raise outcome[0]
    return outcome[0], vocab_size


def run_verify(recipe: Recipe) -> tuple[VerifyReport, bool]:
    """``mcore-prefix-tree verify``: compare the recipe's first batch, and say whether this is the main rank."""
    check_backend(recipe.attention_backend)
    with session(recipe) as place:
        groups, vocab_size = read_data(recipe, place)
        chunks = build_chunks(recipe, place.config, vocab_size=vocab_size, device=place.device)
        return verify(
            chunks, _order(recipe, groups).take(0, recipe.batch.global_batch_size), recipe, place
        ), place.is_main


def run_compare(recipe: Recipe, *, repeats: int) -> tuple[Comparison, bool]:
    """Measure the recipe's first batch folded and unfolded; for benchmarks. Also says whether this is the main rank."""
    check_backend(recipe.attention_backend)
    _check_trainable(recipe)
    with session(recipe) as place:
        groups, vocab_size = read_data(recipe, place)
        order = _order(recipe, groups)
        chunks = build_chunks(recipe, place.config, vocab_size=vocab_size, device=place.device)
        return Trainer(recipe, place, order, chunks).compare(1, repeats=repeats), place.is_main


def run_train(recipe: Recipe, reporter: Reporter, *, resume: bool = False) -> None:
    """``mcore-prefix-tree train``.

    Args:
        recipe: the job's.
        reporter: is told on the main rank.
        resume: continue from the last complete checkpoint in ``checkpoint.save``, if there is one.

    Raises:
        VerificationError: folded and unfolded differ on the first batch; nothing was trained.
        RecipeError, SampleError, NotImplementedError: see what raises them.
    """
    check_backend(recipe.attention_backend)
    _check_trainable(recipe)
    saved = None if recipe.checkpoint.save is None else checkpoint.latest_iteration(recipe.checkpoint.save)
    if resume and recipe.checkpoint.save is None:
        raise RecipeError("--resume needs checkpoint.save, the folder to resume from")
    if saved is not None and not resume:
        raise RecipeError(
            f"checkpoint.save={recipe.checkpoint.save} already holds iteration {saved}; continue it with --resume or "
            "choose another folder"
        )
    with session(recipe) as place:
        groups, vocab_size = read_data(recipe, place)
        order = _order(recipe, groups)
        if recipe.checkpoint.save is not None and place.is_main:
            # Where nothing can be written is better known now than after the last step.
            Path(recipe.checkpoint.save).mkdir(parents=True, exist_ok=True)
        chunks = build_chunks(recipe, place.config, vocab_size=vocab_size, device=place.device)
        if recipe.verify.enabled and saved is None:
            report = verify(chunks, order.take(0, recipe.batch.global_batch_size), recipe, place)
            if place.is_main:
                reporter.verified(report)
            if not report.passed:
                raise VerificationError(
                    "folded and unfolded runs differ by more than rounding, of the gradients most in "
                    f"{report.worst_parameter}; nothing was trained"
                )
        Trainer(recipe, place, order, chunks).train(saved, reporter)


def _check_positions(groups: Sequence[Sequence[Sample]], positions: int) -> None:
    for sample in chain.from_iterable(groups):
        if len(sample) > positions:
            raise SampleError(
                f"{sample.source}: the sample has {len(sample)} tokens, but model.max_position_embeddings is "
                f"{positions} and positions are learned; raise it, shorten the sample or use "
                "model.position_embedding_type=rope"
            )


def _order(recipe: Recipe, groups: Sequence[Sequence[Sample]]) -> SampleOrder:
    return SampleOrder(groups, seed=recipe.seed, shuffle=recipe.data.shuffle)


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
