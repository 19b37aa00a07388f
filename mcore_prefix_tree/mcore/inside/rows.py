"""The rows of a packed micro-batch on the host, folded, and what carries them through the model.

Legend: T tokens of the packed micro-batch, with its padding; P tokens of the folded one, with its padding; S rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
    """A packed micro-batch and its folded layout, on the host.

    Attributes:
        layout: folded; its samples are the rows that have tokens, in their order.
        start: int64 ``[S]``, where each row begins in the packed micro-batch.
        size: T.
        device: device of the answers.
    """

    layout: FlatLayout
    start: Int64Array
    size: int
    device: torch.device

    @property
    def length(self) -> Int64Array:
        """int64 ``[S]``, tokens of each row."""
        return np.diff(self.layout.cu_sample_lens)

    @cached_property
    def position(self) -> Int64Array:
        """int64 ``[L]``, where the rows' tokens stand in the packed micro-batch, row after row."""
        shift = self.start - self.layout.cu_sample_lens[:-1]
        return np.arange(self.layout.logical_tokens) + np.repeat(shift, self.length)

    @property
    def padded(self) -> bool:
        """Whether some positions of the packed micro-batch belong to no row."""
        return self.size > self.layout.logical_tokens

    @cached_property
    def place(self) -> torch.Tensor:
        """int64 tensor ``[T]``, the folded token that answers for each position; P for padding."""
        place = np.full(self.size, self.layout.padded_size)
        place[self.position] = self.layout.sample_map
        return upload(place, self.device)


@dataclass
class RowsPackedSeqParams(TreePackedSeqParams):
    """The tree of a micro-batch that the model folded itself, and how its output becomes the rows' answers.

    Attributes:
        finish: turns the output of the folded micro-batch into that of the packed one.
        report: what folding it is worth.
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

    What is on a device is copied to the host in one transfer, the only one of a micro-batch. Tensors that are still on
    the host cost none.

    Args:
        input_ids: ``[1, T]``.
        packed_seq_params: a ``PackedSeqParams`` with ``qkv_format="thd"``.
        device: of the answers.
        pad_to_multiple_of: of the folded size.
        position_ids: ``[1, T]``, to be checked: each row has to count from 0. None checks nothing.

    Raises:
        ValueError: the arguments do not describe rows in ``input_ids``.
    """
    padded = packed_seq_params.cu_seqlens_q_padded
    given = [input_ids, packed_seq_params.cu_seqlens_q, padded, position_ids]
    ids, borders, slots, positions = _on_host(given)
    assert ids is not None
    if borders is None:
        raise ValueError("packed_seq_params.cu_seqlens_q is missing: it says where each row begins and ends")
    slots = borders if slots is None else slots
    length, room = np.diff(borders), np.diff(slots)
    if len(borders) != len(slots) or borders[0] or slots[0] or (length < 0).any() or (length > room).any():
        raise ValueError(
            f"cu_seqlens_q={borders.tolist()} and cu_seqlens_q_padded={slots.tolist()} must both begin at 0, and each "
            "row of the first must fit into its slot of the second"
        )
    if slots[-1] > len(ids):
        raise ValueError(f"cu_seqlens ends at {slots[-1]}, but input_ids has {len(ids)} tokens")
    kept = np.flatnonzero(length)
    start = slots[:-1][kept]
    rows = [slice(first, first + n) for first, n in zip(start.tolist(), length[kept].tolist(), strict=True)]
    if positions is not None and any((positions[row] != np.arange(row.stop - row.start)).any() for row in rows):
        raise ValueError("position_ids must restart from 0 in every row, or be None, to be folded")
    samples = [Sample(tokens=ids[row], source=f"row {index}") for index, row in zip(kept.tolist(), rows, strict=True)]
    layout = fold(samples, pad_to_multiple_of=pad_to_multiple_of)
    return FoldedRows(layout=layout, start=start, size=len(ids), device=device)


def _on_host(tensors: list[torch.Tensor | None]) -> list[Int64Array | None]:
    """Return flat int64 arrays; those that are on a device arrive in one transfer."""
    flat = [None if tensor is None else tensor.reshape(-1).long() for tensor in tensors]
    away = [tensor for tensor in flat if tensor is not None and tensor.device.type != "cpu"]
    fetched = iter(torch.cat(away).cpu().split([len(tensor) for tensor in away]) if away else ())
    return [
        None if tensor is None else (tensor if tensor.device.type == "cpu" else next(fetched)).numpy()
        for tensor in flat
    ]


def on_device(packed_seq_params: Any, device: torch.device) -> Any:
    """Return packed parameters whose tensors are on the device; the same object where they are there already."""
    tensors = {
        field.name: value
        for field in dataclasses.fields(packed_seq_params)
        if isinstance(value := getattr(packed_seq_params, field.name), torch.Tensor)
    }
    if all(value.device == device for value in tensors.values()):
        return packed_seq_params
    return dataclasses.replace(packed_seq_params, **{name: upload(value, device) for name, value in tensors.items()})
