"""The rows of a packed micro-batch, folded on the host, what carries them through the model, and a report of both.

Legend: T tokens of the packed micro-batch, with its padding; P tokens of the folded one, with its padding; S rows; L
tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.trainer_rows import HostRows, Int64Array
from mcore_prefix_tree.mcore.packed.decoder_in_parts import DecoderPart
from mcore_prefix_tree.mcore.seam.all_tokens import gather_tokens, split_tokens
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.plan.flops import DIMENSIONS, Counts, ExpectedSpeedup, ModelWork
from mcore_prefix_tree.utils.upload import upload


@dataclass(frozen=True, kw_only=True)
class FoldReport:
    """Micro-batches that a model folded; reports add up."""

    work: ModelWork  # FLOPs of the entire model, with all pipeline stages
    folded: Counts  # counts of the computed tokens, with their pairs and predictors
    unfolded: Counts  # counts of the same rows, each by itself
    micro_batches: int = 1  # number of forward passes
    left_alone: int = 0  # number of forward passes that the stock model computed, because their rows share too little
    recomputed_tokens: int = 0  # tokens that backward computes again, of micro-batches above ``max_tokens``
    rows: int = 0
    expanded_bytes: int = 0  # memory of the answers beyond that of the folded output: logits, if rows share theirs

    @classmethod
    def of(cls, layout: FlatLayout, work: ModelWork, *, head_rows: int | None = None) -> FoldReport:
        """Report a folded micro-batch; the head computes ``head_rows`` positions, None is the unique tokens."""
        folded = Counts.folded([layout], *work.limits)
        folded = folded._replace(predictors=folded.tokens if head_rows is None else head_rows)
        unfolded = Counts.of_lengths(np.diff(layout.cu_sample_lens), *work.limits)
        return cls(work=work, folded=folded, unfolded=unfolded, rows=layout.num_samples)

    @classmethod
    def of_stock(cls, lengths: npt.NDArray[np.int64], work: ModelWork) -> FoldReport:
        """Report a micro-batch of rows, int64 ``[S]``, that the stock model computes."""
        counts = Counts.of_lengths(lengths, *work.limits)
        return cls(work=work, folded=counts, unfolded=counts, left_alone=1, rows=len(lengths))

    def __add__(self, other: FoldReport) -> FoldReport:
        sums: dict[str, Any] = {}
        for name in (field.name for field in fields(self) if field.name != "work"):
            mine, theirs = getattr(self, name), getattr(other, name)
            sums[name] = (
                Counts(*map(sum, zip(mine, theirs, strict=True))) if isinstance(mine, Counts) else mine + theirs
            )
        return FoldReport(work=self.work, **sums)

    def over_ranks(self, group: dist.ProcessGroup, device: torch.device) -> FoldReport:
        """Return the sum of the reports of a data-parallel group; a collective on a device of the group's back-end."""
        names = ("micro_batches", "left_alone", "recomputed_tokens", "rows", "expanded_bytes")
        numbers = [*self.folded, *self.unfolded, *(getattr(self, name) for name in names)]
        total = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.all_reduce(total, group=group)
        size, sums = len(self.folded), total.tolist()
        folded, unfolded = Counts(*sums[:size]), Counts(*sums[size : 2 * size])
        return FoldReport(
            work=self.work, folded=folded, unfolded=unfolded, **dict(zip(names, sums[2 * size :], strict=True))
        )

    def __str__(self) -> str:
        return (
            f"prefix trees of {self.micro_batches:,} micro-batches: fold ratio {self.fold_ratio:.2f} "
            f"({self.unique_tokens:,} of {self.logical_tokens:,} tokens computed), expected speed-up "
            f"{self.expected_speedup.ratio:.2f}x"
        )

    @property
    def logical_tokens(self) -> int:
        return self.unfolded.tokens

    @property
    def unique_tokens(self) -> int:
        """Tokens that the layers computed, before padding."""
        return self.folded.tokens

    @property
    def fold_ratio(self) -> float:
        """Ratio of logical to unique tokens; 1 for no tokens."""
        return self.logical_tokens / self.unique_tokens if self.unique_tokens else 1.0

    @property
    def expected_speedup(self) -> ExpectedSpeedup:
        """Speed-up to expect by FLOPs."""
        return ExpectedSpeedup(folded=self.work.of(self.folded), unfolded=self.work.of(self.unfolded))

    def to_log(self) -> dict[str, float]:
        """Return numbers by name, as loggers take them."""
        names = (
            "micro_batches",
            "left_alone",
            "rows",
            "logical_tokens",
            "unique_tokens",
            "recomputed_tokens",
            "fold_ratio",
        )
        numbers = {f"fold/{name}": getattr(self, name) for name in names}
        expected = self.expected_speedup.ratio
        return numbers | {"fold/expanded_bytes": self.expanded_bytes, "fold/expected_speedup": expected}


