"""Helpers of tests of ``torchrun -m mcore_prefix_tree``: data, and contents of a checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.checkpoints import plain_content
from harness.commands import write_rows
from harness.forked_ranks import launch
from harness.forks import PRELOADED

VOCAB = 64
PROGRAM = ("-m", "mcore_prefix_tree")
TRACKER = "latest_checkpointed_iteration.txt"
STEPS = 12
RECIPE = f"""
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: {VOCAB}}}
batch: {{global_batch_size: 4, max_tokens: 40}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1}}
train_iters: {STEPS}
attention_backend: path
compare: false
verify: {{enabled: false}}
"""
TP2 = "parallel.tensor_model_parallel_size=2"


def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(5):
        root = rng.integers(1, VOCAB, size=6).tolist()
        made += [{"tokens": root + rng.integers(1, VOCAB, size=int(rng.integers(2, 8))).tolist()} for _ in range(3)]
    return made


def write_job(folder: Path, recipe: str) -> Path:
    """A recipe's file, with the rows as its data."""
    data = write_rows(folder / "data.jsonl", rows())
    file = folder / "recipe.yaml"
    file.write_text(f"data: {{path: {data}}}\n{recipe}")
    return file


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def command(ranks: int, *arguments: object, program: Sequence[str] = PROGRAM) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, *program, *map(str, arguments)]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run of the command line that is over."""

    code: int
    out: str
    err: str

    @property
    def losses(self) -> dict[int, str]:
        """As printed, by step; fails if a step was printed twice."""
        found = re.findall(r"^step (\d+) \| loss (\S+) ", self.out, flags=re.MULTILINE)
        assert len(found) == len({step for step, _ in found})
        return {int(step): loss for step, loss in found}

    @property
    def errors(self) -> list[str]:
        """Messages of our own code; torchrun adds a report."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run(
    ranks: int,
    *arguments: object,
    program: Sequence[str] = PROGRAM,
    stdin: str | None = None,
    timeout_s: float = 240,
    imports: Sequence[str] = (),
    code: int | None = None,
) -> Ended:
    """Run a command line on ranks that are forked: for their joint work, without the time of torchrun's imports.

    It has to end with the ``code`` if given. ``imports`` are further modules, in folders of ``sys.path``, that the
    ranks find imported.
    """
    words = [*program, *map(str, arguments)]
    status, out, err = launch(
        ranks,
        words,
        stdin=stdin or "",
        environment=environment(),
        timeout_s=timeout_s,
        imports=(*PRELOADED, *imports),
        path=tuple(sys.path) if imports else (),
    )
    assert code in (None, status), err[-8000:]
    return Ended(code=status, out=out, err=err)


def run_torchrun(ranks: int, *arguments: object, stdin: str = "") -> Ended:
    """Run a command line under torchrun itself."""
    done = subprocess.run(
        command(ranks, *arguments),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr)


def checkpoint_content(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Every full tensor of a checkpoint, model and optimizer, from any layout."""
    from mcore_prefix_tree.cpu.emulation import single_process

    with single_process():
        content = plain_content(folder / f"iter_{iteration:07d}")
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert len(expected) > 20
    assert actual.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(actual[name], value)]


LAYOUTS = {
    "tensor and sequence": ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    "pipeline": ("parallel.pipeline_model_parallel_size=2",),
    "data": (),
}
