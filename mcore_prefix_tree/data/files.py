"""Files that ``data.path`` names, data sets of Hugging Face too, and their records; nothing in them is executed."""

from __future__ import annotations

import glob
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_prefix_tree.data.fields import OUR_NAMES, FieldNames
from mcore_prefix_tree.data.jsonl import STDIN, LineIndex, is_gzip, read_lines, reason
from mcore_prefix_tree.data.records import Record
from mcore_prefix_tree.data.skipped import Skipped
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.utils.inputs import HUB, local_path, read_text
from mcore_prefix_tree.utils.versions import install_command

if TYPE_CHECKING:
    from mcore_prefix_tree.data.tables import RowIndex

PathLike = str | os.PathLike[str]

# Everything else is JSON Lines.
TABLES = (".parquet", ".arrow", ".feather")
_GIVE = "give the name of a file, or a list of names; samples that are in memory need no reading: Sample(tokens=[...])"
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_NAME = re.compile(
    r"hf://(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?(:(?P<split>\w+))?", re.ASCII
)


def resolve_paths(paths: PathLike | Iterable[PathLike]) -> list[str]:
    """Return files in the order given, with globs, saved data sets and names on the hub expanded.

    Raises SampleError for a missing file, ImportError without the datasets library, TypeError for an invalid path.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable) else list(paths)
    for path in given:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"a data path is a {type(path).__name__}; {_GIVE}")
    if not given:
        raise SampleError("no data paths; give data.path at least one file, glob or '-' for standard input")
    return [file for path in given for file in _expand(os.fspath(path))]


def _expand(path: str) -> Sequence[str]:
    if path.startswith(HUB):
        return files_of_hub(path)
    try:
        path = local_path(path)
    except ValueError as error:
        raise SampleError(str(error)) from None
    if os.path.isdir(path):
        if is_saved(path):
            return files_of_folder(path)
        raise SampleError(f"{path}: is a folder; name its files, for example '{os.path.join(path, '*.jsonl')}'")
    if path == STDIN or os.path.exists(path):
        return [path]
    if not glob.has_magic(path):
        raise SampleError(f"{path}: no such file in {os.getcwd()}; check the path")
    if matches := sorted(match for match in glob.glob(path, recursive=True) if not os.path.isdir(match)):
        return matches
    raise SampleError(f"{path}: this glob matches no file in {os.getcwd()}; check the pattern")


def is_saved(folder: str) -> bool:
    """Return whether ``save_to_disk`` of the datasets library wrote a folder."""
    return any((Path(folder) / name).is_file() for name in (_STATE, _SPLITS))


def files_of_folder(folder: str) -> list[str]:
    """Return the Arrow files of a saved data set, in order; raise SampleError for several splits or a bad state."""
    if not (Path(folder) / _STATE).is_file():
        splits = _read(folder, _SPLITS).get("splits")
        named = [str(one) for one in splits] if isinstance(splits, list) and splits else ["train"]
        raise SampleError(f"{folder}: holds the splits {', '.join(named)}; name one, such as {Path(folder) / named[0]}")
    state = _read(folder, _STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise SampleError(f"{folder}: selects rows of its files; save it again with flatten_indices()")
    listed = state.get("_data_files")
    names = [one.get("filename") if isinstance(one, dict) else None for one in listed] if listed else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise SampleError(f"{Path(folder) / _STATE}: does not name Arrow files of its folder; save the data set again")
    files = [str(Path(folder) / str(name)) for name in names]
    for file in files:
        if not Path(file).is_file():
            raise SampleError(f"{file}: is missing, but {_STATE} in its folder names it; save the data set again")
    return files


def _read(folder: str, name: str) -> dict[str, Any]:
    path = Path(folder) / name
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise SampleError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SampleError(f"{path}: must hold a JSON object; save the data set again")
    return found


@lru_cache
def files_of_hub(path: str) -> tuple[str, ...]:
    """Return the Arrow files, in the datasets library's cache, of ``hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]``.

    The split is ``train`` by default.

    Raises:
        SampleError: the name is malformed, or the data set cannot be loaded without executing code.
        ImportError: the datasets library is missing.
    """
    parts = _NAME.fullmatch(path)
    if parts is None:
        raise SampleError(f"{path}: is not a name such as hf://OWNER/NAME, hf://OWNER/NAME/CONFIG@REVISION:SPLIT")
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{path}: data sets of the hub need the datasets library: {install_command('hub')}") from None
    options = {"split": parts["split"] or "train", "revision": parts["revision"]}
    if "trust_remote_code" in inspect.signature(datasets.load_dataset).parameters:
        options["trust_remote_code"] = False  # later releases have no such argument: they never execute code
    try:
        found = datasets.load_dataset(parts["name"], parts["config"], **options)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of the network, the hub, a builder: nearly anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SampleError(f"{path}: the datasets library cannot load it: {reason}") from error
    return tuple(str(one["filename"]) for one in found.cache_files)


def is_table(path: str) -> bool:
    """Return whether a file's name is that of a table."""
    return path.lower().endswith(TABLES)


