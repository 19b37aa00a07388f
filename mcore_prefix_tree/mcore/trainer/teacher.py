"""The second model of a distillation by whole vocabularies, asked about every unique token before the student is.

Its last hidden states wait on the last pipeline stage until the student's head makes logits of both, a few rows at a
time: neither model's logits are ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.utils import get_attr_wrapped_model

from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.mcore.engine.backend import cases_of, resolve_backend
from mcore_prefix_tree.mcore.engine.folding import plan_attention
from mcore_prefix_tree.mcore.engine.schedule import forward_only
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.readout import Hidden
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch, TeacherHidden
from mcore_prefix_tree.mcore.seam.output_layer import output_weight_and_head
from mcore_prefix_tree.mcore.seam.validation import check_config
from mcore_prefix_tree.mcore.trainer import checkpoint
from mcore_prefix_tree.mcore.trainer.model import build_chunks, transformer_config
from mcore_prefix_tree.mcore.trainer.session import Session
from mcore_prefix_tree.recipe import ObjectiveConfig, Recipe, RecipeError, load_recipe
from mcore_prefix_tree.sample import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherModel:
    """This rank's part of it, in the student's parallel layout.

    Attributes:
        chunks: bare model chunks with edge heads, whose weights nothing changes.
        attention_backend: of its heads; the student's may be of another size.
        attention_cases: the calls of its layers.
    """

    chunks: Sequence[torch.nn.Module]
    attention_backend: str
    attention_cases: Sequence[Case]

    def plan(self, batches: Sequence[MicroBatch]) -> None:
        """Make the plans of its attention, on the host."""
        for batch in batches:
            plan_attention(batch, self.attention_backend, self.attention_cases)

    def teach(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of a step with what the teacher says of them, on the last pipeline stage.

        All ranks together, as in the student's own forward.

        Args:
            batches: with the rows of a :class:`~mcore_prefix_tree.objectives.Distillation`.
        """
        asked = [
            replace(
                batch,
                packed_seq_params=replace(batch.packed_seq_params, attention_backend=self.attention_backend),
            )
            for batch in batches
        ]
        found = forward_only(self.chunks, asked, Hidden(), Hidden().read)
        if not found:
            return list(batches)
        model = get_attr_wrapped_model(self.chunks[-1], "output_layer", return_model_obj=True)
        taught = []
        for batch, hidden in zip(batches, found, strict=True):
            weight, head = output_weight_and_head(model, batch.edges, batch.temperature)
            # Megatron makes fp32 of whatever a bfloat16 model puts out; these are numbers that bfloat16 has.
            hidden = hidden.to(weight.dtype)
            taught.append(replace(batch, teacher=TeacherHidden(hidden=hidden, weight=weight.detach(), head=head)))
        return taught


def read_teacher_recipe(recipe: Recipe) -> Recipe | None:
    """The recipe of the teacher, as the student's job runs it; None if the objective has no second model.

    Raises:
        RecipeError: it cannot be read, has a scalar head, another vocabulary or shorter positions, or names no
            checkpoint.
    """
    path = recipe.objective.teacher_recipe
    if path is None:
        return None
    teacher = load_recipe(path)
    setting = f"objective.teacher_recipe={path}"
    if teacher.objective.has_scalar_head:
        raise RecipeError(f"{setting}: its objective.name={teacher.objective.name} has no vocabulary to learn from")
    if teacher.checkpoint.save is None:
        raise RecipeError(f"{setting}: set its checkpoint.save, the folder of the teacher's checkpoints")
    sizes = teacher.model.vocab_size, recipe.model.vocab_size
    if None not in sizes and sizes[0] != sizes[1]:
        raise RecipeError(
            f"{setting}: its model.vocab_size={sizes[0]}, but the student's is {sizes[1]}; whole vocabularies are "
            "compared token by token"
        )
    _check_positions(teacher, recipe, setting)
    return replace(
        teacher,
        objective=ObjectiveConfig(),
        parallel=recipe.parallel,
        fused_head=True,
        device=recipe.device,
        deterministic_attention=recipe.deterministic_attention,
    )


def _check_positions(teacher: Recipe, student: Recipe, setting: str) -> None:
    """Sooner than at the first sample that is too long for the teacher."""
    if teacher.model.position_embedding_type != "learned_absolute":
        return
    limits = {"batch.max_tokens": student.batch.max_tokens}
    if student.model.position_embedding_type == "learned_absolute":
        limits["model.max_position_embeddings"] = student.model.max_position_embeddings
    name = min(limits, key=lambda name: limits[name])
    has = teacher.model.max_position_embeddings
    if has < limits[name]:
        raise RecipeError(
            f"{setting}: its learned positions end at model.max_position_embeddings={has}, but the student's samples "
            f"may have {name}={limits[name]} tokens; lower that"
        )


def load_teacher(
    recipe: Recipe,
    place: Session,
    *,
    vocab_size: int,
    first_step: Callable[[], Sequence[Sample]],
    say: Callable[[str], None],
) -> TeacherModel:
    """The teacher with the weights of its last checkpoint.

    Args:
        recipe: from :func:`read_teacher_recipe`.
        place: this rank's.
        vocab_size: padded, the student's.
        first_step: its samples, which ``attention_backend: auto`` looks at.
        say: is told which weights they are, on every rank.

    Raises:
        RecipeError: there is no such model in the student's parallel layout, no checkpoint, or it does not fit.
        NotImplementedError: folding cannot do the teacher exactly; see :func:`check_config`.
        ValueError: see :func:`resolve_backend`.
    """
    try:
        config = transformer_config(recipe, on_gpu=place.device.type == "cuda")
        check_config(config)
    except (RecipeError, NotImplementedError) as error:
        raise type(error)(f"of the teacher: {error}") from error
    backend = resolve_backend(
        recipe.attention_backend,
        config,
        first_step,
        device=place.device,
        deterministic=recipe.deterministic_attention,
    )
    chunks = build_chunks(recipe, config, vocab_size=vocab_size, device=place.device)
    folder = recipe.checkpoint.save
    assert folder is not None, "read_teacher_recipe asks for it"
    iteration = everyone(checkpoint.latest_weights(folder))[0]
    if iteration is None:
        raise RecipeError(f"the teacher's checkpoint.save={folder} holds no checkpoint; name the folder of a run")
    checkpoint.load_weights(folder, iteration, chunks, model=recipe.model)
    for chunk in chunks:
        chunk.requires_grad_(False)
    say(f"the teacher's weights are {checkpoint.iteration_folder(folder, iteration)}")
    cases = cases_of(config, device=place.device, deterministic=recipe.deterministic_attention)
    return TeacherModel(chunks=chunks, attention_backend=backend, attention_cases=cases)
