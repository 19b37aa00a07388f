"""Tables: Parquet files, Arrow IPC files and streams. A record is a row; a chunk is the unit of decoding.

A chunk is a row group of a Parquet file, a record batch of an Arrow file, and all of an Arrow stream, which has no
index. Arrow's buffers become NumPy arrays as they are; nothing here walks tokens.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from mcore_prefix_tree.data.fields import OUR_NAMES, FieldNames
from mcore_prefix_tree.data.formats import FIELDS, FORMATS, JSON_FIELDS, KNOWN, PROMPT_ALONE
from mcore_prefix_tree.data.jsonl import JsonText, to_arrays
from mcore_prefix_tree.data.keys import is_known_in_chats, shown, suggest_fields
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.utils.inputs import check_regular, is_utf8

# Most rows and numbers that are decoded together.
_BATCH_ROWS, _BATCH_VALUES = 256, 1 << 20
# Bytes of decoded chunks that a process holds, and so the largest size of one.
CACHE_BYTES = 1 << 29
# A chunk whose data is mapped holds its arrays as Python and Arrow keep them.
_CHUNK_OVERHEAD = 1 << 16
# Bytes of a written row group or record batch, which a reader unpacks for a single row.
PART_BYTES = 1 << 24
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

        Lists of numbers are arrays, with NaN for a null. Nulls within structs are dropped, since a column has every key
        in every row. JSON with meaningful nulls, such as the schema of a tool's parameters, can be a column of text.
        """
        row, known = {}, names.of_file(self.columns, self.source)
        for name, mine in known.items():
            if self.columns[name] is None:
                continue
            try:
                scalar = self.columns[name][self.at]
                value = _without_nulls(scalar.as_py()) if mine in JSON_FIELDS else _value_of(scalar)
            except (ValueError, OverflowError, *_FAULTS) as error:
                raise SampleError(f"{self.source}: field '{name}' cannot be read: {error}") from error
            if value is not None:
                row[mine] = value
        return row, [name for name, column in self.columns.items() if name not in known or column is None]

    def others(self, read: Collection[str]) -> dict[str, Any]:
        """Return the other columns at this row, Arrow arrays of one value; see :class:`Record`."""
        cut = {name: column.slice(self.at, 1) for name, column in self.columns.items() if name not in read}
        return {name: one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for name, one in cut.items()}


