"""Hugging Face folders in and out: models of ``model.hf`` answer what transformers answers, and export the same bits.

Needs Megatron-Bridge, and with it Python 3.12: see requirements-bridge.txt.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
import safetensors.torch
import torchrun_jobs
import transformers
from bridge_models import auto_bridge
from hf_folders import FAMILIES, rows, saved_model
from safetensors.torch import load_file
from train_jobs import command, write_rows

from mcore_prefix_tree import ending
from mcore_prefix_tree.mcore.engine.schedule import run_schedule
from mcore_prefix_tree.mcore.engine.steps import fold_step
from mcore_prefix_tree.mcore.trainer.hf import bridge_of
from mcore_prefix_tree.mcore.trainer.jobs import run_once
from mcore_prefix_tree.mcore.trainer.resolve import Resolved
from mcore_prefix_tree.recipe import load_recipe

auto_bridge()
PROGRAM = (str(Path(__file__).with_name("bridge_command.py")),)
RECIPE = """
batch: {global_batch_size: 9, max_tokens: 40}
train_iters: 1
compare: false
"""
# A step that changes no bit of a weight.
STILL = "optimizer.lr=1e-30"
TP2_SP = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
PP2 = ("parallel.pipeline_model_parallel_size=2",)


def write_job(folder: Path, family: str, **options: Any) -> tuple[Path, Path, Any]:
    """A recipe, the folder of a model, and transformers' model."""
    model = saved_model(family, folder / "source", **options)
    data = write_rows(folder / "data.jsonl", [{"tokens": row} for row in rows()])
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"data: {{path: {data}}}\n{RECIPE}")
    return recipe, folder / "source", model


def nll(model: Any, row: list[int]) -> torch.Tensor:
    """Negative log-likelihood of each token after the first, by transformers."""
    logprobs = torch.log_softmax(model(torch.tensor([row])).logits[0].float(), dim=-1)[:-1]
    return -logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0]


def worst_score(scores: Path, model: Any) -> float:
    lines = [json.loads(line) for line in scores.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == rows()
    with torch.no_grad():
        expected = [-nll(model, row).numpy() for row in rows()]
    found = [np.array(line["old_logprobs"][1:], dtype=float) for line in lines]
    return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def read_model(folder: Path) -> Any:
    """transformers' model of a folder.

    Not by ``from_pretrained``, which in a process that has emulated a GPU leaves tables of rotary embeddings unset.
    """
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).float()
    model.load_state_dict(weights_in(folder))
    return model.eval()


def assert_same_folder(exported: Path, source: Path) -> None:
    assert sorted(one.name for one in exported.iterdir()) == sorted(one.name for one in source.iterdir())
    expected = weights_in(source)
    assert len(expected) > 15
    found = weights_in(exported)
    assert found.keys() == expected.keys()
    assert not [name for name, weight in expected.items() if weight.dtype != found[name].dtype]
    assert not [name for name, weight in expected.items() if not torch.equal(weight, found[name])]
    for one in source.glob("*.json"):
        assert (exported / one.name).read_bytes() == one.read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    recipe, source, model = write_job(tmp_path, family)
    scored = command("score", recipe, "--hf", str(source), "--output", str(tmp_path / "scores.jsonl"))
    assert scored.exit_code == 0, scored.output
    assert worst_score(tmp_path / "scores.jsonl", model) <= 1e-5

    found, _ = run_once(load_recipe(recipe, [f"model.hf={source}"]), gradients)
    sum(nll(model, row).sum() for row in rows()).backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(tmp_path / "gradients")
    expected = weights_in(tmp_path / "gradients")
    trained = [name for name in expected if not name.endswith("e_score_correction_bias")]
    whole = torch.stack([expected[name].norm() for name in trained]).norm()
    errors = {name: float((found[name] - expected[name]).norm()) for name in trained}
    assert np.linalg.norm(list(errors.values())) <= 1e-4 * whole
    for name, error in errors.items():
        assert error <= 1e-4 * max(expected[name].norm(), 1e-3 * whole), name


