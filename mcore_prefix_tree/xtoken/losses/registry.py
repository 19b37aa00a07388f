"""Losses of chunks by name, and their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.xtoken.losses.alm import LikelihoodMatching
from mcore_prefix_tree.xtoken.losses.base import ChunkLoss, Vocabularies
from mcore_prefix_tree.xtoken.losses.gold import Gold
from mcore_prefix_tree.xtoken.losses.p_kl import ProjectedKL
from mcore_prefix_tree.xtoken.losses.partition import PartitionKL
from mcore_prefix_tree.xtoken.losses.uld import UniversalLogits

Mode = Literal["p_kl", "gold", "h_kl", "partition_kl", "alm", "uld"]


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Inputs of a loss, and the settings that it has.

    Attributes:
        projection: the projection matrix.
        tokens: which tokens a chunk has, besides its predictors: chunks that differ in them are different.
        token_bytes: exact bytes of both vocabularies.
        temperature: logits are divided by a temperature, and terms multiplied by its square.
        reverse: there is a reverse form.
        whole: every log-probability of the teacher, so that rows of its likeliest tokens do not do.
    """

    projection: bool = False
    tokens: bool = False
    token_bytes: bool = False
    temperature: bool = False
    reverse: bool = False
    whole: bool = False


MODES: dict[Mode, Reads] = {
    "p_kl": Reads(projection=True, temperature=True, reverse=True),
    "gold": Reads(projection=True, temperature=True, reverse=True, whole=True),
    "h_kl": Reads(projection=True, temperature=True, reverse=True, whole=True),
    "partition_kl": Reads(projection=True, tokens=True, token_bytes=True, whole=True),
    "alm": Reads(tokens=True),
    "uld": Reads(whole=True),
}


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Name of a loss, and its numbers.

    Attributes:
        mode: of the loss.
        temperature: of both models' logits, for modes that have one.
        top_k: columns of the teacher's vocabulary that P-KL compares; None takes all.
        reverse: the KL of the student's distribution from the teacher's.
        tail: uncommon tokens that gold and H-KL compare, at most.
        theta: tempers ALM's likelihoods.
        exported: the teacher's logits are rows of its likeliest tokens, -inf elsewhere.
    """

    mode: Mode = "p_kl"
    temperature: float = 1.0
    top_k: int | None = None
    reverse: bool = False
    tail: int = 8192
    theta: float = 1.0
    exported: bool = False

    @property
    def reads(self) -> Reads:
        """Return the inputs of the loss."""
        return MODES[self.mode]

    @property
    def scale(self) -> float:
        """Factor on every term: the square of the temperature keeps the size of the gradients."""
        return self.temperature**2


def make_loss(
    settings: LossSettings, vocabularies: Vocabularies, *, columns: npt.NDArray[np.int64] | None = None
) -> ChunkLoss:
    """Return a loss; ``columns``, int64 ids ascending, are those that P-KL compares, None for all."""
    if settings.mode == "p_kl":
        return ProjectedKL(vocabularies, columns, reverse=settings.reverse, named=settings.exported)
    if settings.mode in ("gold", "h_kl"):
        relaxed = settings.mode == "h_kl"
        return Gold(vocabularies, relaxed=relaxed, reverse=settings.reverse, tail=settings.tail)
    if settings.mode == "partition_kl":
        return PartitionKL(vocabularies)
    if settings.mode == "alm":
        return LikelihoodMatching(vocabularies, theta=settings.theta)
    return UniversalLogits(vocabularies)
