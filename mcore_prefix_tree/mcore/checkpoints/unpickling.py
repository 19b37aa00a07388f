"""Check that a checkpoint holds only data, no code, before Megatron and torch open it.

Megatron's distributed checkpoints are made of pickles, and a pickle can call any function when it is opened. torch
opens tensors and ``common.pt`` with ``weights_only=True``, but not ``.metadata`` and the objects among the tensors.
Neither torch nor Megatron lets a caller choose the reader of these. So this module opens them first, with unpicklers
that construct only the classes that torch and Megatron write, and rejects the checkpoint if it names anything else.
Megatron's loader is as strict with enums, which :func:`pickle_enums_by_value` writes in the form that it accepts.
"""

from __future__ import annotations

import copyreg
import io
import json
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from mcore_prefix_tree.settings import RecipeError
from mcore_prefix_tree.utils.inputs import open_regular, read_regular

_BACKEND = "torch_dist"
_CHECKPOINT_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
)
_PLAIN = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


class UnsafeCheckpointError(RecipeError):
    """A checkpoint names code, or files outside its folder."""


class _MetadataUnpickler(pickle.Unpickler):
    """Constructs the classes that torch writes into ``.metadata``, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of torch's metadata; raise ``UnpicklingError`` for any other."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        found: Any = None
        if module in _CHECKPOINT_MODULES:
            found = super().find_class(module, name)
            is_data = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
        elif module == "torch":
            found = getattr(torch, name, None)
            is_data = isinstance(found, torch.dtype)
        else:
            is_data = False
        if not is_data:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def check_holds_only_data(folder: Path) -> None:
    """Check every pickle of a distributed checkpoint that torch or Megatron would open without limits.

    Raises:
        UnsafeCheckpointError: a file names code or a file outside the folder, or has a format that is opened by other
            libraries. The message names the file, and for an object of the model its key.
        OSError: a file cannot be read.
    """
    _check_backend(folder / "metadata.json")
    metadata = read_metadata(folder / ".metadata")
    for name in sorted({str(stored.relative_path) for stored in metadata.storage_data.values()}):
        _check_inside(folder, name)
    for index, stored in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):  # an object, not a tensor
            with open_regular(folder / stored.relative_path) as file:
                file.seek(stored.offset)
                _check_object(folder / stored.relative_path, index.fqn, file.read(stored.length))
    common = folder / "common.pt"
    if common.exists():
        _load_data(read_regular(common), str(common))


def _check_backend(path: Path) -> None:
    try:
        backend = json.loads(read_regular(path))["sharded_backend"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UnsafeCheckpointError(f"{path} is damaged: it does not name a sharded_backend") from None
    if backend != _BACKEND:
        raise UnsafeCheckpointError(f"{path} has sharded_backend={backend!r}; only {_BACKEND!r} is read here")


def read_metadata(path: Path) -> Metadata:
    """Read ``.metadata``, the places of all tensors and objects; raise UnsafeCheckpointError if it holds code."""
    with open_regular(path) as file:
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


def _check_inside(folder: Path, name: str) -> None:
    if PurePosixPath(name).name != name:
        raise UnsafeCheckpointError(f"{folder / '.metadata'} names the file {name}, which is outside the checkpoint")
    if not (folder / name).is_file():
        raise UnsafeCheckpointError(f"{folder / name} is missing; restore it, or use another checkpoint")


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
