"""Teachers of a distillation: their recipes, their weights, and the hook that runs them before each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.engine.backend import attention_cases_of_model, resolve_backend
from mcore_prefix_tree.mcore.engine.job import Job, StepHook
from mcore_prefix_tree.mcore.models.bridge import described
from mcore_prefix_tree.mcore.models.build_gpt import build_chunks, transformer_config
from mcore_prefix_tree.mcore.models.lora import load_start
from mcore_prefix_tree.mcore.seam.validation import check_config
from mcore_prefix_tree.mcore.teachers.paired_teachers import ExportedTeacher, PairedTeachers
from mcore_prefix_tree.mcore.teachers.teacher_model import TeacherModel, TeacherRanks
from mcore_prefix_tree.objectives import BoundCrossTokenizer, Distillation
from mcore_prefix_tree.objectives.objective import Output
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.settings import ModelConfig, ObjectiveConfig, ParallelConfig, Recipe, RecipeError
from mcore_prefix_tree.settings.teachers import check_stage, parallel_of_teachers, teacher_recipes


@dataclass(frozen=True, kw_only=True, eq=False)
class HookLoader:
    """Loader of a job's step hook, for example of teachers with their last checkpoints' weights."""

    student: Recipe
    job: Job  # job without its hook
    # Function that returns samples for a teacher's attention_backend: auto to look at.
    first_step: Callable[[], Sequence[Sample]]
    vocab_size: int  # number of tokens of the student's vocabulary
    padded_vocab_size: int  # number of rows of its embedding
    say: Callable[[str], None]  # function that receives which weights they are, on every rank
    # Whether all layers of a teacher are on the student's last pipeline stage; else it has the same stages.
    on_last_stage: bool = False

    def hook(self) -> StepHook:
        """Return the hook; all ranks together.

        Raises:
            RecipeError: this parallel layout has no such model, or the checkpoint is missing or does not fit.
            NotImplementedError: folding cannot do the teacher exactly; see :func:`check_config`.
            ValueError: see :func:`resolve_backend`.
        """
        make = HOOKS.get(self.job.objective.output)
        if make is None:
            return self.job.hook
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        check_stage(stage.size(), self.student.objective)
        return make(self, self.job.objective)

    @cached_property
    def teachers(self) -> list[tuple[str, Recipe]]:
        """Return the recipes of the teachers that each step asks."""
        needed = self.job.objective.second_models
        return teacher_recipes(self.student) if needed is not None and needed.asked else []

    @property
    def layout(self) -> ParallelConfig:
        layout = parallel_of_teachers(self.student.objective, self.student.parallel)
        if not self.on_last_stage:
            return layout
        return replace(layout, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None)

    def models(self, sizes: Sequence[tuple[int, int]]) -> list[TeacherModel]:
        """Return the teachers' models; ``sizes`` are each one's tokens and rows of the embedding."""
        student, layout = self.student, self.layout
        # The student may be the only one with experts.
        dense = replace(layout, expert_model_parallel_size=1)
        ranks = TeacherRanks.of(layout.tensor_model_parallel_size, on_last_stage=self.on_last_stage)
        return [
            load_model(
                replace(
                    teacher,
                    objective=ObjectiveConfig(),
                    parallel=layout if teacher.model.hf or teacher.model.transformer.get("num_moe_experts") else dense,
                    fused_head=True,
                    device=student.device,
                    deterministic_attention=student.deterministic_attention,
                ),
                *of_model,
                first_step=self.first_step,
                device=self.job.folding.device,
                say=self.say,
                ranks=ranks,
            )
            for (_, teacher), of_model in zip(self.teachers, sizes, strict=True)
        ]


def _same_vocabulary(loader: HookLoader, objective: Distillation) -> StepHook:
    """Return the hook of a teacher whose vocabulary is compared token by token."""
    columns, ranks = loader.padded_vocab_size, loader.layout.tensor_model_parallel_size
    if columns % ranks:
        raise RecipeError(
            f"objective.teacher_tensor_model_parallel_size={ranks} does not divide the {columns} tokens of the "
            "vocabulary, "
            "padding included, in which teacher and student are compared; choose another, or remove it"
        )
    (model,) = loader.models([(loader.vocab_size, columns)])
    return model


def _across_tokenizers(loader: HookLoader, objective: BoundCrossTokenizer) -> StepHook:
    """Return the hook of teachers with their own tokenizers, or of rows that the samples bring."""
    parallel, device = loader.student.parallel, loader.job.folding.device
    columns = loader.padded_vocab_size // parallel.tensor_model_parallel_size
    if not loader.teachers:
        return ExportedTeacher(objective=objective, models=(), student_columns=columns, device=device)
    # As many columns on each rank of the teacher, and on each of the student.
    cut = max(loader.layout, parallel, key=lambda one: one.tensor_model_parallel_size)
    tokens = [side.teacher_size for side in objective.sides]
    sizes = [
        cut.padded_vocab_size(find_teacher_vocab_size(teacher.model, size))
        for (_, teacher), size in zip(loader.teachers, tokens, strict=True)
    ]
    models = loader.models(list(zip(tokens, sizes, strict=True)))
    return PairedTeachers(objective=objective, models=models, student_columns=columns, device=device)


# By the output that an objective names; others need nothing before a step.
HOOKS: Mapping[Output, Callable[[HookLoader, Any], StepHook]] = {
    "divergences": _same_vocabulary,
    "chunks": _across_tokenizers,
}


def find_teacher_vocab_size(model: ModelConfig, tokens: int) -> int:
    """Return a teacher's vocabulary size: its recipe's, or its tokenizer's ``tokens``, which must not be larger."""
    own = model.vocab_size
    if own is not None and own < tokens:
        raise RecipeError(
            f"the teacher's model.vocab_size={own} is smaller than its tokenizer's {tokens}; raise it or remove it"
        )
    return own or tokens


