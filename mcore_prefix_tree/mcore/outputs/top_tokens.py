"""The readout of the likeliest tokens, which ``score`` reads from a teacher.

Legend: P padded tokens, R rows, n tokens of a sample, k tokens of each prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.logprob import top_logprobs
from mcore_prefix_tree.mcore.outputs.logprobs import Logprobs
from mcore_prefix_tree.mcore.outputs.readout import Readout, SampleScores, VocabularyReadout, split_logits
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import Teacher


@dataclass(frozen=True, kw_only=True, eq=False)
class TopTokens(SampleScores):
    """The k likeliest tokens of every prediction of one sample, for a distillation.

    ``teacher`` has ids and log-probabilities, ``[n, k]`` each, the likeliest first; ids from 0 and NaN if not scored.
    """

    teacher: Teacher

    def fault(self, sample: Sample) -> str | None:
        return self._not_finite("teacher's log-probability", self.teacher.logprobs.min(axis=1), sample)

    def columns(self, column: str) -> dict[str, Any]:
        return {column: self.teacher}


@dataclass(frozen=True, kw_only=True)
class TopLogprobs(VocabularyReadout[tuple[torch.Tensor, torch.Tensor]]):
    """Ids and log-probabilities ``[R, k]`` after each of ``batch.edges.row``, the likeliest first, from the logits.

    ``k`` is at most the vocabulary; ``vocab_size`` is its size before padding, None means no padding.
    """

    fused: bool = False
    k: int
    vocab_size: int | None = None

    def _read_logits(self, logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and log-probabilities ``[R, k]`` of local logits ``[P, V / tp]``."""
        split = split_logits(logits, batch)
        return top_logprobs(logits, batch.edges.row, self.k, vocab_size=self.vocab_size, **split)

    def flat(self, output: torch.Tensor, batch: MicroBatch) -> Teacher:
        """Read both onto the host, ``[P, k]`` each, at the predictors."""
        return self.on_host(*self.read(output, batch), batch)

    def on_host(self, token_ids: torch.Tensor, top: torch.Tensor, batch: MicroBatch) -> Teacher:
        """Return the predictors' ids and log-probabilities, ``[R, k]`` each, as ``[P, k]`` on the host."""
        size = (batch.layout.padded_size, self.k)
        ids = np.tile(np.arange(self.k, dtype=np.int32), (size[0], 1))
        values = top.cpu().numpy()
        logprobs = np.full(size, np.nan, dtype=values.dtype)
        ids[batch.edges.host_row] = token_ids.cpu().numpy()
        logprobs[batch.edges.host_row] = values
        return Teacher(token_ids=ids, logprobs=logprobs)

    def sample_scores(self, flat: Teacher, tokens: npt.NDArray[np.int32], scored: npt.NDArray[np.bool_]) -> TopTokens:
        before = np.concatenate([tokens[:1], tokens[:-1]])  # nothing comes before the first, and it is not scored
        teacher = Teacher(
            token_ids=np.where(scored[:, None], flat.token_ids[before], np.arange(self.k, dtype=np.int32)),
            logprobs=np.where(scored[:, None], flat.logprobs[before], flat.logprobs.dtype.type("nan")),
        )
        return TopTokens(scored=scored, teacher=teacher)


@dataclass(frozen=True, kw_only=True)
class ExportedRows(Readout[Any]):
    """The likeliest tokens of every prediction (``top``), and the log-probability of the next token (``realised``)."""

    top: TopLogprobs
    realised: Logprobs = field(default_factory=partial(Logprobs, fused=False))

    def arguments(self, layer: Any, batch: MicroBatch) -> dict[str, Any]:
        """Request the logits, which both read."""
        return self.top.arguments(layer, batch)

    def read(self, output: torch.Tensor, batch: MicroBatch) -> tuple[Any, Any]:
        """Read the likeliest tokens and the next one from local logits ``[1, P, V / tp]``."""
        return self.top.read(output, batch), self.realised.read(output, batch)

    def flat(self, output: torch.Tensor, batch: MicroBatch) -> tuple[Any, Any]:
        """Read both onto the host, ``[P, k]`` and ``[P]``."""
        (ids, top), (logprob, _) = self.read(output, batch)
        return self.top.on_host(ids, top, batch), (logprob.cpu().numpy(), None)

    def sample_scores(
        self, flat: tuple[Any, Any], tokens: npt.NDArray[np.int32], scored: npt.NDArray[np.bool_]
    ) -> TopTokens:
        """Return a sample's rows; see :class:`TopTokens`."""
        top = self.top.sample_scores(flat[0], tokens, scored)
        logprobs = self.realised.sample_scores(flat[1], tokens, scored).logprobs
        return replace(top, teacher=replace(top.teacher, realised=logprobs))
