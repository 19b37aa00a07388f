"""One folded micro-batch on its device: everything a forward and a loss need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.logprob import Edges
from mcore_prefix_tree.mcore.seam.carried_keys import Carry
from mcore_prefix_tree.mcore.seam.packed_seq_params import DepthPackedSeqParams, TreePackedSeqParams
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.objectives import LossRows
from mcore_prefix_tree.utils.upload import moved, upload


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """A layout and its tensors.

    Attributes:
        layout: layout of the micro-batch, on the host.
        input_ids: int64 ``[1, P]``.
        position_ids: int64 ``[1, P]``.
        loss_weight: float64 ``[P + M]``, weight of each log-probability in a weighted sum.
        edges: edges to score: the layout's own, or those to a teacher's tokens.
        temperature: float64 ``[P]``, divisor of the logits at each token; None is 1.
        packed_seq_params: parameters with the tree metadata.
        head_chunk_rows: most predictors whose logits the fused head holds at a time; None leaves it to the head.
        rows: rows that the loss of the step's objective reads, unless it is a weighted sum of log-probabilities.
        routes_fit: whether its routes were checked against the model when its step was planned.
        hook_data: data that the job's step hook adds for itself and for its objective's readout, for example outputs of
            teachers; None without a hook.
        forward_only: whether it trains nothing, and only keeps keys and values for others of its step.
        loss_scale: multiplier of the objective's loss, in a step that is divided by its tokens; None in others.
    """

    layout: FlatLayout
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    loss_weight: torch.Tensor
    edges: Edges
    temperature: torch.Tensor | None
    packed_seq_params: TreePackedSeqParams
    head_chunk_rows: int | None = None
    rows: LossRows | None = None
    routes_fit: bool = False
    hook_data: Any = None
    forward_only: bool = False
    loss_scale: float | None = None

    @classmethod
    def from_layout(
        cls,
        layout: FlatLayout,
        *,
        device: torch.device | str = "cpu",
        attention_backend: str = "path",
        deterministic_attention: bool = False,
        needed: npt.NDArray[np.bool_] | None = None,
        head_chunk_rows: int | None = None,
    ) -> MicroBatch:
        """Make a micro-batch of a layout.

        ``needed``, bool ``[P + M]``, is the mask of the log-probabilities that will be read; None is all. For the
        attention's settings see :class:`TreePackedSeqParams`.
        """
        metadata = TreeMetadata.from_layout(layout)
        params = TreePackedSeqParams.from_metadata(
            metadata, attention_backend=attention_backend, deterministic_attention=deterministic_attention
        )
        on_host = cls(
            layout=layout,
            input_ids=upload(layout.input_ids, "cpu").long().unsqueeze(0),
            position_ids=metadata.tree_position_ids.long().unsqueeze(0),
            loss_weight=upload(layout.edge_weight, "cpu"),
            edges=Edges.from_layout(layout, needed=needed),
            temperature=None if layout.temperature is None else upload(layout.temperature, "cpu"),
            packed_seq_params=replace(
                params, depths=DepthPackedSeqParams.from_layout(layout, params, layout.depth_weight)
            ),
            head_chunk_rows=head_chunk_rows,
        )
        return on_host.on(device)

    def on(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on the device, with the plans that attention derived from the tree so far.

        Plans that attention derives later stay with the copy, and are freed with it.
        """
        params = self.packed_seq_params
        metadata = params.tree_metadata
        assert metadata is not None, "a folded micro-batch has it"
        others = (field.name for field in fields(self) if field.name not in ("layout", "packed_seq_params"))
        return replace(
            self,
            **{name: moved(getattr(self, name), device) for name in others},
            packed_seq_params=replace(
                params,
                tree_metadata=metadata.with_plans_on(device),
                depths=moved(params.depths, device),
                carry=None if params.carry is None else params.carry.on(device),
            ),
        )

    def for_scoring(self) -> MicroBatch:
        """Return the micro-batch for a pass over all parts of its tree, forward only, from the first to the last."""
        params = self.packed_seq_params.with_carry(Carry.for_scoring)
        return replace(self, packed_seq_params=replace(params, depths=()))

    def without_backward(self) -> MicroBatch:
        """Return the micro-batch for a run of its step forward only: the numbers are those of training, to the bit."""
        return replace(self, packed_seq_params=self.packed_seq_params.with_carry(Carry.without_backward))

    def without_routes(self) -> MicroBatch:
        """Return the micro-batch for a model that routes by itself; it shares the plans of its attention."""
        params = self.packed_seq_params
        if self.layout.routes is None or params.tree_metadata is None:
            return self
        params = replace(params, tree_metadata=replace(params.tree_metadata, routes=None))
        return replace(self, layout=replace(self.layout, routes=None), packed_seq_params=params)


def from_first_to_last(batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    """Return a step's micro-batches in the order of a scoring pass; those of a step that trains are in reverse."""
    carries = (batch.packed_seq_params.carry for batch in batches if not batch.forward_only)
    return batches[::-1] if any(carry is not None and not carry.keeps for carry in carries) else batches


class WaitingMicroBatch:
    """A micro-batch that waits on the host until the model takes it to its device.

    A step's micro-batches wait in a list, or in Megatron's iterator, until the step ends. On the device each is there
    from the first model chunk's forward to the last chunk's, and afterwards only as long as autograd or recomputation
    holds it: rotary rows and block lists take no more memory than the micro-batches in flight need. Each of this rank's
    ``chunks`` model chunks takes it once in a step.
    """

    def __init__(self, batch: MicroBatch, device: torch.device, *, chunks: int = 1) -> None:
        self._waiting, self._device, self._chunks = batch, device, chunks
        self._taken: tuple[MicroBatch, int] | None = None

    def take(self) -> MicroBatch:
        """Return the micro-batch on the device, to one model chunk after the other. A repeated step takes it again."""
        batch, times = self._taken or (self._waiting.on(self._device), 0)
        self._taken = None if times + 1 == self._chunks else (batch, times + 1)
        return batch
