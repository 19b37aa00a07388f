"""Ranks that ``mpirun`` or ``srun`` started, in the variables that torchrun would set."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping

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
    "MPICH or Intel MPI": {
        RANK: "PMI_RANK",
        SIZE: "PMI_SIZE",
        LOCAL_RANK: "MPI_LOCALRANKID",
        LOCAL_SIZE: "MPI_LOCALNRANKS",
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
    one process is ignored. Raises ValueError for incomplete or contradictory variables, or without ``MASTER_ADDR``.
    """
    if RANK not in environment:
        _adopt(environment)
    if RANK in environment:
        _check_ranks(environment)
    elif environment.get(SIZE, "1") != "1":
        raise ValueError(f"{SIZE}={environment[SIZE]} is set without {RANK}; start every rank with both, or unset it")


def _adopt(environment: MutableMapping[str, str]) -> None:
    for launcher, names in LAUNCHERS.items():
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
    _check_alone(environment)


def _check_alone(environment: Mapping[str, str]) -> None:
    """Check that no launcher started this process as one of several without naming its rank."""
    for launcher, names in LAUNCHERS.items():
        # The shell of a batch job has Slurm's rank 0; a later rank has been started with others.
        if environment.get(names[RANK], "0") != "0" or environment.get(names[SIZE], "1") != "1":
            missing = " and ".join(names[one] for one in (RANK, SIZE, LOCAL_RANK) if names[one] not in environment)
            if missing:
                raise ValueError(
                    f"{launcher} started this process as one of several, but {missing} "
                    f"{'are' if ' ' in missing else 'is'} missing; set {RANK}, {SIZE} and {LOCAL_RANK} yourself"
                )


def _check_ranks(environment: Mapping[str, str]) -> None:
    """Raise ValueError for a wrong variable, with which torch and Megatron would hang or fail without a sentence."""
    for name in (SIZE, "MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ValueError(f"{RANK}={environment[RANK]} is set without {name}; start the ranks with torchrun")
    number: dict[str, int] = {}
    for name in (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, "MASTER_PORT"):
        if name in environment:
            if not re.fullmatch(r"[0-9]{1,9}", environment[name]):
                raise ValueError(f"{name}={environment[name]} is not a number")
            number[name] = int(environment[name])
    for rank, size in ((RANK, SIZE), (LOCAL_RANK, LOCAL_SIZE), (LOCAL_RANK, SIZE)):
        if rank in number and size in number and number[rank] >= number[size]:
            raise ValueError(
                f"{rank}={number[rank]} is not below {size}={number[size]}; ranks are numbered from 0, and every rank "
                "has a different number"
            )
    if not 0 < number["MASTER_PORT"] < 2**16:
        raise ValueError(f"MASTER_PORT={number['MASTER_PORT']} is not a port; ports are 1 to 65535")
    try:
        socket.getaddrinfo(environment["MASTER_ADDR"], number["MASTER_PORT"])
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"MASTER_ADDR={environment['MASTER_ADDR']} cannot be resolved ({error}); name the machine of the first rank"
        ) from None


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
