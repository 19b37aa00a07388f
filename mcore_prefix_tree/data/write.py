"""Writers of files that this package reads back: JSON Lines, Parquet, Arrow. A file appears complete or not at all."""

from __future__ import annotations

import errno
import glob
import gzip
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from mcore_prefix_tree.data.fields import OUR_NAMES, FieldNames
from mcore_prefix_tree.data.files import TABLES, is_saved, is_table, require_pyarrow
from mcore_prefix_tree.data.jsonl import LineWriter, is_gzip
from mcore_prefix_tree.sample import Sample, Tempered
from mcore_prefix_tree.signals import Signals
from mcore_prefix_tree.utils.inputs import files_of_folder, is_same_file

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


class RowWriter(Protocol):
    """Takes rows in order, each as values by name; a list of numbers is an array, NaN for a missing entry.

    Values of carried fields are as the reader gave them: JSON text, or an Arrow array of one.
    """

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write more rows; raise SampleError for mixed types in a column, OSError without room."""


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
        ValueError: the file's folder does not exist or cannot be written to, the path is not a regular file, or the
            command reads it.
        ImportError: the name is that of a table, and pyarrow is missing.
    """
    target, fault = Path(path), ""
    if target.exists() and not target.is_file():
        fault = "exists and is not a regular file; name another"
    elif not os.access(f"{target.absolute().parent}/", os.W_OK):
        fault = "its folder does not exist or cannot be written to; create it, or name another"
    elif target.exists() and any(is_same_file(path, one) for given in inputs for one in _list_files(str(given))):
        fault = "is read by this command, which would replace it; name another file"
    if fault:
        raise ValueError(f"{path}: {fault}")
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
    if not str(path).lower().endswith((*_LINES, *TABLES)):
        names = f"{', '.join(_LINES)} (JSON Lines), {', '.join(TABLES[:-1])} or {TABLES[-1]}"
        raise ValueError(f"{path}: give a name that ends in {names}")


@contextmanager
def rows_file(path: str | Path) -> Iterator[RowWriter]:
    """Write rows to a file of the format in its name; raise SampleError for unsuitable rows, OSError if it fails."""
    if is_table(str(path)):
        require_pyarrow(str(path))
        from mcore_prefix_tree.data.tables import TableWriter

        is_parquet = str(path).lower().endswith(".parquet")
        with whole_file(path) as unfinished, closing(TableWriter(unfinished, is_parquet=is_parquet)) as writer:
            yield writer
            writer.finish()
    else:
        opened = gzip.open if is_gzip(str(path)) else open
        with whole_file(path) as unfinished, opened(unfinished, "wt", encoding="utf-8") as stream:
            yield LineWriter(stream)


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
