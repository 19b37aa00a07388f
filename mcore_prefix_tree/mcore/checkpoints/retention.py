"""Retention of checkpoints: which ones ``checkpoint.keep_last`` removes, and which a run must not overwrite."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from mcore_prefix_tree.mcore.checkpoints.integrity import INFORMATION
from mcore_prefix_tree.settings import RecipeError

_NAME = re.compile(r"iter_(\d{7,})")
# Of a checkpoint's files the one that Megatron writes last, and the pattern of the ones that it writes first.
_LAST, _FIRST = "metadata.json", "*.distcp"
_WRITTEN = re.compile(
    r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|common\.pt|metadata\.json"
    + "".join(f"|{re.escape(name)}" for name in INFORMATION)
)


def saving_mark(target: Path) -> Path:
    """Return the file that marks a checkpoint as unfinished until the tracker names it."""
    return target.with_name(f".{target.name}.saving")


def check_not_overwritten(folder: str | Path, latest: int | None) -> None:
    """Check that a run which continues from ``latest``, the tracker's iteration, overwrites only unfinished saves.

    Raises RecipeError if a later checkpoint is complete, or a later folder holds a file that no checkpoint has.
    """
    if not Path(folder).is_dir():
        return
    for path in sorted(Path(folder).iterdir()):
        name = _NAME.fullmatch(path.name)
        if name is None or not path.is_dir() or (latest is not None and int(name[1]) <= latest):
            continue
        if (path / _LAST).exists() and not saving_mark(path).exists():
            tracker = "no latest_checkpointed_iteration.txt" if latest is None else f"its tracker names {latest}"
            raise RecipeError(
                f"checkpoint.save={folder} holds {path.name}, but {tracker}, and the run would overwrite it; write "
                f"{int(name[1])} into {Path(folder) / 'latest_checkpointed_iteration.txt'} to continue from it, or "
                "choose another folder"
            )
        foreign = next((file.name for file in sorted(path.iterdir()) if not _WRITTEN.fullmatch(file.name)), None)
        if foreign is not None:
            raise RecipeError(
                f"checkpoint.save={folder}: {path / foreign} would be removed with the unfinished checkpoint there; "
                "move it, or choose another folder"
            )


def remove_older(folder: str | Path, iteration: int, *, keep: int, say: Callable[[str], None]) -> None:
    """Remove the checkpoints before the ``keep`` newest complete ones; for the main rank, once it has named the newest.

    Everything else in the folder stays: links, folders that hold no part of a checkpoint, and the checkpoints of later
    iterations, which this run has not come from. ``say`` receives the folders that could not be removed, and why.
    """
    try:
        found = {int(name[1]): path for path in Path(folder).iterdir() if (name := _NAME.fullmatch(path.name))}
        # Of Megatron's distributed format: what it wrote, or began to.
        folders = {number: path for number, path in found.items() if path.is_dir() and not path.is_symlink()}
        own = {number: one for number, one in folders.items() if (one / _LAST).exists() or any(one.glob(_FIRST))}
        whole = sorted(number for number, path in own.items() if number <= iteration and (path / _LAST).exists())
    except OSError as error:
        say(f"checkpoint.keep_last={keep}: {folder} cannot be read ({error.strerror}); all in it stays")
        return
    oldest = min([iteration, *whole[-keep:]])
    for number, path in sorted(own.items()):
        if number < oldest:
            try:
                # First the file that marks it as complete: no half of a checkpoint is ever taken for one.
                (path / _LAST).unlink(missing_ok=True)
                shutil.rmtree(path)
            except OSError as error:
                say(f"checkpoint.keep_last={keep}: {path} could not be removed ({error.strerror}); remove it by hand")
