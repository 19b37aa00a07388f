"""Losses of chunks by name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.xtoken.losses.alm import LikelihoodMatching
from mcore_prefix_tree.xtoken.losses.chunk_loss import ChunkLoss, Vocabularies
from mcore_prefix_tree.xtoken.losses.gold import Gold
from mcore_prefix_tree.xtoken.losses.p_kl import ProjectedKL
from mcore_prefix_tree.xtoken.losses.partition import PartitionKL
from mcore_prefix_tree.xtoken.losses.uld import UniversalLogits
from mcore_prefix_tree.xtoken.modes import LossSettings


def make_loss(
    settings: LossSettings, vocabularies: Vocabularies, *, columns: npt.NDArray[np.int64] | None = None
) -> ChunkLoss:
    """Return a loss; P-KL compares ``columns``, int64 ids ascending, None for all."""
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
