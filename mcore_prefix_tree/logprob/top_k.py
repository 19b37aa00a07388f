"""The k likeliest next tokens at R rows of logits ``[P, Vl]``, for a teacher to be distilled from."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mcore_prefix_tree.logprob.edges import ROWS, mask_padding_, slices, wide
from mcore_prefix_tree.logprob.softmax import RowSums, over_ranks, softmax_sums


@torch.no_grad()
def top_logprobs(
    logits: torch.Tensor,
    row: torch.Tensor,
    k: int,
    *,
    temperature: torch.Tensor | None = None,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k likeliest tokens after some tokens, the likeliest first; raise ValueError if there are fewer.

    Args:
        logits: ``[P, Vl]``, this rank's columns, in any floating dtype; reductions are in fp32 or better.
        row: int64 ``[R]``, flat indices.
        temperature: ``[P]``, divisor of each row of logits; None means 1.
        vocab_size: id from which columns are padding, which has no probability; None means no padding.
        vocab_start: id of the first column.
        group: tensor-parallel group over which the vocabulary is split evenly, None if it is not.

    Returns:
        Ids, int64 ``[R, k]``, and log-probabilities in nats, ``[R, k]`` in fp32 or better; equal on all ranks.
    """
    vocabulary = vocab_size or logits.shape[1] * (1 if group is None else dist.get_world_size(group))
    if not 1 <= k <= vocabulary:
        raise ValueError(f"{k} tokens were asked for, and the vocabulary has {vocabulary}")
    ids = torch.empty(len(row), k, dtype=torch.int64, device=logits.device)
    values = torch.empty(len(row), k, dtype=wide(logits.dtype), device=logits.device)
    sums = RowSums.empty(len(row), with_entropy=False, like=values)
    for part in slices(len(row), ROWS):
        block = logits[row[part]].to(values.dtype)  # a copy
        if temperature is not None:
            block = block / temperature[row[part], None].to(values.dtype)
        mask_padding_(block, vocab_size, vocab_start)
        sums[part].set(softmax_sums(block))
        found, column = block.topk(min(k, block.shape[1]), dim=1)
        values[part], ids[part] = _merge_ranks(found, column + vocab_start, k, group)
    return ids, over_ranks(sums, group).logprob(values)


def _merge_ranks(
    values: torch.Tensor, ids: torch.Tensor, k: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k likeliest values and ids of all ranks, ``[R, k]``, from those of each."""
    if group is None:
        return values, ids
    joined = []
    for own in (values, ids):
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        joined.append(torch.cat(parts, dim=1))
    top, at = joined[0].topk(k, dim=1)
    return top, joined[1].gather(1, at)
