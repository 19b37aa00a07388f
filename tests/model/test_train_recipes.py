"""The recipe for one GPU, narrow enough for a CPU: it verifies, trains and saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.commands import run_command
from harness.train_jobs import train

RECIPE = Path(__file__).parents[2] / "recipes" / "one_gpu.yaml"
NARROW = (
    "device=cpu",
    f"data.path={RECIPE.parent / 'data' / 'quickstart_rollouts.jsonl'}",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.kv_channels=8",
    "batch.global_batch_size=2",
    "optimizer.lr_warmup_steps=1",
    "train_iters=2",
)


@pytest.mark.ci
def test_the_recipe_for_one_gpu_trains(tmp_path: Path) -> None:
    notes = train(RECIPE, *NARROW, f"checkpoint.save={tmp_path / 'saved'}", "verify.enabled=true", "compare=false")
    (verified,) = notes.verifications
    assert verified.passed
    assert notes.spans == [(1, 2)]
    assert len(notes.losses) == 2
    assert all(9 < loss < 12 for loss in notes.losses), "random weights over 32,768 tokens: ln(32768) is 10.4"
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_missing_gpu_is_reported(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run_command("train", RECIPE, f"checkpoint.save={tmp_path}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: device=cuda, but torch sees no GPU; set device=auto or device=cpu\n"
