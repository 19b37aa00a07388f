"""Tables: Parquet files, Arrow IPC files and streams. A record is a row; a chunk is the unit of decoding.

A chunk is a row group of a Parquet file, a record batch of an Arrow file, and all of an Arrow stream, which has no
index. Arrow's buffers become NumPy arrays as they are; nothing here walks tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from mcore_prefix_tree.data.fields import OUR_NAMES, FieldNames
from mcore_prefix_tree.data.formats import FIELDS, FORMATS, JSON_FIELDS, KNOWN, PROMPT_ALONE
from mcore_prefix_tree.data.jsonl import Unchanged
from mcore_prefix_tree.data.keys import is_known_in_chats, shown, suggest_fields
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.utils.inputs import check_regular, is_utf8

# Rows that are decoded together where rows are read in order.
_BATCH_ROWS = 256
# Bytes of decoded chunks that a process holds, and so the largest size of one.
_CACHE_BYTES = 1 << 29
# Of a chunk whose data is mapped: its arrays as Python and Arrow keep them.
_CHUNK_OVERHEAD = 1 << 16
_FILE_MAGIC = b"ARROW1"
_FAULTS = (OSError, pa.ArrowException)
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)

# By name; None for a column that is not read.
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A row; see :class:`mcore_prefix_tree.data.records.Record`. ``at`` is its index in ``columns``."""

    source: str
    columns: Columns
    at: int
    size: int = 0

    def fields(self, names: FieldNames) -> tuple[dict[str, Any], list[str]]:
        """Return the fields that are not null, by our names, and other columns' names.

        Lists of numbers are arrays, with NaN for a null.

        Nulls within structs are dropped, since a column has every key in every row. JSON with meaningful nulls, for
        example the schema of a tool's parameters, can be a column of text.
        """
        row, known = {}, names.of_file(self.columns, self.source)
        rest = [name for name in self.columns if name not in known]
        for name, mine in known.items():
            if self.columns[name] is None:
                rest.append(name)
                continue
            try:
                scalar = self.columns[name][self.at]
                value = _without_nulls(scalar.as_py()) if mine in JSON_FIELDS else _value_of(scalar)
            except (ValueError, OverflowError, *_FAULTS) as error:
                raise SampleError(f"{self.source}: field '{name}' cannot be read: {error}") from error
            if value is not None:
                row[mine] = value
        return row, rest

    def others(self, read: Collection[str]) -> dict[str, Any]:
        """Return the other columns at this row, Arrow arrays of one value; see :class:`Record`."""
        cut = {name: column.slice(self.at, 1) for name, column in self.columns.items() if name not in read}
        return {name: one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for name, one in cut.items()}


