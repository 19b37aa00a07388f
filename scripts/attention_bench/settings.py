"""Settings of the attention benchmark, and one row of its result.

Legend: T tokens, H query heads, K key/value heads, D head_dim, W value head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mcore_prefix_tree.attention import AttentionOptions, Case


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        heads: H.
        kv_heads: K.
        head_dim: D.
        value_dim: W.
        dtype: name of a torch dtype.
        device: ``cuda`` or ``cpu``.
        repeats: timed rounds, in each of which every method runs once.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str
    repeats: int

    @property
    def case(self) -> Case:
        """Return the case that back-ends accept or refuse."""
        device = torch.device(self.device)
        return Case(
            device=device,
            capability=torch.cuda.get_device_capability() if device.type == "cuda" else None,
            dtype=getattr(torch, self.dtype),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            needs_grad=True,
            options=AttentionOptions(softmax_scale=1 / math.sqrt(self.head_dim)),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one layout of one workload.

    Attributes:
        method: its name.
        layout: ``tree``, ``unfolded`` or ``dense``.
        deterministic: whether the deterministic mode was requested.
        tokens: tokens of the layout.
        pairs: visible pairs of the layout.
        forward_seconds, backward_seconds: seconds of each round.
        metadata_seconds: seconds for plans that are derived from a micro-batch once and shared by its layers.
        peak_bytes: peak of forward and backward in addition to the inputs; None if it is unknown.
        tile_efficiency: visible pairs over visited ones, by block size, of methods that visit blocks of our lists.
        difference: largest relative difference in the norm of out, dQ, dK and dV from the first method on the layout.
        parts: number of consecutive calls per round, if the batch does not fit the memory; ``peak_bytes`` and
            ``difference`` are those of the first call.
    """

    method: str
    layout: str
    deterministic: bool
    tokens: int
    pairs: int
    forward_seconds: list[float]
    backward_seconds: list[float]
    metadata_seconds: float
    peak_bytes: int | None
    tile_efficiency: dict[str, float]
    difference: float
    parts: int = 1
