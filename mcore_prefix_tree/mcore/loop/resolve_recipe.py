"""Resolution of a recipe into a job: its samples, back-end and costs; and the model that the recipe describes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from mcore_prefix_tree.data import Skipped
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.data.source import Source
from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.random_draws import without_fp8
from mcore_prefix_tree.mcore.engine.resolve import Run, check_samples
from mcore_prefix_tree.mcore.engine.verification import CannotVerifyError, VerifyReport, verify
from mcore_prefix_tree.mcore.loop.session import Session
from mcore_prefix_tree.mcore.models.build_gpt import build_chunks, transformer_config
from mcore_prefix_tree.mcore.models.config_fields import DTYPES
from mcore_prefix_tree.mcore.models.lora import load_start
from mcore_prefix_tree.mcore.ranks import all_ranks, is_main_rank
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.plan import ModelWork
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.settings import Recipe, RecipeError
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder
from mcore_prefix_tree.settings.sample_source import choose_cutting, make_source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Samples of a recipe, and the order in which steps take them; ``skipped`` holds bad and excluded ones."""

    source: Source
    order: SampleOrder
    skipped: Skipped


def cuts_samples(session: Session, objective: Objective | None) -> bool:
    """Return whether samples above ``batch.max_tokens`` are cut; without an objective they are only scored."""
    return choose_cutting(session.recipe.batch.over_budget, objective).over_budget != "repeat"