def _value_of(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if types.is_struct(kind):
        return {name: value for name, inner in scalar.items() if (value := _value_of(inner)) is not None}
    if isinstance(kind, _LISTS):
        return _to_array(scalar.values)
    return scalar.as_py()


def _to_array(values: Any) -> Any:
    """Return an array if one holds the list without loss: numbers, or as many numbers in each entry."""
    kind = values.type
    if types.is_floating(kind) or ((types.is_integer(kind) or types.is_boolean(kind)) and not values.null_count):
        return values.to_numpy(zero_copy_only=False)
    if isinstance(kind, _LISTS) and len(values) and not values.null_count:
        lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        inner = _to_array(values.flatten())
        if isinstance(inner, np.ndarray) and (lengths == lengths[0]).all():
            return inner.reshape(len(lengths), int(lengths[0]), *inner.shape[1:])
    return [_value_of(scalar) for scalar in values]


def _without_nulls(value: Any) -> Any:
    """Drop the keys that some row of the file has and this one lacks: all entries of a column have the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def read_rows(path: str, names: FieldNames = OUR_NAMES) -> Iterator[Row]:
    """Yield all rows of a table, decoded a few at a time; raises SampleError if it cannot be read or has no samples."""
    number = 0
    try:
        with closing(_open(path, names)) as table:
            for batch in table.batches():
                columns = table.columns(batch)
                size = os.path.getsize(path) // max(table.num_rows, 1)
                for at in range(batch.num_rows):
                    yield Row(f"{path} row {number}", columns, at, size)
                    number += 1
    except _FAULTS as error:
        raise SampleError(f"{path}: cannot be read from row {number} on: {error}") from error


class RecentChunks:
    """The chunks that were used last, up to so many bytes, in one process; a copy in another starts empty."""

    def __init__(self, max_bytes: int = _CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._chunks: dict[tuple[str, int], tuple[Columns, int]] = {}
        self._bytes = 0

    def __reduce__(self) -> tuple[type[RecentChunks], tuple[int]]:
        return RecentChunks, (self.max_bytes,)

    def get(self, path: str, chunk: int, load: Callable[[], tuple[Columns, int]]) -> Columns:
        """Return the columns of a chunk; if they are not held, ``load`` returns them and their bytes."""
        key = path, chunk
        if key in self._chunks:
            self._chunks[key] = self._chunks.pop(key)  # now the last to go
        else:
            columns, size = load()
            self._chunks[key] = columns, size + _CHUNK_OVERHEAD
            self._bytes += size + _CHUNK_OVERHEAD
            while self._bytes > self.max_bytes and len(self._chunks) > 1:
                oldest = next(iter(self._chunks))
                self._bytes -= self._chunks.pop(oldest)[1]
        return self._chunks[key][0]


class RowIndex:
    """Random access to a table's rows, through chunks shared by all tables; raises SampleError if it is unreadable."""

    def __init__(self, path: str, recent: RecentChunks, names: FieldNames = OUR_NAMES) -> None:
        self._path, self._recent, self._names = path, recent, names
        try:
            self._file = Unchanged.since_now(path)
            self.size = self._file.size
            with closing(_open(path, names)) as table:
                self._first_row = np.cumsum([0, *table.rows_of_chunks()])
        except _FAULTS as error:
            raise SampleError(f"{path}: cannot be read: {error}") from error

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._first_row[-1])

    def offset(self, number: int) -> int:
        """Bytes before a row, if all had as many."""
        return self.size * number // len(self)

    def first_at(self, byte: int) -> int:
        """The first row with an :meth:`offset` of at least so many bytes."""
        return min(-(-byte * len(self) // self.size), len(self))

    def read(self, number: int) -> Row:
        """Return a row, from 0; raises SampleError if the file has changed, or a chunk of it is too large."""
        source = f"{self._path} row {number}"
        try:
            self._file.check()  # even if the chunk is held: a part of the file may be mapped
        except OSError as error:
            raise SampleError(f"{source}: cannot be read: {error}") from error
        chunk = int(np.searchsorted(self._first_row, number, side="right")) - 1
        columns = self._recent.get(self._path, chunk, lambda: self._load(chunk))
        return Row(source, columns, number - int(self._first_row[chunk]))

    def _load(self, chunk: int) -> tuple[Columns, int]:
        first, last = self._first_row[chunk : chunk + 2].tolist()
        try:
            with closing(_open(self._path, self._names)) as table:
                same = table.num_chunks == len(self._first_row) - 1
                batch, size = table.chunk(chunk, self._recent.max_bytes) if same else (None, 0)
        except _FAULTS as error:
            raise SampleError(f"{self._path}: cannot be read from row {first} on: {error}") from error
        if size > self._recent.max_bytes:
            raise SampleError(
                f"{self._path}: rows {first} to {last - 1} are {table.name} of at least {size >> 20:,} MiB unpacked, "
                f"and streaming unpacks all of it for a single row; write at most {self._recent.max_bytes >> 20:,} MiB "
                f"together{table.way_out}, or hold all samples in memory (data.streaming=false)"
            )
        if batch is None or batch.num_rows != last - first:
            raise self._file.error()
        return table.columns(batch), size


def _open(path: str, names: FieldNames) -> _Parquet | _Arrow:
    """Return an open table, without the columns that are not read."""
    check_regular(path)
    if not is_utf8(path):
        raise SampleError(f"{path}: Arrow opens no path that is not UTF-8; rename the file")
    if path.lower().endswith(".parquet"):
        return _Parquet(path, names)
    return _Arrow(path, names)


def _known(path: str, schema: Any, names: FieldNames) -> list[str]:
    """Return the columns that are read; raises SampleError if there is nothing to make samples of."""
    known = names.of_file(schema.names, path)
    if not FORMATS.keys() & set(known.values()):
        mapping = suggest_fields(schema.names, FIELDS)
        if "prompt" in known.values() and not mapping:
            raise SampleError(f"{path}: {PROMPT_ALONE}")
        way_out = "name the one that holds the samples in data.fields"
        if mapping:
            way_out = f"name yours in data.fields: {shown(mapping)}"
        raise SampleError(
            f"{path}: has none of the columns {', '.join(map(names.theirs, FORMATS))}, only "
            f"{', '.join(schema.names) or 'none'}; {way_out}"
        )
    kinds = {name: kind for name, kind in zip(schema.names, schema.types, strict=True) if name in known}
    ids = {name for name, kind in kinds.items() if isinstance(kind, _LISTS) and types.is_integer(kind.value_type)}
    if not {known[name] for name in ids} & FORMATS.keys():  # columns that only rows of token ids need may be large
        known = {name: mine for name, mine in known.items() if mine in KNOWN or is_known_in_chats(name)}
    columns = [name for name in schema.names if names.keeps_others or name in known]
    for name in columns:
        if columns.count(name) > 1:
            raise SampleError(f"{path}: has the column '{name}' twice; drop one of them")
    return columns


class _Table:
    """A table with the names of all its columns."""

    all_names: list[str]

    def rows_of_chunks(self) -> list[int]:
        raise NotImplementedError

    @cached_property
    def num_rows(self) -> int:
        return sum(self.rows_of_chunks())

    def columns(self, batch: Any) -> Columns:
        return dict.fromkeys(self.all_names) | dict(zip(batch.schema.names, batch.columns, strict=True))


class _Parquet(_Table):
    name, way_out = "a row group", " (row_group_size of the writer)"

    def __init__(self, path: str, names: FieldNames) -> None:
        # A buffered stream decodes a column as it goes, rather than from all of its bytes.
        self._file = pq.ParquetFile(path, buffer_size=1 << 20, page_checksum_verification=True)
        self._names, self.all_names = _known(path, self._file.schema_arrow, names), self._file.schema_arrow.names
        self._widths = [
            _width(leaf) if field.name in self._names else 0
            for field in self._file.schema_arrow
            for leaf in _leaves(field.type)
        ]

    @property
    def num_chunks(self) -> int:
        return int(self._file.metadata.num_row_groups)

    def rows_of_chunks(self) -> list[int]:
        return [self._file.metadata.row_group(group).num_rows for group in range(self.num_chunks)]

    def batches(self) -> Iterator[Any]:
        # Threads of Arrow's, here and below, would be lost in the worker processes that torch forks.
        yield from self._file.iter_batches(_BATCH_ROWS, columns=self._names, use_threads=False)

    def chunk(self, number: int, limit: int) -> tuple[Any, int]:
        size = self._least(number)
        if size > limit:
            return None, size
        batches, size = [], 0
        # A few rows at a time, because of text nothing says the size beforehand: a dictionary holds it once.
        for batch in self._file.iter_batches(_BATCH_ROWS, row_groups=[number], columns=self._names, use_threads=False):
            batches.append(batch)
            size += batch.nbytes
            if size > limit:
                return None, size
        return pa.Table.from_batches(batches), size

    def _least(self, number: int) -> int:
        """Return the bytes of a row group's numbers, from the file's metadata, whose own size is the packed one."""
        group = self._file.metadata.row_group(number)
        return sum(group.column(leaf).num_values * width // 8 for leaf, width in enumerate(self._widths) if width)

    def close(self) -> None:
        self._file.close()


class _Arrow(_Table):
    """A file, which has an index of its record batches, or a stream, which has none and is one chunk."""

    def __init__(self, path: str, names: FieldNames) -> None:
        self._mapped = pa.memory_map(path).read_buffer()
        self._is_file = self._mapped[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC
        self.name, self.way_out = (
            ("a record batch", ", or uncompressed, which is mapped")
            if self._is_file
            else ("a stream", ", uncompressed, or as an Arrow file")
        )
        reader = self._reader()
        self.num_chunks = int(reader.num_record_batches) if self._is_file else 1
        self._names, self.all_names = _known(path, reader.schema, names), reader.schema.names

    def _reader(self) -> Any:
        # All columns: with only some of them asked for, Arrow copies.
        opened = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return opened(self._mapped, options=pa.ipc.IpcReadOptions(use_threads=False))

    def rows_of_chunks(self) -> list[int]:
        rows = [batch.num_rows for batch in self.batches()]
        return rows if self._is_file else [sum(rows)]

    def batches(self) -> Iterator[Any]:
        reader = self._reader()
        found = map(reader.get_batch, range(self.num_chunks)) if self._is_file else reader
        yield from (_checked(batch, self._names) for batch in found)

    def chunk(self, number: int, limit: int) -> tuple[Any, int]:
        batches = [_checked(self._reader().get_batch(number), self._names)] if self._is_file else list(self.batches())
        return pa.Table.from_batches(batches), sum(_unpacked(batch, self._mapped) for batch in batches)

    def close(self) -> None:
        """Do nothing: the last array that looks into the file unmaps it."""


def _leaves(kind: Any) -> list[Any]:
    """Return the types of a column's values inside all lists and structs; each is a column of Parquet's own."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    if types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves(field.type)]
    if types.is_map(kind):
        return [*_leaves(kind.key_type), *_leaves(kind.item_type)]
    if isinstance(kind, _LISTS):
        return _leaves(kind.value_type)
    return [kind.index_type if types.is_dictionary(kind) else kind]


def _width(kind: Any) -> int:
    """Bits of a value; 0 for text, whose values differ."""
    try:
        return int(kind.bit_width)
    except ValueError:
        return 0


def _checked(batch: Any, names: list[str]) -> Any:
    """Return these columns of a batch, without a copy, after checking that their offsets lie within their buffers."""
    chosen = batch.select(names)
    chosen.validate(full=True)
    return chosen


def _unpacked(batch: Any, mapped: Any) -> int:
    """Bytes of a batch that are not in the file's mapping."""
    first, end = mapped.address, mapped.address + mapped.size
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
    return sum(buffer.size for buffer in buffers if not first <= buffer.address < end)
