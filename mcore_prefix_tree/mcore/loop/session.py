"""Join the job for the length of a ``with`` block: devices, process groups, Megatron's parallel state; end it early."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mcore_prefix_tree.cpu.emulation import cpu_emulation
from mcore_prefix_tree.mcore.models.bridge import described
from mcore_prefix_tree.mcore.models.build_gpt import describe_size, transformer_config
from mcore_prefix_tree.mcore.ranks import is_of_lost_rank
from mcore_prefix_tree.mcore.seam.validation import check_config
from mcore_prefix_tree.settings import ParallelConfig, Recipe, RecipeError
from mcore_prefix_tree.utils.errors import handled_signals, naming_memory
from mcore_prefix_tree.utils.ranks import adopt_ranks

_NEXT_CTRL_C_S = 1.0  # from when on Ctrl-C is meant as a second one


@dataclass(frozen=True, kw_only=True)
class Session:
    """Job that a process has joined; its recipe has the architecture of ``model.hf``."""

    recipe: Recipe
    config: Any
    device: torch.device


class LostRankError(ConnectionError):
    """Another rank of the job ended in the middle of a collective call."""


@contextmanager
def session(recipe: Recipe) -> Iterator[Session]:
    """Set up the ranks that ``torchrun``, ``mpirun`` or ``srun`` started, or a world of one, and take them down again.

    Raises NotImplementedError as :func:`check_config`, ValueError if the recipe does not fit the ranks or their GPUs,
    and LostRankError if another rank ended.
    """
    adopt_ranks(os.environ)
    on_gpu = recipe.device != "cpu" and torch.cuda.is_available()
    if recipe.device == "cuda" and not on_gpu:
        raise RecipeError("device=cuda, but torch sees no GPU; set device=auto or device=cpu")
    model_size = partial(describe_size, recipe.model, scalar_head=recipe.objective.has_scalar_head)
    with ExitStack() as stack:
        stack.enter_context(naming_memory(lambda: f"the job does not fit; it has a model of {model_size()}"))
        if not on_gpu:
            stack.enter_context(cpu_emulation(force=recipe.device == "cpu"))
        config = transformer_config(recipe.model, recipe.parallel, on_gpu=on_gpu)
        check_config(config)
        recipe = replace(recipe, model=described(recipe.model, config))
        device = torch.device("cuda", _device_index()) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        _init_process_group("nccl" if on_gpu else "gloo", recipe.distributed_timeout_minutes)
        stack.push(_leave_process_group)
        stack.callback(parallel_state.destroy_model_parallel)  # also where only some groups could be made
        _init_parallel_state(recipe.parallel, recipe.distributed_timeout_minutes)
        # Stages draw different weights, tensor-parallel ranks cut the same ones: Megatron-LM's offset.
        seed = recipe.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        try:
            yield Session(recipe=recipe, config=config, device=device)
        except RuntimeError as error:
            if not is_of_lost_rank(error):
                raise
            reason = str(error).partition(". This is typically")[0]  # advice of torch's, which is long
            raise LostRankError(
                f"another rank of this job has ended ({reason}); start the job again: training continues from its last "
                "checkpoint with --resume"
            ) from error


def _device_index() -> int:
    """Return the index of this process's own GPU among those that it sees."""
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    # As under srun --gpus-per-task=1, which numbers ranks on a machine and shows each its own GPU. The workers of
    # torchrun all see the same ones.
    if count == 1 and not dist.is_torchelastic_launched():
        return 0
    if local_rank >= count:
        raise RecipeError(
            f"LOCAL_RANK={local_rank} on {socket.gethostname()}, but torch sees {count} of its GPUs; start no "
            "more ranks on a machine than it has GPUs, or set device=cpu"
        )
    return local_rank


def _init_process_group(backend: str, timeout_minutes: int | None) -> None:
    timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:  # a launcher's environment
        try:
            dist.init_process_group(backend, timeout=timeout)
        except dist.DistError as error:
            where = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
            raise RecipeError(f"the ranks do not meet at {where}: {str(error).splitlines()[0]}") from error
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)


def _leave_process_group(error: type[BaseException] | None, *_: object) -> None:
    # If one rank fails, it reports why once it is out of the session. If its connections ended before, the others would
    # fail too and report first.
    if error is None or dist.get_world_size() == 1:
        dist.destroy_process_group()


def _init_parallel_state(parallel: ParallelConfig, timeout_minutes: int | None) -> None:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if dist.get_world_size() % (tp * pp):
        raise RecipeError(
            f"parallel.tensor_model_parallel_size={tp} and parallel.pipeline_model_parallel_size={pp} need a multiple "
            f"of {tp * pp} ranks, but this job has {dist.get_world_size()}; start it with "
            f"torchrun --nproc-per-node {tp * pp} -m mcore_prefix_tree ..."
        )
    of_stage, experts = dist.get_world_size() // pp, parallel.expert_model_parallel_size
    if of_stage % experts:
        raise RecipeError(
            f"parallel.expert_model_parallel_size={experts} does not divide the {of_stage} ranks of a pipeline stage; "
            f"start the job with torchrun --nproc-per-node {math.lcm(tp, experts) * pp} -m mcore_prefix_tree ..."
        )
    timeout = {} if timeout_minutes is None else {"distributed_timeout_minutes": timeout_minutes}
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        **timeout,
    )


class EndedError(Exception):
    """A signal, whose number is ``signal``, ended the run between two steps; this has been reported already."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


class EndRequest:
    """Notes Ctrl-C and the signals by which launchers and schedulers end a job, in a ``with`` block.

    Without a launcher, a second Ctrl-C a second later or more ends the process at once. No other repeated signal does:
    ``timeout`` sends each twice, schedulers warn before they end a job, and launchers repeat signals that all of their
    processes already have. Outside the main thread, which alone may handle signals, no signal is noted.
    """

    def __init__(self) -> None:
        self._noted, self._noted_at = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EndRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, device: torch.device) -> int:
        """Return the signal that any rank has noted, 0 if none has; all ranks together, with the same result."""
        noted = torch.full((), self._noted, dtype=torch.int, device=device)
        dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        return int(noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._noted:
            self._noted, self._noted_at = number, time.monotonic()
            return
        is_second = time.monotonic() - self._noted_at > _NEXT_CTRL_C_S
        if is_second and number == signal.SIGINT and "RANK" not in os.environ:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
