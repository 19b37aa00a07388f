"""Routes of samples as an engine would give them, and a stock model that replays those of one sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree import Sample

KINDS = ("agree", "one token", "everywhere", "missing")


def routes_of(sample: Sample, shape: tuple[int, int, int], *, salt: str = "", from_token: int = 0) -> np.ndarray:
    """Experts ``[n - 1, layers, top-k]``, a function of a token's prefix and, from a token on, of the salt."""
    layers, top_k, experts = shape
    rows = []
    for t in range(len(sample) - 1):
        named = f"{sample.tokens[: t + 1].tolist()} {salt if t >= from_token else ''}"
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big"))
        rows.append([rng.permutation(experts)[:top_k] for _ in range(layers)])
    return np.array(rows, dtype=np.int64).reshape(-1, layers, top_k)


def with_routes(samples: Sequence[Sample], kind: str, shape: tuple[int, int, int]) -> list[Sample]:
    """The samples with routes that agree, differ from one token of every third sample on, differ everywhere, or miss.

    ``shape`` is the number of layers, of experts of a token and of experts.
    """
    routed = []
    for index, sample in enumerate(samples):
        salt, start = {"everywhere": (str(index), 0), "one token": ("" if index % 3 else "other", 2)}.get(kind, ("", 0))
        given = routes_of(sample, shape, salt=salt, from_token=start)
        if kind == "missing":
            given[len(given) // 2 :: 3] = -1
        routes = None if kind == "missing" and index % 4 == 3 else given
        routed.append(
            Sample(
                tokens=sample.tokens,
                loss_mask=sample.loss_mask,
                merge_key=sample.merge_key,
                source=sample.source,
                signals=replace(sample.signals, routed_experts=routes),
            )
        )
    return routed


class _RowByRow:
    """Routes of one sample's tokens, token by token: the given experts, or the default's for one without."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, default: Callable[..., Any]
    ) -> Any:
        chosen = default(scores, topk, num_groups, group_topk)[1].tolist()
        rows = [own if len(row) == 0 else row for own, row in zip(chosen, self._rows, strict=True)]
        index = torch.tensor(rows)
        return scores[torch.arange(len(rows))[:, None], index], index


def routers(model: Any) -> list[Any]:
    """The model's routers, in the order of its layers."""
    return sorted(
        (module for module in model.modules() if hasattr(module, "router_replay")), key=lambda one: one.layer_number
    )


@contextmanager
def replaying(model: Any, sample: Sample, row_of: Callable[[int], int] = lambda layer: layer) -> Iterator[None]:
    """Route the forward of a stock model, and its recomputation, as the sample says; ``row_of`` a layer from 0."""
    routes = sample.signals.routes
    for router in routers(model) if routes is not None else ():
        assert routes is not None
        rows = [row.tolist() if row.min() >= 0 else [] for row in routes.ids[:, row_of(router.layer_number - 1)]]
        router.router_replay = _RowByRow(rows)
    try:
        yield
    finally:
        for router in routers(model):
            router.router_replay = None
