"""TRL's own trainers with a model that folds in its backbone, against the same jobs with the stock model.

Needs TRL: ``pip install --no-deps -r requirements/peers.txt``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
import peft
from harness.transformers_models import InDouble
from trl_jobs import (
    JOBS,
    PICTURE_JOBS,
    STEPS,
    load_model,
    load_picture_model,
    save_model,
    save_picture_model,
    train,
)

from mcore_prefix_tree.integrations.trl import LogFolding, fold_backbone


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "model"


def assert_equal(actual, expected, tolerance):
    assert len(actual) == len(expected) == STEPS
    for one, other in zip(actual, expected, strict=True):
        for figure in ("loss", "grad_norm"):
            assert one[figure] == pytest.approx(other[figure], rel=tolerance, abs=tolerance), figure
        assert one["fold/fold_ratio"] > 1.5
        assert one["fold/left_alone"] == 0


@pytest.mark.parametrize("name", JOBS)
def test_losses_and_gradient_norms_equal_those_of_the_stock_model(folder, name):
    classifies = name == "Reward"
    save_model(folder, classifies=classifies)
    logs = {}
    for folds in (False, True):
        with InDouble():
            logs[folds] = JOBS[name].run(load_model(folder, classifies=classifies, folds=folds), folder)
    assert_equal(logs[True], logs[False], 1e-12)


@pytest.mark.parametrize("name", PICTURE_JOBS)
def test_trainers_of_models_with_pictures_train_the_same(folder, name):
    pytest.importorskip("torchvision", reason="processors of pictures need torchvision")
    save_picture_model(folder)
    logs = {}
    for folds in (False, True):
        with InDouble():
            logs[folds] = PICTURE_JOBS[name].run(load_picture_model(folder, folds=folds), folder)
    assert_equal(logs[True], logs[False], 1e-12)


@pytest.mark.parametrize("name", ["SFT", "GRPO"])
def test_checkpointed_layers_and_adapters_train_the_same_in_single_precision(folder, name):
    save_model(folder)
    settings = {"gradient_checkpointing": True}
    arguments = {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])} if name == "SFT" else {}
    stock, folds = (
        JOBS[name].run(load_model(folder, dtype=torch.float32, folds=folds), folder, settings=settings, **arguments)
        for folds in (False, True)
    )
    assert_equal(folds, stock, 1e-6)


def test_models_that_the_trainer_loads_fold_too(folder):
    save_model(folder)
    stock = JOBS["GRPO"].run(str(folder), folder)
    trainer = JOBS["GRPO"].make(str(folder), folder)
    trainer.add_callback(LogFolding())
    for model in (trainer.model, trainer.ref_model):
        fold_backbone(model)
    assert_equal(train(trainer), stock, 1e-6)
    scored = trainer.ref_model.folding.report(with_grad=False)
    assert scored.fold_ratio > 1.5
    assert not scored.left_alone


def test_adapters_with_dropout_are_refused_at_the_first_step(folder):
    save_model(folder)
    adapter = peft.LoraConfig(r=4, lora_dropout=0.05, target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"q_proj\.lora_dropout\.default has p=0\.05.*set it to 0"):
        JOBS["SFT"].run(load_model(folder, folds=True), folder, peft_config=adapter)


@pytest.mark.slow
def test_data_parallel_ranks_train_the_same_and_log_their_sum(folder):
    save_model(folder)
    script = Path(__file__).with_name("trl_ranks.py")
    paths = os.pathsep.join(path for path in sys.path if path)
    for how in ("stock", "folds"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*command, script, folder, how], check=True, env=os.environ | {"PYTHONPATH": paths})
    stock, folds = (json.loads((folder / f"{how}.json").read_text()) for how in ("stock", "folds"))
    assert_equal(folds, stock, 1e-6)
    assert [entry["fold/rows"] for entry in folds] == [8] * STEPS