def require_pyarrow(path: str) -> None:
    """Raise ImportError if pyarrow is missing, which reads and writes tables."""
    try:
        import pyarrow  # noqa: F401  # takes its time, and JSON Lines need none
    except ImportError:
        raise ImportError(f"{path}: Parquet and Arrow files need pyarrow: {install_command('arrow')}") from None


def read_records(path: str, names: FieldNames = OUR_NAMES) -> Iterator[Record]:
    """Yield a file's records in bounded memory; raise SampleError if unreadable, ImportError without pyarrow."""
    if not is_table(path):
        return read_lines(path)
    require_pyarrow(path)
    from mcore_prefix_tree.data.tables import read_rows

    return read_rows(path, names)


class FileIndex:
    """Random access to the records of some files, numbered together; it can be pickled.

    Raises SampleError for a file that cannot be read from the middle, ImportError if pyarrow is missing.
    """

    def __init__(self, paths: Sequence[str], names: FieldNames = OUR_NAMES) -> None:
        tables = [path for path in paths if is_table(path)]
        if tables:
            require_pyarrow(tables[0])
            from mcore_prefix_tree.data.tables import RecentChunks, RowIndex

            recent = RecentChunks()
        self._paths = paths
        self._files: list[LineIndex | RowIndex] = []
        self._states: list[tuple[int, int]] = []  # before the files are indexed
        for path in paths:
            if path == STDIN or is_gzip(path):
                name = "standard input" if path == STDIN else path
                raise SampleError(
                    f"{name}: cannot be read from the middle, which streaming does; unpack it into a file, or hold all "
                    "samples in memory (data.streaming=false)"
                )
            with _naming(path):
                self._states.append(_state(path))
                self._files.append(RowIndex(path, recent, names) if is_table(path) else LineIndex(path))
        self._first_record = np.cumsum([0, *map(len, self._files)])
        self._first_byte = np.cumsum([0, *(size for size, _ in self._states)])

    def __len__(self) -> int:
        """Records of all files."""
        return int(self._first_record[-1])

    def part(self, rank: int, size: int) -> tuple[range, int]:
        """Return the records of one of so many ranks and their bytes, if all records of a file had as many."""
        ends = self._first_byte[-1] * np.arange(rank, rank + 2) // size
        start, stop = np.interp(ends, self._first_byte, self._first_record).astype(int).tolist()
        return range(start, stop if rank + 1 < size else len(self)), int(ends[1] - ends[0])

    def read(self, record: int) -> Record:
        """Return a record; raises SampleError if its file has changed or cannot be read any more."""
        file = int(np.searchsorted(self._first_record, record, side="right")) - 1
        with _naming(self._paths[file]):
            self._check_unchanged(file)  # before a table is mapped
            found = self._files[file].read(record - int(self._first_record[file]))
            self._check_unchanged(file)  # a line may change while it is read
        return found

    def _check_unchanged(self, file: int) -> None:
        path = self._paths[file]
        if _state(path) != self._states[file]:
            raise SampleError(f"{path}: has changed since the run began; do not change the files while it runs")


def _state(path: str) -> tuple[int, int]:
    """Return size and time of the last change."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


@contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SampleError(f"{path}: cannot be read: {reason(error)}") from error


def no_samples(paths: Sequence[str], skipped: Skipped) -> SampleError:
    """Return the error for files that hold nothing to train on."""
    return SampleError(f"{', '.join(paths)}: no samples; {skipped if skipped else 'there are no records'}")
