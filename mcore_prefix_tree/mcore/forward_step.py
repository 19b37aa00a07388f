"""The forward step that Megatron-Core's schedules call, for folded micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from mcore_prefix_tree.logprob import Chunks, EdgeLoss, LogitLoss
from mcore_prefix_tree.mcore.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.output_layer import EDGE_LOSSES, EdgeHeadMixin, HeadRequest, request_arguments
from mcore_prefix_tree.mcore.outputs import (
    tree_candidates,
    tree_edge_loss,
    tree_logit_losses,
    tree_logprobs,
    tree_logprobs_and_entropy,
    tree_values,
    tree_weighted_sum,
)
from mcore_prefix_tree.mcore.scalar_head import ScalarHead
from mcore_prefix_tree.mcore.validation import check_positions, check_step
from mcore_prefix_tree.objectives import (
    KTO,
    Critic,
    Distillation,
    PolicyGradient,
    Preference,
    RewardModel,
    Rows,
    SupervisedFineTuning,
    Targets,
    TeacherRows,
    sft_loss,
)
from mcore_prefix_tree.objectives import LossOutput as ObjectiveOutput
from mcore_prefix_tree.objectives.divergence import ROWS

LossOutput = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
LogprobObjective = SupervisedFineTuning | PolicyGradient | Preference | KTO
ValueObjective = Critic | RewardModel
ForwardObjective = LogprobObjective | ValueObjective | Distillation
ForwardStep = Callable[[Iterator[Any], Any], tuple[torch.Tensor, Callable[..., Any]]]


def tree_forward(
    model: Any,
    batch: MicroBatch,
    *,
    edge_loss: EdgeLoss | None = None,
    by_rows: bool = False,
    logit_loss: LogitLoss | None = None,
) -> torch.Tensor:
    """Run one pipeline stage of a model built from a :func:`with_prefix_tree` spec.

    Args:
        model: the stage.
        batch: folded.
        edge_loss: what the micro-batch's ``edge_loss`` is to have the gradient of: a scalar of what
            :func:`~mcore_prefix_tree.mcore.outputs.tree_edge_loss` reads of it; see
            :func:`~mcore_prefix_tree.logprob.head_edge_loss`.
        by_rows: see there.
        logit_loss: what its ``logit_losses`` are; see :func:`~mcore_prefix_tree.logprob.head_logit_losses`.

    Returns:
        The stage's output: on the last stage what ``batch.output`` says, hidden states before. Local logits are
        ``[1, P, V / tp]``; scores are for the functions of :mod:`mcore_prefix_tree.mcore.outputs` to read.

    Raises:
        ValueError: if the longest path does not fit the model's learned positions, or the last stage is asked for what
            its output layer does not have.
    """
    gpt_model = get_attr_wrapped_model(model, "position_embedding_type", return_model_obj=True)
    check_positions(gpt_model, batch.layout.max_path_len)
    arguments = {}
    if gpt_model.post_process:
        arguments = _head_arguments(gpt_model.output_layer, batch, edge_loss, by_rows, logit_loss)
    output: torch.Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params,
        **arguments,
    )
    return output


def _head_arguments(
    layer: Any, batch: MicroBatch, edge_loss: EdgeLoss | None, by_rows: bool, logit_loss: LogitLoss | None
) -> dict[str, Any]:
    """Keywords of ``GPTModel.forward`` that ask its output layer for what the micro-batch wants."""
    if isinstance(layer, ScalarHead) != (batch.output == "values"):
        has, way_out = (
            ("values", "make it with output='values'")
            if isinstance(layer, ScalarHead)
            else ("those of a vocabulary", "pass the model through with_scalar_head")
        )
        raise ValueError(
            f"the micro-batch asks for {batch.output}, but the outputs of the model's output layer are {has}; {way_out}"
        )
    if batch.output == "values":
        return {}
    if batch.output == "logits":
        # GPTModel(parallel_output=False) would gather them.
        return {"runtime_gather_output": False}
    if not isinstance(layer, EdgeHeadMixin):
        raise ValueError(
            f"the micro-batch asks for {batch.output}, but the model's output layer only has logits; pass the "
            "model through with_edge_head, or make the micro-batch with output='logits'"
        )
    if batch.output in EDGE_LOSSES and edge_loss is None:
        raise ValueError(f"the micro-batch asks for {batch.output}; give tree_forward the edge_loss")
    if batch.output == "logit_losses" and logit_loss is None:
        raise ValueError("the micro-batch asks for logit_losses; give tree_forward the logit_loss")
    request = HeadRequest(
        output=batch.output,
        edges=batch.edges,
        temperature=batch.temperature,
        token_weight=batch.loss_weight,
        edge_loss=edge_loss,
        by_rows=by_rows,
        logit_loss=logit_loss,
        chunk_rows=batch.head_chunk_rows,
    )
    return request_arguments(request)


def tree_sft_loss(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """:func:`sft_loss` of a micro-batch, from whatever the last stage was asked for."""
    if batch.output == "weighted_sum":
        return -tree_weighted_sum(output, batch)[0]
    return sft_loss(tree_logprobs(output, batch, in_place=True), batch.loss_weight)


def sft_forward_step(
    data_iterator: Iterator[MicroBatch], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossOutput]]:
    """``forward_step_func`` for ``get_forward_backward_func()``; the config needs ``calculate_per_token_loss=True``.

    The loss function gives the sum over the micro-batch, its supervised tokens, and both again for logging.

    Raises:
        ValueError: see :func:`check_step`.
    """
    check_step(model)
    batch = next(data_iterator)
    return tree_forward(model, batch), partial(_sft_loss, batch)


def _sft_loss(batch: MicroBatch, output: torch.Tensor) -> LossOutput:
    loss = tree_sft_loss(output, batch)
    num_tokens = torch.full((), batch.layout.num_supervised, dtype=torch.int, device=output.device)
    return loss, num_tokens, {"loss_sum": loss.detach(), "num_tokens": num_tokens}


def with_rows(batch: MicroBatch, objective: ForwardObjective, targets: Targets, indices: Sequence[int]) -> MicroBatch:
    """A micro-batch with what an objective's loss reads of it.

    Args:
        batch: of the samples at ``indices``, in this order.
        objective: of the step.
        targets: that it made of the step's samples.
        indices: into these.

    Raises:
        ValueError: see :meth:`Targets.rows`.
    """
    device = batch.input_ids.device
    if isinstance(objective, Distillation):
        of_teacher = objective.rows(targets, batch.layout, indices, device=device)
        return replace(batch, rows=of_teacher, edges=of_teacher.edges)
    batch = replace(batch, rows=targets.rows(batch.layout, indices, device=device))
    if batch.output in EDGE_LOSSES and isinstance(objective, LogprobObjective) and objective.terms == "pair":
        return replace(batch, edges=batch.edges.scored_together(*targets.read_by_pairs(batch.layout, indices)))
    return batch


def objective_forward_step(
    data_iterator: Iterator[MicroBatch], model: Any, *, objective: ForwardObjective, with_entropy: bool
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossOutput]]:
    """As :func:`sft_forward_step`, for any objective; the micro-batches have its ``rows``.

    The loss function gives the sum over the micro-batch, its part of the step's divisor, and for logging both again,
    the objective's ``metrics`` and its ``bad_sample``.

    Args:
        data_iterator: of Megatron's.
        model: of Megatron's.
        objective: of the step.
        with_entropy: give one on log-probabilities the entropy too; fused micro-batches then ask for
            ``edge_loss_and_entropy`` or ``logprobs_and_entropy``.

    Raises:
        ValueError: see :func:`check_step`.
    """
    check_step(model)
    batch = next(data_iterator)
    if isinstance(batch.rows, TeacherRows):
        batch = replace(batch, rows=replace(batch.rows, vocab_size=get_attr_wrapped_model(model, "vocab_size")))

    def loss_of(scores: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        return _loss_of(objective, batch, scores, entropy).loss

    edge_loss, by_rows, logit_loss = None, False, None
    if batch.teacher is not None:
        assert isinstance(objective, Distillation)
        logit_loss = _from_teacher(objective, batch)
    elif batch.output in EDGE_LOSSES:
        assert not isinstance(objective, ValueObjective)
        edge_loss, by_rows = loss_of, objective.terms == "row"
    output = tree_forward(model, batch, edge_loss=edge_loss, by_rows=by_rows, logit_loss=logit_loss)
    return output, partial(_objective_loss, batch, objective, with_entropy)


def _from_teacher(objective: Distillation, batch: MicroBatch) -> LogitLoss:
    """The divergence of a chunk's rows from the teacher's, whose logits are made a few rows at a time."""
    taught, rows = batch.teacher, batch.rows
    assert taught is not None
    assert isinstance(rows, TeacherRows)
    teacher = Chunks(taught.hidden, taught.weight, replace(taught.head, rows_at_a_time=ROWS))

    def logit_loss(chunk: slice, logits: torch.Tensor) -> torch.Tensor:
        def of_teacher(block: slice) -> torch.Tensor:
            return teacher.logits(slice(chunk.start + block.start, chunk.start + block.stop))

        return objective.of_logits_(logits, of_teacher, rows.weight[chunk], group=taught.head.group)

    return logit_loss


def _objective_loss(
    batch: MicroBatch, objective: ForwardObjective, with_entropy: bool, output: torch.Tensor
) -> LossOutput:
    assert batch.rows is not None, "the step's targets make the rows of every micro-batch"
    of_batch = objective_output(output, batch, objective, with_entropy=with_entropy)
    num_tokens = torch.full((), batch.rows.count, dtype=torch.int, device=output.device)
    return (
        of_batch.loss,
        num_tokens,
        {
            "loss_sum": of_batch.loss.detach(),
            "num_tokens": num_tokens,
            "metrics": of_batch.metrics,
            "bad_sample": of_batch.bad_sample,
        },
    )


def objective_output(
    output: torch.Tensor, batch: MicroBatch, objective: ForwardObjective, *, with_entropy: bool
) -> ObjectiveOutput:
    """An objective's loss on a micro-batch, from what the last stage gave; arguments as of the forward step."""
    if batch.output in EDGE_LOSSES:
        gradient, scores, entropy = tree_edge_loss(output, batch)
        value = _loss_of(objective, batch, scores, entropy)
        return replace(value, loss=value.loss + gradient)
    if isinstance(objective, Distillation):
        if batch.output == "logit_losses":
            assert isinstance(batch.rows, TeacherRows)
            gradient, of_row = tree_logit_losses(output, batch)
            value = objective.weighed(of_row, batch.rows)
            return replace(value, loss=value.loss + gradient)
        return _loss_of(objective, batch, tree_candidates(output, batch, in_place=True), None)
    if isinstance(objective, ValueObjective):
        return _loss_of(objective, batch, tree_values(output, batch), None)
    if with_entropy:
        return _loss_of(objective, batch, *tree_logprobs_and_entropy(output, batch))
    return _loss_of(objective, batch, tree_logprobs(output, batch, in_place=True), None)


def _loss_of(
    objective: ForwardObjective, batch: MicroBatch, scores: torch.Tensor, entropy: torch.Tensor | None
) -> ObjectiveOutput:
    """An objective's loss on what it reads: candidates ``[E]``, or values or log-probabilities ``[P]``."""
    rows = batch.rows
    if isinstance(objective, Distillation):
        assert isinstance(rows, TeacherRows)
        return objective.loss(scores.view(rows.logprobs.shape), rows)
    assert isinstance(rows, Rows)
    if isinstance(objective, ValueObjective):
        return objective.loss(scores, rows)
    return objective.loss(scores, entropy, rows)
