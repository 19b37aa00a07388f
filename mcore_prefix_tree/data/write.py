"""Writers of files that this package reads back: JSON Lines, Parquet, Arrow. A file appears complete or not at all."""

from __future__ import annotations

import errno
import glob
import gzip
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from mcore_prefix_tree.data.fields import OUR_NAMES, FieldNames
from mcore_prefix_tree.data.files import TABLES, is_saved, is_table, require_pyarrow
from mcore_prefix_tree.data.jsonl import JsonText, is_gzip
from mcore_prefix_tree.data.packed_arrays import pack_array
from mcore_prefix_tree.sample import Sample, SampleError, Tempered
from mcore_prefix_tree.signals import RoutedExperts, SamplingMask, Signals, Teacher
from mcore_prefix_tree.utils.inputs import files_of_folder, is_same_file

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# Endings of names of files of lines; tables have other ones.
_LINES, _PACKED_LINES = (".jsonl", ".json"), (".jsonl.gz", ".json.gz")


class RowWriter(Protocol):
    """Takes rows in order, each as values by name; a list of numbers is an array, NaN for a missing entry.

    Values of carried fields are as the reader gave them: JSON text, or an Arrow array of one.
    """

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write more rows; raise SampleError, with a ``source``, for mixed types in a column, OSError without room."""


def make_row(sample: Sample, names: FieldNames = OUR_NAMES) -> dict[str, Any]:
    """Return all fields of a sample, by the file's names, and those that it carries; a carried ``source`` is kept."""
    key = sample.merge_key
    row: dict[str, Any] = {"tokens": sample.tokens, "loss_mask": sample.loss_mask}
    if isinstance(key, Tempered):
        row["temperature"], key = key.temperature, key.key
    if key is not None:
        row["merge_key"] = key
    for field in fields(Signals):
        value = getattr(sample.signals, field.name)
        if value is not field.default:
            row[field.name] = value
    own = {names.theirs(name): value for name, value in row.items()}
    return {**sample.carried, **own, "source": sample.carried.get("source", sample.source)}


def check_output(path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
    """Check that a file could be written, before there is anything to write.

    ``inputs`` are the command's: files, globs, ``-``, folders of runs, models, tokenizers and data sets, or missing
    paths.

    Raises:
        ValueError: the file's folder does not exist or cannot be written to, the path is a folder or a device, or the
            command reads it.
        ImportError: the name is that of a table, and pyarrow is missing.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: its folder does not exist; create it")
    if Path(path).is_dir():
        raise ValueError(f"{path}: is a folder; name a file in it, such as {Path(path) / 'scored.jsonl'}")
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path}: exists and is not a regular file; name another")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{path}: its folder cannot be written to; name another")
    if Path(path).exists() and any(is_same_file(path, one) for given in inputs for one in _list_files(str(given))):
        raise ValueError(f"{path}: is read by this command, which would replace it; name another file")
    if is_table(str(path)):
        require_pyarrow(str(path))


def _list_files(given: str) -> Iterator[str]:
    """Yield the files that an input names; a folder's own."""
    for one in (given, *glob.glob(given, recursive=True)):
        if not os.path.isdir(one):
            yield one
        elif is_saved(one):
            yield from (entry.path for entry in os.scandir(one))
        else:
            yield from files_of_folder(one)


def check_rows_output(path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
    """Check as :func:`check_output` does, and that :func:`rows_file` writes files of this name."""
    check_output(path, inputs)
    if not str(path).lower().endswith((*_LINES, *_PACKED_LINES, *TABLES)):
        raise ValueError(
            f"{path}: give a name that ends in {', '.join((*_LINES, *_PACKED_LINES))} (JSON Lines), "
            f"{', '.join(TABLES[:-1])} or {TABLES[-1]}"
        )


@contextmanager
def rows_file(path: str | Path) -> Iterator[RowWriter]:
    """Write rows to a file of the format in its name; raise SampleError for unsuitable rows, OSError if it fails."""
    if is_table(str(path)):
        require_pyarrow(str(path))
        from mcore_prefix_tree.data.write_tables import TableSpool

        is_parquet = str(path).lower().endswith(".parquet")
        with whole_file(path) as unfinished, closing(TableSpool(unfinished, is_parquet=is_parquet)) as spool:
            yield spool
            spool.finish()
    else:
        opened = gzip.open if is_gzip(str(path)) else open
        with whole_file(path) as unfinished, opened(unfinished, "wt", encoding="utf-8") as stream:
            yield _JsonLines(stream)


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to, renamed when it is complete and removed after an error; raise OSError with its name."""
    target = Path(path).resolve()  # the target of a link, so that the link stays one
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        with unfinished.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(unfinished, target)
    except OSError as error:
        # Writers do not know the name that the file will have, or any.
        if error.filename not in (None, str(unfinished)) and error.errno not in _NO_ROOM:
            raise
        reason = next((os.strerror(code) for code in _NO_ROOM if f"[Errno {code}]" in str(error)), error.strerror)
        raise OSError(error.errno, f"cannot be written: {reason or error}", str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)


class _JsonLines:
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
        return json.dumps(_plain(value), allow_nan=False)
    except TypeError:
        raise SampleError(
            f"{row['source']}: field '{name}' is {value.type}, which JSON Lines cannot hold; write a table (a name "
            f"that ends in {TABLES[0]})"
        ) from None


def _plain(value: Any) -> Any:
    if hasattr(value, "to_pylist"):  # an Arrow array of one
        value = value.to_pylist()[0]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, RoutedExperts):
        return pack_array(value.ids)
    if isinstance(value, (SamplingMask, Teacher)):
        return {name: _part(part) for name, part in value.parts().items()}
    if isinstance(value, np.ndarray):
        return [_plain(row) for row in value] if value.ndim > 1 else _listed(value)
    return value


def _part(part: Any) -> Any:
    """Return a part of a teacher; of float32 the digits that it is read back from, which are half of a double's."""
    if isinstance(part, list):
        return [None if row is None else _part(row) for row in part]
    if not isinstance(part, np.ndarray) or part.dtype != np.float32:
        return _plain(part)
    short = part.astype(np.str_).astype(np.float64)
    return _plain(np.where(short.astype(np.float32) == part, short, part))


def _listed(values: np.ndarray[Any, Any]) -> list[Any]:
    """Return an array ``[n]`` or ``[n, k]`` as a list."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
