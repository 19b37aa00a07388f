"""Ranks that mpirun or srun started."""

from __future__ import annotations

import pytest

from mcore_prefix_tree.utils.ranks import adopt_ranks, check_gpus

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
MEET = {"MASTER_ADDR": "127.0.0.1"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | MEET | {"MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (OPEN_MPI, {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}),
        (SLURM, {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8"},
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8"},
        ),
        # Not the same on all nodes.
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}, {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}),
        # Open MPI starts its own processes through srun.
        (SLURM | OPEN_MPI, {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}),
    ],
)
def test_launcher_variables_are_translated(said: dict[str, str], expected: dict[str, str]) -> None:
    environment = said | MEET
    adopt_ranks(environment)
    assert environment == said | MEET | expected | {"MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        MEET,
        SLURM | TORCHRUN,  # torchrun, started by srun
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},  # the shell of a batch job
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_environment_without_a_launcher_is_unchanged(environment: dict[str, str]) -> None:
    before = dict(environment)
    adopt_ranks(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (OPEN_MPI, r"Open MPI started 16 ranks \(OMPI_COMM_WORLD_SIZE\), but MASTER_ADDR is missing"),
        (SLURM, r"Slurm started 8 ranks \(SLURM_STEP_NUM_TASKS\)"),
    ],
)
def test_missing_rendezvous_is_rejected(said: dict[str, str], sentence: str) -> None:
    environment = dict(said)
    with pytest.raises(ValueError, match=sentence):
        adopt_ranks(environment)
    assert environment == said


def test_a_port_that_is_given_is_kept() -> None:
    environment = OPEN_MPI | MEET | {"MASTER_PORT": "1234"}
    adopt_ranks(environment)
    assert environment["MASTER_PORT"] == "1234"


@pytest.mark.parametrize("tasks", ["4(x2)", "3,5"])
def test_ranks_that_see_one_gpu_each_are_refused(tasks: str) -> None:
    """``srun --gpus-per-task=1``: Megatron would take GPU 2 of one."""
    environment = SLURM | MEET | {"SLURM_STEP_TASKS_PER_NODE": tasks}
    adopt_ranks(environment)
    ranks = 4 if tasks == "4(x2)" else 3
    with pytest.raises(ValueError, match=rf"^this machine has {ranks} ranks, .* sees 1: .*--gpu-bind=none"):
        check_gpus(environment, 1)
    check_gpus(environment, 4)


def test_the_first_rank_of_a_machine_does_not_wait_for_those_that_are_refused() -> None:
    environment = SLURM | MEET | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    adopt_ranks(environment)
    with pytest.raises(ValueError, match="has 4 ranks"):
        check_gpus(environment, 1)


def test_single_process_needs_one_gpu() -> None:
    check_gpus({}, 1)
