"""Machines without a shared folder: no part of a checkpoint passes for a complete one, and data are compared."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from harness.commands import write_rows
from harness.torchrun_jobs import VOCAB, Ended, rows, run

RECIPE = f"""
data: {{path: data.jsonl}}
model: {{num_layers: 1, hidden_size: 32, num_attention_heads: 4, vocab_size: {VOCAB}}}
batch: {{global_batch_size: 4, max_tokens: 40}}
optimizer: {{lr: 1e-2}}
train_iters: 2
attention_backend: path
checkpoint: {{save: runs/mine}}
compare: false
verify: {{enabled: false}}
"""
# ``FOLDER ARGUMENT...``: the command line, in a working directory that each rank has for itself.
APART = """
import os, sys

from mcore_prefix_tree.cli.main import app

if __name__ == "__main__":
    os.chdir(os.path.join(sys.argv.pop(1), os.environ["RANK"]))
    app()
"""


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """A folder with a working directory for each of two ranks, and equal data in both."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "apart.py").write_text(APART)
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        write_rows(tmp_path / rank / "data.jsonl", rows())
    return tmp_path


def train(folder: Path, *overrides: str) -> Ended:
    return run(2, folder, "train", folder / "recipe.yaml", *overrides, program=(str(folder / "apart.py"),))


def test_a_folder_that_is_not_shared_fails_at_the_first_save(apart: Path) -> None:
    done = train(apart)
    assert done.code == 2
    (sentence,) = done.errors
    assert sentence.startswith("error: checkpoint.save=runs/mine: iteration 2 could not be written to runs/mine/iter_")
    assert not list(apart.rglob("latest_checkpointed_iteration.txt"))


def test_data_that_are_not_the_same_are_known_before_the_first_step(apart: Path) -> None:
    stale = [*rows()[:-1], {"tokens": [1, 2, 3]}]
    write_rows(apart / "1" / "data.jsonl", stale)
    done = train(apart)
    assert (done.code, done.out) == (2, "")
    (sentence,) = done.errors
    host = socket.gethostname()
    assert sentence.startswith(f"error: rank 1 on {host} ")
    assert f" rank 0 on {host} " in sentence
    assert ", from data.jsonl (" in sentence
    assert sentence.endswith("; give all machines the same files, and the same tokenizer in the same version")
