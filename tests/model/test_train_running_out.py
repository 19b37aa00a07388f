"""Exhausted resources, for example a full disk, and nonsensical settings: one sentence, exit code 2, no output."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.commands import run_command

from mcore_prefix_tree.mcore.engine import pipeline, step_planner
from mcore_prefix_tree.mcore.loop import resolve_recipe, trainer
from mcore_prefix_tree.settings import bind_objective

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.2 GiB is free"
)
HOST = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


def sentence(done: Any) -> str:
    """The error of a command that failed."""
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return str(line.removeprefix("error: "))


@contextmanager
def at_most(limit: int, kind: int = resource.RLIMIT_FSIZE) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA), RuntimeError(HOST), MemoryError()], ids=type)
def test_a_step_without_memory_names_the_largest_micro_batch(
    job: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run_out(**_: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "get_forward_backward_func", lambda: run_out)
    said = sentence(run_command("train", job))
    assert said.startswith("memory ran out")
    assert ("2.00 GiB" in said) == isinstance(error, torch.OutOfMemoryError)
    assert ": the forward and backward pass of " in said
    assert " micro-batches of up to " in said
    assert said.endswith(" tokens does not fit; lower batch.max_tokens")


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        (trainer, "fold_step", "memory ran out: the job does not fit; it has a model of at least "),
        (step_planner, "fold_micro_batches", "memory ran out: planning a step of 6 samples, "),
        (
            resolve_recipe,
            "build_chunks",
            "weights (model.num_layers=2, hidden_size=32, vocab_size=64); lower these or batch.max_",
        ),
        (trainer, "get_megatron_optimizer", "memory ran out: the job does not fit; it has a model of at least "),
        (bind_objective, "make_objective", "memory ran out; use a machine with more"),
    ],
)
def test_memory_runs_out_in_other_places(
    job: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, says: str
) -> None:
    def run_out(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(module, name, run_out)
    assert says in sentence(run_command("train", job))


def test_samples_that_do_not_fit_name_streaming(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 1.25 GiB for an array")

    monkeypatch.setattr("mcore_prefix_tree.data.source.iter_sample_groups", run_out)
    said = sentence(run_command("train", job))
    assert said.startswith("memory ran out, 1.25 GiB more were asked for: the samples of ")
    assert said.endswith("do not fit; set data.streaming=true")


@pytest.mark.parametrize("override", ["model.hidden_size=40000000", "model.vocab_size=2000000000"])
def test_a_model_larger_than_the_memory_is_refused_with_its_size(job: Path, override: str) -> None:
    said = sentence(run_command("train", job, override))
    assert said.startswith("the weights of this rank take ")
    assert override.removeprefix("model.") in said


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("layernorm_epsilon=abc", 'input should be a valid number (given "abc")'),
        ("layernorm_epsilon=true", "input should be a valid number (given true)"),
        ("layernorm_epsilon=.nan", "input should be a finite number (given NaN)"),
        ("hidden_dropout=[0.1]", "input should be a valid number (given [0.1])"),
        ("num_moe_experts=2.5", "input should be a valid integer (given 2.5)"),
        ("num_moe_experts=true", "input should be a valid integer (given true)"),
        ("moe_ffn_hidden_size=99999999999", "input should be at most 2147483647 (given 99999999999)"),
        ("window_size=[16]", "field required (given [16])"),
        ("window_size=16", "input should be a valid array (given 16)"),
        ("fp32_residual_connection=maybe", 'input should be a valid boolean (given "maybe")'),
        ("recompute_granularity=some", "input should be 'full' or 'selective' (given \"some\")"),
        ("moe_aux_loss_coeff={a: 1}", "input should be a valid number; or input should be a valid array (given {"),
        ("init_method=normal", 'input should be callable (given "normal")'),
    ],
)
def test_every_field_of_the_transformer_has_its_type(job: Path, setting: str, says: str) -> None:
    said = sentence(run_command("train", job, f"model.transformer.{setting}"))
    assert said.startswith(f"model.transformer.{setting.partition('=')[0]}: ")
    assert says in said


def test_plan_checks_the_model_that_it_plans_for(job: Path) -> None:
    job.write_text(job.read_text().replace("num_layers: 2", "num_layers: 2\n  transformer: {layernorm_epsilon: abc}"))
    for name in ("plan", "inspect"):
        said = sentence(run_command(name, job.with_name("data.jsonl"), "--model", job))
        assert said.startswith("model.transformer.layernorm_epsilon: input should be a valid number")


@pytest.mark.parametrize("target", ["recipe.yaml", "data.jsonl", "link.jsonl"])
def test_an_output_that_is_an_input_is_refused(job: Path, target: str) -> None:
    (job.parent / "link.jsonl").symlink_to(job.parent / "data.jsonl")
    before = job.read_text(), (job.parent / "data.jsonl").read_text()
    output = job.with_name(target)
    said = sentence(run_command("score", job, "--output", output))
    assert said.endswith(f"--output {output}: is read by this command, which would replace it; name another file")
    assert (job.read_text(), (job.parent / "data.jsonl").read_text()) == before


def test_metrics_do_not_replace_the_data(job: Path) -> None:
    data = job.with_name("data.jsonl")
    assert sentence(run_command("train", job, f"log.metrics={data}")).startswith(
        f"log.metrics={data}: is read by this "
    )


def test_two_runs_do_not_write_to_one_file_of_metrics(job: Path) -> None:
    metrics = job.with_name("metrics.jsonl")
    run_command("train", job, f"log.metrics={metrics}", "train_iters=2", code=0)
    before = metrics.read_text()
    with metrics.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        said = sentence(run_command("train", job, f"log.metrics={metrics}", "train_iters=2"))
    assert said == f"log.metrics={metrics}: another run writes to this file; name another"
    assert metrics.read_text() == before
    run_command("train", job, f"log.metrics={metrics}", "train_iters=2", code=0)


def test_full_disk_error_names_the_path(job: Path) -> None:
    pytest.importorskip("tensorboard")
    output = job.with_name("tb")
    with at_most(64):
        said = sentence(run_command("train", job, f"log.tensorboard={output}"))
    assert str(output) in said
    assert "File too large" in said
    assert not list(job.parent.glob("*.unfinished"))


def test_ranks_without_a_meeting_place_are_rejected_at_once(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(variable, value)
    assert sentence(run_command("train", job)).startswith("Slurm started 2 ranks (SLURM_STEP_NUM_TASKS), but MASTER_")


def test_port_in_use_is_reported(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **where}.items():
        monkeypatch.setenv(variable, value)
    said = sentence(run_command("train", job))
    assert said.startswith(f"the ranks do not meet at MASTER_ADDR=127.0.0.1 MASTER_PORT={store.port}: ")
    assert "already in use" in said


def test_unreadable_files_are_named(job: Path) -> None:
    # The first run imports modules and leaves garbage; later, garbage would free numbers of files.
    run_command("train", job)
    gc.collect()
    free = os.dup(0)  # the least number that no open file has
    os.close(free)
    with at_most(free, resource.RLIMIT_NOFILE):
        said = sentence(run_command("train", job))
    assert said == f"too many open files: this process may have {free} (ulimit -n); raise that"
