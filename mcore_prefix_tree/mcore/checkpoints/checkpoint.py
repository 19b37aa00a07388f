"""Checkpoints in Megatron's own distributed format and folder layout.

``FOLDER/iter_0000010`` holds one checkpoint, ``FOLDER/latest_checkpointed_iteration.txt`` names the last complete one.
The name is written after everything else, so a run killed while it saves resumes from the checkpoint before.
Model keys are those of the stock model; a scalar head, which the stock model lacks, is ``scalar_head.weight``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from mcore_prefix_tree.mcore.checkpoints.integrity import (
    DamagedCheckpointError,
    UnsafeCheckpointError,
    check_holds_only_data,
    check_integrity,
    check_metadata,
    pickle_enums_by_value,
    read_metadata,
    write_checksums,
)
from mcore_prefix_tree.mcore.checkpoints.retention import saving_mark
from mcore_prefix_tree.mcore.checkpoints.saved_recipe import check_same_function, write_settings
from mcore_prefix_tree.mcore.checkpoints.writing import WriteInRank
from mcore_prefix_tree.mcore.models.bridge import ADAPTER
from mcore_prefix_tree.mcore.models.lora import load_frozen
from mcore_prefix_tree.mcore.ranks import everyone, is_of_lost_rank, on_main_rank
from mcore_prefix_tree.mcore.seam.scalar_output_layer import CHECKPOINT_KEY, start_new_head
from mcore_prefix_tree.settings import ModelConfig, RecipeError
from mcore_prefix_tree.utils.inputs import TRACKER

RELEASE = "release"
_RECIPE_SETTINGS = ("max_lr", "min_lr", "betas")
# Errors that Megatron and torch raise when the disk fails while they write.
_WRITING_ERRORS = (OSError, RuntimeError, CheckpointException)


class UnfitCheckpointError(RecipeError):
    """A checkpoint that cannot be read into this model."""


class SaveError(OSError):
    """A checkpoint could not be written. The message names the place, the reason, and the last complete checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run, and the settings that must not change for it to continue the same way."""

    iteration: int
    global_batch_size: int | None
    groups_per_step: int | None
    seed: int
    order: str
    samples_per_epoch: int  # number of samples in the first epoch
    consumed_samples: int  # number of logical samples of these data that were trained on
    data_from: int  # number of steps done before the first of these samples
    # Checksum of the samples, by how they were read; samples read another way are not compared.
    checksums: dict[str, int]


def latest_iteration(folder: str | Path) -> int | None:
    """Return the last complete checkpoint's iteration, None without one; raise RecipeError, OSError for a bad file."""
    tracker = Path(folder) / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_bytes().decode("ascii", errors="backslashreplace").strip()
    if not re.fullmatch(r"\d{1,18}", text):
        raise RecipeError(f"{tracker} holds {text!r:.40} instead of an iteration; write the last complete one there")
    return int(text)


def latest_weights(folder: str | Path) -> int | str | None:
    """Return :func:`latest_iteration`, or ``release``, which Megatron-LM's converters write instead of an iteration."""
    tracker = Path(folder) / TRACKER
    if tracker.exists() and tracker.read_bytes().strip() == RELEASE.encode():
        return RELEASE
    return latest_iteration(folder)


def find_weights(folder: str | Path, setting: str) -> int | str:
    """Return the main rank's :func:`latest_weights`; raise RecipeError, with the name of the setting, without any."""
    # A network folder shows another machine's last checkpoint late: all take the main rank's.
    iteration: int | str | None = everyone(latest_weights(folder))[0]
    if iteration is None:
        raise RecipeError(f"{setting}={folder} holds no checkpoint; name the folder of a run")
    return iteration


def iteration_folder(folder: str | Path, iteration: int | str) -> Path:
    """Return the folder of an iteration's checkpoint, or of one without an iteration; Megatron-LM's name for it."""
    return Path(folder) / (iteration if isinstance(iteration, str) else f"iter_{iteration:07d}")


def make_folder(folder: str | Path) -> None:
    """Make the folder for checkpoints, on the main rank; raise SaveError on every rank if it cannot be written to."""

    def make() -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it cannot be written to")
        except OSError as error:
            raise SaveError(f"checkpoint.save={folder}: {error.strerror}; name a folder to write to") from error

    on_main_rank(make)


