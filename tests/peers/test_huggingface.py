"""Hugging Face folders in and out: models of ``model.hf`` have transformers' outputs, and export the same bits.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.commands import run_command

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
import safetensors.torch
from hf_folders import LLAMA3, rows, saved_model
from hf_jobs import (
    DEPTH,
    PP2,
    QUICK,
    REFERENCE,
    STILL,
    TP2_SP,
    assert_same_folder,
    change_folder,
    check_depth,
    loss_of_depth,
    nll,
    read_model,
    run_ranks,
    run_with_engine,
    weights_in,
    worst_score,
    write_depth_job,
    write_job,
)

pytestmark = pytest.mark.usefixtures("megatron_bridge")


def test_transformers_reads_trained_weights(tmp_path: Path) -> None:
    """Also after a resume, and through ``export``."""
    recipe, source, model = write_job(tmp_path, "Llama 3")
    saved = f"checkpoint.save={tmp_path / 'run'}"
    (source / "tf_model.h5").write_bytes(b"the untrained weights once more")
    for iterations in (1, 2):
        options = (saved, f"train_iters={iterations}", "optimizer.lr_decay_style=constant")
        exported = tmp_path / f"after {iterations}"
        run_command("train", recipe, "--hf", source, "--resume", *options, f"checkpoint.export_hf={exported}", code=0)
    run_command("export", recipe, tmp_path / "again", "--hf", source, saved, code=0)
    assert_same_folder(tmp_path / "again", exported)
    assert not list(exported.glob("*.h5"))
    losses = []
    for folder in (source, tmp_path / "after 1", exported):
        model = read_model(folder)
        with torch.no_grad():
            losses.append(float(sum(nll(model, row).sum() for row in rows())))
    assert losses[0] > losses[1] > losses[2]
    refused = run_command("export", recipe, exported, "--hf", source, saved, code=2)
    assert "exists already" in refused.output
    run_command("score", recipe, "--hf", source, saved, "--output", tmp_path / "scores.jsonl")
    assert worst_score(tmp_path / "scores.jsonl", model) <= 1e-5


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("No space left on device, it seems")]
)
def test_failed_export_leaves_nothing(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, source, _ = write_job(tmp_path, "Llama 3", max_shard_size="100KB")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    target = tmp_path / "exported"
    done = run_command(
        "train", recipe, "--hf", source, f"checkpoint.export_hf={target}", "verify.enabled=false", code=2
    )
    assert "No space left on device" in done.output
    assert not list(tmp_path.glob("exported*"))


def test_signal_during_the_export_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, source, _ = write_job(tmp_path, "Llama 3")
    save_file = safetensors.torch.save_file

    def interrupted(*args: Any, **options: Any) -> None:
        # It would end this process, and pytest with it.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise OSError(errno.EINTR, "ended at once")
        os.kill(os.getpid(), signal.SIGTERM)
        save_file(*args, **options)

    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    target = tmp_path / "exported"
    run_command(
        "train", recipe, "--hf", source, STILL, f"checkpoint.export_hf={target}", "verify.enabled=false", code=0
    )
    assert_same_folder(target, source)


def test_weights_beyond_the_type_of_the_source(tmp_path: Path) -> None:
    recipe, source, model = write_job(tmp_path, "Llama 3")
    model.half().save_pretrained(source)
    exported = tmp_path / "exported"
    options = ("optimizer.lr=1e6", "optimizer.lr_decay_style=constant", "verify.enabled=false")
    refused = run_command("train", recipe, "--hf", source, f"checkpoint.export_hf={exported}", *options, code=2)
    assert "has values beyond that type's largest" in " ".join(refused.output.split())
    assert not list(tmp_path.glob("exported*"))


@pytest.mark.parametrize("name", ["model.layers.{layers}.eh_proj", "model.mtp_layers.0.input_proj", "mtp.fc"])
def test_layers_of_multi_token_prediction_are_exported_unchanged(tmp_path: Path, name: str) -> None:
    """As DeepSeek-V3 and GLM, MiMo, and Qwen3-Next name them."""
    recipe, source, _ = write_job(tmp_path, "Llama 3")
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    file = source / "model.safetensors"
    weights = safetensors.torch.load_file(file) | {f"{name.format(layers=layers)}.weight": torch.rand(4, 6)}
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    exported = tmp_path / "exported"
    job = ("train", recipe, "--hf", source, STILL, "verify.enabled=false")
    run_command(*job, f"checkpoint.export_hf={exported}", code=0)
    assert_same_folder(exported, source)
    refused = run_command(*job, "model.transformer.mtp_num_layers=1", code=2)
    assert "mtp_num_layers=1: depths in folders of llama are not trained" in " ".join(refused.output.split())


@pytest.mark.slow
def test_complete_depth_is_exported_unchanged(tmp_path: Path) -> None:
    recipe, source = write_depth_job(tmp_path, embed_tokens=torch.rand(128, 64))
    exported = tmp_path / "exported"
    run_command("train", recipe, "--hf", source, STILL, f"checkpoint.export_hf={exported}", code=0)
    assert_same_folder(exported, source)


def test_depth_of_a_folder_is_trained_and_exported(tmp_path: Path) -> None:
    source, after = check_depth("DeepSeek-V3", tmp_path)
    before = weights_in(source)
    assert after.keys() == before.keys()
    deeper = {name for name in after if name.startswith("model.layers.4.") and "e_score" not in name}
    assert not [name for name in deeper if torch.equal(after[name], before[name])]
    assert torch.equal(after["model.layers.4.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert torch.equal(after["model.layers.4.shared_head.head.weight"], after["lm_head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GLM-4.5", "Qwen3-Next", "Qwen3.5-MoE"])
def test_depth_through_layers_of_transformer_engine(family: str, tmp_path: Path) -> None:
    """They need a stand-in, which has no unfolded attention for ``verify``, and another process."""
    options = "'model.transformer_impl=transformer_engine', 'verify.enabled=false', 'attention_backend=reference'"
    run_with_engine(f"import hf_jobs; hf_jobs.check_depth('{family}', pathlib.Path(sys.argv[1]), {options})", tmp_path)


@pytest.mark.parametrize(
    "family",
    [
        # A depth on one rank is trained and exported by default.
        pytest.param("GLM-4.5", marks=pytest.mark.ci),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("DeepSeek-V3", "Qwen3-Next", "Qwen3.5-MoE")),
    ],
)
def test_depth_with_tensor_parallelism(family: str, tmp_path: Path) -> None:
    work = f"hf_jobs.check_depth_with_tensor_parallelism('{family}', pathlib.Path(sys.argv[1]))"
    run_with_engine(f"import hf_jobs; {work}", tmp_path)


@pytest.mark.slow
def test_depth_of_a_folder_in_two_stages(tmp_path: Path) -> None:
    recipe, source = write_depth_job(tmp_path)
    exported, log = tmp_path / "exported", tmp_path / "log.jsonl"
    options = (DEPTH, STILL, *PP2, "batch.max_tokens=200", f"log.metrics={log}", f"checkpoint.export_hf={exported}")
    run_ranks(2, "train", recipe, "--hf", source, *options, code=0)
    assert json.loads(log.read_text())["metrics"]["mtp_1 loss"] == pytest.approx(loss_of_depth(source), rel=1e-5)
    assert_same_folder(exported, source)


def test_depths_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    recipe, source = write_depth_job(tmp_path, embed_tokens=torch.rand(128, 64))
    for asked, says in (
        (DEPTH, "'model.layers.4.embed_tokens.weight' differs from 'model.embed_tokens.weight'"),
        ("model.transformer.mtp_num_layers=2", "has 1 (num_nextn_predict_layers or mtp_num_hidden_layers)"),
    ):
        refused = run_command("train", recipe, "--hf", source, asked, "verify.enabled=false", code=2)
        assert says in " ".join(refused.output.split())


def other_folder(folder: Path, family: str = "Llama 3") -> Any:
    """Save a model with separate weights, and return it."""
    model = saved_model(family, folder, {}, seed=1)
    assert model is not None
    return model


def test_reference_is_a_folder(tmp_path: Path) -> None:
    recipe, source, model = write_job(tmp_path, "Llama 3")
    reference = other_folder(tmp_path / "reference")
    scores = tmp_path / "scores.jsonl"
    options = ("--hf", str(source), "--output", str(scores), "--reference")
    run_command("score", recipe, *options, tmp_path / "reference", code=0)
    assert worst_score(scores, model) <= 1e-5
    assert worst_score(scores, reference, column="ref_logprobs") <= 1e-5
    assert worst_score(scores, reference) > 1e-3
    other_folder(tmp_path / "qwen", "Qwen3")
    scores.unlink()
    refused = run_command("score", recipe, *options, tmp_path / "qwen", code=2)
    assert "is another model than model.hf=" in " ".join(refused.output.split())


def test_teacher_is_a_folder(tmp_path: Path) -> None:
    recipe, source, _ = write_job(tmp_path, "Llama 3")
    other_folder(tmp_path / "teacher")
    distill = ("objective.name=distill", "objective.options.teacher=full", STILL, "verify.enabled=false")
    losses = []
    for teacher in (source, tmp_path / "teacher"):
        trained = run_command("train", recipe, "--hf", source, *distill, f"objective.teacher_recipe={teacher}", code=0)
        assert f"the teacher's weights are {teacher}" in trained.output
        losses += [abs(float(loss)) for loss in re.findall(r"^step 1 \| loss (\S+) ", trained.output, re.MULTILINE)]
    assert losses[0] < 1e-6
    assert losses[1] > 1e-3


def test_code_of_a_folder_is_ignored(tmp_path: Path) -> None:
    """It is exported, as every file of the folder."""
    recipe, source, model = write_job(tmp_path, "Llama 3")
    (source / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    kinds = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config = json.loads((source / "config.json").read_text()) | {"auto_map": kinds}
    (source / "config.json").write_text(json.dumps(config))
    exported, scores = tmp_path / "exported", tmp_path / "scores.jsonl"
    run_command("train", recipe, "--hf", str(source), STILL, f"checkpoint.export_hf={exported}", code=0)
    assert_same_folder(exported, source)
    run_command("score", recipe, "--hf", str(exported), "--output", str(scores), code=0)
    assert worst_score(scores, model) <= 1e-5
    assert not (tmp_path / "ran").exists()


def damage(source: Path, weight: str) -> Path:
    """Shorten a weight in its file's header, which keeps its length, and return the file."""
    file = source / json.loads((source / "model.safetensors.index.json").read_text())["weight_map"][weight]
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[weight]["data_offsets"][1] -= 4
    file.write_bytes(content[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(end - 8) + content[end:])
    return file


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        pytest.param("damaged", PP2, id="damaged-pp2", marks=pytest.mark.ci),
        pytest.param("damaged", TP2_SP, id="damaged-tp2-sp", marks=pytest.mark.ci),
        pytest.param("another shape", TP2_SP, id="shape-tp2-sp", marks=pytest.mark.ci),
    ],
)
def test_weights_that_one_rank_cannot_load(how: str, layout: tuple[str, ...], tmp_path: Path) -> None:
    """The other rank ends too, with the same sentence: it does not wait in a collective."""
    recipe, source, _ = write_job(tmp_path, "Llama 3", max_shard_size="50KB")
    if how == "damaged":
        says = f"{damage(source, 'model.layers.1.mlp.down_proj.weight')} is not a safetensors file, was cut off or is"
    else:
        config = json.loads((source / "config.json").read_text()) | {"intermediate_size": 80}
        (source / "config.json").write_text(json.dumps(config))
        says = "its weights do not fit its config.json: 'model.layers."
    done = run_ranks(2, "verify", recipe, "--hf", source, *layout, timeout_s=60, code=2)
    assert len(done.errors) == 1, done.err
    assert says in done.errors[0]


HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
# Transformers takes none of them.
IGNORED = {
    "model.layers.9.self_attn.q_proj.weight": torch.rand(64, 64),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8),
    "mtp.fc.weight": torch.rand(4, 6),
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one == "Qwen3" else pytest.mark.ci) for one in QUICK if one != "Nemotron-H"],
)
def test_tied_folder_with_a_head_of_equal_bits(family: str, tmp_path: Path) -> None:
    """Transformers ties the head, before training and after it."""
    recipe, source, _ = write_job(tmp_path, family)
    tied = weights_in(source)[EMBEDDINGS].clone()
    change_folder(source, {"tie_word_embeddings": True}, {HEAD: tied, **IGNORED})
    exported = tmp_path / "exported"
    run_command("train", recipe, "--hf", source, REFERENCE, f"checkpoint.export_hf={exported}", code=0)
    for folder in (source, exported):
        scores, model = tmp_path / f"{folder.name}.jsonl", read_model(folder)
        run_command("score", recipe, "--hf", folder, REFERENCE, "--output", scores, code=0)
        assert worst_score(scores, model) <= 1e-5
        assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not torch.equal(weights_in(exported)[HEAD], tied)


def refused(folder: Path, family: str, config: Any, weights: Any, *options: str) -> str:
    """The sentence of ``verify`` about a changed folder."""
    recipe, source, _ = write_job(folder, family)
    change_folder(source, config, weights)
    done = run_command("verify", recipe, "--hf", source, *options, code=2)
    return " ".join(done.output.split())


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_parameters": {"rope_type": "default"}}
# What transformers reads as another model, or Megatron-Bridge does not build: family, configuration, weights, sentence.
OTHERS: list[tuple[str, dict[str, Any], dict[str, torch.Tensor | None], str]] = [
    ("Llama 3", {"architectures": ["UnheardOfForCausalLM"]}, {}, "Megatron-Bridge cannot build UnheardOfForCausalLM"),
    ("Llama 3", {"architectures": ["MistralForCausalLM"]}, {}, "model_type=llama, which is LlamaForCausalLM in transf"),
    ("Llama 3", {"intermediate_size": 80}, {}, "its weights do not fit its config.json"),
    ("Llama 3", {"num_hidden_layers": 3}, {}, "lacks 'model.layers.2."),
    ("Llama 3", QWEN2, {}, "lacks 'model.layers.0.self_attn.k_proj.bias'"),
    ("Llama 3", {"tie_word_embeddings": True}, {}, "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
    ("Qwen3", {}, {HEAD: torch.rand(128, 64)}, "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
    ("Qwen3", {}, {HEAD: torch.rand(96, 64)}, "'lm_head.weight' has shape [96, 64] instead of [128, 64]"),
    ("Qwen3", {}, {HEAD: torch.rand(128, 64), EMBEDDINGS: None}, "has 'lm_head.weight', which"),
    ("Qwen3", {"tie_word_embeddings": False}, {}, "lacks 'lm_head.weight' of transformers' model"),
    ("Llama 3", {}, {f"{EMBEDDINGS[:-6]}bias": torch.rand(64)}, "embed_tokens.bias', which"),
    ("Qwen3-MoE", {"attention_bias": True}, {}, "lacks 'model.layers.0.self_attn."),
    ("Gemma 4 31B", {}, {"model.layers.1.self_attn.v_proj.weight": torch.rand(32, 64)}, "v_proj.weight'"),
    (
        *("Qwen3", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, {}),
        "self_attn.k_norm.weight', which Megatron-Bridge's model does not read",
    ),
    *(
        ("Llama 3", {"rope_parameters": rope}, {}, "no rotary embeddings with these settings")
        for rope in (LLAMA3 | {"low_freq_factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0})
    ),
    ("Qwen3", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, {}, "no sliding window"),
]
# What transformers itself refuses.
CONTRADICTIONS = [
    ("Llama 3", {"hidden_size": 66}, "The hidden size (66) is not a multiple of the number of attention heads (4)"),
    ("Qwen3", {"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` (1)"),
    ("Qwen3", {"layer_types": ["another", "full_attention"]}, "The `layer_types` entries must be in"),
    ("Qwen3", {"rope_parameters": {"rope_type": "yarn"}}, "Missing required keys in `rope_parameters`"),
    ("Qwen3", {"rope_scaling": "linear"}, "Validation error for field 'rope_parameters'"),
    ("Qwen3", {"rms_norm_eps": "small"}, "Validation error for field 'rms_norm_eps'"),
    ("Granite 4 dense", {"mamba_d_head": 8}, "The dimensions for the Mamba head state do not match"),
]
PER_TOKEN = "model.transformer.calculate_per_token_loss"  # without it every micro-batch would have a separate mean
# Options that such a model does not fit.
UNFIT = [
    (f"{PER_TOKEN}=false", f"{PER_TOKEN}: other keys of the recipe, or folding, decide this"),
    ("parallel.pipeline_model_parallel_size=3", "has 2 layers, which 3 stages of a pipeline cannot share evenly"),
    ("parallel.tensor_model_parallel_size=3", "does not divide the vocabulary"),
]


@pytest.mark.parametrize(("family", "config", "weights", "says"), OTHERS)
def test_folders_of_another_model_are_refused(
    family: str, config: dict[str, Any], weights: dict[str, torch.Tensor | None], says: str, tmp_path: Path
) -> None:
    assert says in refused(tmp_path, family, config, weights, REFERENCE)


@pytest.mark.parametrize(("family", "config", "says"), CONTRADICTIONS)
def test_contradicting_configurations_are_refused_at_once(
    family: str, config: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("waits for the network"))
    said = refused(tmp_path, family, config, {})
    assert "transformers refuses config.json" in said, said
    assert says in said


@pytest.mark.parametrize(("option", "says"), UNFIT)
def test_options_that_a_folder_does_not_fit(option: str, says: str, tmp_path: Path) -> None:
    assert says in refused(tmp_path, "Llama 3", {}, {}, option)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("Llama 3", {"rope_parameters": LLAMA3}),
        ("Qwen3", {"sliding_window": 4, "use_sliding_window": False}),
    ],
)
def test_positions_and_windows(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    recipe, source, _ = write_job(tmp_path, family)
    change_folder(source, change, {})
    run_command("verify", recipe, "--hf", source, code=0)


YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("DeepSeek-V3", {"norm_topk_prob": False}),
        ("DeepSeek-V3", {"rope_interleave": False}),
        ("GLM-4.5", {"norm_topk_prob": False}),
        ("Gemma 3", {"final_logit_softcapping": 30.0}),
        ("Gemma 3", {"use_bidirectional_attention": True}),
        ("Gemma 3", {"layer_types": ["sliding_attention", "full_attention"] * 3}),
        ("Gemma 4", {"hidden_size_per_layer_input": 8}),
        ("Gemma 4", {"num_kv_shared_layers": 2}),
        ("Gemma 4 31B", {"num_kv_shared_layers": 2}),
        ("Gemma 4 E2B", {"rms_norm_eps": 1e-5}),
        ("Gemma 4", {"use_bidirectional_attention": "all"}),
        ("Gemma 4", {"per_layer_config": {"0": {"head_dim": 8}}}),
        ("Mistral", {"hidden_act": "gelu"}),
        ("OLMoE", {"norm_topk_prob": True}),
        ("OLMoE", {"clip_qkv": 8.0}),
        ("Qwen3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("Qwen3", {"rope_parameters": YARN | {"attention_factor": 2.0}}),
        ("gpt-oss", {"swiglu_limit": 9.0}),
        ("gpt-oss", {"layer_types": ["full_attention", "full_attention"]}),
        ("gpt-oss", {"rope_parameters": YARN}),
        ("gpt-oss", {"sliding_window": None}),
    ],
)
def test_settings_that_layers_pass_over(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    said = refused(tmp_path, family, change, {})
    assert re.search("config.json has (\\w+)=|rotary embeddings with these settings|cannot build GptOss", said), said


@pytest.mark.parametrize("truncate", [None, False])
def test_yarn_has_the_defaults_of_transformers(truncate: bool | None, tmp_path: Path) -> None:
    rope = YARN if truncate is None else YARN | {"truncate": truncate}
    recipe, source, model = write_job(tmp_path, "Qwen3", {"rope_parameters": rope})
    run_command("score", recipe, "--hf", source, "--output", tmp_path / "scores.jsonl", code=0)
    assert worst_score(tmp_path / "scores.jsonl", model) <= 1e-5


def test_recipe_in_a_checkpoint_exports(tmp_path: Path) -> None:
    recipe, source, _ = write_job(tmp_path, "Llama 3")
    saved = tmp_path / "run"
    run_command("train", recipe, "--hf", source, f"checkpoint.save={saved}", "verify.enabled=false", code=0)
    run_command("export", next(saved.glob("*/recipe.yaml")), tmp_path / "exported", code=0)
    assert (tmp_path / "exported" / "config.json").is_file()


@pytest.mark.ci
def test_loading_takes_one_file_of_memory_on_top_of_the_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 8}
    saved_model("Qwen3", tmp_path / "source", sizes, max_shard_size="32MB")
    program = [sys.executable, str(Path(__file__).with_name("loading_memory.py")), str(tmp_path / "source")]
    folders = Path(__file__).parent, Path(__file__).parents[1], os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(map(str, folders))
    # Freed memory goes back at once: loading does not need the tens of MiB that the allocator keeps for later.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = os.environ | allocator | {"PYTHONPATH": path}
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shard"] > 3 * found["file"], "a second copy would show"
    assert found["grew"] <= found["file"]
