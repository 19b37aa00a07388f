"""The time of a step by parts: known amounts of work in a made model, and the order of parts in Megatron's."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.commands import run_command
from harness.train_jobs import batch_of, write_job

from mcore_prefix_tree.mcore.engine import comparison as module
from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.engine.stand_ins import plain
from mcore_prefix_tree.mcore.engine.step_parts import EventClock, HostClock, make_clocks, marked
from mcore_prefix_tree.mcore.engine.step_planner import fold_step
from mcore_prefix_tree.mcore.loop.jobs import run_once
from mcore_prefix_tree.mcore.loop.resolve_recipe import Resolved
from mcore_prefix_tree.mcore.loop.trainer import Trainer
from mcore_prefix_tree.plan import Parts
from mcore_prefix_tree.settings import load_recipe

pytestmark = pytest.mark.filterwarnings("ignore:::megatron", "ignore:::torch")

Spend = Callable[[float], None]


class Work(torch.autograd.Function):
    """The identity, which spends one time forward and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spend: Spend, forward: float, backward: float) -> torch.Tensor:
        ctx.rest = spend, backward
        spend(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spend, seconds = ctx.rest
        spend(seconds)
        return grads[0], None, None, None


class Works(torch.nn.Module):
    def __init__(self, spend: Spend, forward: float, backward: float) -> None:
        super().__init__()
        self.amounts = spend, forward, backward

    def forward(self, *inputs: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = sum((*inputs, *more.values()), start=torch.zeros(()))
        out: torch.Tensor = Work.apply(x, *self.amounts)
        return out


class Layer(torch.nn.Module):
    """A body of 3 forward and 5 backward around attention of 7 and 11."""

    def __init__(self, spend: Spend) -> None:
        super().__init__()
        self.qkv = torch.nn.ModuleList(Works(spend, 1, 1) for _ in range(2))
        self.core_attention = Works(spend, 7, 11)
        self.mlp = Works(spend, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (part(x) for part in self.qkv)
        return self.mlp(self.core_attention(query, value=key))


class Model(torch.nn.Module):
    """Two layers, and a head of 13 forward and 17 backward whose loss takes 19 and 23."""

    def __init__(self, spend: Spend) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.ones(2))
        self.layers = torch.nn.ModuleList(Layer(spend) for _ in range(2))
        self.output_layer = Works(spend, 13, 17)

    def forward(self) -> torch.Tensor:
        x = self.embedding * 1
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(x)


PLANNING = 29
EXPECTED = Parts(body=PLANNING + 2 * (3 + 5), attention=2 * (7 + 11), head=13 + 17 + 19 + 23, rest=31)


def run_made(model: Model, config: Any, spend: Spend, micro_batches: int) -> None:
    spend(PLANNING)
    for _ in range(micro_batches):
        Work.apply(model(), spend, 19, 23).sum().backward()
    config.finalize_model_grads_func()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_known_amounts_of_work_are_found(micro_batches: int) -> None:
    """On a clock that the work itself advances, so that every part is exact."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    config = SimpleNamespace(finalize_model_grads_func=lambda: spend(31))
    finalize, model, clocks = config.finalize_model_grads_func, Model(spend), [HostClock(lambda: now)]
    with marked([model], config) as marks:
        marks.clocks = clocks
        run_made(model, config, spend, micro_batches)
    body, attention, head, rest = EXPECTED
    body = PLANNING + (body - PLANNING) * micro_batches
    assert clocks[0].parts() == (body, attention * micro_batches, head * micro_batches, rest)
    assert config.finalize_model_grads_func is finalize
    run_made(model, config, spend, micro_batches)
    assert clocks[0].parts().attention == attention * micro_batches, "no hook is left"


@pytest.mark.parametrize("kind", ["sleeps", "computes"])
def test_cpu_clocks_measure_known_amounts_of_work(kind: str) -> None:
    """A millisecond per unit: wall time counts sleep, processor time only computation."""

    def spend(seconds: float) -> None:
        if kind == "sleeps":
            time.sleep(seconds / 1e3)
        else:
            # Both clocks, since the processor's may run ahead of the wall's on a virtual machine.
            clocks = (time.process_time, time.perf_counter)
            ends = [clock() + seconds / 1e3 for clock in clocks]
            while any(clock() < end for clock, end in zip(clocks, ends, strict=True)):
                pass

    config = SimpleNamespace(finalize_model_grads_func=lambda: spend(31))
    model = Model(spend)
    with marked([model], config) as marks:
        started = time.process_time()
        marks.clocks = make_clocks(torch.device("cpu"))
        run_made(model, config, spend, 1)
        wall, cpu = (clock.parts() for clock in marks.clocks)
        took = time.process_time() - started
    assert sum(cpu) == pytest.approx(took, rel=0.05, abs=2e-3)
    assert all(found >= least / 1e3 for found, least in zip(wall, EXPECTED, strict=True))
    if kind == "computes":
        assert cpu == pytest.approx([part / 1e3 for part in EXPECTED], rel=0.3)
    else:
        assert sum(cpu) < sum(wall) / 2


def test_the_clock_of_a_gpu_reads_its_events_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that a device reaches later, each a given time after the one before."""
    reached: list[float] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = 3.0 ** len(reached)
            reached.append(self.at)

        def elapsed_time(self, end: Event) -> float:
            assert synchronized
            return end.at - self.at

    synchronized: list[bool] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(True))
    clock = EventClock()
    for part in ("attention", "body", "head", "body", "rest"):
        clock.begin(part)
    found = clock.parts()
    assert len(synchronized) == 1
    milliseconds = {"body": 3 - 1 + 27 - 9 + 243 - 81, "attention": 9 - 3, "head": 81 - 27, "rest": 729 - 243}
    assert found._asdict() == pytest.approx({part: value / 1e3 for part, value in milliseconds.items()})


def test_waiting_for_the_last_rank_is_body() -> None:
    last, early = Parts(9.0, 1.0, 1.0, 0.5), Parts(5.0, 1.0, 1.0, 4.5)
    assert module._without_waiting([last, early]) == [last, Parts(9.0, 1.0, 1.0, 0.5)]


class Sequence:
    """A clock that only records which parts began."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin(self, part: str) -> None:
        if self.begun[-1:] != [part]:
            self.begun.append(part)

    def parts(self) -> Parts:
        raise NotImplementedError


LAYER = ["attention", "body"]


@pytest.mark.parametrize(
    ("changes", "attends_backward"),
    [
        pytest.param((), LAYER, id="plain"),
        pytest.param(
            ("model.transformer={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}",),
            [*LAYER, *LAYER],
            id="recomputed layers",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_the_parts_of_megatrons_step(changes: tuple[str, ...], attends_backward: list[str], tmp_path: Path) -> None:
    """Two layers in one micro-batch, and the rest once, after the last backward."""
    recipe = load_recipe(write_job(tmp_path), ["device=cpu", "batch.max_tokens=400", *changes])

    def step(run: Resolved) -> tuple[list[str], Parts, float]:
        chunks = Trainer(run, run.new_model())._chunks
        job, samples = plain(run.job, batch_of(recipe, 1))
        order = Sequence()
        with marked(chunks, job.config) as marks:
            started = time.process_time()
            _, cpu = make_clocks(torch.device("cpu"))
            marks.clocks = [order, cpu]
            run_schedule(chunks, fold_step(samples, job).micro_batches, job.forward_step)
            return order.begun, cpu.parts(), time.process_time() - started

    (begun, parts, took), _ = run_once(recipe, step, is_trained=True)
    forward = ["body", *LAYER, *LAYER, "head"]
    assert begun == [*forward, "body", *attends_backward, *attends_backward, "rest"]
    # In processor time: other load on the machine would count between two readings of wall time.
    assert sum(parts) == pytest.approx(took, rel=0.05, abs=2e-3)
    assert min(parts) > 0


def test_a_far_slower_way_is_timed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the others in turn, every other round backwards, with a progress that ends at its total."""
    calls: list[str] = []
    seconds = {"folded": 1.0, "unfolded, packed": 2.0, "unfolded, small": 3.9, "unfolded, stock": 4.1}

    def timed(way: Any, *_: Any) -> list[Parts]:
        calls.append(way.name)
        return [Parts(seconds[way.name], 0.0, 0.0, 0.0)] * 2

    monkeypatch.setattr(module, "_timed", timed)
    recipe = load_recipe(write_job(tmp_path), ["device=cpu"])
    progress: list[tuple[int, int]] = []

    def compare(run: Resolved) -> module.Comparison:
        return Trainer(run, run.new_model()).compare(1, repeats=3, progress=lambda *one: progress.append(one))

    comparison, _ = run_once(recipe, compare, is_trained=True)
    every, again = list(seconds), list(seconds)[:-1]
    assert calls == [*every, *every, *again[::-1], *again]
    assert progress[-1] == (len(calls), len(calls))
    assert [len(way.rounds) for way in comparison.unfolded] == [3, 3, 1]
    assert comparison.fastest is comparison.packed
    assert comparison.gain.speedups == [2.0] * 3
    assert comparison.gain.bound.least == (2.0, 0.0, 0.0, 0.0)
    assert comparison.gain.bound.ratio == comparison.fold_ratio


def test_training_ends_with_the_bound(tmp_path: Path) -> None:
    """Through the door: the last lines that ``train`` prints."""
    done = run_command(
        "train",
        write_job(tmp_path),
        "device=cpu",
        "train_iters=2",
        "compare=true",
        "batch.max_tokens=400",
        code=0,
    )
    lines = done.stdout.splitlines()
    at = lines.index("forward and backward of one batch, in one process")
    assert lines[at + 1].split() == ["tokens", "seconds", "CPU", "s", "folded", "is", "by", "CPU", "peak", "memory"]
    ways = [" ".join(line.split()[: 1 if line.startswith("folded") else 2]) for line in lines[at + 2 : at + 6]]
    assert ways == ["folded", "unfolded, packed", "unfolded, small", "unfolded, stock"]
    assert re.fullmatch(r"sharing can give at most \d+\.\d\dx; \d+% of it, by CPU time", lines[at + 6])
