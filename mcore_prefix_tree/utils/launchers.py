"""Ranks that ``mpirun`` or ``srun`` started, in the variables that torchrun would set."""

from __future__ import annotations

import os
import re
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
