"""Collectives over a tensor-parallel group that autograd supports.

The loss is a sum of shares, one per rank: the contribution of its local columns, or an equal part of a value that all
ranks compute alike. So the gradient of a sum over ranks is the sum over ranks of the gradients, and no rank needs to
know which of its numbers are the same on other ranks. A group of None is a single rank: nothing is sent.

Legend: C chunks, n columns of this rank, m sorted values of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


def group_size(group: Group) -> int:
    """Return the number of ranks."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Return this rank's number in the group."""
    return 0 if group is None else dist.get_rank(group)


def sum_over(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of a tensor of any shape over ranks, the same on all of them."""
    if group is None:
        return values
    total: torch.Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]
    return total


def max_over(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the maximum of a tensor of any shape over ranks, without a gradient."""
    found = values.detach().clone()
    if group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


def exchange(values: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> torch.Tensor:
    """Send the first ``sent[0]`` rows of ``[sum(sent), ...]`` to rank 0, the next to rank 1, and so on.

    Returns ``[sum(received), ...]``, in the order of the ranks that they come from.
    """
    if group is None:
        return values
    found: torch.Tensor = _Exchange.apply(values, list(sent), list(received), group)  # type: ignore[no-untyped-call]
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _summed(grads[0], ctx.group), None


def _summed(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of a tensor of any shape over ranks."""
    total = values.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(values, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(values: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange ``[sum(sent), ...]`` for ``[sum(received), ...]``; see :func:`exchange`."""
    found = values.new_empty((sum(received), *values.shape[1:]))
    dist.all_to_all_single(found, values.contiguous(), received, sent, group=group)
    return found


def log_softmax(logits: torch.Tensor, group: Group) -> torch.Tensor:
    """Return log-probabilities ``[A, n]`` of this rank's logits ``[A, n]``; a rank may have no columns."""
    lowest = logits.new_full((len(logits), 1), torch.finfo(logits.dtype).min)
    maximum = max_over(torch.cat([logits.detach(), lowest], dim=1).amax(dim=1), group)
    shifted = logits - maximum[:, None]
    return shifted - sum_over(shifted.exp().sum(dim=1), group).log()[:, None]


def sorted_over(values: torch.Tensor, size: int, widths: Sequence[int], group: Group) -> torch.Tensor:
    """Return this rank's part of the sorted columns of all ranks, the largest first: ``[C, ceil(m / ranks)]`` or fewer.

    The rank of the i-th largest value depends only on i, so two sorted rows of one size meet place by place. No rank
    has more than its own columns, those of one other rank, and its part. All shapes are known beforehand: the host does
    not wait for the device.

    Args:
        values: ``[C, n]``, at least 0; ranks may have different n, or none.
        size: m, number of all ranks' values that are kept; if there are fewer, the rest are 0.
        widths: n of each rank.
    """
    own = values.topk(min(size, values.shape[1]), dim=1).values
    if group is None:
        return torch.nn.functional.pad(own, (0, size - own.shape[1]))
    each = -(-size // group_size(group))
    place = _places(own.detach(), [min(size, width) for width in widths], group)
    part: torch.Tensor = _Placed.apply(own, place, each, group)  # type: ignore[no-untyped-call]
    return part[:, : max(0, min(each, size - group_rank(group) * each))]


class _Placed(torch.autograd.Function):
    """Give each rank the values ``[C, each]`` of its places, and 0 in places without one; one receiver at a time."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, place: torch.Tensor, each: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.each, ctx.group = each, group
        found = own.new_empty(0)
        for rank in range(group_size(group)):
            # No other rank has a value in the same place, so the sum is that value. The last column takes the others.
            part = own.new_zeros(len(own), each + 1).scatter_(1, _slots(place, rank, each), own)[:, :each].contiguous()
            dist.reduce(part, dist.get_global_rank(group, rank), group=group)
            if rank == group_rank(group):
                found = part
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (place,), each, group = grads, ctx.saved_tensors, ctx.each, ctx.group
        total = grad.new_zeros(place.shape)
        for rank in range(group_size(group)):
            part = grad.contiguous() if rank == group_rank(group) else torch.empty_like(grad)
            dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
            total += torch.nn.functional.pad(part, (0, 1)).gather(1, _slots(place, rank, each))
        return total, None, None, None


def _slots(place: torch.Tensor, rank: int, each: int) -> torch.Tensor:
    """Return int64 ``[C, n]``, index of each place among a rank's own; ``each`` for places of others."""
    slot = place - rank * each
    return slot.where((slot >= 0) & (slot < each), each)


def _places(own: torch.Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return int64 ``[C, n]``, place of each of this rank's values, sorted, among those of all ranks."""
    here = group_rank(group)
    place = torch.arange(own.shape[1], device=own.device).repeat(len(own), 1)
    for rank, width in enumerate(widths):
        others = own.clone() if rank == here else own.new_empty(len(own), width)
        dist.broadcast(others, dist.get_global_rank(group, rank), group=group)
        if rank != here:
            # Among equal values those of the lower rank come first.
            place += torch.searchsorted(-others, -own, right=rank < here)
    return place
