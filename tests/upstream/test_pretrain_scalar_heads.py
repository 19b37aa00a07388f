"""Critics and reward models in Megatron-LM's own loop: their initial weights, and resuming.

Their equality with unfolded samples is tested in :mod:`test_pretrain_objectives`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_lm import (
    CPU,
    ENTRY,
    FOLDED,
    LOSS,
    MODEL,
    STOCK,
    TRAIN,
    UNFOLDED,
    Run,
    megatron,
    require_checkout,
    trained,
    write_rollouts,
)
from megatron_lm import saved_tensors as tensors_of

from mcore_prefix_tree.mcore.seam.scalar_output_layer import CHECKPOINT_KEY

require_checkout()

UNTIED = "--untie-embeddings-and-output-weights"
BODY = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rollouts.jsonl"
    write_rollouts(path)
    return path


def language_model(data: Path, folder: Path, model: str) -> Path:
    """Train the stock model for two steps."""
    samples = f"--prefix-tree-data-path {data} --prefix-tree-order file"
    trained(STOCK, CPU, model, TRAIN, UNFOLDED, samples, f"--save {folder} --exit-interval 2")
    return folder


@pytest.mark.parametrize(
    ("head", "ranks", "layout"),
    [
        ("tied", 2, "--tensor-model-parallel-size 2"),
        pytest.param("untied", 2, "--pipeline-model-parallel-size 2", marks=pytest.mark.ci),
    ],
)
def test_starts_from_a_language_model_and_resumes(
    data: Path, tmp_path: Path, head: str, ranks: int, layout: str
) -> None:
    model = MODEL if head == "untied" else MODEL.replace(UNTIED, "")
    source = language_model(data, tmp_path / "lm", model)
    still = TRAIN.replace("--lr 1e-3 --min-lr 1e-4", "--lr 0 --min-lr 0")
    samples = f"--prefix-tree-data-path {data} --prefix-tree-objective critic --prefix-tree-valid-data-path {data}"
    evaluating = still.replace("--eval-interval 1000", "--eval-interval 2 --eval-iters 1")

    def start(*arguments: str) -> Run:
        first = (CPU, model, evaluating, FOLDED, samples, f"--pretrained-checkpoint {source}", layout)
        return trained(ENTRY, *first, *arguments, ranks=ranks)

    whole = start(f"--save {tmp_path / 'whole'} --exit-interval 3")
    said = f"the weights start from {source / 'iter_0000002'}, with a new scalar head"
    assert whole.output.count(said) == 1
    assert "validation loss at iteration 2" in whole.output
    tensors, before = tensors_of(tmp_path / "whole", 3), tensors_of(source, 2)
    assert not [name for name in tensors if "output_layer" in name]
    assert tensors[CHECKPOINT_KEY].shape == (1, 32)
    assert 0.5 < tensors[CHECKPOINT_KEY].std() * 33**0.5 < 1.5
    of_model = {name for name in before if not name.startswith(("optimizer", "output_layer"))}
    assert of_model > BODY
    for name in of_model:
        assert torch.equal(tensors[name], before[name]), name

    folders = f"--load {tmp_path / 'cut'} --save {tmp_path / 'cut'}"
    assert start(folders, "--exit-interval 1").output.count(said) == 1
    rest = start(folders, "--exit-interval 3")
    assert said not in rest.output, "the same command line resumes"
    assert sorted(rest.iterations) == [2, 3]
    assert rest.losses == pytest.approx({step: whole.losses[step] for step in (2, 3)}, rel=LOSS)
    assert torch.equal(tensors_of(tmp_path / "cut", 3)[CHECKPOINT_KEY], tensors[CHECKPOINT_KEY])


def test_optimizer_of_a_language_model_is_refused(data: Path, tmp_path: Path) -> None:
    source = language_model(data, tmp_path / "lm", MODEL)
    samples = f"--prefix-tree-data-path {data} --prefix-tree-objective reward_model"
    run = megatron(ENTRY, CPU, MODEL, TRAIN, FOLDED, samples, f"--load {source}")
    (error,) = {line for line in run.output.splitlines() if line.startswith("error: ")}
    assert f"--load {source} holds a language model, and --prefix-tree-objective reward_model trains" in error
    assert "name it with --pretrained-checkpoint, or add --finetune" in error
    assert "mcore_prefix_tree/mcore" not in run.output, "no traceback of ours"
