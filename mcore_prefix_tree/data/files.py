"""Files that ``data.path`` names, and their records, one after another or by number."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from mcore_prefix_tree.data.fields import OUR_NAMES, FieldNames
from mcore_prefix_tree.data.jsonl import STDIN, LineIndex, read_lines
from mcore_prefix_tree.data.records import Record
from mcore_prefix_tree.data.saved_datasets import files_of_folder, files_of_hub, is_saved
from mcore_prefix_tree.data.skipped import Skipped
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.utils.inputs import HUB, local_path
from mcore_prefix_tree.utils.versions import install_command

PathLike = str | os.PathLike[str]

# Everything else is JSON Lines.
_GIVE = "give the name of a file, or a list of names; samples that are in memory need no reading: Sample(tokens=[...])"
TABLES = (".parquet", ".arrow", ".feather")


class RecordIndex(Protocol):
    """Random access to the records of a file: its lines or its rows. It can be pickled."""

    def __len__(self) -> int:
        """Number of records."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def offset(self, number: int) -> int:
        """Return the bytes before a record; for a table, an estimate."""

    def first_at(self, byte: int) -> int:
        """Return the first record with an :meth:`offset` of at least so many bytes, or the number of records."""

    def read(self, number: int) -> Record:
        """Return a record, from 0; raises SampleError if the file has changed or cannot be read any more."""


def resolve_paths(paths: PathLike | Iterable[PathLike]) -> list[str]:
    """Return files in the order given, with globs, saved data sets and names on the hub expanded.

    Raises SampleError for a missing file, ImportError without the datasets library, TypeError for an invalid path.
    """
    if not isinstance(paths, str | os.PathLike | Iterable):
        raise TypeError(f"the data paths are a {type(paths).__name__}; {_GIVE}")
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    for path in given:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"a data path is a {type(path).__name__}; {_GIVE}")
    if not given:
        raise SampleError("no data paths; give data.path at least one file, glob or '-' for standard input")
    resolved: list[str] = []
    for path in [os.fspath(path) for path in given]:
        if path.startswith(HUB):
            resolved += files_of_hub(path)
            continue
        try:
            path = local_path(path)
        except ValueError as error:
            raise SampleError(str(error)) from None
        if os.path.isdir(path):
            if is_saved(path):
                resolved += files_of_folder(path)
                continue
            raise SampleError(f"{path}: is a folder; name its files, for example '{os.path.join(path, '*.jsonl')}'")
        if path == STDIN or os.path.exists(path):
            resolved.append(path)
        elif glob.has_magic(path):
            matches = sorted(match for match in glob.glob(path, recursive=True) if not os.path.isdir(match))
            if not matches:
                raise SampleError(f"{path}: this glob matches no file in {os.getcwd()}; check the pattern")
            resolved += matches
        else:
            raise SampleError(f"{path}: no such file in {os.getcwd()}; check the path")
    return resolved


def read_records(path: str, names: FieldNames = OUR_NAMES) -> Iterator[Record]:
    """Yield a file's records in bounded memory; raise SampleError if unreadable, ImportError without pyarrow."""
    if not is_table(path):
        return read_lines(path)
    require_pyarrow(path)
    from mcore_prefix_tree.data.tables import read_rows

    return read_rows(path, names)


def index_files(paths: Sequence[str], names: FieldNames = OUR_NAMES) -> list[RecordIndex]:
    """Return random access to files' records; raise SampleError for unseekable ones, ImportError without pyarrow."""
    tables = [path for path in paths if is_table(path)]
    if not tables:
        return [LineIndex(path) for path in paths]
    require_pyarrow(tables[0])
    from mcore_prefix_tree.data.tables import RecentChunks, RowIndex

    recent = RecentChunks()
    return [RowIndex(path, recent, names) if is_table(path) else LineIndex(path) for path in paths]


def is_table(path: str) -> bool:
    """Return whether a file's name is that of a table."""
    return path.lower().endswith(TABLES)


def no_samples(paths: Sequence[str], skipped: Skipped) -> SampleError:
    """Return the error for files that hold nothing to train on."""
    why = "there are no rows" if all(map(is_table, paths)) else "every line is blank"
    if skipped:
        kinds = ["bad"] * bool(skipped.count) + ["excluded"] * bool(skipped.excluded)
        why = f"all are {' or '.join(kinds)}: {skipped}"
    return SampleError(f"{', '.join(paths)}: no samples; {why}")


def require_pyarrow(path: str) -> None:
    """Raise ImportError if pyarrow is missing, which reads and writes tables."""
    try:
        import pyarrow  # noqa: F401  # takes its time, and JSON Lines need none
    except ImportError:
        raise ImportError(f"{path}: Parquet and Arrow files need pyarrow: {install_command('arrow')}") from None
