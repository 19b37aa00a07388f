"""Which rank this process is, where ``mpirun`` or ``srun`` started it: in the variables that torchrun would set."""

from __future__ import annotations

from collections.abc import MutableMapping

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
    "Slurm": {RANK: "SLURM_PROCID", SIZE: "SLURM_STEP_NUM_TASKS", LOCAL_RANK: "SLURM_LOCALID"},
}
PORT = "29500"  # torchrun's own


def adopt_ranks(environment: MutableMapping[str, str]) -> None:
    """Set ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` by what a launcher other than torchrun says, unless they are set.

    ``MASTER_PORT`` becomes torchrun's where there is none. A launcher of one process is no launcher.

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
        environment.update(said)
        environment.setdefault("MASTER_PORT", PORT)
        return
