"""Arrays of a sample's fields, as users give them."""

from __future__ import annotations

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