def load_model(
    recipe: Recipe,
    vocab_size: int,
    padded_vocab_size: int,
    *,
    first_step: Callable[[], Sequence[Sample]],
    device: torch.device,
    say: Callable[[str], None],
    ranks: TeacherRanks | None = None,
) -> TeacherModel:
    """Return one teacher with the weights of its last checkpoint, whose name ``say`` receives on every rank.

    ``ranks`` are those of a layout other than the job's, None takes the job's. Raises as :meth:`HookLoader.hook` does.
    """
    try:
        config = transformer_config(recipe.model, recipe.parallel, on_gpu=device.type == "cuda")
        check_config(config)
        model = described(recipe.model, config)
    except (RecipeError, NotImplementedError) as error:
        raise type(error)(f"of the teacher: {error}") from error
    if ranks is not None:
        _check_other_layout(recipe.model, config, tensor_parallel=ranks.groups.tp.size())
    deterministic = recipe.deterministic_attention
    backend = resolve_backend(recipe.attention_backend, config, first_step, device=device, deterministic=deterministic)
    groups = None if ranks is None else ranks.groups
    chunks = []
    if ranks is None or ranks.is_here:
        chunks = build_chunks(
            model, config, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, device=device, groups=groups
        )
    weights = _fill(chunks, recipe.checkpoint.save, model, replicas=None if groups is None else groups.dp_cp)
    for chunk in chunks:
        chunk.requires_grad_(False)
    say(f"the teacher's weights are {weights}")
    cases = attention_cases_of_model(config, device=device, deterministic=deterministic)
    return TeacherModel(chunks=chunks, attention_backend=backend, attention_cases=cases, ranks=ranks)


def _check_other_layout(model: ModelConfig, config: TransformerConfig, *, tensor_parallel: int) -> None:
    """Check that a teacher can be cut over other ranks than its student."""
    if model.hf is not None or config.num_moe_experts is not None:
        raise RecipeError(
            "of the teacher: with experts or model.hf it is cut as its student is; remove its tensor-parallel size, "
            "and with pipeline stages of Megatron-LM export its rows with mcore-prefix-tree xtoken export-teacher"
        )
    groups = config.num_query_groups
    if groups is not None and groups % tensor_parallel:
        # Upstream gathers the keys of fewer groups over the student's ranks, not over the model's.
        raise RecipeError(
            f"of the teacher: its model.num_query_groups={groups} is not a multiple of the {tensor_parallel} ranks "
            "that it is cut over; choose fewer"
        )


def _fill(
    chunks: list[torch.nn.Module], folder: str | None, model: ModelConfig, *, replicas: dist.ProcessGroup | None
) -> str | Path:
    """Fill a teacher with its last checkpoint or, if it names none, with its Hugging Face folder; return which one."""
    if folder is None:
        assert model.hf is not None, "check_teachers asks for one of them"
        try:
            load_start(model, chunks)
        except RecipeError as error:
            raise RecipeError(f"of the teacher: {error}") from error
        return model.hf
    iteration = checkpoint.find_weights(folder, "the teacher's checkpoint.save")
    checkpoint.load_weights(folder, iteration, chunks, model=model, replicas=replicas)
    return checkpoint.iteration_folder(folder, iteration)
