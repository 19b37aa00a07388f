"""Arrays of integers in JSON, packed, ``{"dtype": "int16", "shape": [6, 48, 8], "data": "<base64>"}``, or in a file."""

from __future__ import annotations

import base64
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.utils.inputs import check_regular

KEYS = frozenset({"dtype", "shape", "data"})
FILE_KEYS = frozenset({"npz", "key"})
ARRAY_BYTES = 1 << 29  # of one array, as of a line
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


def array_of_file(reference: Mapping[str, Any], folder: Path | None, name: str) -> npt.NDArray[Any]:
    """Return the array ``[...]`` that an object of :data:`FILE_KEYS` names; its file is in ``folder``, if there is one.

    Raises ChatError, with the field's name, if there is no such array. Pickled objects are not read.
    """
    file, key = reference["npz"], reference["key"]
    if not (isinstance(file, str) and isinstance(key, str)):
        raise ChatError(f'field \'{name}\' must name a file and a key of it: {{"npz": "routes.npz", "key": "17"}}')
    if folder is None:
        raise ChatError(f"field '{name}' names {file!r:.80}, but standard input has no folder; name a file of data")
    try:
        path = (folder / file).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ChatError(f"field '{name}.npz' names {file!r:.80}, outside the folder of the data; put it there")
        check_regular(path)
        stat = path.stat()
        arrays = _open(path, stat.st_mtime_ns, stat.st_size)
        member = arrays.zip.NameToInfo.get(f"{key}.npy")
        if member is None:
            raise ChatError(
                f"field '{name}.key' is {key!r:.80}, which {file!r} does not have; it has {len(arrays.files)} keys, "
                f"for example {', '.join(arrays.files[:3])}"
            )
        size = member.file_size
        if size > ARRAY_BYTES:
            raise ChatError(f"field '{name}.key' names {size >> 20:,} MiB of {file!r}; {ARRAY_BYTES >> 20} are allowed")
        return np.asarray(arrays[key])
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if isinstance(error, ChatError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ChatError(
            f"field '{name}.npz' names {file!r:.80}, which cannot be read ({reason:.200}); write arrays of integers "
            "with numpy.savez"
        ) from None


@lru_cache(maxsize=2)
def _open(path: Path, _changed: int, _size: int) -> Any:
    """Return an open file; a job reads its lines one after another."""
    found = np.load(path, allow_pickle=False)
    if not hasattr(found, "files"):
        raise ValueError("it is not an .npz file")
    return found
