"""Data sets of Hugging Face, saved or on the hub, read as Arrow files; nothing in them is executed."""

from __future__ import annotations

import inspect
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.utils.inputs import read_text
from mcore_prefix_tree.utils.versions import install_command

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_NAME = re.compile(
    r"hf://(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?(:(?P<split>\w+))?", re.ASCII
)


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
    # Later releases have no such argument, because they never execute a data set's code.
    trust = "trust_remote_code" in inspect.signature(datasets.load_dataset).parameters
    try:
        found = datasets.load_dataset(
            parts["name"],
            parts["config"],
            split=parts["split"] or "train",
            revision=parts["revision"],
            **({"trust_remote_code": False} if trust else {}),
        )
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of the network, the hub, a builder: nearly anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SampleError(f"{path}: the datasets library cannot load it: {reason}") from error
    return tuple(str(one["filename"]) for one in found.cache_files)
