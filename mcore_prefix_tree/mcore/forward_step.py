"""The forward step that Megatron-Core's schedules call, for folded micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from mcore_prefix_tree.logprob import candidate_logprobs, edge_logprobs, edge_logprobs_and_entropy, top_logprobs
from mcore_prefix_tree.mcore.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.output_layer import EdgeHeadMixin, HeadRequest, request_arguments
from mcore_prefix_tree.mcore.scalar_head import ScalarHead
from mcore_prefix_tree.mcore.validation import check_positions
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

LossOutput = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
LogprobObjective = SupervisedFineTuning | PolicyGradient | Preference | KTO
ValueObjective = Critic | RewardModel
ForwardObjective = LogprobObjective | ValueObjective | Distillation
ForwardStep = Callable[[Iterator[Any], Any], tuple[torch.Tensor, Callable[..., Any]]]


def tree_forward(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Run one pipeline stage of a model built from a :func:`with_prefix_tree` spec.

    Returns:
        The stage's output: on the last stage what ``batch.output`` says, hidden states before. Local logits are
        ``[1, P, V / tp]``; scores are for :func:`tree_logprobs`, :func:`tree_logprobs_and_entropy`,
        :func:`tree_weighted_sum`, :func:`tree_candidates` or :func:`tree_values` to read.

    Raises:
        ValueError: if the longest path does not fit the model's learned positions, or the last stage is asked for what
            its output layer does not have.
    """
    gpt_model = get_attr_wrapped_model(model, "position_embedding_type", return_model_obj=True)
    check_positions(gpt_model, batch.layout.max_path_len)
    arguments = _head_arguments(gpt_model.output_layer, batch) if gpt_model.post_process else {}
    output: torch.Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params,
        **arguments,
    )
    return output


def _head_arguments(layer: Any, batch: MicroBatch) -> dict[str, Any]:
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
    if batch.output in ("logits", "values"):
        return {}
    if not isinstance(layer, EdgeHeadMixin):
        raise ValueError(
            f"the micro-batch asks for {batch.output}, but the model's output layer only has logits; pass the "
            "model through with_edge_head, or make the micro-batch with output='logits'"
        )
    request = HeadRequest(
        output=batch.output, edges=batch.edges, temperature=batch.temperature, token_weight=batch.loss_weight
    )
    return request_arguments(request)


def tree_logprobs(output: torch.Tensor, batch: MicroBatch, *, in_place: bool = False) -> torch.Tensor:
    """Log-probability of every scored token given its path, ``[P]``; see :func:`edge_logprobs`.

    Args:
        output: of the last stage.
        batch: that it was asked for.
        in_place: let the gradient of logits overwrite them; without effect where there are none.

    Raises:
        ValueError: the output is a ``weighted_sum``, whose log-probabilities have no gradient.
    """
    if batch.output != "logits":
        return _scores(output, batch)[0]
    return edge_logprobs(output.squeeze(0), batch.edges, in_place=in_place, **_from_logits(output, batch))


