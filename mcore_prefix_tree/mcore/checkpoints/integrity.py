"""Checksums of a checkpoint: written next to its files, and compared before a value of it is used.

torch stores each tensor and object as an archive with a CRC-32 of each record, computed while it is written, and does
not compare them when it reads. So a checkpoint needs no second pass over its data: ``checksums.json`` holds a digest of
each file's CRC-32s, which distinguishes the files of two runs, and reading compares the CRC-32s with the data.
Checkpoints of other programs have no ``checksums.json``; only their CRC-32s are compared.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mcore_prefix_tree.mcore.checkpoints.saved_recipe import FILE as SETTINGS
from mcore_prefix_tree.mcore.checkpoints.unpickling import read_metadata
from mcore_prefix_tree.mcore.ranks import all_ranks, everyone, on_main_rank
from mcore_prefix_tree.settings import RecipeError
from mcore_prefix_tree.utils.inputs import open_regular, read_regular

MANIFEST = "checksums.json"
_TENSORS = ".distcp"
# The other files that Megatron and torch read of a checkpoint.
_SMALL = (".metadata", "common.pt", "metadata.json")
# Files that this package adds to Megatron's; neither is read back into a run.
INFORMATION = (MANIFEST, SETTINGS)
_READ_AT_ONCE = 1 << 20


class DamagedCheckpointError(RecipeError):
    """A file of a checkpoint differs from the file that was written."""


def write_checksums(folder: Path) -> None:
    """Write ``checksums.json`` into the folder of a finished checkpoint; all ranks together."""
    own = {path.name: _digest(path, items) for path, items in _share_of_files(folder)}
    of_all = {name: digest for digests in everyone(own) for name, digest in digests.items()}
    on_main_rank(lambda: (folder / MANIFEST).write_text(json.dumps({"files": of_all}, indent=1, sort_keys=True) + "\n"))


def check_metadata(folder: Path) -> None:
    """Raise DamagedCheckpointError if ``.metadata`` is damaged: the files that it describes would look damaged."""
    path = folder / ".metadata"
    written = (_read_manifest(folder / MANIFEST) or {}).get(path.name)
    if written is not None and written != _digest(path, []):
        raise _differs(path)


def check_integrity(folder: Path) -> None:
    """Compare a checkpoint's files with their checksums, each rank a share of them; all ranks together.

    Raises:
        DamagedCheckpointError: a file changed after it was written, is missing, or belongs to another checkpoint;
            raised alike on every rank.
    """
    failure = None
    try:
        _check_share(folder)
    except (DamagedCheckpointError, OSError) as error:
        failure = error
    failures = [failure for failure in everyone(failure) if failure is not None]
    if failures:
        raise failures[0]


def _check_share(folder: Path) -> None:
    written = _read_manifest(folder / MANIFEST)
    if written is not None:
        for name in written:
            if not (folder / name).is_file():
                raise DamagedCheckpointError(f"{folder / name} is missing, and {MANIFEST} names it")
    for path, items in _share_of_files(folder):
        try:
            with open_regular(path) as file:
                if any(_archive(file, stored).testzip() is not None for stored in items):
                    raise zipfile.BadZipFile
            digest = _digest(path, items)
        except Exception as error:  # a damaged archive makes zipfile raise nearly anything
            raise DamagedCheckpointError(
                f"{path} is damaged: a checksum in it differs; restore the file, or use another checkpoint"
            ) from error
        is_foreign = not items and path.name not in _SMALL
        expected = digest if written is None else written.get(path.name, digest if is_foreign else None)
        if expected != digest:
            raise _differs(path)


def _differs(path: Path) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} changed after this checkpoint was written ({MANIFEST}); restore the file, or use another checkpoint"
    )


def _read_manifest(path: Path) -> Mapping[str, str] | None:
    if not path.exists():
        return None
    try:
        files = json.loads(read_regular(path))["files"]
        return {str(name): str(digest) for name, digest in files.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DamagedCheckpointError(f"{path} is damaged; restore it, or use another checkpoint") from None


def _share_of_files(folder: Path) -> list[tuple[Path, list[Any]]]:
    """Return the files that this rank checks, and where each archive in them lies, in the order of the file."""
    items: dict[str, list[Any]] = defaultdict(list)
    for stored in sorted(read_metadata(folder / ".metadata").storage_data.values(), key=lambda stored: stored.offset):
        items[stored.relative_path].append(stored)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in INFORMATION)
    ranks = all_ranks()
    return [(path, items[path.name]) for path in files[ranks.rank :: ranks.size]]


def _digest(path: Path, items: list[Any]) -> str:
    """Return the SHA-256 of a small file, or of the CRC-32s of the archives that a file of tensors is made of."""
    if path.suffix != _TENSORS:
        return hashlib.sha256(read_regular(path)).hexdigest()
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for stored in items:
            for record in _archive(file, stored).infolist():
                line = f"{stored.offset} {stored.length} {record.filename} {record.CRC} {record.file_size}\n"
                digest.update(line.encode())
    return digest.hexdigest()


def _archive(file: BinaryIO, stored: Any) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BufferedReader(_Slice(file, stored.offset, stored.length), _READ_AT_ONCE))


class _Slice(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError(f"cannot seek to {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(memoryview(buffer)[:count])  # type: ignore[attr-defined]
        self._at += read
        return int(read)
