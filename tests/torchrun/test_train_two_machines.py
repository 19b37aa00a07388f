"""``torchrun --nnodes 2`` for real: two agents meet over loopback, lose workers, and end as if nothing had happened.

Each agent stands for one machine of a cluster; they share nothing but the rendezvous and a folder. TP=2 x PP=2
takes both, so that a worker lost on one ends the other's work too.
"""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from harness.torchrun_jobs import TRACKER, VOCAB, assert_same_bits, checkpoint_content, environment, write_job

STEPS = 10
RECIPE = f"""
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: {VOCAB}}}
parallel: {{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}}
batch: {{global_batch_size: 48, max_tokens: 24}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1}}
train_iters: {STEPS}
checkpoint: {{save_interval: 1}}
compare: false
verify: {{enabled: false}}
"""
LAST_RANK = 3
# Without it torch 2.13 keeps the store that workers meet in over a restart, and new ones call where dead ones listened;
# https://github.com/pytorch/pytorch/issues/135712. The recipes' launchers set it too.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PATIENCE_S = 300


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe, its checkpoint folder, and its agents' output files."""

    recipe: Path
    saved: Path
    printed: list[Path]
    agents: list[subprocess.Popen[bytes]]

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in self.printed)

    def folder(self, iteration: int) -> Path:
        return self.saved / f"iter_{iteration:07d}"

    def last_saved(self) -> int:
        tracker = self.saved / TRACKER
        return int(tracker.read_text()) if tracker.exists() else 0

    def worker(self, rank: int) -> psutil.Process:
        """The process that is a rank now."""
        (found,) = [
            process
            for agent in self.agents
            for process in psutil.Process(agent.pid).children()
            if process.environ().get("RANK") == str(rank)
        ]
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Look much more often than a step takes; fail once an agent is gone or minutes have passed."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert all(agent.poll() is None for agent in self.agents), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.002)


@contextmanager
def started(folder: Path, launchers: list[list[str]]) -> Iterator[Job]:
    """A job of one agent for each launcher, ended with the block if it has not ended by itself."""
    folder.mkdir()
    recipe, saved = write_job(folder, RECIPE), folder / "saved"
    printed = [folder / f"agent_{number}.log" for number in range(len(launchers))]
    agents = []
    for launcher, path in zip(launchers, printed, strict=True):
        torchrun = [sys.executable, "-m", "torch.distributed.run", *launcher]
        train = ["-m", "mcore_prefix_tree", "train", str(recipe), f"checkpoint.save={saved}", "--resume"]
        with path.open("wb") as log:
            agents.append(
                subprocess.Popen(
                    [*torchrun, *train], stdout=log, stderr=subprocess.STDOUT, env=environment() | FRESH_STORE
                )
            )
    try:
        yield Job(recipe=recipe, saved=saved, printed=printed, agents=agents)
    finally:
        for agent in agents:
            if agent.poll() is None:
                for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
                    process.kill()
            agent.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def two_machines(max_restarts: int) -> list[list[str]]:
    """Arguments on both machines, after ``torchrun``."""
    endpoint = f"127.0.0.1:{free_port()}"
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test"]
    shape = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", str(max_restarts)]
    return [[*shape, *rendezvous, "--local-addr", "127.0.0.1"]] * 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last checkpoint's folder is the oracle."""
    one_machine = ["--standalone", "--nproc-per-node", "4"]
    with started(tmp_path_factory.mktemp("undisturbed") / "job", [one_machine]) as job:
        assert job.agents[0].wait(timeout=PATIENCE_S) == 0, job.output
    return job.saved


@pytest.mark.slow
def test_lost_workers_do_not_change_a_bit(undisturbed: Path, tmp_path: Path) -> None:
    with started(tmp_path / "job", two_machines(max_restarts=2)) as job:
        # One worker dies in the middle of a step.
        job.wait_until(lambda: job.last_saved() >= 2)
        killed = job.worker(LAST_RANK)
        job.wait_until(lambda: stopped_in_a_step(job, killed))
        first = job.last_saved()
        killed.kill()

        # Another cannot write more than half of its part of a checkpoint, for example on a full disk.
        job.wait_until(lambda: job.last_saved() > first)
        full = job.worker(LAST_RANK)
        assert full.pid != killed.pid
        half = (job.folder(first) / f"__{LAST_RANK}_0.distcp").stat().st_size // 2
        full.rlimit(resource.RLIMIT_FSIZE, (half, half))
        job.wait_until(lambda: not full.is_running())
        second = job.last_saved()
        assert half in {path.stat().st_size for path in job.folder(second + 1).glob(f"__{LAST_RANK}_*")}

        assert [agent.wait(timeout=PATIENCE_S) for agent in job.agents] == [0, 0], job.output

    resumed = re.findall(r"^resumed from (.*)$", job.output, flags=re.MULTILINE)
    assert resumed == [str(job.folder(first)), str(job.folder(second))]
    assert_same_bits(checkpoint_content(job.saved, STEPS), checkpoint_content(undisturbed, STEPS))


def stopped_in_a_step(job: Job, worker: psutil.Process) -> bool:
    """Stop a worker; if that was while a checkpoint is being written, let it continue."""
    worker.suspend()
    in_a_step = not job.folder(job.last_saved() + 1).exists()
    if not in_a_step:
        worker.resume()
    return in_a_step
