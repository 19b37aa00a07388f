"""The rows of a packed micro-batch, folded on the host, and what carries them through the model.

Legend: T tokens of the packed micro-batch, with its padding; P tokens of the folded one, with its padding; S rows; L
tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.layout import FlatLayout, fold
from mcore_prefix_tree.mcore.inside.report import FoldReport
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.upload import upload

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedRows:
    """A packed micro-batch and its folded layout.

    Attributes:
        layout: folded; its samples are the rows that have tokens, in their order.
        start: int64 ``[S]``, where each row begins in the packed micro-batch.
        size: T.
        device: device of the model.
    """

    layout: FlatLayout
    start: Int64Array
    size: int
    device: torch.device

    @cached_property
    def position(self) -> Int64Array:
        """int64 ``[L]``, where the rows' tokens stand in the packed micro-batch, row after row."""
        borders = self.layout.cu_sample_lens
        return np.arange(borders[-1]) + np.repeat(self.start - borders[:-1], np.diff(borders))

    @cached_property
    def place(self) -> torch.Tensor:
        """int64 tensor ``[T]``, the folded token that answers for each position; P for padding."""
        place = np.full(self.size, self.layout.padded_size)
        place[self.position] = self.layout.sample_map
        return upload(place, self.device)


@dataclass
class RowsPackedSeqParams(TreePackedSeqParams):
    """The tree of a micro-batch that the model folded itself.

    Attributes:
        finish: turns the output of the folded micro-batch into that of the packed one.
        report: what folding the micro-batch is worth.
    """

    finish: Callable[[Any], Any] = lambda output: output
    report: FoldReport | None = None


def read_rows(
    input_ids: torch.Tensor,
    packed_seq_params: Any,
    *,
    device: torch.device,
    pad_to_multiple_of: int,
    position_ids: torch.Tensor | None = None,
) -> FoldedRows:
    """Fold a packed micro-batch on the host.

    Tensors on a device are copied to the host in one transfer, the only one of a micro-batch; tensors on the host cost
    none.

    Args:
        input_ids: ``[1, T]``.
        packed_seq_params: with ``qkv_format="thd"``.
        device: device of the model.
        pad_to_multiple_of: see :func:`fold`.
        position_ids: ``[1, T]``, checked to restart in each row; None is not checked.

    Raises:
        ValueError: the arguments do not describe rows of ``input_ids``.
    """
    borders, slots = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
    if borders is None:
        raise ValueError("packed_seq_params.cu_seqlens_q is missing: it tells where each row begins and ends")
    checked = [] if position_ids is None else [position_ids]
    ids, borders, slots, *positions = _on_host([input_ids, borders, borders if slots is None else slots, *checked])
    length = np.diff(borders)
    if borders[0] or slots[0] or len(borders) != len(slots) or (length < 0).any() or (length > np.diff(slots)).any():
        raise ValueError(
            f"cu_seqlens_q={borders.tolist()} and cu_seqlens_q_padded={slots.tolist()} must both begin at 0, and each "
            "row of the first must fit into its slot of the second"
        )
    if slots[-1] > len(ids):
        raise ValueError(f"cu_seqlens ends at {slots[-1]}, but input_ids has {len(ids)} tokens")
    rows = {row: slice(slots[row], slots[row] + length[row]) for row in np.flatnonzero(length).tolist()}
    for row, span in rows.items():
        if positions and (positions[0][span] != np.arange(length[row])).any():
            raise ValueError(f"position_ids of row {row} must count from 0 to be folded")
    samples = [Sample(tokens=ids[span], source=f"row {row}") for row, span in rows.items()]
    layout = fold(samples, pad_to_multiple_of=pad_to_multiple_of)
    return FoldedRows(layout=layout, start=slots[:-1][length > 0], size=len(ids), device=device)


def _on_host(tensors: Sequence[torch.Tensor]) -> list[Int64Array]:
    """Return flat int64 arrays; those that are on a device arrive in one transfer."""
    flat = [tensor.reshape(-1).long() for tensor in tensors]
    away = [tensor for tensor in flat if tensor.device.type != "cpu"]
    fetched = iter(torch.cat(away).cpu().split([len(tensor) for tensor in away]) if away else ())
    return [(tensor if tensor.device.type == "cpu" else next(fetched)).numpy() for tensor in flat]
