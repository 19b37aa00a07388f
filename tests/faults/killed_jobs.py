"""A training job that a signal meets at a chosen place, in one process or under torchrun.

The program of a job is the command line, in which one function of the package is wrapped by name: when it is called for
the n-th time, the process sends the signal, to itself, to its process group, to its launcher, or to the other rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from harness.commands import write_rows
from harness.torchrun_jobs import TP2, TRACKER, VOCAB, rows

from mcore_prefix_tree.bench import describe_machine

STEPS = 8
SAVED_EVERY = 3
RECIPE = f"""
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: {VOCAB}}}
batch: {{global_batch_size: 4, max_tokens: 40}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1}}
train_iters: {STEPS}
checkpoint: {{save_interval: {SAVED_EVERY}}}
attention_backend: path
compare: false
verify: {{enabled: false}}
"""
STREAMED = ("data.num_workers=2", "data.streaming=true")
LIMIT_S = 20.0

_LOOP, _CHECKPOINTS = "mcore_prefix_tree.mcore.loop", "mcore_prefix_tree.mcore.checkpoints"


@dataclass(frozen=True)
class Stage:
    """A place in a run that evaluates after every second step and saves after every third.

    Attributes:
        function: that is wrapped.
        call: which of its calls the signal comes before.
        killed: the iteration that is saved if the process is killed there; None for none.
        ended: the iteration that is saved if the process is terminated there; None for none.
    """

    function: str
    call: int
    killed: int | None
    ended: int | None


STAGES = {
    "reading data": Stage(f"{_LOOP}.jobs:read_data", 1, None, None),
    "building the model": Stage("mcore_prefix_tree.mcore.models.build_gpt:build_chunks", 1, None, None),
    "building the optimizer": Stage(f"{_LOOP}.trainer:get_megatron_optimizer", 1, None, None),
    "first step": Stage(f"{_LOOP}.trainer:Trainer._step", 1, None, 1),
    "step": Stage(f"{_LOOP}.trainer:Trainer._step", 5, 3, 5),
    "last step": Stage(f"{_LOOP}.trainer:Trainer._step", STEPS, 6, STEPS),
    "evaluation": Stage("mcore_prefix_tree.mcore.engine.evaluation:HeldOut.evaluate", 3, 3, 4),
    "first save": Stage(f"{_CHECKPOINTS}.checkpoint:save", 1, None, 3),
    "first save: tensors": Stage(f"{_CHECKPOINTS}.writing:_Writer.write_data", 1, None, 3),
    "first save: checksums": Stage(f"{_CHECKPOINTS}.checkpoint:write_checksums", 1, None, 3),
    "first save: tracker": Stage(f"{_CHECKPOINTS}.checkpoint:_name_as_latest", 1, None, 3),
    "later save": Stage(f"{_CHECKPOINTS}.checkpoint:save", 2, 3, 6),
    "later save: tensors": Stage(f"{_CHECKPOINTS}.writing:_Writer.write_data", 2, 3, 6),
    "later save: checksums": Stage(f"{_CHECKPOINTS}.checkpoint:write_checksums", 2, 3, 6),
    "later save: tracker": Stage(f"{_CHECKPOINTS}.checkpoint:_name_as_latest", 2, 3, 6),
    "later save: mark": Stage(f"{_CHECKPOINTS}.checkpoint:saving_mark", 4, 6, 6),
    "removing older": Stage(f"{_LOOP}.trainer:remove_older", 2, 6, 6),
}

_PROGRAM = """
import importlib, os, signal, sys, time

def wrap(place, call, number, target):
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    *classes, name = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    wrapped, calls = getattr(owner, name), []

    def signalled(*arguments, **options):
        calls.append(None)
        if len(calls) == call and os.environ.get("RANK", "0") == "0":
            print(f"signalled at {time.time()}", file=sys.stderr, flush=True)
            if target == "process":
                os.kill(os.getpid(), number)
            elif target == "group":
                os.killpg(0, number)
            elif target == "launcher":
                os.kill(os.getppid(), number)
            else:
                import psutil
                other, = (one for one in psutil.Process(os.getppid()).children() if one.environ().get("RANK") == "1")
                other.send_signal(number)
        return wrapped(*arguments, **options)

    setattr(owner, name, signalled)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("mcore_prefix_tree") and getattr(module, name, None) is wrapped:
            setattr(module, name, signalled)

