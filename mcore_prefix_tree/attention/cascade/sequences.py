"""Calls of an ordinary varlen attention whose pairs, on T tokens without padding, are the visible pairs.

One causal call takes all runs, one full call all branches of the same nesting depth, whose queries are disjoint (see
:mod:`mcore_prefix_tree.attention.spans`), as N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mcore_prefix_tree.attention.spans import Int64Array, cut_into_spans
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import upload

Rows = slice | torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """N runs of queries, each of which attends to a separate run of keys.

    Attributes:
        cu_q: borders of the runs of queries, from 0, ``N + 1`` integers; no run is empty.
        cu_k: borders of the runs of keys, likewise.
        causal: whether query i of a run sees keys 0 to i of its run, which has as many keys; otherwise it sees all
            keys.
    """

    cu_q: list[int]
    cu_k: list[int]
    causal: bool

    @classmethod
    def of(cls, query_lens: Int64Array, key_lens: Int64Array, *, causal: bool) -> Sequences:
        """Make sequences of lengths int64 ``[N]``."""
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(lens)]).tolist() for lens in (query_lens, key_lens))
        return cls(cu_q=cu_q, cu_k=cu_k, causal=causal)


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """One full call: rows of the queries that attend and of the keys, ascending, and their sequences."""

    queries: Rows
    keys: Rows
    sequences: Sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class CascadePlan:
    """All calls of a micro-batch: the causal one, and full ones, outermost branches first.

    Queries are the tokens from ``unread`` on, keys all T tokens.
    """

    unread: int
    runs: Sequences
    levels: tuple[Level, ...]


def build_plan(metadata: TreeMetadata) -> CascadePlan:
    """Return the calls of a micro-batch, on the device of its metadata."""
    device = metadata.subtree_end.device
    spans = cut_into_spans(metadata)
    run_lens = np.diff(spans.runs)
    unread = int(spans.runs[0])
    return CascadePlan(
        unread=unread,
        runs=Sequences.of(run_lens, run_lens, causal=True),
        levels=tuple(
            _level(spans.queries[spans.depth == depth] - unread, spans.keys[spans.depth == depth], device)
            for depth in range(int(spans.depth.max(initial=-1)) + 1)
        ),
    )


def _level(queries: Int64Array, keys: Int64Array, device: torch.device) -> Level:
    """Make a full call from spans of queries and of keys, int64 ``[N, 2]``."""
    return Level(
        queries=_rows(queries, device),
        keys=_rows(keys, device),
        sequences=Sequences.of(queries[:, 1] - queries[:, 0], keys[:, 1] - keys[:, 0], causal=False),
    )


def _rows(spans: Int64Array, device: torch.device) -> Rows:
    """Spans ``[N, 2]`` as one slice if they touch, so that nothing is gathered, else as int64 indices."""
    if (spans[1:, 0] == spans[:-1, 1]).all():
        return slice(int(spans[0, 0]), int(spans[-1, 1]))
    lens = spans[:, 1] - spans[:, 0]
    rows = np.arange(lens.sum()) + np.repeat(spans[:, 0] - (np.cumsum(lens) - lens), lens)
    return upload(rows.astype(np.int32), device).long()
