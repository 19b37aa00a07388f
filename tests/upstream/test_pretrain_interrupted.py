"""A run of ``pretrain_gpt`` that is interrupted continues to the end of the undisturbed stock run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


@pytest.mark.slow
def test_ctrl_c_in_a_step_is_quiet_and_the_run_resumes(stock: Stock, tmp_path: Path) -> None:
    saved, log = only_checkpoint(stock.folder, FIRST, tmp_path / "saved"), tmp_path / "agent.log"
    tracker = saved / "latest_checkpointed_iteration.txt"
    arguments = (*stock.args(saved), f"--load {saved}", "--save-interval 2", "--tensor-model-parallel-size 2")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [word for argument in arguments for word in argument.split()]
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PATH": search_path()}
    with log.open("wb") as stream:
        agent = subprocess.Popen(
            [*torchrun, *ENTRY, *words],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | fixed,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        while int(tracker.read_text() or 0) < 4:  # Megatron empties the file before it writes
            assert agent.poll() is None, log.read_text()[-8000:]
            assert time.monotonic() < deadline, log.read_text()[-8000:]
            time.sleep(0.002)
        everyone = psutil.Process(agent.pid).children(recursive=True)
        os.killpg(agent.pid, signal.SIGINT)  # as a terminal does
        assert agent.wait(timeout=60) != 0
        _, alive = psutil.wait_procs(everyone, timeout=10)
        assert alive == []
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    said = log.read_text()
    assert "torch.distributed.elastic.multiprocessing.api.SignalException" in said, "torchrun's own"
    assert "mcore_prefix_tree/" not in said, "no rank's stack"
    assert f"iteration {ITERATIONS:8d}/" not in said
    run = trained(ENTRY, *arguments, ranks=2)
    assert f"successfully loaded checkpoint from {saved}" in run.output
    assert min(run.losses) >= 5
    assert_same_tensors(saved, stock.folder, ITERATIONS)
