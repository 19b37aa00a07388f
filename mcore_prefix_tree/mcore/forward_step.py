"""The forward step that Megatron-Core's schedules call, for folded micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from mcore_prefix_tree.logprob import edge_logprobs, edge_logprobs_and_entropy
from mcore_prefix_tree.mcore.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.validation import check_positions
from mcore_prefix_tree.objectives import sft_loss

LossOutput = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def tree_forward(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Run one pipeline stage of a model built from a :func:`with_prefix_tree` spec.

    Returns:
        The stage's output: local logits ``[1, P, V / tp]`` on the last stage, hidden states before.

    Raises:
        ValueError: if the longest path does not fit the model's learned positions.
    """
    gpt_model = get_attr_wrapped_model(model, "position_embedding_type", return_model_obj=True)
    check_positions(gpt_model, batch.layout.max_path_len)
    output: torch.Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params,
    )
    return output


def tree_logprobs(logits: torch.Tensor, batch: MicroBatch, *, in_place: bool = False) -> torch.Tensor:
    """:func:`edge_logprobs` over the tensor-parallel group, from the last stage's output ``[1, P, V / tp]``."""
    return edge_logprobs(logits.squeeze(0), batch.edges, in_place=in_place, **_vocabulary_split(logits))


def tree_logprobs_and_entropy(logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`edge_logprobs_and_entropy` over the tensor-parallel group, from the last stage's output."""
    return edge_logprobs_and_entropy(logits.squeeze(0), batch.edges, **_vocabulary_split(logits))


def _vocabulary_split(logits: torch.Tensor) -> dict[str, Any]:
    parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    return {
        "vocab_start": parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1],
        "group": parallel_state.get_tensor_model_parallel_group() if parallel else None,
    }


def sft_forward_step(
    data_iterator: Iterator[MicroBatch], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossOutput]]:
    """``forward_step_func`` for ``get_forward_backward_func()``; the config needs ``calculate_per_token_loss=True``.

    The loss function gives the sum over the micro-batch, its supervised tokens, and both again for logging.
    """
    batch = next(data_iterator)
    return tree_forward(model, batch), partial(_sft_loss, batch)


def _sft_loss(batch: MicroBatch, logits: torch.Tensor) -> LossOutput:
    logprob = tree_logprobs(logits, batch, in_place=True)
    loss = sft_loss(logprob, batch.loss_weight)
    num_tokens = torch.tensor(batch.layout.num_supervised, dtype=torch.int, device=logits.device)
    return loss, num_tokens, {"loss_sum": loss.detach(), "num_tokens": num_tokens}
