"""Objects whose arrays lie in a file that is mapped: processes share its pages, and memory can drop them."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, islice
from tempfile import TemporaryFile
from typing import IO, Any

from mcore_prefix_tree.sample import Sample

_ALIGNED = 64
_AT_ONCE = 1024

# What is left of an object without its arrays, and their sizes in bytes.
Head = tuple[bytes, list[int]]


def write_object(found: object, stream: IO[bytes]) -> Head:
    """Append the arrays of an object to a stream, and return its head; raise OSError without room, with the way out."""
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(found, protocol=5, buffer_callback=arrays.append)
    sizes = [one.raw().nbytes for one in arrays]
    try:
        for one, size in zip(arrays, sizes, strict=True):
            stream.write(one.raw())
            stream.write(b"\0" * (-size % _ALIGNED))
        stream.flush()
    except OSError as error:
        reason = f"{error.strerror}: samples are held in a temporary file; set TMPDIR to a folder with room for them"
        raise OSError(error.errno, reason) from error
    return head, sizes


def map_objects(heads: Iterable[Head], stream: IO[bytes]) -> Iterator[Any]:
    """Yield the objects that were written to a stream, in order, with read-only arrays; the stream may be closed."""
    size, at = stream.seek(0, 2), 0
    mapped = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
    for head, sizes in heads:
        *starts, at = accumulate((one + -one % _ALIGNED for one in sizes), initial=at)
        arrays = [mapped[start : start + one] for start, one in zip(starts, sizes, strict=True)]
        yield pickle.loads(head, buffers=arrays)


def hold_on_disk(lines: Iterable[list[Sample]]) -> list[list[Sample]]:
    """Return lines of samples whose arrays lie in a temporary file; raises as :func:`write_object`."""
    rest, heads = iter(lines), list[Head]()
    with TemporaryFile(prefix="mcore_prefix_tree-") as stream:
        while some := list(islice(rest, _AT_ONCE)):
            heads.append(write_object(some, stream))
        return list(chain.from_iterable(map_objects(heads, stream)))
