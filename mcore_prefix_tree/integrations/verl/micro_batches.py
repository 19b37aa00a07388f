"""Cut a mini-batch of verl's into micro-batches whose rows share prefixes, under a budget of unique tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.plan import BudgetError, plan_step
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import sort_samples
from mcore_prefix_tree.utils.errors import spell


def cut(
    rows: Sequence[torch.Tensor],
    *,
    max_tokens: int,
    group: Any = None,
    device: str | torch.device = "cpu",
    multiple: int = 1,
    group_size: int = 1,
    routes: Sequence[torch.Tensor] | None = None,
) -> list[list[int]]:
    """Return the rows of each micro-batch, in their order. No micro-batch is empty.

    The smallest micro-batches come first and last: while a pipeline fills and drains, all stages wait for those. All
    ranks of ``group`` get the same number of micro-batches, and all raise if one of them has to.

    Args:
        rows: ``[n]`` token ids of each row of this rank.
        max_tokens: number of unique tokens that a micro-batch may hold.
        group: data-parallel process group; None is this process only.
        multiple: divisor of the number of micro-batches.
        group_size: number of successive rows that stay together.
        routes: integers ``[tokens, layers, top-k]`` of each row, the experts of its tokens.

    Raises:
        ValueError: a row, or rows that stay together, exceed the budget, or a rank has too few rows.
    """
    experts = [None] * len(rows) if routes is None else [one.cpu().numpy() for one in routes]
    samples = [
        Sample(tokens=row.cpu().numpy(), routed_experts=chosen, source=f"row {index}")
        for index, (row, chosen) in enumerate(zip(rows, experts, strict=True))
    ]
    together = [index // group_size for index in range(len(samples))] if group_size > 1 else None
    planned = partial(plan_step, samples, max_tokens=max_tokens, micro_batch_multiple=multiple, together=together)
    units = len(samples) // group_size
    error, needed = "on another rank", 0
    if len(samples) % group_size:
        error = f"{len(samples)} rows are not a multiple of force_group_size={group_size}"
    else:
        try:
            plan = planned()
            needed = plan.num_micro_batches
        except BudgetError as refused:
            error = spell(str(refused), {"batch.max_tokens": "max_token_len_per_gpu"})
    agreed = torch.tensor([needed, -units, needed == 0], dtype=torch.int64, device=device)
    if group is not None:
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    count, fewest, failed = agreed.tolist()
    if failed:
        raise ValueError(f"cannot cut micro-batches: {error}")
    if count > -fewest:
        raise ValueError(
            f"cannot cut {count} micro-batches: a data-parallel rank has only {-fewest} rows or forced groups; raise "
            "max_token_len_per_gpu, or lower microbatch_group_size_per_vp_stage"
        )
    if count != needed:  # another rank needs more
        plan = planned(micro_batches=count)
    parts = [list(dict.fromkeys(index // group_size for index in part)) for part in plan.micro_batches[0]]
    while [] in parts:
        longest = max(parts, key=len)
        parts[parts.index([])] = longest[len(longest) // 2 :]
        del longest[len(longest) // 2 :]
    rows_of = [
        [index for unit in sorted(part) for index in range(unit * group_size, (unit + 1) * group_size)]
        for part in parts
    ]
    rows_of.sort(key=lambda rows: _unique_tokens([samples[index] for index in rows]))
    return rows_of[0::2] + rows_of[1::2][::-1]


def _unique_tokens(samples: Sequence[Sample]) -> int:
    return sum(map(len, samples)) - int(sort_samples(samples)[1].sum())