def save(
    folder: str | Path,
    chunks: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    progress: Progress,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Write a checkpoint and its recipe, all ranks together; raise SaveError if a rank cannot write its part."""
    target = iteration_folder(folder, progress.iteration)
    pickle_enums_by_value()  # as vetting reads them
    state = _state(chunks, optimizer, is_loading=False)
    try:
        on_main_rank(lambda: _make_empty(target))
        dist_checkpointing.save(
            state | {"opt_param_scheduler": scheduler.state_dict(), "progress": vars(progress)},
            str(target),
            sharded_strategy=WriteInRank(),
        )
        write_checksums(target)
        on_main_rank(partial(write_settings, target, settings))
        on_main_rank(lambda: _name_as_latest(folder, progress.iteration))
        on_main_rank(saving_mark(target).unlink)
    except _WRITING_ERRORS as error:
        if is_of_lost_rank(error):
            raise
        last = latest_iteration(folder)
        left = "no checkpoint was saved before it" if last is None else f"the checkpoint of iteration {last} is whole"
        raise SaveError(
            f"checkpoint.save={folder}: iteration {progress.iteration} could not be written to {target} "
            f"({_reason(error)}{_room(folder)}); {left}; make room there and start again with --resume"
        ) from error


def _make_empty(target: Path) -> None:
    # Files of a killed save of the same iteration.
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    saving_mark(target).touch()


def _name_as_latest(folder: str | Path, iteration: int) -> None:
    tracker = Path(folder) / TRACKER
    unfinished = tracker.with_suffix(".tmp")
    unfinished.write_text(str(iteration))
    os.replace(unfinished, tracker)


def _room(folder: str | Path) -> str:
    """Describe how much fits: torch's archives call a full disk an unexpected position."""
    try:
        return f"; {shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free"
    except OSError:
        return ""


def load(
    folder: str | Path,
    iteration: int,
    chunks: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    *,
    model: ModelConfig | None = None,
) -> Progress:
    """Read a checkpoint into model, optimizer and scheduler; any parallel layout may have written it.

    Raises RecipeError, with the folder, if the checkpoint is missing, damaged, does not fit the model, or was trained
    as another than ``model``.
    """
    source = _existing(folder, iteration, model)
    loaded = _read(source, _state(chunks, optimizer, is_loading=True))
    if "progress" not in loaded:
        raise RecipeError(f"checkpoint {source} does not say how far in the data it is: another program wrote it")
    # Numbers if experts have a separate optimizer, else the names of one optimizer's parts.
    if len({type(key) for key in loaded["optimizer"]}) > 1:
        raise RecipeError(
            f"checkpoint {source} and this run disagree on whether ranks share experts, whose optimizer Megatron then "
            "keeps apart; change parallel.expert_model_parallel_size from or to 1 as it was, or start from the weights "
            "with checkpoint.pretrained_checkpoint"
        )
    _load_into(chunks, loaded)
    # Megatron's groups carry settings of the recipe: the current recipe overrides them. Since 0.19
    # Megatron also finds a saved group by them, so they are exchanged before it looks.
    settings = {key: optimizer.param_groups[0][key] for key in _RECIPE_SETTINGS}
    for group in _param_groups(loaded["optimizer"]):
        group.update(settings)
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    known = {one.name for one in fields(Progress)}  # a newer version may write more
    return Progress(**{key: value for key, value in loaded["progress"].items() if key in known})


def load_weights(
    folder: str | Path,
    iteration: int | str,
    chunks: Sequence[Any],
    *,
    model: ModelConfig,
    replicas: dist.ProcessGroup | None = None,
) -> None:
    """Read only the model of a checkpoint; Megatron-LM may have written it, in any parallel layout.

    ``replicas`` are the ranks that have the same weights; None takes the data-parallel group. Raises RecipeError as
    :func:`load`, or if the checkpoint's recipe describes another function of the weights than ``model``.
    """
    source = _existing(folder, iteration, model)
    load_frozen(model, chunks)
    _load_into(chunks, _read(source, _model_state(chunks, replicas)))


def load_pretrained(folder: str | Path, iteration: int | str, chunks: Sequence[Any], *, model: ModelConfig) -> bool:
    """Read weights as :func:`load_weights` does; return whether they include a scalar head. Without one, keep ours."""
    source = _existing(folder, iteration, model)
    with _reading(source):
        has_head = CHECKPOINT_KEY in read_metadata(source / ".metadata").state_dict_metadata
    if not has_head:
        for chunk in chunks:
            start_new_head(unwrap_model(chunk))
    _load_into(chunks, _read(source, _model_state(chunks)))
    return has_head


def _existing(folder: str | Path, iteration: int | str, model: ModelConfig | None = None) -> Path:
    """Return the folder of a checkpoint that is safe, undamaged and, if given, of weights trained as ``model``."""
    source = iteration_folder(folder, iteration)
    if not source.is_dir():
        raise RecipeError(f"{Path(folder) / TRACKER} names iteration {iteration}, but {source} does not exist")
    with _reading(source):
        on_main_rank(partial(check_metadata, source))
        on_main_rank(partial(check_holds_only_data, source))
        check_integrity(source)
    if model is not None:
        on_main_rank(partial(check_same_function, source, model))
    return source


def _read(source: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    with _reading(source):
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(source))
    return loaded


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    try:
        yield
    except (UnsafeCheckpointError, DamagedCheckpointError):
        raise
    except (Exception, CheckpointException) as error:  # of many types, for a damaged file
        raise UnfitCheckpointError(
            f"checkpoint {source} is damaged or does not fit this recipe's model: {_reason(error)}"
        ) from error


def _load_into(chunks: Sequence[Any], loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(chunks):
        state, bare = loaded[_model_key(index, len(chunks))], unwrap_model(chunk)
        bare.load_state_dict(bare.state_dict() | state if _is_adapter(state) else state)


def _param_groups(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the groups, which hold the recipe's settings, of an optimizer's state or of each in a chained one."""
    for key, value in state.items():
        if key == "param_groups":
            yield from value
        elif isinstance(value, dict):
            yield from _param_groups(value)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own text is the tracebacks of all ranks, which only some know
        error = next((failure for failure, _ in error.failures.values()), RuntimeError("another rank failed"))
    return f"{type(error).__name__}: {error}"


def _state(chunks: Sequence[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    model = _model_state(chunks)
    sharded = optimizer.sharded_state_dict(dict(model), is_loading=is_loading, metadata=_metadata())
    _leave_out_absent(sharded)
    return {**model, "optimizer": sharded}


def _leave_out_absent(state: dict[Any, Any]) -> None:
    """Drop the state of a rank that gathers nothing (:func:`_metadata`): Megatron would warn of a difference."""
    for key, value in list(state.items()):
        if key == "param_state" and value is None:
            del state[key]
        elif isinstance(value, dict):
            _leave_out_absent(value)


def _model_state(chunks: Sequence[Any], replicas: dist.ProcessGroup | None = None) -> dict[str, Any]:
    metadata = _metadata() if replicas is None else _metadata() | {"dp_cp_group": replicas}
    states = [unwrap_model(chunk).sharded_state_dict(metadata=metadata) for chunk in chunks]
    if any(map(_is_adapter, states)):
        # The other weights are those of the folder that the recipe names.
        states = [{name: part for name, part in state.items() if ADAPTER in name} for state in states]
    return {_model_key(index, len(chunks)): state for index, state in enumerate(states)}


def _is_adapter(state: Mapping[str, Any]) -> bool:
    return any(ADAPTER in name for name in state)


def _metadata() -> dict[str, Any]:
    """Return the metadata of a format that any parallel layout can read, the distributed optimizer's part included."""
    # The first rank of each data-parallel group gathers that part over gloo, and is the only one that writes it.
    # Otherwise every rank would hold all of it in its host's memory.
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        # Experts over ranks have a separate optimizer, which other layouts may lack.
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_key(index: int, count: int) -> str:
    """Return Megatron-LM's name of a model chunk."""
    return "model" if count == 1 else f"model{index}"


def hold(descriptor: int) -> bool:
    """Lock an open file or folder for this process; return whether no other process holds it.

    The operating system drops the lock when the process ends, also if it is killed. Network file systems without such
    locks let every run in.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # ENOLCK, ENOSYS, or from NFS EBADF for a folder: the run continues without this protection
    return True


@contextmanager
def exclusive_save(folder: str | Path) -> Iterator[None]:
    """Lock a folder for the length of a ``with`` block; if another run has it, every rank raises SaveError."""
    held: list[int] = []

    def claim() -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        held.append(descriptor)
        if not hold(descriptor):
            raise SaveError(
                f"checkpoint.save={folder}: another run is saving there at this moment; wait for its end or choose "
                "another folder"
            )

    try:
        on_main_rank(claim)
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
