"""The trajectories of Megatron-LM's micro-batches, taken out of its padded rows or its packed bins.

Entry t of an array of token values belongs to ``tokens[t]``; Megatron-LM's tensors of log-probabilities begin with
the second token, and so are one shorter.

Legend: n tokens of a trajectory, k of them scored; b rows, s tokens of each with its padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.mcore.megatron_lm.rl.script import Script

# In the order of train_rl.py's own unpacking of a batch.
OLD, REFERENCE, INFERENCE = "old_logprobs", "ref_logprobs", "inference_logprobs"


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One trajectory without its padding; cut behind its last scored token, since nothing reads later ones.

    Attributes:
        tokens: int64 ``[n]``, n >= 1.
        loss_mask: float32 ``[n]``, 0 for the first token.
        advantage: advantage of all its tokens.
        columns: values of its scored tokens, ``[k]`` each.
    """

    tokens: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    advantage: float
    columns: Mapping[str, npt.NDArray[np.floating]]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopMicroBatch:
    """One of Megatron-LM's micro-batches.

    Attributes:
        tokens: number of scored tokens, as its loss counts them: at least 1.
        sequences: number of sequences, as Megatron-LM counts them.
        dtypes: dtype of each tensor that the columns were taken from.
    """

    trajectories: tuple[Trajectory, ...]
    tokens: float
    sequences: int
    dtypes: Mapping[str, torch.dtype]


def read_micro_batch(batch: Any, script: Script, *, packed: bool, corrects: bool) -> LoopMicroBatch:
    """Read a micro-batch that Megatron-LM's data iterator returned: tensors of padded rows, or the number of a bin.

    ``packed`` and ``corrects`` are ``--rl-use-sequence-packing`` and ``--rl-inference-logprobs-is-correction``.
    """
    if packed:
        context = script.state().packing_context
        (_, advantages, old, mask, _, reference, inference, starts, lengths, _, _) = values = script.packed_bin(
            batch[0].item(), context, corrects
        )
        tokens = values[0]
        # Of the first token of a bin there is no mask, and nothing scores it.
        mask = torch.nn.functional.pad(mask, (1, 0))
        spans = [(0, start, length) for start, length in zip(starts, lengths, strict=False)]
    else:
        tokens, advantages, old, mask, _, reference, inference = batch
        spans = [(row, 0, tokens.shape[1]) for row in range(len(tokens))]
    columns = {OLD: old, REFERENCE: reference} | ({INFERENCE: inference} if corrects and inference is not None else {})
    host = {name: _on_host(values) for name, values in columns.items()}
    ids, masks, advantage = tokens.cpu().numpy(), mask.float().cpu().numpy(), _on_host(advantages)
    return LoopMicroBatch(
        trajectories=tuple(
            _trajectory(
                ids[row, start : start + length],
                masks[row, start : start + length],
                float(advantage[at]),
                {name: values[row, start : start + length - 1] for name, values in host.items()},
            )
            for at, (row, start, length) in enumerate(spans)
        ),
        tokens=float(masks[:, 1:].sum()) or 1.0,
        sequences=len(spans),
        dtypes={name: values.dtype for name, values in columns.items()},
    )


def _on_host(values: torch.Tensor) -> npt.NDArray[np.floating]:
    """Return a tensor of any shape as an array on the host; NumPy has no bfloat16."""
    wide = values.float() if values.dtype.itemsize < 4 else values
    found: npt.NDArray[np.floating] = wide.cpu().numpy()
    return found


def _trajectory(
    ids: npt.NDArray[np.int64],
    mask: npt.NDArray[np.float32],
    advantage: float,
    columns: Mapping[str, npt.NDArray[np.floating]],
) -> Trajectory:
    """Cut one out of its row; a trajectory without a scored token keeps its first."""
    scored = np.flatnonzero(mask[1:]) + 1
    length = int(scored[-1]) + 1 if len(scored) else 1
    kept = mask[:length].copy()
    kept[:1] = 0  # nothing predicts it
    tokens = ids[:length] if len(ids) else np.zeros(1, dtype=np.int64)
    return Trajectory(
        tokens=tokens,
        loss_mask=kept if len(ids) else np.zeros(1, dtype=np.float32),
        advantage=advantage,
        columns={name: values[scored - 1] for name, values in columns.items()},
    )
