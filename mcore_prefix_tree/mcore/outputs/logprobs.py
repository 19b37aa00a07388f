"""Readouts that ``score`` reads: a policy's log-probabilities and entropies, and a teacher's likeliest tokens.

Legend: P padded tokens, M kept edges, R rows, D distributions over kept sets, n tokens of a sample,
k tokens of each prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.tree_chunks import join_scores
from mcore_prefix_tree.logprob import Head, edge_logprobs, head_logprobs, top_logprobs
from mcore_prefix_tree.mcore.outputs.readout import FloatArray, Readout, SampleScores, VocabularyReadout, split_logits
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import Teacher


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores(SampleScores):
    """Log-probabilities of one sample."""

    # [n] in nats, float32 or the model's dtype if that is wider; NaN for tokens that are not scored.
    logprobs: FloatArray
    entropy: FloatArray | None  # [n], entropy of the distribution that predicts token t; None if it was not requested

    def fault(self, sample: Sample) -> str | None:
        fault = self._not_finite("log-probability", self.logprobs, sample)
        if fault is None and self.entropy is not None:
            fault = self._not_finite("entropy", self.entropy, sample)
        return fault

    def columns(self, column: str) -> dict[str, Any]:
        return {column: self.logprobs} | ({} if self.entropy is None else {"entropy": self.entropy})


@dataclass(frozen=True, kw_only=True)
class Logprobs(VocabularyReadout[tuple[torch.Tensor, torch.Tensor | None]]):
    """Log-probabilities ``[P + M]`` of all tokens with an edge, and entropies ``[P + M]`` of the predictions or None.

    Attributes:
        entropy: whether to compute the entropies too.
    """

    entropy: bool = False

    def _pack(self, batch: MicroBatch, hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
        """Return ``[P + M, 1]``, with entropies ``[P + M, 2]``, from ``[R + D, h]`` and ``weight`` ``[V / tp, h]``."""
        logprob, entropy = head_logprobs(hidden, weight, head, with_entropy=self.entropy)
        return torch.stack([logprob] if entropy is None else [logprob, entropy], dim=1)

    def _unpack(self, packed: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities and entropies ``[P + M]`` of the packed ``[P + M, 1]`` or ``[P + M, 2]``."""
        return packed[:, 0], packed[:, 1] if self.entropy else None

    def _read_logits(self, logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities and entropies ``[P + M]`` of local logits ``[P, V / tp]``."""
        return edge_logprobs(logits, batch.edges, with_entropy=self.entropy, **split_logits(logits, batch))

    def flat(self, output: torch.Tensor, batch: MicroBatch) -> tuple[FloatArray, FloatArray | None]:
        """Read both onto the host, ``[P + M]`` each; the entropies also stand at the predicted tokens."""
        logprob, entropy = self.read(output, batch)
        if entropy is not None:
            behind = len(batch.layout.edge_predictor)
            at_kept = entropy[behind:]
            entropy = batch.edges.at_tokens(entropy[batch.edges.predictor])
            entropy[behind:] = at_kept
        return logprob.cpu().numpy(), None if entropy is None else entropy.cpu().numpy()

    def joined(
        self, layouts: Sequence[FlatLayout], flats: Sequence[tuple[FloatArray, FloatArray | None]]
    ) -> tuple[FloatArray, FloatArray | None]:
        """Return :meth:`flat` of a tree, ``[P]`` each, from those of its chunks."""
        entropies = [entropy for _, entropy in flats if entropy is not None]
        logprob = join_scores(layouts, [logprob for logprob, _ in flats])
        return logprob, join_scores(layouts, entropies) if entropies else None

    def sample_scores(
        self, flat: tuple[FloatArray, FloatArray | None], tokens: npt.NDArray[np.int32], scored: npt.NDArray[np.bool_]
    ) -> Scores:
        logprobs, entropy = (
            None if values is None else np.where(scored, values[tokens], values.dtype.type("nan")) for values in flat
        )
        assert logprobs is not None
        return Scores(scored=scored, logprobs=logprobs, entropy=entropy)


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

    def joined(self, layouts: Sequence[FlatLayout], flats: Sequence[Teacher]) -> Teacher:
        """Return :meth:`flat` of a tree, ``[P, k]`` each, from those of its chunks."""
        ids = join_scores(layouts, [flat.token_ids for flat in flats], of_edges=False)
        return Teacher(token_ids=ids, logprobs=join_scores(layouts, [flat.logprobs for flat in flats], of_edges=False))

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

    def joined(self, layouts: Sequence[FlatLayout], flats: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return :meth:`flat` of a tree, ``[P, k]`` and ``[P]``, from those of its chunks."""
        top, realised = zip(*flats, strict=True)
        return self.top.joined(layouts, top), self.realised.joined(layouts, realised)

    def sample_scores(
        self, flat: tuple[Any, Any], tokens: npt.NDArray[np.int32], scored: npt.NDArray[np.bool_]
    ) -> TopTokens:
        """Return a sample's rows; see :class:`TopTokens`."""
        top = self.top.sample_scores(flat[0], tokens, scored)
        logprobs = self.realised.sample_scores(flat[1], tokens, scored).logprobs
        return replace(top, teacher=replace(top.teacher, realised=logprobs))
