"""Real limits, for example few descriptors, little memory or data without end. One sentence within 20 s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.commands import write_rows

pytestmark = pytest.mark.slow

RECIPE = """
data: {{path: {data}}}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, vocab_size: 64}}
batch: {{global_batch_size: 4, max_tokens: 64}}
train_iters: 2
compare: false
verify: {{enabled: false}}
"""
# Megatron by itself takes seconds to import, and more on a busy machine.
LIMIT_S = 20 if os.cpu_count() and os.getloadavg()[0] < (os.cpu_count() or 1) else 90


@pytest.fixture
def job(tmp_path: Path) -> Path:
    data = write_rows(tmp_path / "data.jsonl", ({"tokens": [*range(20), 40 + row]} for row in range(8)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(data=data))
    return recipe


def sentence(*arguments: object, limit: str = "true", **streams: object) -> str:
    """The error of a command that fails under ``ulimit``."""
    program = f'{limit} && exec "$@"'
    started = time.monotonic()
    done = subprocess.run(  # type: ignore[call-overload]
        ["bash", "-c", program, "bash", sys.executable, "-m", "mcore_prefix_tree", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **streams,
    )
    assert time.monotonic() - started < LIMIT_S
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return str(line)


@pytest.mark.parametrize("files", [8, 16, 32])
def test_few_descriptors(job: Path, files: int) -> None:
    said = sentence("train", job, f"checkpoint.save={job.parent / 'saved'}", limit=f"ulimit -n {files}")
    assert said == f"error: too many open files: this process may have {files} (ulimit -n); raise that"


@pytest.mark.parametrize("kib", [800_000, 1_000_000, 1_200_000])
def test_little_memory(job: Path, kib: int) -> None:
    assert sentence("train", job, limit=f"ulimit -v {kib}").startswith("error: memory ran out")


def test_error_of_a_model_beyond_memory_names_its_size(job: Path) -> None:
    sizes = ("model.hidden_size=8192", "model.num_attention_heads=8", "model.ffn_hidden_size=16384")
    said = sentence("train", job, *sizes, limit="ulimit -v 6000000")
    assert said.startswith("error: memory ran out, ")
    assert " GiB more were asked for: the job does not fit; it has a model of at least 1," in said


def test_error_of_a_step_beyond_memory_names_its_tokens(job: Path) -> None:
    tokens = [index % 60 for index in range(20_000)]
    job.with_name("data.jsonl").write_text(json.dumps({"tokens": tokens}) + "\n")
    sizes = ("batch.max_tokens=20000", "batch.global_batch_size=1", "model.ffn_hidden_size=65536")
    said = sentence("train", job, *sizes, limit="ulimit -v 5000000")
    assert said.startswith("error: memory ran out, ")
    assert said.endswith("of 1 micro-batches of up to 20,000 tokens does not fit; lower batch.max_tokens")


def test_four_gigabytes_without_a_newline(job: Path) -> None:
    data = job.with_name("sparse.jsonl")
    with data.open("wb") as stream:
        stream.truncate(1 << 32)
    says = f"error: {data}:1: the line is longer than 512 MiB; write JSON Lines, one JSON object a line"
    assert sentence("inspect", data) == says
    assert sentence("train", job, f"data.path={data}", "data.streaming=true") == says


def test_blank_lines_from_a_pipe() -> None:
    with subprocess.Popen(["yes", ""], stdout=subprocess.PIPE) as endless:
        said = sentence("inspect", "-", stdin=endless.stdout)
        endless.kill()
    assert said.endswith(": more than 1 MiB of blank lines end here; remove them")


def test_a_fifo_without_a_writer(job: Path) -> None:
    os.mkfifo(fifo := job.with_name("fifo.jsonl"))
    assert "no process has opened this FIFO to write to it within 10 s" in sentence("inspect", fifo)
