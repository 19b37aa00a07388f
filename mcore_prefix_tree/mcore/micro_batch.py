"""One folded micro-batch on its device: everything a forward and a loss need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.logprob import Edges
from mcore_prefix_tree.mcore.packed_seq_params import TreePackedSeqParams
from mcore_prefix_tree.metadata import TreeMetadata


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """A layout and its tensors.

    Attributes:
        layout: on the host.
        input_ids: int64 ``[1, P]``.
        position_ids: int64 ``[1, P]``.
        loss_weight: float32 ``[P]``.
        edges: of the layout.
        packed_seq_params: with the tree metadata.
    """

    layout: FlatLayout
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    loss_weight: torch.Tensor
    edges: Edges
    packed_seq_params: TreePackedSeqParams

    @classmethod
    def from_layout(
        cls, layout: FlatLayout, *, device: torch.device | str = "cpu", attention_backend: str = "path"
    ) -> MicroBatch:
        """Moves what a layout holds to ``device``; see :class:`TreePackedSeqParams` for ``attention_backend``."""
        metadata = TreeMetadata.from_layout(layout, device=device)
        return cls(
            layout=layout,
            input_ids=torch.from_numpy(layout.input_ids).to(device).unsqueeze(0),
            position_ids=metadata.tree_position_ids.long().unsqueeze(0),
            loss_weight=torch.from_numpy(layout.loss_weight).to(device),
            edges=Edges.from_layout(layout, device=device),
            packed_seq_params=TreePackedSeqParams.from_metadata(metadata, attention_backend=attention_backend),
        )
