"""The readout of every token's log-probability, and of the entropies, which ``score`` reads from a policy.

Legend: P padded tokens, M kept edges, R rows, D distributions over kept sets, n tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.tree_chunks import join_scores
from mcore_prefix_tree.logprob import Head, edge_logprobs, head_logprobs
from mcore_prefix_tree.mcore.outputs.readout import FloatArray, SampleScores, VocabularyReadout, split_logits
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.sample import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores(SampleScores):
    """Log-probabilities of one sample.

    Attributes:
        logprobs: ``[n]`` in nats, float32 or the model's dtype if that is wider; NaN for tokens that are not scored.
        entropy: ``[n]``, entropy of the distribution that predicts token t; None if it was not requested.
    """

    logprobs: FloatArray
    entropy: FloatArray | None

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
