"""The tokens of a micro-batch on all ranks, and a rank's part of them under sequence parallelism.

Legend: P tokens of a folded micro-batch, with its padding; h hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

from mcore_prefix_tree.layout import row_multiple


def count_splits(module: Any) -> int:
    """Return the number of ranks that a micro-batch's tokens are split over."""
    return int(module.tp_group.size()) if module.config.sequence_parallel else 1


def padding_multiple(model: Any) -> int:
    """Return the divisor of the padded size of a micro-batch of this bare model; see :func:`row_multiple`."""
    return row_multiple(count_splits(model), model.config.fp8, model.config.fp8_recipe)


def gather_tokens(hidden: torch.Tensor, module: Any) -> torch.Tensor:
    """Return hidden states of all tokens, ``[P, 1, h]``; with sequence parallelism a rank gives ``[P / tp, 1, h]``.

    ``module`` has the ``config`` and the ``tp_group``. Each rank has the gradients of all tokens, so none are summed.
    """
    if module.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=module.tp_group)
    return hidden


def split_tokens(hidden: torch.Tensor, module: Any) -> torch.Tensor:
    """Return this rank's part of :func:`gather_tokens`, ``[P / tp, 1, h]``."""
    if module.config.sequence_parallel:
        hidden = scatter_to_sequence_parallel_region(hidden, group=module.tp_group)
    return hidden