def gradients(run: Resolved) -> dict[str, torch.Tensor]:
    """The gradients of the first step's summed loss, converted as weights are."""
    chunks = run.starting_model(print)
    step = fold_step(run.first_step(), run.job)
    assert step.logical_tokens > 1.5 * step.physical_tokens
    run_schedule(chunks, step.micro_batches, run.job.forward_step)
    for parameter in chunks[0].parameters():
        parameter.data = parameter.grad
    assert run.recipe.model.hf is not None
    return {name: weight.clone() for name, weight in bridge_of(run.recipe.model.hf).export_hf_weights(chunks, cpu=True)}


def test_training_changes_what_transformers_reads(tmp_path: Path) -> None:
    """Also after a resume, and through ``export``."""
    recipe, source, model = write_job(tmp_path, "Llama")
    saved = f"checkpoint.save={tmp_path / 'run'}"
    (source / "tf_model.h5").write_bytes(b"the untrained weights once more")
    for iterations in (1, 2):
        options = (saved, f"train_iters={iterations}", "optimizer.lr_decay_style=constant")
        exported = tmp_path / f"after {iterations}"
        done = command("train", recipe, "--hf", str(source), "--resume", *options, f"checkpoint.export_hf={exported}")
        assert done.exit_code == 0, done.output
    again = command("export", recipe, str(tmp_path / "again"), "--hf", str(source), saved)
    assert again.exit_code == 0, again.output
    assert_same_folder(tmp_path / "again", exported)
    assert not list(exported.glob("*.h5"))
    losses = []
    for folder in (source, tmp_path / "after 1", exported):
        model = read_model(folder)
        with torch.no_grad():
            losses.append(float(sum(nll(model, row).sum() for row in rows())))
    assert losses[0] > losses[1] > losses[2]
    refused = command("export", recipe, str(exported), "--hf", str(source), saved)
    assert refused.exit_code == 2
    assert "exists already" in refused.output
    command("score", recipe, "--hf", str(source), saved, "--output", str(tmp_path / "scores.jsonl"))
    assert worst_score(tmp_path / "scores.jsonl", model) <= 1e-5


def test_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, source, _ = write_job(tmp_path, "Llama", max_shard_size="100KB")
    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    target = tmp_path / "exported"
    done = command("train", recipe, "--hf", str(source), f"checkpoint.export_hf={target}", "verify.enabled=false")
    assert done.exit_code == 2, done.output
    assert "No space left on device" in done.output
    assert not list(tmp_path.glob("exported*"))