def _value_of(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    if types.is_struct(scalar.type):
        return {name: value for name, inner in scalar.items() if (value := _value_of(inner)) is not None}
    return _to_array(scalar.values) if isinstance(scalar.type, _LISTS) else scalar.as_py()


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


class _Parquet:
    def __init__(self, path: str, metadata: Any = None) -> None:
        # A buffered stream decodes a column as it goes, rather than from all of its bytes.
        self._file = pq.ParquetFile(path, metadata=metadata, buffer_size=1 << 20, page_checksum_verification=True)
        self.schema, self.metadata = self._file.schema_arrow, self._file.metadata
        self.rows = [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]

    def batches(self, columns: list[str], chunk: int) -> Iterator[tuple[Any, int]]:
        """Yield record batches of some columns of a chunk, with the bytes that they take in memory."""
        # Nothing says the bytes beforehand: a dictionary holds equal values once.
        group = self.metadata.row_group(chunk)
        leaves = [group.column(number) for number in range(group.num_columns)]
        values = sum(leaf.num_values for leaf in leaves if leaf.path_in_schema.partition(".")[0] in columns)
        rows = min(_BATCH_ROWS, max(1, _BATCH_VALUES * group.num_rows // max(values, 1)))
        # Threads of Arrow's, here and below, would be lost in the worker processes that torch forks.
        for batch in self._file.iter_batches(rows, row_groups=[chunk], columns=columns, use_threads=False):
            yield batch, batch.nbytes


class _Arrow:
    """A file, which has an index of its record batches, or a stream, which has none and is one chunk."""

    metadata = None

    def __init__(self, path: str) -> None:
        self._mapped = pa.memory_map(path).read_buffer()
        self._is_file = self._mapped[:6].to_pybytes() == b"ARROW1"
        reader = self._reader()
        self.schema = reader.schema
        if self._is_file:
            self.rows = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
        else:
            self.rows = [sum(batch.num_rows for batch in reader)]

    def _reader(self) -> Any:
        # All columns: with only some of them asked for, Arrow copies.
        opened = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return opened(self._mapped, options=pa.ipc.IpcReadOptions(use_threads=False))

    def batches(self, columns: list[str], chunk: int) -> Iterator[tuple[Any, int]]:
        reader, before = self._reader(), pa.total_allocated_bytes()
        for batch in [reader.get_batch(chunk)] if self._is_file else reader:
            chosen = batch.select(columns)
            chosen.validate(full=True)  # offsets that point out of the file would be followed
            # Uncompressed data is mapped, and takes none.
            yield chosen, max(pa.total_allocated_bytes() - before, 0)
            before = pa.total_allocated_bytes()


def _open(path: str, metadata: Any = None) -> _Parquet | _Arrow:
    """Open a table; ``metadata`` of an earlier opening spares reading those of all row groups again."""
    check_regular(path)
    if not is_utf8(path):
        raise SampleError(f"{path}: Arrow opens no path that is not UTF-8; rename the file")
    return _Parquet(path, metadata) if path.lower().endswith(".parquet") else _Arrow(path)


def _columns(path: str, schema: Any, names: FieldNames) -> list[str]:
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


def _by_name(schema: Any, batch: Any) -> Columns:
    return dict.fromkeys(schema.names) | dict(zip(batch.schema.names, batch.columns, strict=True))


def read_rows(path: str, names: FieldNames = OUR_NAMES) -> Iterator[Row]:
    """Yield all rows of a table, decoded a few at a time; raises SampleError if it cannot be read or has no samples."""
    number = 0
    try:
        table = _open(path)
        size, wanted = os.path.getsize(path) // max(sum(table.rows), 1), _columns(path, table.schema, names)
        for batch, _ in chain.from_iterable(table.batches(wanted, chunk) for chunk in range(len(table.rows))):
            columns = _by_name(table.schema, batch)
            for at in range(batch.num_rows):
                yield Row(f"{path} row {number}", columns, at, size)
                number += 1
    except _FAULTS as error:
        raise SampleError(f"{path}: cannot be read from row {number} on: {error}") from error


class RecentChunks:
    """The chunks that were used last, up to :data:`CACHE_BYTES`, in one process; a copy in another starts empty."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[str, int], tuple[Columns, int]] = {}
        self._bytes = 0

    def __reduce__(self) -> tuple[type[RecentChunks], tuple[()]]:
        return RecentChunks, ()

    def get(self, key: tuple[str, int], load: Callable[[], tuple[Columns, int]]) -> Columns:
        """Return the columns of a chunk; if it is not held, load it with its bytes, and drop those used longest ago."""
        found = self._chunks.pop(key, None)
        if found is None:
            columns, size = load()
            found = columns, size + _CHUNK_OVERHEAD
            self._bytes += found[1]
            while self._bytes > CACHE_BYTES and self._chunks:
                self._bytes -= self._chunks.pop(next(iter(self._chunks)))[1]
        self._chunks[key] = found
        return found[0]


class RowIndex:
    """Random access to a table's rows, through chunks shared by all tables; raises SampleError if it is unreadable."""

    def __init__(self, path: str, recent: RecentChunks, names: FieldNames = OUR_NAMES) -> None:
        self._path, self._recent = path, recent
        try:
            table = _open(path)
            self._columns, self._metadata = _columns(path, table.schema, names), table.metadata
            self._first_row = np.cumsum([0, *table.rows])
        except _FAULTS as error:
            raise SampleError(f"{path}: cannot be read: {error}") from error

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._first_row[-1])

    def read(self, number: int) -> Row:
        """Return a row, from 0; raises SampleError if its chunk is too large or cannot be read."""
        chunk = int(np.searchsorted(self._first_row, number, side="right")) - 1
        columns = self._recent.get((self._path, chunk), partial(self._load, chunk))
        return Row(f"{self._path} row {number}", columns, number - int(self._first_row[chunk]))

    def _load(self, chunk: int) -> tuple[Columns, int]:
        first, end = self._first_row[chunk : chunk + 2].tolist()
        batches, size = [], 0
        try:
            table = _open(self._path, self._metadata)
            for batch, taken in table.batches(self._columns, chunk):
                batches.append(batch)
                size += taken
                if size > CACHE_BYTES:
                    raise SampleError(
                        f"{self._path}: rows {first} to {end - 1} are one part of the file and more than "
                        f"{CACHE_BYTES >> 20:,} MiB unpacked, and streaming unpacks all of it for a single row; write "
                        "smaller row groups or record batches, or hold all samples in memory (data.streaming=false)"
                    )
        except _FAULTS as error:
            raise SampleError(f"{self._path}: cannot be read from row {first} on: {error}") from error
        return _by_name(table.schema, pa.Table.from_batches(batches)), size


class TableWriter:
    """A table that is being written; see :class:`mcore_prefix_tree.data.write.RowWriter`.

    A table begins with the types of its columns, but the fields of the samples are known only after the last. So rows
    are first written to a nameless file in the table's folder, in parts with separate types, and copied from there.
    """

    def __init__(self, path: Path, *, is_parquet: bool) -> None:
        self._path, self._is_parquet = path, is_parquet
        self._spool = tempfile.TemporaryFile(dir=path.absolute().parent)  # noqa: SIM115  # closed on exit
        self._schema, self._parts = pa.schema([]), 0

    def close(self) -> None:
        """Remove the parts."""
        self._spool.close()

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write more rows."""
        columns = {}
        for field in dict.fromkeys(name for row in rows for name in row):
            with _naming_column(f"field '{field}'"):
                columns[field] = _array([to_arrays(row.get(field)) for row in rows])
                schemas = [self._schema, pa.schema([(field, columns[field].type)])]
                self._schema = pa.unify_schemas(schemas, promote_options="permissive")
        part = pa.table(columns)
        self._parts += 1
        with pa.ipc.new_stream(self._spool, part.schema) as stream:
            stream.write_table(part)

    def finish(self) -> None:
        """Write the table."""
        if self._is_parquet:
            opened = pq.ParquetWriter(self._path, self._schema, compression="zstd", write_page_checksum=True)
        else:
            opened = pa.ipc.new_file(self._path, self._schema)  # uncompressed: readers map it
        pending: list[Any] = []
        self._spool.seek(0)
        with _naming_column("a field"), opened as writer:
            for number in range(self._parts):
                with pa.ipc.open_stream(self._spool) as stream:
                    parts = [self._schema.empty_table(), stream.read_all()]
                pending.append(pa.concat_tables(parts, promote_options="permissive"))
                if sum(table.nbytes for table in pending) >= PART_BYTES or number == self._parts - 1:
                    writer.write_table(pa.concat_tables(pending).combine_chunks())
                    pending = []


@contextmanager
def _naming_column(name: str) -> Iterator[None]:
    try:
        yield
    except (OverflowError, pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise SampleError(
            f"{name} cannot be a column of a table ({error}); write JSON Lines (a name that ends in .jsonl)"
        ) from error


def _array(values: Sequence[Any]) -> Any:
    """Return an Arrow array of values of one kind. In a list of numbers, NaN becomes null."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, pa.Array) for value in known):
        # Carried values keep their type, or take the one that holds all of them.
        schemas = [pa.schema([("", value.type)]) for value in known]
        kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        return pa.concat_arrays([pa.nulls(1, kind) if value is None else value.cast(kind) for value in values])
    if all(isinstance(value, np.ndarray) for value in known):
        if known[0].ndim == 3:
            return _fixed_lists(values)
        dtype = np.result_type(*(value.dtype for value in known))
        lists = [None if value is None else value.astype(dtype, copy=False) for value in values]
        return pa.array(lists, type=pa.list_(pa.from_numpy_dtype(dtype)), from_pandas=True)
    return pa.array([_to_python(value) for value in values])


def _to_python(value: Any) -> Any:
    if isinstance(value, JsonText):
        return json.loads(value)
    if isinstance(value, pa.Array):
        return value.to_pylist()[0]
    if isinstance(value, dict):  # Arrow takes the type of a field from its arrays of one dimension
        return {name: list(one) if getattr(one, "ndim", 0) > 1 else one for name, one in value.items()}
    return value


def _fixed_lists(values: Sequence[npt.NDArray[np.integer] | None]) -> Any:
    """Return lists ``[n]`` of lists of a fixed size, int16, of routes ``[n, layers, top-k]``."""
    ids = [np.zeros((0, 0, 0), np.int16) if value is None else value.astype(np.int16) for value in values]
    known = [one for one, value in zip(ids, values, strict=True) if value is not None]
    if len({one.shape[1:] for one in known}) > 1:
        raise pa.ArrowInvalid("its routes have different numbers of layers or of experts")
    rows = pa.array(np.concatenate(known).reshape(-1))
    for size in reversed(known[0].shape[1:]):
        rows = pa.FixedSizeListArray.from_arrays(rows, size)
    ends, absent = np.cumsum([0, *map(len, ids)]), pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), rows, mask=absent)
