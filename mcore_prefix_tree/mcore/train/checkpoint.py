"""Checkpoints in Megatron's own distributed format and folder layout.

``FOLDER/iter_0000010`` holds one checkpoint, ``FOLDER/latest_checkpointed_iteration.txt`` names the last complete one.
The name is written after everything else, so a run killed while it saves resumes from the checkpoint before.
Model keys are those of the stock model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from mcore_prefix_tree.recipe import RecipeError

TRACKER = "latest_checkpointed_iteration.txt"
_RECIPE_SETTINGS = ("max_lr", "min_lr", "betas")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, and what must not change for it to go on the same way.

    Attributes:
        iteration: steps done.
        global_batch_size: of the recipe.
        seed: of the recipe.
        shuffle: of the recipe's data.
        samples_per_epoch: in the data.
        consumed_samples: logical samples trained on.
    """

    iteration: int
    global_batch_size: int
    seed: int
    shuffle: bool
    samples_per_epoch: int
    consumed_samples: int


def latest_iteration(folder: str | Path) -> int | None:
    """The last complete checkpoint's iteration, or None if there is none.

    Raises:
        RecipeError: the tracker file does not hold a number.
    """
    tracker = Path(folder) / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_bytes().decode("ascii", errors="backslashreplace").strip()
    if not text.isdigit():
        raise RecipeError(f"{tracker} holds {text!r} instead of an iteration; write the last complete one there")
    return int(text)


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies; Megatron-LM's name for it."""
    return Path(folder) / f"iter_{iteration:07d}"


def save(folder: str | Path, chunks: Sequence[Any], optimizer: Any, scheduler: Any, progress: Progress) -> None:
    """Write a checkpoint; all ranks together."""
    target = iteration_folder(folder, progress.iteration)
    if dist.get_rank() == 0:
        # What a killed save of the same iteration left behind.
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        _state(chunks, optimizer, is_loading=False)
        | {"opt_param_scheduler": scheduler.state_dict(), "progress": vars(progress)},
        str(target),
    )
    dist.barrier()
    if dist.get_rank() == 0:
        tracker = Path(folder) / TRACKER
        unfinished = tracker.with_suffix(".tmp")
        unfinished.write_text(str(progress.iteration))
        os.replace(unfinished, tracker)
    dist.barrier()


def load(folder: str | Path, iteration: int, chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> Progress:
    """Read a checkpoint into model, optimizer and scheduler; any parallel layout may have written it.

    Raises:
        RecipeError: the checkpoint is missing, damaged or does not fit the model; names the folder.
    """
    source = _existing(folder, iteration)
    loaded = _read(source, _state(chunks, optimizer, is_loading=True))
    if "progress" not in loaded:
        raise RecipeError(f"checkpoint {source} does not say how far in the data it is: another program wrote it")
    _load_into(chunks, loaded)
    # Megatron's groups carry settings of the recipe: what it says now wins over what the checkpoint says. Since 0.19
    # Megatron also finds a saved group by them, so they are exchanged before it looks.
    settings = {key: optimizer.param_groups[0][key] for key in _RECIPE_SETTINGS}
    for group in _param_groups(loaded["optimizer"]):
        group.update(settings)
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    return Progress(**loaded["progress"])


def load_weights(folder: str | Path, iteration: int, chunks: Sequence[Any]) -> None:
    """Read a checkpoint's model and nothing else; Megatron-LM may have written it, in any parallel layout.

    Raises:
        RecipeError: as :func:`load`.
    """
    _load_into(chunks, _read(_existing(folder, iteration), _model_state(chunks)))


def _existing(folder: str | Path, iteration: int) -> Path:
    source = iteration_folder(folder, iteration)
    if not source.is_dir():
        raise RecipeError(f"{Path(folder) / TRACKER} names iteration {iteration}, but {source} does not exist")
    return source


def _read(source: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(source))
    except (Exception, CheckpointException) as error:  # whatever a damaged file makes Megatron and torch raise
        raise RecipeError(
            f"checkpoint {source} is damaged or does not fit this recipe's model: {_reason(error)}"
        ) from error
    return loaded


def _load_into(chunks: Sequence[Any], loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(chunks):
        unwrap_model(chunk).load_state_dict(loaded[_model_key(index, len(chunks))])


def _param_groups(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Of an optimizer's state, or of each that a chained one holds; the recipe's settings are those of all of them."""
    for key, value in state.items():
        if key == "param_groups":
            yield from value
        elif isinstance(value, dict):
            yield from _param_groups(value)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # its own text is the tracebacks of all ranks
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


def _state(chunks: Sequence[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    model = _model_state(chunks)
    sharded = optimizer.sharded_state_dict(dict(model), is_loading=is_loading, metadata=_metadata())
    return {**model, "optimizer": sharded}


def _model_state(chunks: Sequence[Any]) -> dict[str, Any]:
    return {
        _model_key(index, len(chunks)): unwrap_model(chunk).sharded_state_dict(metadata=_metadata())
        for index, chunk in enumerate(chunks)
    }


def _metadata() -> dict[str, Any]:
    """Megatron's defaults for torch_dist; the optimizer's shards can be read by any number of data-parallel ranks."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_key(index: int, count: int) -> str:
    """Megatron-LM's names of the model chunks."""
    return "model" if count == 1 else f"model{index}"