if __name__ == "__main__":
    import warnings
    warnings.simplefilter("ignore")
    place, call, number, target = (sys.argv.pop(1) for _ in range(4))
    if place != "nowhere":
        import mcore_prefix_tree.mcore.loop.jobs
        wrap(place, int(call), int(number), target)
    from mcore_prefix_tree.__main__ import main
    main()
"""


@dataclass(frozen=True)
class Case:
    """Time, kind and receiver of a signal."""

    stage: str
    signal: signal.Signals
    target: str
    ranks: int = 1
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        layout = f"{self.ranks} rank{'s' * (self.ranks > 1)}{', with workers' * bool(self.settings)}"
        return f"{self.stage}, {self.signal.name} to the {self.target}, {layout}"


@dataclass(frozen=True)
class Outcome:
    """The remains of a job."""

    case: Case
    status: int
    out: str
    err: str
    seconds: float
    alive: tuple[int, ...]

    @property
    def own_words(self) -> list[str]:
        """Messages of the job itself on standard error."""
        beginnings = ("error: ", "ended by ", "standard output")
        return [line for line in self.err.splitlines() if line.startswith(beginnings)]

    @property
    def row(self) -> dict[str, Any]:
        case = asdict(self.case) | {"signal": self.case.signal.name, "settings": list(self.case.settings)}
        return case | {"status": self.status, "seconds": round(self.seconds, 1), "said": len(self.own_words)}


def write_job(folder: Path) -> Path:
    """Write data, held-out data, a recipe and the program; returns the recipe."""
    data = write_rows(folder / "data.jsonl", rows())
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"data: {{path: {data}}}\nvalidation: {{path: {data}, eval_interval: 2}}\n{RECIPE}")
    (folder / "killed.py").write_text(_PROGRAM)
    return recipe


def settings_of(case: Case, saved: Path) -> list[str]:
    """The settings of a job, in addition to its recipe."""
    layout = [TP2] if case.ranks > 1 else []
    return [*layout, *case.settings, f"checkpoint.save={saved}", "checkpoint.keep_last=5"]


def command(recipe: Path, saved: Path, case: Case, *more: str, signalled: bool = True) -> list[str]:
    """The command line of a job; without its signal, the job runs to its end."""
    stage = STAGES[case.stage]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    program = [str(recipe.with_name("killed.py")), stage.function if signalled else "nowhere", str(stage.call)]
    words = [*program, str(int(case.signal)), case.target, "train", str(recipe), *settings_of(case, saved), *more]
    return [sys.executable, *(launcher if case.ranks > 1 else []), *words]


def run(recipe: Path, saved: Path, case: Case) -> Outcome:
    """Run a job until nothing of it is left, or for a minute; remaining processes are killed then."""
    with subprocess.Popen(
        command(recipe, saved, case),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=300)
        finally:
            for one in of_session(process.pid) if process.returncode is None else ():
                one.kill()
    _, alive = psutil.wait_procs(of_session(process.pid), timeout=LIMIT_S)
    ended = time.time()
    for one in alive:
        one.kill()
    signalled = [float(line.split()[-1]) for line in err.splitlines() if line.startswith("signalled at ")]
    assert signalled, f"{case.name} was not reached: {out[-500:]}{err[-2000:]}"
    return Outcome(case, process.returncode, out, err, ended - signalled[0], tuple(one.pid for one in alive))


def of_session(leader: int) -> list[psutil.Process]:
    """The processes of a session, with any parent."""
    return [one for one in psutil.process_iter() if _session_of(one.pid) == leader]


def _session_of(process: int) -> int | None:
    try:
        return os.getsid(process)
    except ProcessLookupError:
        return None


def last_saved(saved: Path) -> int | None:
    """The iteration that the tracker names."""
    return int((saved / TRACKER).read_text()) if (saved / TRACKER).exists() else None


def write_result(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write the file that docs/correctness.md is rendered from, a line a case."""
    lines = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
    Path(path).write_text(f'{{"machine": {json.dumps(describe_machine())}, "cases": [\n{lines}\n]}}\n')