def count_model_flops(model: Any) -> ModelWork:
    """Count the FLOPs of a ``GPTModel`` or ``HybridModel`` with all its pipeline stages."""
    config = model.config
    return ModelWork.from_dimensions(
        **{name: getattr(config, name) for name in DIMENSIONS},
        vocab_size=model.vocab_size,
        num_query_groups=config.num_query_groups,
        swiglu=config.gated_linear_unit,
        fused_head=True,  # a report counts the positions that the head computes
        settings=vars(config),
        pattern=getattr(model, "hybrid_layer_pattern", None),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows(HostRows):
    """The rows of a packed micro-batch, on the host, without empty ones; ``device`` is that of the model.

    ``tail`` is the number of tokens behind the last slot, which upstream's rotary embedding does not take.
    ``spatial`` are positions of M-RoPE from each row's first token, int64 ``[3, T]``, which ids number too, or None.
    """

    device: torch.device
    tail: int = 0
    spatial: Int64Array | None = None

    @property
    def place(self) -> torch.Tensor:
        """Token of the stage that answers for each position, int64 tensor ``[T]``."""
        return torch.arange(self.size, device=self.device)

    def fold(self, *, pad_to_multiple_of: int) -> FoldedRows:
        """Fold the rows; raise ValueError for a token id that is negative or does not fit into 32 bits."""
        layout = self.make_layout(pad_to_multiple_of=pad_to_multiple_of)
        return FoldedRows(layout=layout, **{field.name: getattr(self, field.name) for field in fields(PackedRows)})


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedRows(PackedRows):
    """Packed rows with their folded layout, whose samples are the rows, in their order."""

    layout: FlatLayout

    @cached_property
    def place(self) -> torch.Tensor:  # type: ignore[override]
        """Folded token that answers for each position, int64 tensor ``[T]``; P for padding."""
        return upload(self.places_in(self.layout), self.device)

    def make_call(self, attention_backend: str, *, deterministic_attention: bool = False, **own: Any) -> dict[str, Any]:
        """Return ids, positions and parameters of the folded micro-batch for a model's forward.

        ``own`` are fields of :class:`RowsPackedSeqParams` and its bases.
        """
        metadata = TreeMetadata.from_layout(self.layout, device=self.device)
        params: Any = RowsPackedSeqParams.from_metadata(
            metadata, attention_backend=attention_backend, deterministic_attention=deterministic_attention
        )
        return {
            "input_ids": upload(self.layout.input_ids, self.device).long().unsqueeze(0),
            "position_ids": metadata.tree_position_ids.long().unsqueeze(0),
            "packed_seq_params": replace(params, **own),
        }


@dataclass
class RoutedPackedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Packed rows whose tokens bring their experts, for a model that folds inside.

    ``routed_experts`` are integers ``[T, layers, top-k]``, the same on all ranks, -1 in all entries of a token that the
    model routes. The last token of a row is not read.
    """

    routed_experts: torch.Tensor | None = None

    @classmethod
    def of(cls, params: PackedSeqParams, routed_experts: torch.Tensor) -> RoutedPackedSeqParams:
        """Return the parameters of a trainer's packed rows with their experts ``[T, layers, top-k]``."""
        return cls(**vars(params), routed_experts=routed_experts)


@dataclass
class PicturePackedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Packed rows with pictures, for a model with M-RoPE that folds inside and is given ``decoder_input``.

    ``picture_tokens`` are integers ``[T]``, the same on all ranks: -1 for a token of text, and for a token of a picture
    a number that only tokens with the same embedding have, at the same place of equal pictures.
    """

    picture_tokens: torch.Tensor | None = None

    @classmethod
    def of(cls, params: PackedSeqParams, picture_tokens: torch.Tensor) -> PicturePackedSeqParams:
        """Return the parameters of a trainer's packed rows with the numbers ``[T]`` of pictures' tokens."""
        return cls(**vars(params), picture_tokens=picture_tokens)


@dataclass
class RowsPackedSeqParams(TreePackedSeqParams):
    """The tree of a micro-batch that the model folded itself; ``finish`` makes the output of the packed one.

    ``parts`` are those that the decoder runs one after another; empty if it runs the micro-batch at once.
    """

    finish: Callable[[Any], Any] = lambda output: output
    parts: Sequence[DecoderPart] = ()
    report: FoldReport | None = None


def read_rows(
    input_ids: torch.Tensor, packed_seq_params: Any, *, device: torch.device, position_ids: torch.Tensor | None = None
) -> PackedRows:
    """Read the rows of a packed micro-batch on the host.

    Tensors on a device are copied to the host in one transfer, and routes in a second, the only ones of a micro-batch;
    tensors on the host need none.

    Args:
        input_ids: ``[1, T]``.
        packed_seq_params: parameters of the rows, with ``qkv_format="thd"``.
        position_ids: ``[1, T]``, positions that must restart in each row; None skips the check.

    Raises:
        ValueError: the arguments do not describe rows of ``input_ids``.
    """
    borders, slots = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
    if borders is None:
        raise ValueError("packed_seq_params.cu_seqlens_q is missing: it tells where each row begins and ends")
    checked = [] if position_ids is None else [position_ids]
    ids, borders, slots, *positions = _on_host([input_ids, borders, borders if slots is None else slots, *checked])
    if not len(borders) or not len(slots):
        raise ValueError(
            "packed_seq_params.cu_seqlens_q has no entry: it begins with 0, also for a micro-batch without rows, [0]"
        )
    length = np.diff(borders)
    if borders[0] or slots[0] or len(borders) != len(slots) or (length < 0).any() or (length > np.diff(slots)).any():
        raise ValueError(
            f"cu_seqlens_q={borders.tolist()} and cu_seqlens_q_padded={slots.tolist()} must both begin at 0, and each "
            "row of the first must fit into its slot of the second"
        )
    if slots[-1] > len(ids):
        raise ValueError(f"cu_seqlens ends at {slots[-1]}, but input_ids has {len(ids)} tokens")
    row = np.flatnonzero(length)
    routes = getattr(packed_seq_params, "routed_experts", None)
    if routes is not None:
        if routes.ndim != 3 or len(routes) != len(ids):
            raise ValueError(
                f"packed_seq_params.routed_experts must be [{len(ids)}, layers, top-k], a row for each of input_ids, "
                f"not {list(routes.shape)}"
            )
        routes = routes.cpu().numpy()
    tail = len(ids) - int(slots[-1])
    rows = PackedRows(ids=ids, row=row, start=slots[row], length=length[row], device=device, routes=routes, tail=tail)
    for checked_ids in positions:
        for number, start, count in zip(row.tolist(), rows.start.tolist(), rows.length.tolist(), strict=True):
            if (checked_ids[start : start + count] != np.arange(count)).any():
                raise ValueError(f"position_ids of row {number} must count from 0 to be folded")
    return rows


def with_spatial(rows: PackedRows, position_ids: torch.Tensor | None, packed_seq_params: Any) -> PackedRows:
    """Return rows that share a token only while positions ``[3, 1, T]`` and numbers of pictures' tokens agree.

    Raises:
        ValueError: a shape does not fit.
    """
    if position_ids is None or position_ids.shape != (3, 1, rows.size):
        found = "None" if position_ids is None else list(position_ids.shape)
        raise ValueError(
            f"position_embedding_type='mrope' needs position_ids [3, 1, {rows.size}] on every stage, not {found}"
        )
    pictures = getattr(packed_seq_params, "picture_tokens", None)
    if pictures is not None and pictures.shape != (rows.size,):
        raise ValueError(f"picture_tokens must be [{rows.size}], one for each of input_ids, not {list(pictures.shape)}")
    position, *numbers = (one.cpu().numpy() for one in (position_ids[:, 0], pictures) if one is not None)
    spatial = rows.from_first(position)
    return replace(rows.compared_by(*numbers, *spatial), spatial=spatial)


def take_tokens(model: Any, rows: FoldedRows, call: dict[str, Any]) -> dict[str, Any]:
    """Return the ids, positions and embeddings of unique tokens whose rows have positions in three dimensions."""
    if rows.spatial is None:
        return {}
    source = rows.sources_in(rows.layout)
    at = upload(source, rows.device)
    embeddings = call.get("decoder_input")
    if embeddings is not None:
        # The tower computes equal pictures alike, so the gradient of all may enter by one of them.
        embeddings = split_tokens(gather_tokens(embeddings, model).index_select(0, at), model)
    return {
        "input_ids": call["input_ids"].to(rows.device).index_select(1, at),
        "position_ids": upload(rows.spatial[:, None, source], rows.device),
        "decoder_input": embeddings,
    }


def _on_host(tensors: Sequence[torch.Tensor]) -> list[Int64Array]:
    """Return flat int64 arrays of tensors of any shape; those on a device arrive in one transfer."""
    flat = [tensor.reshape(-1).long() for tensor in tensors]
    away = [tensor for tensor in flat if tensor.device.type != "cpu"]
    fetched = iter(torch.cat(away).cpu().split([len(tensor) for tensor in away]) if away else ())
    return [(tensor if tensor.device.type == "cpu" else next(fetched)).numpy() for tensor in flat]