def tree_logprobs_and_entropy(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`tree_logprobs`, and the entropy ``[P]`` of what each predictor predicts; see there.

    Raises:
        ValueError: the output is neither ``logits`` nor ``logprobs_and_entropy``.
    """
    if batch.output != "logits":
        scores = _scores(output, batch)
        if len(scores) != 2:
            raise ValueError(f"the micro-batch asks for {batch.output}; make it with output='logprobs_and_entropy'")
        return scores[0], scores[1]
    return edge_logprobs_and_entropy(output.squeeze(0), batch.edges, **_from_logits(output, batch))


def tree_weighted_sum(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum_t batch.loss_weight[t] log p_t``, and the log-probabilities ``[P]`` without a gradient.

    The cheapest way to train a loss that is linear in the log-probabilities: see :func:`head_weighted_sum`.

    Raises:
        ValueError: the micro-batch asks for something else than ``weighted_sum``.
    """
    if batch.output != "weighted_sum":
        raise ValueError(f"the micro-batch asks for {batch.output}; make it with output='weighted_sum'")
    total, logprob = output.flatten().tensor_split((1,))
    return total.squeeze(0), logprob.detach()


def tree_candidates(output: torch.Tensor, batch: MicroBatch, *, in_place: bool = False) -> torch.Tensor:
    """Log-probability of every edge of ``batch.edges`` by itself, ``[E]``; as :func:`tree_logprobs`.

    Raises:
        ValueError: the output is neither ``logits`` nor ``candidates``.
    """
    if batch.output == "logits":
        return candidate_logprobs(output.squeeze(0), batch.edges, in_place=in_place, **_from_logits(output, batch))
    if batch.output != "candidates":
        raise ValueError(f"the micro-batch asks for {batch.output}; make it with output='candidates'")
    return output.flatten()


def tree_top_logprobs(
    output: torch.Tensor, batch: MicroBatch, k: int, *, vocab_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest tokens after each of ``batch.edges.row``, and their log-probabilities; see :func:`top_logprobs`.

    Raises:
        ValueError: the output is not ``logits``.
    """
    if batch.output != "logits":
        raise ValueError(f"the micro-batch asks for {batch.output}; make it with output='logits'")
    return top_logprobs(output.squeeze(0), batch.edges.row, k, vocab_size=vocab_size, **_from_logits(output, batch))


def tree_values(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """What a scalar head says after each token, ``[P]`` in fp32 or better.

    Raises:
        ValueError: the micro-batch asks for something else than ``values``.
    """
    if batch.output != "values":
        raise ValueError(f"the micro-batch asks for {batch.output}; make it with output='values'")
    return output.flatten()


def _scores(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
    if batch.output in ("weighted_sum", "candidates", "values"):
        raise ValueError(f"the micro-batch asks for {batch.output}, which tree_{batch.output} reads")
    return output.squeeze(0).unbind(dim=1)


def _from_logits(logits: torch.Tensor, batch: MicroBatch) -> dict[str, Any]:
    parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    return {
        "temperature": batch.temperature,
        "vocab_start": parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1],
        "group": parallel_state.get_tensor_model_parallel_group() if parallel else None,
    }


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
    """
    batch = next(data_iterator)
    return tree_forward(model, batch), partial(_sft_loss, batch)


def _sft_loss(batch: MicroBatch, output: torch.Tensor) -> LossOutput:
    loss = tree_sft_loss(output, batch)
    num_tokens = torch.tensor(batch.layout.num_supervised, dtype=torch.int, device=output.device)
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
    return replace(batch, rows=targets.rows(batch.layout, indices, device=device))


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
            ``logprobs_and_entropy``.
    """
    batch = next(data_iterator)
    return tree_forward(model, batch), partial(_objective_loss, batch, objective, with_entropy)


def _objective_loss(
    batch: MicroBatch, objective: ForwardObjective, with_entropy: bool, output: torch.Tensor
) -> LossOutput:
    assert batch.rows is not None, "the step's targets make the rows of every micro-batch"
    of_batch = objective_output(output, batch, objective, with_entropy=with_entropy)
    num_tokens = torch.tensor(batch.rows.count, dtype=torch.int, device=output.device)
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
    rows = batch.rows
    if isinstance(objective, Distillation):
        assert isinstance(rows, TeacherRows)
        return objective.loss(tree_candidates(output, batch, in_place=True).view(rows.logprobs.shape), rows)
    assert isinstance(rows, Rows)
    if isinstance(objective, ValueObjective):
        return objective.loss(tree_values(output, batch), rows)
    if with_entropy:
        if objective.needs_entropy and batch.output == "logprobs_and_watched_entropy":
            raise ValueError("the loss has a gradient through the entropy; make it with output='logprobs_and_entropy'")
        logprob, entropy = tree_logprobs_and_entropy(output, batch)
        return objective.loss(logprob, entropy, rows)
    return objective.loss(tree_logprobs(output, batch, in_place=True), None, rows)