def test_signal_during_the_export_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, source, _ = write_job(tmp_path, "Llama")
    save_file = safetensors.torch.save_file

    def interrupted(*args: Any, **options: Any) -> None:
        # It would end this process, and pytest with it.
        if signal.getsignal(signal.SIGTERM) is ending._end_at_once:
            raise OSError(errno.EINTR, "ended at once")
        os.kill(os.getpid(), signal.SIGTERM)
        save_file(*args, **options)

    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    target = tmp_path / "exported"
    done = command(
        "train", recipe, "--hf", str(source), STILL, f"checkpoint.export_hf={target}", "verify.enabled=false"
    )
    assert done.exit_code == 0, done.output
    assert_same_folder(target, source)


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("Llama", TP2_SP, id="llama-tp2-sp"),
        pytest.param("Qwen3", PP2, id="qwen3-pp2"),
        pytest.param("Qwen3", TP2_SP, id="qwen3-tp2-sp", marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", TP2_SP, id="qwen3-moe-tp2-sp", marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", PP2, id="qwen3-moe-pp2", marks=pytest.mark.slow),
        pytest.param("DeepseekV3", PP2, id="deepseek-v3-pp2", marks=pytest.mark.slow),
    ],
)
def test_layouts(family: str, layout: tuple[str, ...], tmp_path: Path) -> None:
    """Weights of several files; ``verify`` compares folded with unfolded before the step."""
    recipe, source, model = write_job(tmp_path, family, max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    options = ("--hf", source, *layout, STILL)
    exported = f"checkpoint.export_hf={tmp_path / 'exported'}"
    trained = torchrun_jobs.run(2, "train", recipe, *options, exported, program=PROGRAM)
    assert trained.code == 0, trained.err
    assert_same_folder(tmp_path / "exported", source)
    scores = tmp_path / "scores.jsonl"
    scored = torchrun_jobs.run(2, "score", recipe, *options, "--output", scores, program=PROGRAM)
    assert scored.code == 0, scored.err
    assert worst_score(scores, model) <= 1e-5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["UnheardOfForCausalLM"]}, "Megatron-Bridge cannot build UnheardOfForCausalLM"),
        ({"intermediate_size": 80}, "its weights do not fit its config.json"),
        ({"num_hidden_layers": 3}, "lacks the weights of decoder.layers.2."),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "lacks the weights of decoder.layers.0."),
    ],
)
def test_folders_whose_parts_disagree(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    recipe, source, _ = write_job(tmp_path, "Llama")
    config = json.loads((source / "config.json").read_text()) | change
    (source / "config.json").write_text(json.dumps(config))
    refused = command("verify", recipe, "--hf", str(source))
    assert refused.exit_code == 2, refused.output
    assert says in " ".join(refused.output.split())


def test_weights_that_no_layer_reads(tmp_path: Path) -> None:
    recipe, source, _ = write_job(tmp_path, "Qwen3")
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    refused = command("verify", recipe, "--hf", str(source))
    assert refused.exit_code == 2, refused.output
    assert "self_attn.k_norm.weight', which Megatron-Bridge's model does not read" in " ".join(refused.output.split())


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_parameters": LLAMA3}, None),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "no rotary embeddings with these settings"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "no rotary embeddings with these settings"),
        ({"sliding_window": 4}, "no sliding window for this architecture"),
        ({"sliding_window": 4, "use_sliding_window": False}, None),
    ],
)
def test_positions_and_windows(change: dict[str, Any], says: str | None, tmp_path: Path) -> None:
    recipe, source, _ = write_job(tmp_path, "Llama")
    config = json.loads((source / "config.json").read_text()) | change
    (source / "config.json").write_text(json.dumps(config))
    done = command("verify", recipe, "--hf", str(source))
    assert done.exit_code == (2 if says else 0), done.output
    assert (says or "") in " ".join(done.output.split())


def test_settings_that_folding_decides(tmp_path: Path) -> None:
    """Without losses by token every micro-batch would have a mean of its own."""
    recipe, source, _ = write_job(tmp_path, "Llama")
    setting = "model.transformer.calculate_per_token_loss"
    refused = command("verify", recipe, "--hf", str(source), f"{setting}=false")
    assert refused.exit_code == 2, refused.output
    assert f"{setting}: other keys of the recipe, or folding, decide this" in " ".join(refused.output.split())


@pytest.mark.parametrize("change", [{"norm_topk_prob": False}, {"rope_interleave": False}, {"rms_norm_eps": 0.1}])
def test_settings_that_deepseek_layers_pass_over(change: dict[str, Any], tmp_path: Path) -> None:
    recipe, source, _ = write_job(tmp_path, "DeepseekV3")
    config = json.loads((source / "config.json").read_text()) | change
    (source / "config.json").write_text(json.dumps(config))
    refused = command("verify", recipe, "--hf", str(source))
    assert refused.exit_code == 2, refused.output
    assert f"config.json has {next(iter(change))}=" in " ".join(refused.output.split())


def test_vocabulary_that_tensor_parallel_ranks_cannot_share(tmp_path: Path) -> None:
    recipe, source, _ = write_job(tmp_path, "Llama")
    refused = command("verify", recipe, "--hf", str(source), "parallel.tensor_model_parallel_size=3")
    assert refused.exit_code == 2
    assert "does not divide the vocabulary" in refused.output
