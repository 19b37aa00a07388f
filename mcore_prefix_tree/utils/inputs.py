"""Open files that users name, and end with a sentence for a file that never ends or never begins."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

PathLike = str | os.PathLike[str]

FIFO_S = 10.0
TEXT_BYTES = 1 << 24
MOST = 2**31 - 1  # of tokens, which are counted in int32, and of other counts

# File of a run's folder that names its last checkpoint, and the folders of its checkpoints; Megatron-LM's names.
TRACKER = "latest_checkpointed_iteration.txt"
_CHECKPOINT = re.compile(r"iter_\d{7,}|release")
# Files that only the folder of a model, an adapter or a tokenizer has, and the one folder in it that is read.
_MODEL = {"config.json", "adapter_config.json", "tokenizer_config.json"}
_TEMPLATES = "additional_chat_templates"
# Prefix of names of data sets on Hugging Face's hub, in data settings.
HUB = "hf://"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Files that commands write into a model's folder, and that are not a part of the model.
_NO_MODEL = (".jsonl", ".gz", ".parquet", ".arrow", ".feather", ".png", ".svg")


def local_path(path: str) -> str:
    """Return a setting's path with ``~`` expanded; raise ValueError for a URL or an unknown user."""
    if _URL.match(path):
        raise ValueError(f"{path} is a URL, and only local files are read and written; give the path of a mounted copy")
    found = os.path.expanduser(path)
    if path.startswith("~") and found == path and not os.path.exists(path):
        user = path.partition("/")[0]
        raise ValueError(f"{path}: {user} is no user's home on this machine; write ./{path} for a name that begins so")
    return found


def files_of_folder(folder: PathLike) -> Iterator[str]:
    """Yield the files that a job reads of a folder: the checkpoints of a run; or a model, an adapter or a tokenizer."""
    entries = list(os.scandir(folder))
    names = {entry.name for entry in entries}
    is_run = TRACKER in names and not names & _MODEL
    for entry in entries:
        if entry.is_dir():
            if _CHECKPOINT.fullmatch(entry.name) or entry.name == _TEMPLATES:
                yield from (str(inner) for inner in Path(entry.path).rglob("*"))
        elif entry.name == TRACKER if is_run else not entry.name.lower().endswith(_NO_MODEL):
            yield entry.path


def open_input(path: PathLike) -> BinaryIO:
    """Open a file for reading; raises OSError for a FIFO that no process writes to."""
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        return open(path, "rb")
    # Opening a FIFO waits for a writer; only a thread can wait for a limited time and lose nothing that is written.
    opened: list[BinaryIO] = []
    waiting = threading.Thread(target=lambda: opened.append(Path(path).open("rb")), daemon=True)  # noqa: SIM115
    waiting.start()
    waiting.join(FIFO_S)
    if not opened:
        why = f"no process has opened this FIFO to write to it within {FIFO_S:g} s; start its writer first"
        raise TimeoutError(errno.ETIMEDOUT, why, os.fspath(path))
    return opened[0]


@contextmanager
def damage_as(sentence: str) -> Iterator[None]:
    """Raise ValueError for whatever a damaged file of arrays makes its library raise, but OSError and MemoryError."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception:
        raise ValueError(sentence) from None


def read_text(path: PathLike) -> str:
    """Return a small file's text; raise OSError as :func:`open_input`, ValueError if it is not UTF-8 or too large."""
    with open_input(path) as stream:
        content = stream.read(TEXT_BYTES + 1)
    if len(content) > TEXT_BYTES:
        raise ValueError(f"{os.fspath(path)}: is larger than {TEXT_BYTES >> 20} MiB")
    return content.decode("utf-8-sig")


def parse_json(text: str) -> Any:
    """Return the value of an option in JSON; raises ValueError too if an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{text!r:.60} is not JSON ({error})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key '{twice}' is there twice; remove one")
    return found


def check_regular(path: PathLike) -> None:
    """Raise OSError unless a path names a regular file, which can be read from any place in it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.ESPIPE, "is not a regular file, and cannot be read from the middle", os.fspath(path))


def is_utf8(path: PathLike) -> bool:
    """Return whether the name of a path is text; Python keeps the bytes of others as half surrogate pairs."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_same_file(one: PathLike, other: PathLike) -> bool:
    """Return whether two paths name one existing file."""
    return Path(one).exists() and Path(other).exists() and os.path.samefile(one, other)
