"""Checks of a checkpoint before a value of it is used: it holds only data, no code, and what was written.

Megatron's distributed checkpoints are made of pickles, and a pickle can call any function when it is opened. torch
opens tensors and ``common.pt`` with ``weights_only=True``, but not ``.metadata`` and the objects among the tensors.
Neither torch nor Megatron lets a caller choose the reader of these. So this module opens them first, with unpicklers
that construct only the classes that torch and Megatron write, and rejects the checkpoint if it names anything else.
Megatron's loader is as strict with enums, which :func:`pickle_enums_by_value` writes in the form that it accepts.

torch stores each tensor and object as an archive with a CRC-32 of each record, computed while it is written, and does
not compare them when it reads. So a checkpoint needs no second pass over its data: ``checksums.json`` holds a digest of
each file's CRC-32s, which distinguishes the files of two runs, and reading compares the CRC-32s with the data.
Checkpoints of other programs have no ``checksums.json``; only their CRC-32s are compared.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import json
import pickle
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from mcore_prefix_tree.mcore.checkpoints.saved_recipe import FILE as SETTINGS
from mcore_prefix_tree.mcore.ranks import all_ranks, everyone, on_main_rank
from mcore_prefix_tree.settings import RecipeError

MANIFEST = "checksums.json"
_TENSORS = ".distcp"
# The other files that Megatron and torch read of a checkpoint.
_SMALL = (".metadata", "common.pt", "metadata.json")
# Files that this package adds to Megatron's; neither is read back into a run.
INFORMATION = (MANIFEST, SETTINGS)
_READ_AT_ONCE = 1 << 20
_BACKEND = "torch_dist"
_CHECKPOINT_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
)
_PLAIN = {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): torch.serialization._get_layout}


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

    Raises DamagedCheckpointError, alike on every rank, for a file that changed, is missing, or is another checkpoint's.
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
            with path.open("rb") as file:
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
        files = json.loads(path.read_bytes())["files"]
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
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    with path.open("rb") as file:
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


class UnsafeCheckpointError(RecipeError):
    """A checkpoint names code, or files outside its folder."""


class _MetadataUnpickler(pickle.Unpickler):
    """Constructs the classes that torch writes into ``.metadata``, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of torch's metadata; raise ``UnpicklingError`` for any other."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module in _CHECKPOINT_MODULES:
            found = super().find_class(module, name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def check_holds_only_data(folder: Path) -> None:
    """Check every pickle of a distributed checkpoint that torch or Megatron would open without limits.

    Raises UnsafeCheckpointError, with the file and the object's key, for code, a file outside the folder, or a format
    that other libraries open.
    """
    _check_backend(folder / "metadata.json")
    metadata = read_metadata(folder / ".metadata")
    for name in sorted({str(stored.relative_path) for stored in metadata.storage_data.values()}):
        if PurePosixPath(name).name != name:
            raise UnsafeCheckpointError(
                f"{folder / '.metadata'} names the file {name}, which is outside the checkpoint"
            )
        if not (folder / name).is_file():
            raise UnsafeCheckpointError(f"{folder / name} is missing; restore it, or use another checkpoint")
    for index, stored in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):  # an object, not a tensor
            with (folder / stored.relative_path).open("rb") as file:
                file.seek(stored.offset)
                _check_object(folder / stored.relative_path, index.fqn, file.read(stored.length))
    common = folder / "common.pt"
    if common.exists():
        _load_data(common.read_bytes(), str(common))


def _check_backend(path: Path) -> None:
    try:
        backend = json.loads(path.read_bytes())["sharded_backend"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UnsafeCheckpointError(f"{path} is damaged: it does not name a sharded_backend") from None
    if backend != _BACKEND:
        raise UnsafeCheckpointError(f"{path} has sharded_backend={backend!r}; only {_BACKEND!r} is read here")


def read_metadata(path: Path) -> Metadata:
    """Read ``.metadata``, the places of all tensors and objects; raise UnsafeCheckpointError if it holds code."""
    with path.open("rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # a malformed pickle raises nearly anything
            raise _unsafe(str(path), error) from None
    if not isinstance(metadata, Metadata):
        raise UnsafeCheckpointError(f"{path} holds a {type(metadata).__name__} instead of torch's Metadata")
    tables = metadata.state_dict_metadata, metadata.storage_data
    if not all(isinstance(table, dict) for table in tables):
        raise UnsafeCheckpointError(f"{path} is damaged: a table of torch's Metadata is missing")
    return metadata


def _check_object(path: Path, key: str, data: bytes) -> None:
    for state in _leaves(_load_data(data, f"{path}, {key}")):
        # TransformerEngine unpickles its state for FP8, which is not supported here; without FP8 the state is empty.
        if "_extra_state" in key and _size(state):
            raise UnsafeCheckpointError(
                f"{path}, {key}: it holds state that TransformerEngine would unpickle; save the checkpoint without FP8"
            )


def _load_data(data: bytes, where: str) -> Any:
    try:
        with torch.serialization.safe_globals([io.BytesIO]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other pickle protocols
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a malformed archive or pickle raises nearly anything
        raise _unsafe(where, error) from None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _size(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel()
    return len(state.getvalue()) if isinstance(state, io.BytesIO) else 0


def _unsafe(where: str, error: Exception) -> UnsafeCheckpointError:
    # torch's own text advises to open the file without limits, so only the name in it is repeated.
    named = re.search(r"(?:GLOBAL|it names) ([\w.]+)", str(error))
    reason = f"it names {named[1]}, which is not data" if named else "it is damaged, or has another format than torch's"
    return UnsafeCheckpointError(f"{where} was not opened: {reason}; use a checkpoint from a source that you trust")


def pickle_enums_by_value() -> None:
    """Register the enums that the loader admits, and torch's tensor metadata's, to be pickled as class and value.

    Most versions of Python pickle an enum so. Python 3.11.2, for example, pickles ``getattr`` and a name instead, and
    Python 3.10 the name of ``signal.SIGTERM``: Megatron-Core's loader refuses both, under any Python, and they are
    among the arguments in Megatron-LM's checkpoints.
    """
    for admitted in (*SAFE_GLOBALS, _MEM_FORMAT_ENCODING):
        if isinstance(admitted, type) and issubclass(admitted, Enum):
            copyreg.pickle(admitted, lambda member: (type(member), (member.value,)))
