"""A run of ``pretrain_gpt`` that is interrupted or loses a worker continues to the end of the undisturbed stock run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from megatron_lm import (
    ENTRY,
    FIRST,
    ITERATIONS,
    Stock,
    assert_same_tensors,
    only_checkpoint,
    require_checkout,
    search_path,
    trained,
)

require_checkout()

TRACKER = "latest_checkpointed_iteration.txt"
SAVING = "--save-interval 2"
PATIENCE_S = 300


@dataclass(frozen=True)
class Job:
    """Agents, each leading a separate session, their output files, and the checkpoint folder of their ranks."""

    agents: list[subprocess.Popen[bytes]]
    logs: list[Path]
    saved: Path

    @property
    def output(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def last_saved(self) -> int:
        # Megatron empties the file before it writes.
        return int((self.saved / TRACKER).read_text() or 0)

    def workers(self) -> list[psutil.Process]:
        """The ranks of now."""
        children = [child for agent in self.agents for child in psutil.Process(agent.pid).children()]
        return sorted((child for child in children if "RANK" in child.environ()), key=rank_of)

    def wait_until_saved(self, iteration: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.last_saved() < iteration:
            assert all(agent.poll() is None for agent in self.agents), self.output[-8000:]
            assert time.monotonic() < deadline, self.output[-8000:]
            time.sleep(0.002)

    def stop_in_a_step(self, worker: psutil.Process) -> int:
        """Stop a worker while no checkpoint is being written; returns the last one's iteration."""
        while True:
            worker.suspend()
            last = self.last_saved()
            if not (self.saved / f"iter_{last + 2:07d}").exists():
                return last
            worker.resume()
            self.wait_until_saved(last + 2)


def rank_of(worker: psutil.Process) -> int:
    return int(worker.environ()["RANK"])


@contextmanager
def started(folder: Path, launchers: list[list[str]], arguments: tuple[str, ...], saved: Path) -> Iterator[Job]:
    """Agents of one job, ended with the block if they have not ended by themselves."""
    words = [word for argument in arguments for word in argument.split()]
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PATH": search_path()}
    # As the recipes' launchers: see recipes/launch/job.sh.
    fixed["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logs = [folder / f"agent_{number}.log" for number in range(len(launchers))]
    agents = []
    for launcher, path in zip(launchers, logs, strict=True):
        with path.open("wb") as log:
            agents.append(
                subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *launcher, *ENTRY, *words],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | fixed,
                    start_new_session=True,
                )
            )
    try:
        yield Job(agents, logs, saved)
    finally:
        for agent in agents:
            if agent.poll() is None:
                for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
                    process.kill()
            agent.wait()


@pytest.mark.slow
def test_ctrl_c_in_a_step_is_quiet_and_the_run_resumes(stock: Stock, tmp_path: Path) -> None:
    saved = only_checkpoint(stock.folder, FIRST, tmp_path / "saved")
    arguments = (*stock.args(saved), f"--load {saved}", SAVING, "--tensor-model-parallel-size 2")
    with started(tmp_path, [["--standalone", "--nproc-per-node", "2"]], arguments, saved) as job:
        (agent,) = job.agents
        job.wait_until_saved(4)
        everyone = psutil.Process(agent.pid).children(recursive=True)
        os.killpg(agent.pid, signal.SIGINT)  # as a terminal does
        assert agent.wait(timeout=60) != 0
        _, alive = psutil.wait_procs(everyone, timeout=10)
        assert alive == []
        said = job.output
    assert "torch.distributed.elastic.multiprocessing.api.SignalException" in said, "torchrun's own"
    assert "mcore_prefix_tree/" not in said, "no rank's stack"
    assert f"iteration {ITERATIONS:8d}/" not in said
    run = trained(ENTRY, *arguments, ranks=2)
    assert f"successfully loaded checkpoint from {saved}" in run.output
    assert min(run.losses) >= 5
    assert_same_tensors(saved, stock.folder, ITERATIONS)


@pytest.mark.slow
def test_a_worker_lost_by_one_of_two_machines_changes_nothing(stock: Stock, tmp_path: Path) -> None:
    """TP=2 x PP=2 takes both agents, so that a worker lost on one ends the other's work too."""
    saved = only_checkpoint(stock.folder, FIRST, tmp_path / "saved")
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    launcher = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1", "--local-addr", "127.0.0.1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test"]
    arguments = (*stock.args(saved), f"--load {saved}", SAVING, layout)
    with started(tmp_path, [launcher, launcher], arguments, saved) as job:
        job.wait_until_saved(4)
        worker = job.workers()[-1]
        last = job.stop_in_a_step(worker)
        worker.kill()
        assert [agent.wait(timeout=PATIENCE_S) for agent in job.agents] == [0, 0], job.output[-8000:]
        said = job.output
    loaded = re.findall(r"successfully loaded checkpoint from .* at iteration (\d+)", said)
    assert loaded == [str(FIRST), str(last)]
    assert last < ITERATIONS
    assert_same_tensors(saved, stock.folder, ITERATIONS)
