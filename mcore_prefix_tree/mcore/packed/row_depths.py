"""Losses of multi-token prediction on packed rows that are folded, equal to those that Megatron-Core computes.

A depth's row of the tree predicts what the model's own does: the label behind it. So all depths have the edges of the
rows' labels, and the first labels of a row weigh nothing: its first depth has none for the first position, and so on.

Legend: T tokens of the packed micro-batch, with its padding; E edges, one for every token of every row; K depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree.mcore.packed.answers import RowLogprobs
from mcore_prefix_tree.mcore.packed.packed_rows import FoldedRows
from mcore_prefix_tree.mcore.seam.packed_seq_params import DepthPackedSeqParams, TreePackedSeqParams
from mcore_prefix_tree.plan.model_shape import trained_depths
from mcore_prefix_tree.utils.upload import moved, upload


def with_depths(
    model: Any, rows: FoldedRows, params: TreePackedSeqParams, call: Mapping[str, Any]
) -> TreePackedSeqParams:
    """Return the parameters with those of each depth, if this stage scores depths that learn.

    As in Megatron-Core, a depth's loss is the mean over the labels that ``loss_mask`` keeps, times all of them with
    ``calculate_per_token_loss``; without ``labels`` they are the next tokens, and the mask is that of the tokens.
    """
    depths = trained_depths(vars(model.config))
    if not (depths and model.mtp_process and torch.is_grad_enabled()):
        return params
    labels, mask = call.get("labels"), call.get("loss_mask")
    weight = upload(torch.ones(rows.size) if mask is None else mask.reshape(-1), rows.device).double()
    if labels is None:
        labels, weight = torch.from_numpy(rows.ids).roll(-1), weight.roll(-1)
        weight[upload(rows.start + rows.length - 1, rows.device)] = 0
    edges, position = RowLogprobs(labels=labels).edges(rows)
    weight = weight.index_select(0, position)
    before = upload(rows.from_first(np.arange(rows.size)[None])[0], rows.device).index_select(0, position)
    made = []
    unscored = np.zeros((depths, rows.layout.padded_size))
    for number, depth in enumerate(DepthPackedSeqParams.from_layout(rows.layout, params, unscored), start=1):
        own = weight * (before >= number)
        scale = (weight.sum() if model.config.calculate_per_token_loss else 1) / own.sum().clamp(min=1)
        made.append(replace(moved(depth, rows.device), edges=edges, weight=own, scale=scale))
    return replace(params, depths=tuple(made))
