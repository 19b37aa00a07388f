"""Readouts of a scalar head: its values, and a loss of them.

Legend: P padded tokens, M kept edges, n tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.tree_chunks import ChunkLayout, join_scores, whole_layouts
from mcore_prefix_tree.mcore.outputs.readout import FloatArray, Readout, SampleScores, T_co
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.scalar_output_layer import ScalarHead
from mcore_prefix_tree.objectives import LossOutput, TokenObjective
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.utils.upload import upload


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleValues(SampleScores):
    """Values of one sample."""

    # [n], a critic's values; entry t for the state that token t is chosen in, as in Signals.values. float32, or the
    # model's dtype if that is wider; NaN for tokens that are not scored.
    values: FloatArray
    last: float  # value after the last token: a reward model's reward

    def fault(self, sample: Sample) -> str | None:
        fault = self._not_finite("value", self.values, sample)
        if fault is None and not np.isfinite(self.last):
            fault = f"{sample.source}: the value after the last token is {self.last}; the model's weights are bad"
        return fault

    def columns(self, column: str) -> dict[str, Any]:
        return {column: {"values": self.values, "reward": self.last}[column]}


class _OfScalarHead(Readout[T_co]):
    def arguments(self, layer: Any, batch: MicroBatch) -> dict[str, Any]:
        if not isinstance(layer, ScalarHead):
            raise ValueError(
                f"{type(self).__name__} reads a scalar head, but the model ends in a vocabulary's; pass the model "
                "through with_scalar_head"
            )
        return {}


class Values(_OfScalarHead[torch.Tensor]):
    """Values of a scalar head after each token, ``[P]`` in fp32 or better."""

    def read(self, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the values ``[P]`` of the stage's output ``[1, P, 1]``."""
        return output.flatten()

    def flat(self, output: torch.Tensor, batch: MicroBatch) -> FloatArray:
        """Read the values of the output ``[1, P, 1]`` onto the host, ``[P + M]``, or ``[P]`` of a chunk."""
        values: FloatArray = self.read(output, batch).cpu().numpy()
        return values if isinstance(batch.layout, ChunkLayout) else _with_kept(values, batch.layout)

    def joined(self, layouts: Sequence[FlatLayout], flats: Sequence[FloatArray]) -> FloatArray:
        """Return :meth:`flat` of a tree from those of its chunks."""
        (whole,) = whole_layouts(layouts)
        return _with_kept(join_scores(layouts, flats, of_edges=False), whole)

    def sample_scores(
        self, flat: FloatArray, tokens: npt.NDArray[np.int32], scored: npt.NDArray[np.bool_]
    ) -> SampleValues:
        own = flat[tokens]
        before = np.concatenate([own[:1], own[:-1]])  # nothing comes before the first, and it is not scored
        values = np.where(scored, before, own.dtype.type("nan"))
        return SampleValues(scored=scored, values=values, last=float(own[-1]))


def _with_kept(values: FloatArray, layout: FlatLayout) -> FloatArray:
    """Return values ``[P + M]`` for those of tokens, ``[P]``: a kept edge's is its token's."""
    return values if layout.kept is None else np.append(values, values[layout.kept.token])


@dataclass(frozen=True, kw_only=True)
class ValueLoss(_OfScalarHead[LossOutput]):
    """An objective's loss on the values; the micro-batches have its rows."""

    objective: TokenObjective

    def read(self, output: torch.Tensor, batch: MicroBatch) -> LossOutput:
        """Return the loss of the stage's output ``[1, P, 1]``; the value of a kept edge is its predictor's."""
        values, kept = output.flatten(), batch.layout.kept
        if kept is not None:
            predictor = upload(kept.predictor[kept.distribution], values.device)
            later = values.new_zeros(len(batch.layout.edge_predictor) - len(values))
            values = torch.cat([values, later, values[predictor]])
        assert batch.rows is not None, "the objective makes them"
        return batch.rows.loss_of(self.objective, values, None)
