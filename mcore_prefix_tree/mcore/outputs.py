"""Reading what the last pipeline stage gave for a folded micro-batch, by what it was asked for.

Legend: P padded tokens, E edges, R rows (predictors with an edge, or with a row of a teacher's).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from mcore_prefix_tree.logprob import candidate_logprobs, edge_logprobs, edge_logprobs_and_entropy, top_logprobs
from mcore_prefix_tree.mcore.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.output_layer import EDGE_LOSSES


def tree_logprobs(output: torch.Tensor, batch: MicroBatch, *, in_place: bool = False) -> torch.Tensor:
    """Log-probability of every scored token given its path, ``[P]``; see :func:`edge_logprobs`.

    Args:
        output: of the last stage.
        batch: that it was asked for.
        in_place: let the gradient of logits overwrite them; without effect where there are none.

    Raises:
        ValueError: the output is one that another of these functions reads.
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
    return _scalar_and_rest(output, batch, "weighted_sum")


def tree_edge_loss(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A 0 with the gradient of a loss of edges, and what to compute its value from; see :func:`head_edge_loss`.

    Returns:
        A scalar; the log-probabilities ``[P]`` as of :func:`tree_logprobs`, or ``[E]`` as of :func:`tree_candidates` if
        the edges are to a teacher's tokens; and the entropies ``[P]``, if they were asked for.

    Raises:
        ValueError: the micro-batch asks for something else than ``edge_loss`` or ``edge_loss_and_entropy``.
    """
    gradient, scores = _scalar_and_rest(output, batch, *EDGE_LOSSES)
    if batch.output == "edge_loss":
        return gradient, scores, None
    logprob, entropy = scores.chunk(2)
    return gradient, logprob, entropy


def tree_logit_losses(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """A 0 with the gradient of a loss of logits, and its rows' values ``[R]``; see :func:`head_logit_losses`.

    Raises:
        ValueError: the micro-batch asks for something else than ``logit_losses``.
    """
    return _scalar_and_rest(output, batch, "logit_losses")


def tree_hidden(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The last hidden states of the predictors, ``[R, h]``.

    Raises:
        ValueError: the micro-batch asks for something else than ``hidden``.
    """
    if batch.output != "hidden":
        raise ValueError(f"the micro-batch asks for {batch.output}; make it with output='hidden'")
    return output.squeeze(0)


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


def _scalar_and_rest(output: torch.Tensor, batch: MicroBatch, *asked: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands first has the gradient, and the rest none.

    Raises:
        ValueError: the micro-batch does not ask for one of these.
    """
    if batch.output not in asked:
        raise ValueError(f"the micro-batch asks for {batch.output}; make it with output='{asked[0]}'")
    scalar, rest = output.flatten().tensor_split((1,))
    return scalar.squeeze(0), rest.detach()


def _scores(output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
    if batch.output in ("weighted_sum", "candidates", "values", "hidden", "logit_losses", *EDGE_LOSSES):
        reader = "edge_loss" if batch.output in EDGE_LOSSES else batch.output
        raise ValueError(f"the micro-batch asks for {batch.output}, which tree_{reader} reads")
    return output.squeeze(0).unbind(dim=1)


def _from_logits(logits: torch.Tensor, batch: MicroBatch) -> dict[str, Any]:
    parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    return {
        "temperature": batch.temperature,
        "vocab_start": parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1],
        "group": parallel_state.get_tensor_model_parallel_group() if parallel else None,
    }
