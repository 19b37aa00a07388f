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
import transformers

pytest.importorskip("trl", reason="TRL is not installed")
import peft
from harness.transformers_models import InDouble
from trl_jobs import (
    EXACT,
    JOBS,
    PICTURE_JOBS,
    STEPS,
    load_model,
    load_picture_model,
    save_model,
    save_picture_model,
    train,
)

from mcore_prefix_tree.integrations.automodel import prefix_tree_collate_fn
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
            logs[folds] = JOBS[name].run(load_model(folder, classifies=classifies, folds=folds), folder, settings=EXACT)
    assert_equal(logs[True], logs[False], 1e-12)


@pytest.mark.parametrize("name", PICTURE_JOBS)
def test_trainers_of_models_with_pictures_train_the_same(folder, name):
    pytest.importorskip("torchvision", reason="processors of pictures need torchvision")
    save_picture_model(folder)
    logs = {}
    for folds in (False, True):
        with InDouble():
            logs[folds] = PICTURE_JOBS[name].run(load_picture_model(folder, folds=folds), folder, settings=EXACT)
    assert_equal(logs[True], logs[False], 1e-12)


@pytest.mark.parametrize("name", ["SFT", "GRPO"])
def test_checkpointed_layers_and_adapters_train_the_same_in_single_precision(folder, name):
    save_model(folder)
    settings = {"bf16": False}
    arguments = {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])} if name == "SFT" else {}
    stock, folds = (
        JOBS[name].run(load_model(folder, dtype=torch.float32, folds=folds), folder, settings=settings, **arguments)
        for folds in (False, True)
    )
    assert_equal(folds, stock, 1e-6)


def finish(trainer, *, folds=False):
    """Train; return the trained weights."""
    if folds:
        trainer.add_callback(LogFolding())
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
            fold_backbone(model)
    log = train(trainer)
    if folds:
        assert all(entry["fold/fold_ratio"] > 1.5 and entry["fold/left_alone"] == 0 for entry in log)
    return {name: weight.detach().double() for name, weight in trainer.model.named_parameters()}


def assert_as_close(single, stock, folds):
    """Weights are no further from those of single precision than 3 times the stock job's."""
    errors = [sum((one[name] - weight).norm() ** 2 for name, weight in single.items()) for one in (stock, folds)]
    assert 0 < errors[1] <= 3**2 * errors[0]


@pytest.mark.parametrize(
    ("job", "adapts"),
    [
        *(pytest.param(job, False, id=name) for name, job in JOBS.items()),
        pytest.param(JOBS["SFT"], True, id="SFT, LoRA"),
        *(pytest.param(PICTURE_JOBS[name], False, id=f"{name}, pictures") for name in ("SFT", "GRPO")),
    ],
)
def test_jobs_by_the_defaults_of_the_trainer(folder, job, adapts):
    """The trainer loads float32 weights, trains under autocast and recomputes layers."""
    if job.has_pictures:
        pytest.importorskip("torchvision", reason="processors of pictures need torchvision")
        save_picture_model(folder)
    else:
        save_model(folder, classifies=job.name == "Reward")
    arguments = {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])} if adapts else {}
    single = finish(job.make(str(folder), folder, settings={"bf16": False}, **arguments))
    stock = finish(job.make(str(folder), folder, **arguments))
    trainer = job.make(str(folder), folder, **arguments)
    assert trainer.args.bf16
    assert trainer.args.gradient_checkpointing
    assert_as_close(single, stock, finish(trainer, folds=True))
    if (reference := getattr(trainer, "ref_model", None)) is not None:
        scored = reference.folding.report(with_grad=False)
        assert scored.fold_ratio > 1.5
        assert not scored.left_alone


@pytest.mark.parametrize("door", ["fold_backbone", "prefix_tree"])
def test_trainers_of_transformers_under_autocast(folder, door):
    """Groups of Automodel's calls, or rows of Transformers' own collator of which only the borders are given."""
    save_model(folder)
    groups = [
        {"prompt_ids": [*range(at, at + 9)], "completions": [[7, 8, at], [7, 9], [4, 5, 6, at]]} for at in (11, 23)
    ]
    rows = [
        {"input_ids": group["prompt_ids"] + answer, "labels": [-100] * 9 + answer}
        for group in groups
        for answer in group["completions"]
    ]
    flatten, borders = transformers.DataCollatorWithFlattening, {"return_position_ids": False}

    def run(data, collate, *, folds=False, attention="sdpa", bf16=True):
        model = load_model(folder, dtype=torch.float32, folds=False)
        model.set_attn_implementation(attention)
        args = transformers.TrainingArguments(
            output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=len(data), optim="sgd",
            learning_rate=1e-1, report_to="none", use_cpu=True, bf16=bf16, logging_steps=1, remove_unused_columns=False,
        )  # fmt: skip
        return finish(transformers.Trainer(model, args, train_dataset=data, data_collator=collate), folds=folds)

    def fold_groups(batch):
        folded = prefix_tree_collate_fn(batch)
        return folded | {"shift_labels": folded["labels"], "use_cache": False}

    if door == "prefix_tree":
        folds = run(groups, fold_groups, attention="prefix_tree")
    else:
        folds = run(rows, flatten(**borders, return_flash_attn_kwargs=True), folds=True)
    assert_as_close(run(rows, flatten(), bf16=False), run(rows, flatten()), folds)


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
