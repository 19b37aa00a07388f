"""Ranks of a job as data, checkpoints, messages and launchers see them; ``mcore/ranks.py`` asks torch.distributed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

_NAMED_HOSTS = 3


def _alone(value: Any) -> list[Any]:
    return [value]


def _by_itself(action: Callable[[], Any]) -> Any:
    return action()


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that share work on the same data; ``on_main`` runs an action on the main rank, with its result on all."""

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = _alone
    on_main: Callable[[Callable[[], Any]], Any] = _by_itself


ALONE = Ranks()


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the names of ranks in order, for example ``ranks 8-15 on node-b``; ``hosts`` are those of all ranks."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [
        f"{'rank' if len(own) == 1 else 'ranks'} {_spans(own)} on {host}"
        for host, own in list(by_host.items())[:_NAMED_HOSTS]
    ]
    if (more := len(by_host) - _NAMED_HOSTS) > 0:
        named.append(f"those of {more:,} other machine{'' if more == 1 else 's'}")
    return " and ".join(named)


def _spans(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


# Names that torch and Megatron read, and those that each launcher sets. The first launcher found counts, because mpirun
# uses srun inside a Slurm job. Slurm's names are those of a step: a shell inside the job is no rank.
RANK, SIZE, LOCAL_RANK, LOCAL_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
LAUNCHERS = {
    "Open MPI": {
        RANK: "OMPI_COMM_WORLD_RANK",
        SIZE: "OMPI_COMM_WORLD_SIZE",
        LOCAL_RANK: "OMPI_COMM_WORLD_LOCAL_RANK",
        LOCAL_SIZE: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    "Slurm": {
        RANK: "SLURM_PROCID",
        SIZE: "SLURM_STEP_NUM_TASKS",
        LOCAL_RANK: "SLURM_LOCALID",
        LOCAL_SIZE: "SLURM_STEP_TASKS_PER_NODE",
    },
}
PORT = "29500"  # torchrun's own


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or by itself: it warns for all."""
    return os.environ.get(RANK, "0") == "0"


def adopt_ranks(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables in ``environment``, unless they are set, to the values of another launcher's.

    Sets ``LOCAL_WORLD_SIZE`` if the launcher has it, and a missing ``MASTER_PORT`` to torchrun's default. A launcher of
    one process is ignored. Raises ValueError without ``MASTER_ADDR``.
    """
    for launcher, names in LAUNCHERS.items() if RANK not in environment else ():
        said = {ours: environment[theirs] for ours, theirs in names.items() if theirs in environment}
        if not {RANK, SIZE, LOCAL_RANK} <= said.keys() or said[SIZE] == "1":
            continue
        if "MASTER_ADDR" not in environment:
            raise ValueError(
                f"{launcher} started {said[SIZE]} ranks ({names[SIZE]}), but MASTER_ADDR is missing: export the name "
                "of the first rank's machine"
            )
        # Slurm's list of all nodes, "8(x2)" or "8,8,4", is a number where all have as many.
        if LOCAL_SIZE in said:
            alike = re.fullmatch(r"(\d+)(\(x\d+\))?", said.pop(LOCAL_SIZE))
            said |= {LOCAL_SIZE: alike[1]} if alike else {}
        environment.update(said)
        environment.setdefault("MASTER_PORT", PORT)
        return


def check_gpus(environment: Mapping[str, str], seen: int) -> None:
    """Raise ValueError unless each rank can have the GPU of its ``LOCAL_RANK``, as Megatron-LM does, among ``seen``.

    All ranks of a machine are rejected, if its launcher reports their number: any other would wait for ever. The
    ``environment`` is as :func:`adopt_ranks` leaves it.
    """
    ranks = max(int(environment.get(LOCAL_SIZE, "1")), int(environment.get(LOCAL_RANK, "0")) + 1)
    if ranks > seen:
        raise ValueError(
            f"this machine has {ranks} ranks, each of which takes the GPU numbered {LOCAL_RANK}, and this one sees "
            f"{seen}: let every rank see all GPUs of its machine, under srun with --gpus-per-node, or with "
            "--gpu-bind=none and --gpus-per-task"
        )
