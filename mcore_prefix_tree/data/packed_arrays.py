"""Arrays of integers in JSON, packed, ``{"dtype": "int16", "shape": [6, 48, 8], "data": "<base64>"}``, or in a file."""

from __future__ import annotations

import base64
import io
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format

from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.utils.inputs import MOST, check_regular

KEYS = frozenset({"dtype", "shape", "data"})
FILE_KEYS = frozenset({"npz", "key"})
_HEADER_BYTES = 1 << 16
_MOST_EXPERTS = 1 << 16  # of a token, in all layers
_HEADERS: dict[object, Any] = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}
_read_magic: Any = format.read_magic  # without types
_BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the codecs that unpack no more than they are asked for
_DTYPES = ("int8", "uint8", "int16", "int32", "int64")


def pack_array(array: npt.NDArray[np.integer]) -> dict[str, Any]:
    """Return an array ``[...]`` as an object for JSON; its bytes are little-endian."""
    data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64.b64encode(data).decode()}


def unpack_array(packed: Mapping[str, Any], name: str) -> npt.NDArray[np.integer]:
    """Return ``[tokens, layers, top-k]`` of an object of :data:`KEYS`; raise ChatError, with the field's name."""
    dtype, shape, text = packed["dtype"], packed["shape"], packed["data"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ChatError(f"field '{name}.dtype' must be one of {', '.join(_DTYPES)}, not {dtype!r:.40}")
    sizes = shape.tolist() if isinstance(shape, np.ndarray) else shape
    if not isinstance(sizes, list) or not _are_sizes(sizes, MOST):
        raise ChatError(f"field '{name}.shape' must be a list of sizes, [tokens, layers, top-k]")
    try:
        data = base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise ChatError(f"field '{name}.data' must be the base64 text of the array's bytes") from None
    needed = math.prod(sizes) * np.dtype(dtype).itemsize
    if len(data) != needed:
        raise ChatError(
            f"field '{name}.data' has {len(data)} bytes, but an array of {dtype} and shape {sizes} has {needed}; give "
            "the shape and dtype that the engine reports"
        )
    found: npt.NDArray[np.integer] = np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(sizes)
    return found


def _are_sizes(sizes: Sequence[object], tokens: int) -> bool:
    """Return whether sizes are those of ``[tokens, layers, top-k]``, of at most ``tokens``. Booleans are none."""
    whole = [size for size in sizes if type(size) is int and 0 <= size <= MOST]
    if not len(sizes) == len(whole) == 3:
        return False
    return whole[0] <= tokens and max(*whole[1:], whole[1] * whole[2]) <= _MOST_EXPERTS


def array_of_file(reference: Mapping[str, Any], folder: Path | None, name: str, tokens: int) -> npt.NDArray[Any]:
    """Return the integers ``[tokens, layers, top-k]`` that an object of :data:`FILE_KEYS` names, of at most ``tokens``.

    Their file is in ``folder``, if there is one. Raises ChatError, with the field's name, if there is no such array,
    before the array is read. Pickled objects are not read.
    """
    file, key = reference["npz"], reference["key"]
    if not (isinstance(file, str) and isinstance(key, str)):
        raise ChatError(f'field \'{name}\' must name a file and a key of it: {{"npz": "routes.npz", "key": "17"}}')
    if folder is None:
        raise ChatError(f"field '{name}' names {file!r:.80}, but standard input has no folder; name a file of data")
    try:
        path = os.path.realpath(folder / file)
        if not Path(path).is_relative_to(os.path.realpath(folder)):
            raise ChatError(f"field '{name}.npz' names {file!r:.80}, outside the folder of the data; put it there")
        check_regular(path)
        stat = os.stat(path)
        archive = _open(path, stat.st_mtime_ns, stat.st_size, os.getpid())
        member = archive.NameToInfo.get(f"{key}.npy")
        if member is None:
            keys = [one.removesuffix(".npy") for one in archive.NameToInfo]
            raise ChatError(
                f"field '{name}.key' is {key!r:.80}, which {file!r:.80} does not have; it has {len(keys)} keys, for "
                f"example {', '.join(keys[:3]):.80}"
            )
        with archive.open(member) as stream:
            head = io.BytesIO(stream.read(_HEADER_BYTES))
        shape, by_columns, dtype = _HEADERS[_read_magic(head)](head)
        if dtype.kind not in "iu" or not _are_sizes(shape, tokens):
            raise ChatError(
                f"field '{name}.key' names {dtype!s:.40} {shape!s:.80} of {file!r:.80}; it must be integers [tokens, "
                "layers, top-k] of the line's tokens"
            )
        if head.tell() + math.prod(shape) * dtype.itemsize != member.file_size or member.compress_type not in _BOUNDED:
            raise ValueError
        found = np.frombuffer(archive.read(member), dtype, offset=head.tell())
        routes: npt.NDArray[Any] = found.reshape(shape, order="F" if by_columns else "C")
        return routes
    except ChatError:
        raise
    except Exception as error:  # a damaged archive makes zipfile and NumPy raise nearly anything
        reason = getattr(error, "strerror", None) or "it is not an .npz file, or is damaged"
        raise ChatError(
            f"field '{name}.npz' names {file!r:.80}, which cannot be read ({reason}); write arrays of integers with "
            "numpy.savez"
        ) from None


@lru_cache(maxsize=2)
def _open(path: str, _changed: int, _size: int, _process: int) -> zipfile.ZipFile:
    """Return an open file; a job reads its lines one after another. Processes that are forked have their own place."""
    return zipfile.ZipFile(path)
