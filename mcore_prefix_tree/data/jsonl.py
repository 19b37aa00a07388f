"""JSON Lines: one JSON object a line, read one after another or by number, and written."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.data.json_fields import ChatError, Doubled
from mcore_prefix_tree.data.packed_arrays import FILE_KEYS, array_of_file, pack_array
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.signals import RoutedExperts, SamplingMask, Teacher
from mcore_prefix_tree.utils.inputs import check_regular, open_input

STDIN, _LABEL = "-", "<stdin>"
# The longest line: a file that is not JSON Lines may have no end.
LINE_BYTES = 1 << 29
_INDEXED_BYTES = 1 << 20
# First bytes of gzip, Zstandard, bzip2, xz and tables, and what such a file is.
_PACKED = dict.fromkeys(
    (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ"),
    "compressed; unpack it, or name a gzip file something.gz",
)
_ARROW = dict.fromkeys((b"ARROW1", b"\xff\xff\xff\xff"), "Arrow, known by its name; call it something.arrow")
_OTHERS = _PACKED | _ARROW | {b"PAR1": "Parquet, known by its name; call it something.parquet"}
# Characters that may lie between the names and the values of a valid object.
_SPACE = re.compile(r"[\s:,]*")
_scan = json.JSONDecoder().raw_decode


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else Doubled(pairs)


_parse = json.JSONDecoder(object_pairs_hook=_object).decode


class JsonText(str):
    """JSON text of a value, to be written as it was read."""

    __slots__ = ()


@dataclass(frozen=True)
class Line:
    """A line; see :class:`mcore_prefix_tree.data.records.Record`. ``source`` is ``file:number``, from 1."""

    source: str
    raw: bytes
    is_first: bool = False

    @property
    def size(self) -> int:
        """Its bytes in the file; of a packed file, unpacked ones."""
        return len(self.raw)

    def fields(self, names: FieldNames) -> tuple[dict[str, Any], list[str]] | None:
        """Return the line's object by our names without null fields, and other names; or None for a blank line."""
        text = self._text()
        if not text or text.isspace():
            return None
        if self.is_first and text.lstrip().startswith("["):
            raise SampleError(
                f"{self.source}: the file is a JSON array; write JSON Lines, one object a line: jq -c '.[]' FILE"
            )
        try:
            row = _parse(text)
        except (ValueError, RecursionError) as error:  # ValueError also for an integer of more than 4300 digits
            raise SampleError(f"{self.source}: not valid JSON ({error}); each line must be one JSON object") from None
        if not isinstance(row, dict):
            raise SampleError(f"{self.source}: each line must be one JSON object with 'tokens' or 'messages'")
        if isinstance(row, Doubled):
            raise SampleError(f"{self.source}: has the field '{row.twice}' twice; drop one of them")
        row = {name: value for name, value in row.items() if value is not None}
        known = names.of_file(row, self.source)
        found = {known[name]: value for name, value in row.items() if name in known}
        routes = found.get("routed_experts")
        if isinstance(routes, dict) and routes.keys() == FILE_KEYS:
            file = self.source.rpartition(":")[0]
            folder = None if file == _LABEL else Path(file).parent
            try:
                found["routed_experts"] = array_of_file(routes, folder, "routed_experts", len(self.raw) // 2)
            except ChatError as error:
                raise SampleError(f"{self.source}: {error}") from None
        return found, [name for name in row if name not in known]

    def others(self, read: Collection[str]) -> dict[str, Any]:
        """Return the JSON text of each other field; see :class:`mcore_prefix_tree.data.records.Record`."""
        text, found = self._text(), {}

        def after(at: int) -> int:
            return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere

        at = after(text.index("{") + 1)
        while text[at] != "}":  # the object is valid JSON
            name, end = _scan(text, at)
            at = after(end)
            _, end = _scan(text, at)
            if name not in read:
                found[name] = JsonText(text[at:end])
            at = after(end)
        return found

    def _text(self) -> str:
        raw = self.raw
        if self.is_first:
            raw = raw.removeprefix(codecs.BOM_UTF8)
            for magic, what in _OTHERS.items():
                if raw.startswith(magic):
                    raise SampleError(f"{self.source}: the file is {what}")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SampleError(
                f"{self.source}: byte {error.start + 1} of the line is not UTF-8; convert the file to UTF-8"
            ) from None


def is_gzip(path: str) -> bool:
    """Return whether a file's name is that of a packed file."""
    return path.lower().endswith(".gz")


def read_lines(path: str) -> Iterator[Line]:
    """Yield all lines of a file, ``.gz`` unpacked, or of standard input; raises SampleError if it cannot be read."""
    label, number = _LABEL if path == STDIN else path, 0
    try:
        with _open(path) as stream:
            while raw := stream.readline(LINE_BYTES + 1):
                number += 1
                if len(raw) > LINE_BYTES:
                    raise _long_line(f"{label}:{number}")
                yield Line(f"{label}:{number}", raw, is_first=number == 1)
    except (OSError, EOFError, zlib.error) as error:
        raise SampleError(f"{label}: cannot be read after line {number}: {reason(error)}") from error


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    with open_input(path) as stream:
        if is_gzip(path):
            with gzip.open(stream, "rb") as unpacked:
                yield cast("BinaryIO", unpacked)
        else:
            yield stream


def reason(error: Exception) -> str:
    """Return the operating system's reason of an error, or its text."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _long_line(source: str) -> SampleError:
    return SampleError(
        f"{source}: the line is longer than {LINE_BYTES >> 20} MiB; write JSON Lines, one JSON object a line"
    )


class LineIndex:
    """Random access to a plain file's lines by their offsets; raises OSError if it cannot be read."""

    def __init__(self, path: str) -> None:
        check_regular(path)
        self._path, self._offsets = path, _line_offsets(path)

    def __len__(self) -> int:
        """Number of lines."""
        return len(self._offsets) - 1

    def read(self, number: int) -> Line:
        """Return a line, from 0; raises OSError if it cannot be read any more."""
        start, end = self._offsets[number : number + 2].tolist()
        # Opened each time: workers share nothing, and a job reads too few lines a second to notice.
        with Path(self._path).open("rb", buffering=0) as stream:
            return Line(f"{self._path}:{number + 1}", os.pread(stream.fileno(), end - start, start), number == 0)


def _line_offsets(path: str) -> npt.NDArray[np.int64]:
    """Return the offset of each line and the end of the file, int64 ``[lines + 1]``."""
    found = [np.zeros(1, dtype=np.int64)]
    at = begun = lines = 0
    with Path(path).open("rb", buffering=0) as stream:
        while chunk := stream.read(_INDEXED_BYTES):
            found.append(at + 1 + np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")))
            at += len(chunk)
            lines += len(found[-1])
            begun = int(found[-1][-1]) if len(found[-1]) else begun
            if at - begun > LINE_BYTES:
                raise _long_line(f"{path}:{lines + 1}")
    return np.concatenate(found if begun == at else [*found, [at]])  # the last line may lack its newline


class LineWriter:
    """JSON Lines that are being written; see :class:`mcore_prefix_tree.data.write.RowWriter`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a line for each; JSON has no NaN and no infinity, so null stands for them."""
        for row in rows:
            texts = [f"{json.dumps(name)}: {_json(name, value, row)}" for name, value in row.items()]
            self._stream.write(f"{{{', '.join(texts)}}}\n")


def _json(name: str, value: Any, row: Mapping[str, Any]) -> str:
    if isinstance(value, JsonText):
        return value
    try:
        return json.dumps(_plain(to_arrays(value)), allow_nan=False)
    except TypeError:
        raise SampleError(
            f"{row['source']}: field '{name}' is {value.type}, which JSON Lines cannot hold; write a table (a name "
            "that ends in .parquet)"
        ) from None


def to_arrays(value: Any) -> Any:
    """Return routes, kept ids and teachers as arrays ``[...]`` and objects of arrays; other values as they are."""
    if isinstance(value, RoutedExperts):
        return value.ids
    return value.parts() if isinstance(value, (SamplingMask, Teacher)) else value


def _plain(value: Any, *, is_short: bool = False) -> Any:
    """Return a value for JSON; if ``is_short``, float32 with the few digits that it is read back from."""
    if hasattr(value, "to_pylist"):  # an Arrow array of one
        value = value.to_pylist()[0]
    if isinstance(value, dict):
        return {name: _plain(one, is_short=True) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, is_short=is_short) for one in value]
    if not isinstance(value, np.ndarray):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if value.ndim == 3:
        return pack_array(value)
    if is_short and value.dtype == np.float32:
        short = value.astype(np.str_).astype(np.float64)
        value = np.where(short.astype(np.float32) == value, short, value)
    return (value if np.isfinite(value).all() else np.where(np.isfinite(value), value, np.array(None))).tolist()
