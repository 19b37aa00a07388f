"""Writer of Parquet and Arrow files that :mod:`mcore_prefix_tree.data.tables` reads back.

A table begins with the types of its columns, but the fields of the samples are known only after the last. So rows are
first written to a nameless file in the table's folder, in parts with separate types, and are copied from there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mcore_prefix_tree.data.jsonl import JsonText
from mcore_prefix_tree.signals import RoutedExperts, SampleError, SamplingMask, Teacher

# Bytes of a row group or record batch, which a reader unpacks for a single row.
_PART_BYTES = 1 << 24


class TableSpool:
    """A table that is being written; see :class:`mcore_prefix_tree.data.write.RowWriter`."""

    def __init__(self, path: Path, *, is_parquet: bool) -> None:
        self._path, self._is_parquet = path, is_parquet
        self._spool = tempfile.TemporaryFile(dir=path.absolute().parent)  # noqa: SIM115  # closed on exit
        self._schemas: list[Any] = []
        # Of each column, the kind of its values, and the row that was the first to say it.
        self._kinds: dict[str, tuple[str, str]] = {}

    def close(self) -> None:
        """Remove the parts."""
        self._spool.close()

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write more rows; each names its ``source``."""
        names = dict.fromkeys(name for row in rows for name in row)
        part = pa.table({name: self._column(name, rows) for name in names})
        self._schemas.append(part.schema)
        with pa.ipc.new_stream(self._spool, part.schema) as stream:
            stream.write_table(part)

    def _column(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
        values = [row.get(name) for row in rows]
        try:
            if all(value is None or isinstance(value, pa.Array) for value in values):
                return _together(values)
        except (OverflowError, pa.ArrowException) as error:
            raise _no_column(f"field '{name}'", error) from error
        values = [_decoded(value) for value in values]
        for value, row in zip(values, rows, strict=True):
            if value is not None:
                kind, first = self._kinds.setdefault(name, (_json_kind(value), _describe_source(row)))
                if kind != _json_kind(value):
                    raise SampleError(
                        f"{_describe_source(row)}: field '{name}' is {_json_kind(value)} and that of {first} is {kind}"
                        ", but a column of a table holds one kind; write JSON Lines (a name that ends in .jsonl)"
                    )
        try:
            return _array(values)
        except (OverflowError, pa.ArrowException) as error:
            raise _no_column(f"field '{name}'", error) from error

    def finish(self) -> None:
        """Write the table."""
        try:
            schema = pa.unify_schemas(self._schemas, promote_options="permissive")
            with self._writer(schema) as writer:
                pending: list[Any] = []
                for part in self._parts(schema):
                    pending.append(part)
                    if sum(table.nbytes for table in pending) >= _PART_BYTES:
                        _flush(writer, pending)
                _flush(writer, pending)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise _no_column("a field", error) from error

    def _writer(self, schema: Any) -> Any:
        if self._is_parquet:
            return pq.ParquetWriter(self._path, schema, compression="zstd", write_page_checksum=True)
        return pa.ipc.new_file(self._path, schema)  # uncompressed: readers map it

    def _parts(self, schema: Any) -> Iterator[Any]:
        self._spool.seek(0)
        for _ in self._schemas:
            with pa.ipc.open_stream(self._spool) as stream:
                part = stream.read_all()
            yield pa.concat_tables([schema.empty_table(), part], promote_options="permissive")


def _flush(writer: Any, pending: list[Any]) -> None:
    if pending:
        writer.write_table(pa.concat_tables(pending).combine_chunks())
        pending.clear()


def _together(values: Sequence[Any]) -> Any:
    """Return Arrow arrays of one value, or None for a null, as one array of the type that holds all of them."""
    known = [value.type for value in values if value is not None]
    schemas = [pa.schema([("", kind)]) for kind in dict.fromkeys(known)]
    kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    return pa.concat_arrays([pa.nulls(1, kind) if value is None else value.cast(kind) for value in values])


def _decoded(value: Any) -> Any:
    if isinstance(value, JsonText):
        return json.loads(value)
    return value.to_pylist()[0] if isinstance(value, pa.Array) else value


def _describe_source(row: Mapping[str, Any]) -> str:
    return str(_decoded(row["source"]))


def _json_kind(value: Any) -> str:
    if isinstance(value, (RoutedExperts, np.ndarray, list)):
        return "a list"
    if isinstance(value, (SamplingMask, Teacher, dict)):
        return "an object"
    if isinstance(value, (bool, np.bool_)):
        return "true or false"
    return "a string" if isinstance(value, str) else "a number"


def _array(values: Sequence[Any]) -> Any:
    """Return an Arrow array of values of one kind. In a list of numbers, NaN becomes null."""
    example = next((value for value in values if value is not None), None)
    if isinstance(example, (SamplingMask, Teacher)):
        return _structs(values)
    if isinstance(example, RoutedExperts):
        return _fixed_lists([None if value is None else value.ids for value in values])
    if isinstance(example, np.ndarray):
        dtype = np.result_type(*(value.dtype for value in values if value is not None))
        lists = [None if value is None else value.astype(dtype, copy=False) for value in values]
        return pa.array(lists, type=pa.list_(pa.from_numpy_dtype(dtype)), from_pandas=True)
    return pa.array(values)


def _fixed_lists(values: Sequence[Any]) -> Any:
    """Return an Arrow array of lists ``[n]`` of lists of a fixed size, int16, of arrays ``[n, layers, top-k]``."""
    known = [value.astype(np.int16) for value in values if value is not None]
    if len({one.shape[1:] for one in known}) > 1:
        raise pa.ArrowInvalid("its routes have different numbers of layers or of experts")
    rows = pa.array(np.concatenate(known).reshape(-1))
    for size in reversed(known[0].shape[1:]):
        rows = pa.FixedSizeListArray.from_arrays(rows, size)
    ends = np.cumsum([0 if value is None else len(value) for value in values])
    absent = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(np.append(0, ends), pa.int32()), rows, mask=absent)


def _structs(values: Sequence[SamplingMask | Teacher | None]) -> Any:
    """Return an Arrow array of masks or of teachers, of the fields that any of them has."""
    parts: dict[str, list[Any]] = {}
    for name, part in ((name, part) for one in values if one for name, part in one.arrays().items()):
        parts.setdefault(name, []).append(part)
    rows = [None if one is None else {name: _plain(part) for name, part in one.parts().items()} for one in values]
    return pa.array(rows, type=pa.struct([(name, _infer_type(own)) for name, own in parts.items()]))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(row) for row in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _infer_type(values: Sequence[Any]) -> Any:
    """Return the Arrow type of texts, or of arrays of one number of dimensions."""
    if not isinstance(values[0], np.ndarray):
        return pa.string()
    kind = pa.from_numpy_dtype(np.result_type(*(value.dtype for value in values)))
    for _ in range(values[0].ndim):
        kind = pa.list_(kind)
    return kind


def _no_column(what: str, error: Exception) -> SampleError:
    return SampleError(f"{what} cannot be a column of a table ({error}); write JSON Lines (a name that ends in .jsonl)")
