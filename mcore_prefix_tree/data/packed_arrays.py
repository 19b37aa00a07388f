"""Arrays of integers in JSON, packed: ``{"dtype": "int16", "shape": [6, 48, 8], "data": "<base64>"}``."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.json_fields import ChatError

KEYS = frozenset({"dtype", "shape", "data"})
_DTYPES = ("int8", "uint8", "int16", "int32", "int64")


def pack_array(array: npt.NDArray[np.integer]) -> dict[str, Any]:
    """Return an array ``[...]`` as an object for JSON; its bytes are little-endian."""
    data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64.b64encode(data).decode()}


def unpack_array(packed: Mapping[str, Any], name: str) -> npt.NDArray[np.integer]:
    """Return the array ``[...]`` of an object of :data:`KEYS`; raise ChatError, with the field's name, if it is not."""
    dtype, shape, text = packed["dtype"], np.asarray(packed["shape"]), packed["data"]
    if dtype not in _DTYPES:
        raise ChatError(f"field '{name}.dtype' must be one of {', '.join(_DTYPES)}, not {dtype!r:.40}")
    if shape.ndim != 1 or shape.dtype.kind not in "iu" or not len(shape) or (shape < 0).any():
        raise ChatError(f"field '{name}.shape' must be a list of sizes")
    try:
        data = base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise ChatError(f"field '{name}.data' must be the base64 text of the array's bytes") from None
    needed = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if len(data) != needed:
        raise ChatError(
            f"field '{name}.data' has {len(data)} bytes, but an array of {dtype} and shape {shape.tolist()} has "
            f"{needed}; give the shape and dtype that the engine reports"
        )
    found: npt.NDArray[np.integer] = np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return found