def read_data(
    session: Session,
    objective: Objective | None,
    *,
    every_sample: bool = False,
    keeps_others: bool = False,
    checked: bool = False,
    is_scored: bool = True,
    whole_samples: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Data:
    """Read a recipe's samples; all ranks together.

    Args:
        objective, every_sample, whole_samples: see :func:`make_source`; None for the last follows from the objective.
        keeps_others: whether samples carry the fields that are not read.
        checked: whether to check before the first step that no sample lacks a field that the objective reads.
        is_scored, progress: see :meth:`Source.read`.

    Raises:
        SampleError: the data is bad; the message names file, line and field. Or ranks read different data.
        RecipeError: the vocabulary is too small, or there are fewer samples than a step of complete groups takes.
    """
    recipe = session.recipe
    names = FieldNames(given=recipe.data.fields, format=recipe.data.format, keeps_others=keeps_others)
    if whole_samples is None:
        whole_samples = objective is None or not cuts_samples(session, objective)
    source = make_source(
        recipe, objective, ranks=all_ranks(), every_sample=every_sample, names=names, whole_samples=whole_samples
    )
    check = partial(check_samples, objective) if checked and objective is not None else None
    try:
        order, skipped = source.read(check=check, progress=progress, is_scored=is_scored)
    except SampleError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return Data(source=source, order=order, skipped=skipped)


@dataclass(frozen=True, kw_only=True, eq=False)
class Resolved:
    """A recipe on this rank, ready except for the weights, with the values from tokenizer and ``auto`` filled in."""

    recipe: Recipe
    order: SampleOrder
    job: Job

    def first_step(self) -> list[Sample]:
        return self.order.take(0, self.recipe.batch.per_step)

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the model's embedding."""
        return self.recipe.parallel.padded_vocab_size(self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model's vocabulary, without padding."""
        size = self.recipe.model.vocab_size
        assert size is not None, "resolved"
        return size

    def new_model(self, config: Any = None) -> list[torch.nn.Module]:
        """Return the model with new weights, under its ``TransformerConfig`` or one of another dtype."""
        recipe = self.recipe
        return build_chunks(
            recipe.model,
            config or self.job.config,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
            device=self.job.folding.device,
            scalar_head=self.job.objective.has_scalar_head,
            fused_head=self.job.fused_head,
        )

    def starting_model(self, say: Callable[[str], None]) -> list[torch.nn.Module]:
        """Return the model with the weights that training begins with; ``say`` receives which ones these are."""
        recipe, objective = self.recipe, self.job.objective
        chunks, new_head = self.new_model(), ", with a new scalar head" if objective.has_scalar_head else ""
        folder = recipe.checkpoint.pretrained_checkpoint
        if folder is not None:
            iteration = checkpoint.find_weights(folder, "checkpoint.pretrained_checkpoint")
            has_head = checkpoint.load_pretrained(folder, iteration, chunks, model=recipe.model)
            source = checkpoint.iteration_folder(folder, iteration)
            say(f"the weights start from {source}{'' if has_head else new_head}")
        elif recipe.model.hf is not None:
            load_start(recipe.model, chunks)
            new = ""
            if new_head and not HuggingFaceFolder.read(recipe.model.hf).has_scalar_head:
                new = new_head
            elif recipe.model.lora is not None:
                new = f", with {'a new adapter' if recipe.model.adapter is None else recipe.model.adapter}"
            say(f"the weights start from {recipe.model.hf}{new}")
        else:
            hint = ""
            if objective.starts_from_policy:
                name = recipe.objective.name
                hint = f"; objective.name={name} improves a policy, which checkpoint.pretrained_checkpoint would name"
            say(f"the weights are new, drawn with seed={recipe.seed}{hint}")
        return chunks

    def verified(
        self, chunks: list[torch.nn.Module], progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Compare the first batch, see :func:`verify`; raise RecipeError if the unfolded side cannot be run.

        A model in FP8 is also compared without it, and first: a mistake may be smaller than FP8's rounding.
        """
        recipe, config = self.recipe, self.job.config
        if config.gradient_accumulation_fusion:  # its kernel writes only into the buffers of DDP
            raise RecipeError(
                "verify compares plain gradients, which model.transformer.gradient_accumulation_fusion=true does not "
                "give; turn it off, or set verify.enabled=false"
            )
        in_tf32 = self.job.folding.device.type == "cuda" and not self.job.is_local
        if in_tf32 and config.params_dtype is torch.float32 and not recipe.verify.tolerance:
            raise RecipeError(
                "verify measures model.dtype=float32 against float64, which TransformerEngine does not compute; it "
                "also multiplies matrices of float32 in TF32, with 10 bits; set model.dtype=bfloat16, "
                "model.transformer_impl=local or verify.tolerance"
            )

        def in_dtype(dtype: torch.dtype) -> tuple[list[torch.nn.Module], Any]:
            name = next(name for name, known in DTYPES.items() if known is dtype)
            on_gpu = self.job.folding.device.type == "cuda"
            # FP8's rounding is measured against it, as that of the dtype.
            exact = {key: value for key, value in recipe.model.transformer.items() if not key.startswith("fp8")}
            model = replace(recipe.model, dtype=name, transformer=exact)
            other = transformer_config(model, recipe.parallel, on_gpu=on_gpu)
            return self.new_model(other), other

        run = partial(
            verify,
            chunks,
            self.first_step(),
            self.job,
            in_dtype=in_dtype,
            tolerance=recipe.verify.tolerance,
            progress=progress,
        )
        try:
            if not config.fp8:
                return run()
            with without_fp8(chunks):
                report = run()
            return run() if report.passed else report
        except CannotVerifyError as error:
            raise RecipeError(f"{error}, or set verify.enabled=false") from None


def resolve(
    session: Session, objective: Objective, data: Data, *, say: Callable[[str], None] = logger.info
) -> Resolved:
    """Return a session's recipe with all decisions that its steps need; for ``say`` and errors see :class:`Run`."""
    recipe = session.recipe
    model = replace(recipe.model, vocab_size=data.source.options.vocab_size)
    run = Run(
        settings=recipe,
        device=session.device,
        dp_size=parallel_state.get_data_parallel_world_size(),
        work=ModelWork.from_model(model, fused_head=recipe.fused_head, scalar_head=objective.has_scalar_head),
        micro_batch_multiple=recipe.parallel.micro_batch_multiple,
    )
    job = run.make_job(
        objective,
        session.config,
        lambda: data.order.take(0, recipe.batch.per_step),
        say=say if is_main_rank() else logger.debug,
    )
    recipe = replace(recipe, attention_backend=job.folding.attention_backend, model=model)
    return Resolved(recipe=recipe, order=data.order, job=job)
