"""Experts that an engine sent the tokens of a sample to.

Legend: n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt


class SampleError(ValueError):
    """A sample that cannot be trained on. The message names its source and the field at fault."""


def find_absent(rows: object) -> set[int]:
    """Return the rows of a list that are None, or hold nothing but None."""
    return {
        at
        for at, row in enumerate(rows if isinstance(rows, list) else ())
        if row is None or (isinstance(row, list) and all(entry is None for entry in row))
    }


def fill_absent(rows: Any, absent: set[int], fill: float) -> Any:
    """Return rows with ``fill`` in those that are absent; a list stays a list."""
    if not absent or not isinstance(rows, (list, np.ndarray)):
        return rows
    places = [at for at in range(len(rows)) if at not in absent]
    if not places:
        return np.empty((len(rows), 0), dtype=np.min_scalar_type(fill))
    try:
        known = np.asarray([rows[at] for at in places])
    except ValueError:  # ragged, which is refused
        return rows
    dtype = np.result_type(known.dtype, fill) if known.dtype.kind in "iu" else known.dtype
    filled = np.full((len(rows), *known.shape[1:]), fill, dtype=dtype)
    filled[places] = known
    return filled if isinstance(rows, np.ndarray) or isinstance(rows[places[0]], np.ndarray) else filled.tolist()


def to_integers(value: object) -> npt.NDArray[Any]:
    """Return an array ``[...]``; a ragged list is an empty array of floating numbers."""
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        return np.empty(0)


def freeze(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array ``[...]`` read-only."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RoutedExperts:
    """The experts that an engine sent each token of a sample to, in every layer; a sample makes it of an array."""

    # int8 or int16 [n, layers, top-k], the smaller that holds the experts; -1 in all entries of a token without a
    # route. Entries of layers without experts are any. The last token has no route: nothing that the sample scores
    # depends on it.
    ids: npt.NDArray[np.int8] | npt.NDArray[np.int16]

    @cached_property
    def digest(self) -> npt.NDArray[np.uint64]:
        """A number for the route of each token, uint64 ``[n]``: 0 without a route, almost surely its own for another.

        It orders samples; whether routes are equal is decided by the routes.
        """
        rows = self.ids.reshape(len(self.ids), -1)
        words = np.zeros((len(rows), -(-rows.shape[1] // 4) * 4), dtype=np.int16)  # of either type, four to a word
        words[:, : rows.shape[1]] = rows
        factors = np.random.default_rng(0).integers(1 << 63, size=words.shape[1] // 4, dtype=np.uint64) * 2 + 1
        found: npt.NDArray[np.uint64] = np.maximum(words.view(np.uint64) @ factors, 1)
        found[rows.max(axis=1) < 0] = 0
        return found

    def __repr__(self) -> str:
        return f"RoutedExperts({list(self.ids.shape)})"


def check_routed_experts(routes: object, length: int, source: str) -> RoutedExperts:
    """Return checked routes of ``length`` tokens, the last without one."""
    field = f"{source}: field 'routed_experts'"
    given = routes.ids if isinstance(routes, RoutedExperts) else routes
    given = to_integers(fill_absent(given, find_absent(given), -1))
    if given.ndim != 3 or given.dtype.kind not in "iu" or 0 in given.shape[1:]:
        raise SampleError(
            f"{field} must be integers [tokens, layers, top-k]: for each token and layer a list of experts"
        )
    if len(given) not in (length, length - 1):
        raise SampleError(
            f"{field} has {len(given)} rows but 'tokens' has {length}; there must be one for each, or for each but the "
            "last"
        )
    rows = given[: length - 1]
    low, high = (int(rows.min()), int(rows.max())) if rows.size else (-1, -1)
    if low < -1 or high > np.iinfo(np.int16).max:
        raise SampleError(
            f"{field} has expert {low if low < -1 else high}; experts are 0 to {np.iinfo(np.int16).max}, or -1 in all "
            "entries of a token without a route"
        )
    kept = np.full((length, *given.shape[1:]), -1, dtype=np.int8 if high <= np.iinfo(np.int8).max else np.int16)
    kept[: length - 1] = rows
    return RoutedExperts(ids=freeze(kept))
