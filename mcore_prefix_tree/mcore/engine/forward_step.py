"""The forward step that Megatron-Core's schedules call, for folded micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from mcore_prefix_tree.layout.tree_chunks import ChunkLayout
from mcore_prefix_tree.mcore.outputs import Logits, Readout
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.output_layer import unpadded_vocab_size
from mcore_prefix_tree.mcore.seam.routes import check_routes
from mcore_prefix_tree.mcore.seam.tree_layers import check_follows
from mcore_prefix_tree.mcore.seam.validation import check_draws, check_positions, check_step
from mcore_prefix_tree.objectives import LossOutput, LossRows, Objective, Targets

Reported = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
ForwardStep = Callable[[Iterator[Any], Any], tuple[torch.Tensor, Callable[..., Any]]]


def tree_forward(model: Any, batch: MicroBatch, readout: Readout[Any] = Logits()) -> torch.Tensor:  # noqa: B008
    """Run one pipeline stage of a model built from a :func:`with_prefix_tree` spec, or passed to :func:`follow_trees`.

    Args:
        model: pipeline stage.
        batch: folded micro-batch.
        readout: readout that the last stage answers.

    Returns:
        The stage's output: on the last stage the input of ``readout.read``, local logits ``[1, P, V / tp]`` by default;
        hidden states before.

    Raises:
        NotImplementedError: see :func:`check_draws` and :func:`check_follows`.
        ValueError: the longest path does not fit the model's learned positions, routes do not fit its experts, or the
            output layer of the last stage cannot answer the readout.
    """
    gpt_model = get_attr_wrapped_model(model, "position_embedding_type", return_model_obj=True)
    check_follows(gpt_model)
    check_positions(gpt_model, batch.layout.max_path_len)
    if batch.layout.routes is not None and not batch.routes_fit:
        check_routes(gpt_model.config, batch.layout.routes)
    check_draws(gpt_model)
    run: Callable[[], torch.Tensor] = partial(
        model,
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params,
        **(readout.arguments(gpt_model.output_layer, batch) if gpt_model.post_process else {}),
    )
    if not batch.forward_only:
        return run()
    first = torch.zeros(1, device=batch.input_ids.device, requires_grad=True)
    output: torch.Tensor = _ForwardOnly.apply(first if gpt_model.pre_process else gpt_model.decoder.input_tensor, run)  # type: ignore[no-untyped-call]
    return output


class _ForwardOnly(torch.autograd.Function):
    """A stage whose backward computes nothing: Megatron's schedules run one for every forward."""

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the output of ``run``, without a graph; ``received`` is the stage's input, of any shape."""
        ctx.save_for_backward(received)
        return run()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (received,) = ctx.saved_tensors
        return torch.zeros_like(received), None


def with_rows(batch: MicroBatch, objective: Objective, targets: Targets, indices: Sequence[int]) -> MicroBatch:
    """Return the micro-batch of the samples at ``indices`` of a step with the rows that an objective's loss reads.

    If the loss reads whole samples, the first chunk of a tree has the rows of the tree; see :class:`TreeLosses`.
    """
    layout, scale = batch.layout, max(targets.divisor, 1) / max(len(targets.scored), 1)
    depths = tuple(replace(depth, scale=scale) for depth in batch.packed_seq_params.depths)
    batch = replace(batch, packed_seq_params=replace(batch.packed_seq_params, depths=depths))
    if isinstance(layout, ChunkLayout) and not (objective.sums_edges or batch.forward_only):
        is_first = layout.counts_samples
        return replace(batch, rows=objective.rows(targets, layout.whole, indices) if is_first else LossRows(count=0))
    rows, params = objective.rows(targets, layout, indices, device=batch.input_ids.device), batch.packed_seq_params
    if params.carry is not None and rows.above is not None:
        params = replace(params, carry=replace(params.carry, head=params.carry.tokens.reading(rows.above)))
    return replace(batch, rows=rows, edges=rows.scored(batch.edges), packed_seq_params=params)


def for_model(batch: MicroBatch, model: Any) -> MicroBatch:
    """Return a micro-batch whose rows have the vocabulary size of the model that scores them."""
    if batch.rows is None:
        return batch
    bare = get_attr_wrapped_model(model, "vocab_size", return_model_obj=True)
    return replace(batch, rows=replace(batch.rows, vocab_size=unpadded_vocab_size(bare)))


def divided_by_tokens(batch: MicroBatch, scale: float) -> MicroBatch:
    """Return a micro-batch of a step whose gradient is divided by the tokens of all its samples.

    Losses that layers add are sums over tokens, so they become means, whatever the objective's divisor is. The
    objective's loss is multiplied by ``scale``, the ratio of the step's tokens to that divisor.
    """
    depths = tuple(replace(depth, scale=scale * depth.scale) for depth in batch.packed_seq_params.depths)
    return replace(batch, loss_scale=scale, packed_seq_params=replace(batch.packed_seq_params, depths=depths))


def divisor_part(batch: MicroBatch) -> int:
    """Return a micro-batch's part of the divisor of its objective."""
    return batch.layout.num_supervised if batch.rows is None else batch.rows.count


def for_schedule(batch: MicroBatch, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a micro-batch that is differentiated, and its part of the number that divides the step."""
    part, layout = divisor_part(batch), batch.layout
    if batch.loss_scale is not None:
        loss = loss * batch.loss_scale
        part = layout.logical_tokens if layout.counts_samples and not batch.forward_only else 0
    return loss, torch.full((), part, dtype=torch.int, device=loss.device)


def forward_step(
    data_iterator: Iterator[MicroBatch], model: Any, *, readout: Readout[LossOutput]
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Reported]]:
    """Run ``forward_step_func`` of ``get_forward_backward_func()``; the config needs ``calculate_per_token_loss=True``.

    The loss function returns what :func:`for_schedule` does, and a report for logging: the objective's loss, summed
    over the micro-batch, and its part of the objective's divisor; for micro-batches with rows, which all losses but a
    weighted sum read, the objective's ``metrics`` and its ``bad_sample`` too. Raises ValueError as :func:`check_step`
    does.
    """
    check_step(model)
    batch = for_model(next(data_iterator), model)
    return tree_forward(model, batch, readout), partial(_loss, readout, batch)


def _loss(readout: Readout[LossOutput], batch: MicroBatch, output: torch.Tensor) -> Reported:
    """Return loss, divisor and report for the stage's output, local logits ``[1, P, V / tp]`` by default."""
    found = readout.read(output, batch)
    report: dict[str, Any] = {"loss_sum": found.loss.detach(), "num_tokens": divisor_part(batch)}
    if batch.rows is not None:
        report |= {"metrics": found.metrics, "bad_sample": found.bad_sample}
    return *for_schedule(batch, found.loss), report
