"""Cost of a micro-batch: token-wise work, attention by visible pairs, scoring, branching, and a fixed overhead.

A token at depth d sees d + 1 keys in any layout. So the cost of a path is a function of its length, and the cost of a
set of samples is the sum over their unique tokens. A vocabulary head that computes only scored tokens adds a cost to
each of these. Recurrent layers add a cost to each segment (a run of tokens without branching) and to each level of
segments, since they compute one level after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.plan.flops import Counts, ModelWork
from mcore_prefix_tree.plan.model_shape import CHUNK

UNITS_PER_TOKEN = 1024


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a micro-batch: the sum of each cost times its number, and ``micro_batch``.

    Attributes:
        token: cost of one physical token; FLOPs from :meth:`from_work`.
        pair: cost of one visible (query, key) pair, in the same unit.
        scored: cost of scoring a unique token, in addition to ``token``, in the same unit; 0 if the head computes all
            tokens.
        segment: cost of a segment in recurrent layers, in addition to its tokens: on average half a chunk that no token
            fills. It is 0 without such layers, as is ``level``.
        level: cost of a level of segments; FLOPs do not show it.
        micro_batch: fixed cost of a micro-batch, in the same unit.
        state_tokens: tokens of the budget, not a cost, that states of recurrent layers take for each path that joins
            another: two states, of the branch point's two children. Later children take one.

    Raises:
        ValueError: raised on construction, if a cost is negative or not finite, or a token costs nothing.
    """

    token: float = 1.0
    pair: float = 0.0
    scored: float = 0.0
    segment: float = 0.0
    level: float = 0.0
    micro_batch: float = 0.0
    state_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"CostModel.{name}={value} must be finite and >= 0")
        if self.token == 0:
            raise ValueError("CostModel.token=0: a token has to cost something")

    @classmethod
    def from_work(cls, work: ModelWork) -> CostModel:
        """Return the FLOPs of forward and backward, with no sliding windows, and top-k keys of each token if sparse."""
        topk = work.topk or 0
        each = (Counts(1, 0, 0, 0, 0, topk), Counts(0, 1, 1, 0), Counts(0, 0, 0, 1), Counts(0, 0, 0, 0, CHUNK // 2))
        token, pair, scored, segment = (work.of(counts).whole.total for counts in each)
        return cls(token=token, pair=pair, scored=scored, segment=segment, state_tokens=work.state_tokens)

    def of_path(self, length: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """``[...]``: cost of the first ``length`` tokens of a path, for every entry."""
        n = length.astype(np.float64)
        paths: npt.NDArray[np.float64] = self.token * n + self.pair * (n * (n + 1) / 2)
        return paths

    def units_of_path(self, length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return :meth:`of_path` for lengths ``[n]`` in integer units of ``token / UNITS_PER_TOKEN``, int64 ``[n]``.

        Unlike those of floats, sums of integers, and so the plans, are the same on ranks with unlike processors.
        """
        return np.rint(self.of_path(length) * (UNITS_PER_TOKEN / self.token)).astype(np.int64)

    @property
    def units_of_micro_batch(self) -> int:
        """:attr:`micro_batch` in the units of :meth:`units_of_path`."""
        return round(self.micro_batch * (UNITS_PER_TOKEN / self.token))

    def units_of_scored(self, scored: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the cost of scoring so many tokens, int64 ``[n]``, in the units of :meth:`units_of_path`."""
        return np.rint(scored.astype(np.float64) * (self.scored * UNITS_PER_TOKEN / self.token)).astype(np.int64)

    def saved_tokens(self, common: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the tokens of the budget, int64 ``[...]``, that sharing so many tokens saves, int64 ``[...]``.

        Never less than none: states below a shorter path count as many tokens as that has.
        """
        return np.maximum(common - self.state_tokens, 0)

    @property
    def units_of_segment(self) -> int:
        """:attr:`segment` in the units of :meth:`units_of_path`."""
        return round(self.segment * (UNITS_PER_TOKEN / self.token))

    @property
    def units_of_level(self) -> int:
        """:attr:`level` in the units of :meth:`units_of_path`."""
        return round(self.level * (UNITS_PER_TOKEN / self.token))

    def of_micro_batch(
        self, tokens: float, pairs: float, scored: float = 0.0, segments: float = 0.0, levels: float = 0.0
    ) -> float:
        """Cost of a micro-batch of ``tokens`` physical tokens, some of them scored, and ``pairs`` visible pairs."""
        of_tokens = self.token * tokens + self.pair * pairs + self.scored * scored
        return of_tokens + self.segment * segments + self.level * levels + self.micro_batch


def words_of_states(cost_model: CostModel | None) -> str:
    """Return what a message about a budget says of states: nothing without any."""
    if cost_model is None or not cost_model.state_tokens:
        return ""
    return f" (states of recurrent layers count as {cost_model.state_tokens} tokens for each path that joins a tree)"
