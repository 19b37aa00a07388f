"""Which rank this process is, where ``mpirun`` or ``srun`` started it: in the variables that torchrun would set."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

# What torch and Megatron read, and what each launcher calls it; the first that there is counts, because mpirun uses
# srun inside a Slurm job. A step of Slurm, not the job: a shell inside the job is no rank.
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


def adopt_ranks(environment: MutableMapping[str, str]) -> None:
    """Set ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` by what a launcher other than torchrun says, unless they are set.

    ``LOCAL_WORLD_SIZE`` too, where it says that. ``MASTER_PORT`` becomes torchrun's where there is none. A launcher of
    one process is no launcher.

    Args:
        environment: of the process; changed in place.

    Raises:
        ValueError: ``MASTER_ADDR``, which only whoever starts the job knows, does not say where its ranks meet.
    """
    if RANK in environment:
        return
    for launcher, names in LAUNCHERS.items():
        said = {ours: environment[theirs] for ours, theirs in names.items() if theirs in environment}
        if not {RANK, SIZE, LOCAL_RANK} <= said.keys() or said[SIZE] == "1":
            continue
        if "MASTER_ADDR" not in environment:
            raise ValueError(
                f"{launcher} started {said[SIZE]} ranks ({names[SIZE]}), and MASTER_ADDR does not say where they meet: "
                "export it, the name of the machine of the first one"
            )
        # Slurm's list of all nodes, "8(x2)" or "8,8,4", is a number where all have as many.
        if LOCAL_SIZE in said:
            alike = re.fullmatch(r"(\d+)(\(x\d+\))?", said.pop(LOCAL_SIZE))
            said |= {LOCAL_SIZE: alike[1]} if alike else {}
        environment.update(said)
        environment.setdefault("MASTER_PORT", PORT)
        return


def check_gpus(environment: Mapping[str, str], seen: int) -> None:
    """Refuse ranks that cannot each have the GPU of their ``LOCAL_RANK``, which is what Megatron-LM gives them.

    All of a machine's ranks, if its launcher says how many they are: one that stays would wait for the others.

    Args:
        environment: of the process, as :func:`adopt_ranks` leaves it.
        seen: GPUs that the process can use.

    Raises:
        ValueError: there are fewer than ranks on this machine.
    """
    ranks = max(int(environment.get(LOCAL_SIZE, "1")), int(environment.get(LOCAL_RANK, "0")) + 1)
    if ranks > seen:
        raise ValueError(
            f"this machine has {ranks} ranks, each of which takes the GPU numbered {LOCAL_RANK}, and this one sees "
            f"{seen}: let every rank see all GPUs of its machine, under srun with --gpus-per-node, or with "
            "--gpu-bind=none beside --gpus-per-task"
        )
