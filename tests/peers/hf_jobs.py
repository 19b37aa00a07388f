"""Jobs on tiny Hugging Face folders, and how their answers differ from transformers' own."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from harness import forks, torchrun_jobs
from harness.commands import run_command, write_rows
from harness.worlds import Layout, world
from hf_folders import FAMILIES, SIZES, SPARSE, rows, saved_model
from safetensors.torch import load_file, save_file

from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.engine.step_planner import fold_step
from mcore_prefix_tree.mcore.loop.jobs import run_once
from mcore_prefix_tree.mcore.loop.resolve_recipe import Resolved
from mcore_prefix_tree.mcore.models.bridge import load_bridge
from mcore_prefix_tree.plan.flops import Flops, pair_flops
from mcore_prefix_tree.settings import load_recipe

_CENTRED = "linear_attn.norm.weight"
RECIPE = """
batch: {global_batch_size: 9, max_tokens: 40}
train_iters: 1
compare: false
"""
# A step that changes no bit of a weight.
STILL = "optimizer.lr=1e-30"
TP2 = ("parallel.tensor_model_parallel_size=2",)
TP2_SP = (*TP2, "parallel.sequence_parallel=true")
# Families that local layers can build; the first are tested each time.
QUICK = ("Llama 3", "Qwen3", "Qwen3-MoE", "DeepSeek-V3", "Nemotron-H", "Granite 4", "Gemma 4 E2B")
# Megatron-Bridge names their local layers itself, in one stage; without TransformerEngine no norm is split by tokens.
OWN_LAYERS = ("Gemma 4 E2B", "Gemma 4 31B")
LOCAL = (*QUICK, "Granite 4 dense", "Qwen2.5", "Hy3", "Mistral", "GLM-4.7-Flash", "Gemma 4 31B")
EP2 = ("parallel.expert_model_parallel_size=2",)
PP2 = ("parallel.pipeline_model_parallel_size=2",)
# Sinks and windows together, in every kind of model.
REFERENCE = "attention_backend=reference"


# Ranks find Megatron-Bridge imported, which takes five seconds of CPU in each.
run_ranks = partial(torchrun_jobs.run, imports=("bridge_loaded",))


def write_job(
    folder: Path, family: str, settings: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Path, Path, Any]:
    """A recipe, the folder of a model, and transformers' model; ``settings`` are further ones of its configuration."""
    model = saved_model(family, folder / "source", settings or {}, **options)
    return write_recipe(folder), folder / "source", model


def write_recipe(folder: Path) -> Path:
    """A recipe without a model, and its data."""
    data = write_rows(folder / "data.jsonl", [{"tokens": row} for row in rows()])
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"data: {{path: {data}}}\n{RECIPE}")
    return recipe


def change_folder(source: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor | None]) -> None:
    """Change keys of a folder's configuration, and weights of its one file; None removes one."""
    content = json.loads((source / "config.json").read_text()) | config
    (source / "config.json").write_text(json.dumps(content))
    kept = {name: one for name, one in (load_file(source / "model.safetensors") | weights).items() if one is not None}
    save_file(kept, source / "model.safetensors", {"format": "pt"})


def nll(model: Any, row: list[int]) -> torch.Tensor:
    """Negative log-likelihood of each token after the first, by transformers."""
    logprobs = torch.log_softmax(model(torch.tensor([row])).logits[0].float(), dim=-1)[:-1]
    return -logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0]


def worst_score(scores: Path, model: Any, column: str = "old_logprobs") -> float:
    """The largest error of a token's log-probability in a file of scores."""
    lines = [json.loads(line) for line in scores.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == rows()
    with torch.no_grad():
        expected = [-nll(model, row).numpy() for row in rows()]
    found = [np.array(line[column][1:], dtype=float) for line in lines]
    return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def read_model(folder: Path) -> Any:
    """transformers' model of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_same_folder(exported: Path, source: Path) -> None:
    assert sorted(one.name for one in exported.iterdir()) == sorted(one.name for one in source.iterdir())
    expected = weights_in(source)
    assert len(expected) > 15
    found = weights_in(exported)
    assert found.keys() == expected.keys()
    assert not [name for name, weight in expected.items() if weight.dtype != found[name].dtype]
    other = [name for name, weight in expected.items() if not torch.equal(weight, found[name])]
    assert not other, f"exported bits differ: {', '.join(other)}"
    for one in source.glob("*.json"):
        assert (exported / one.name).read_bytes() == one.read_bytes()


def gradients(run: Resolved, *, is_folded: bool = True) -> dict[str, torch.Tensor]:
    """The gradients of the first step's summed loss, converted as weights are."""
    chunks = run.starting_model(print)
    job = replace(run.job, divides_by_tokens=False)
    step = fold_step(run.first_step(), job)
    assert (step.logical_tokens > 1.5 * step.physical_tokens) == is_folded
    run_schedule(chunks, step.micro_batches, job.forward_step)
    assert run.recipe.model.hf is not None
    return exported_gradients(run.recipe.model.hf, chunks, [parameter.grad for parameter in chunks[0].parameters()])


def exported_gradients(path: str, chunks: list[Any], of_parameters: Iterable[torch.Tensor | None]) -> dict[str, Any]:
    """Gradients of a model of one chunk, which it keeps as weights, by the names of a folder's weights."""
    for parameter, gradient in zip(chunks[0].parameters(), of_parameters, strict=True):
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
    exported = dict(load_bridge(path).export_hf_weights(chunks, cpu=True))
    # A weight that Megatron-Core centres at zero is exported with one added to it.
    return {name: weight - 1 if name.endswith(_CENTRED) else weight.clone() for name, weight in exported.items()}


def errors_of(family: str, folder: Path, *overrides: str) -> dict[str, float]:
    """Errors of one process against transformers; raise RuntimeError if the model is rejected.

    ``logprob`` is the largest of a token's log-probability; ``gradient`` the relative norm over all weights; and
    ``worst_gradient`` the largest of one weight's, of which a small one counts as a thousandth of all.
    """
    with mock.patch.dict(os.environ):  # in which Megatron-Core leaves the attention that a model asks for
        recipe, source, model = write_job(folder, family)
        scores = folder / "scores.jsonl"
        scored = run_command("score", recipe, "--hf", source, "--output", scores, *overrides)
        if scored.exit_code:
            raise RuntimeError(" ".join(scored.output.split())) from scored.exception
        found, _ = run_once(load_recipe(recipe, [f"model.hf={source}", *overrides]), gradients)
    errors = {"logprob": worst_score(scores, model)}
    sum(nll(model, row).sum() for row in rows()).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder / "gradients")
    expected = weights_in(folder / "gradients")
    return errors | gradient_errors(found, expected)


def gradient_errors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The errors of gradients by weight, see :func:`errors_of`."""
    kept = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    trained = [name for name in expected if not name.endswith(kept)]
    whole = float(torch.stack([expected[name].norm() for name in trained]).norm())
    each = {name: float((found[name] - expected[name]).norm()) for name in trained}
    return {
        "gradient": float(np.linalg.norm(list(each.values()))) / whole,
        "worst_gradient": max(error / max(float(expected[name].norm()), 1e-3 * whole) for name, error in each.items()),
    }


def run_with_engine(program: str, folder: Path) -> None:
    """Run a program, with ``sys.argv[1]`` a folder, in a process where a stand-in has TransformerEngine's place."""
    # Megatron-Core leaves the attention that a model asks for in the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    first = "import te_stand_in, pathlib, sys, bridge_loaded"
    command = [sys.executable, "-c", f"{first}; {program}", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def check_balancing(family: str, folder: Path, *overrides: str) -> None:
    """Compare gradients, with a loss that balances experts, of folded samples and of samples that share nothing."""
    recipe, source, _ = write_job(folder, family)
    apart = [{"tokens": row, "merge_key": str(i)} for i, row in enumerate(rows())]
    balancing = "moe_router_load_balancing_type=aux_loss", "moe_aux_loss_coeff=10"
    options = [f"model.hf={source}", *(f"model.transformer.{one}" for one in balancing), *overrides]
    with mock.patch.dict(os.environ):
        found, _ = run_once(load_recipe(recipe, options), gradients)
        unbalanced, _ = run_once(load_recipe(recipe, [*options, "model.transformer.moe_aux_loss_coeff=0"]), gradients)
        write_rows(folder / "data.jsonl", apart)
        expected, _ = run_once(load_recipe(recipe, options), partial(gradients, is_folded=False))
    assert gradient_errors(found, expected)["gradient"] <= 1e-4
    assert gradient_errors(unbalanced, expected)["gradient"] > 1e-2


def check_sparse_work(folder: Path, *overrides: str) -> None:
    """Compare the sparse layers that FLOPs count in a folder with its configuration: every second has an indexer."""
    recipe, source, model = write_job(folder, "GLM-5")
    work, _ = run_once(load_recipe(recipe, [f"model.hf={source}", *overrides]), lambda run: run.job.work)
    assert work is not None
    config, every = model.config, SPARSE["index_n_heads"] * SPARSE["index_head_dim"]
    assert (work.layers, work.sparse_layers, work.topk) == (0, config.num_hidden_layers, SPARSE["index_topk"])
    heads = (config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    assert work.pair == pair_flops(*heads), "of latent attention"
    indexers = -(-config.num_hidden_layers // 2)
    assert work.indexer_pair == Flops(forward=2 * indexers * every, backward=0)


def check_layout(family: str, folder: Path, *overrides: str) -> float:
    """Train a step that changes nothing on two ranks, compare the exported bits, score; return the largest error."""
    recipe, source, model = write_job(folder, family, max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    options = ("--hf", source, *overrides, STILL)
    exported = f"checkpoint.export_hf={folder / 'exported'}"
    trained = run_ranks(2, "train", recipe, *options, exported)
    if trained.code:
        raise RuntimeError(trained.err)
    scores = folder / "scores.jsonl"
    run_ranks(2, "score", recipe, *options, "--output", scores, code=0)
    worst = worst_score(scores, model)
    assert worst <= 1e-5, f"a log-probability differs by {worst}"
    assert_same_folder(folder / "exported", source)
    return worst


def check_checkpoints(family: str, folder: Path, *overrides: str, split: tuple[str, ...] = TP2_SP) -> None:
    """Compare checkpoints: of a job that stops and resumes with one that does not, and of two ranks with one.

    Adam's first moment after a step is a tenth of the gradient; norms of keys that are not used have none.
    """
    recipe, source, _ = write_job(folder, family)
    job = ("train", recipe, "--hf", source, "--resume", "optimizer.lr_decay_style=constant", *overrides)

    def train(name: str, steps: int, *layout: str) -> dict[str, torch.Tensor]:
        run_ranks(2 if layout else 1, *job, f"checkpoint.save={folder / name}", f"train_iters={steps}", *layout, code=0)
        return torchrun_jobs.checkpoint_content(folder / name, steps)

    first = train("stopped", 1)
    resumed, whole = train("stopped", 2), train("whole", 2)
    torchrun_jobs.assert_same_bits(resumed, whole)
    moments = [name for name in first if name.startswith("optimizer.state.exp_avg.")]
    assert any(".experts." in name for name in moments) == FAMILIES[family].has_experts
    unmoved = [name for name in moments if torch.equal(first[name], whole[name])]
    assert len(unmoved) == FAMILIES[family].settings.get("num_kv_shared_layers", 0), unmoved
    apart = train("apart", 1, *split)
    errors = gradient_errors(*({name: content[name] for name in moments} for content in (apart, first)))
    assert max(errors.values()) <= 1e-4, errors


DEPTH = "model.transformer.mtp_num_layers=1"
# A depth's own weights by DeepSeek's names, and by Qwen's, behind "mtp.".
_OF_QWEN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


def write_depth_job(folder: Path, family: str = "DeepSeek-V3", **changes: torch.Tensor) -> tuple[Path, Path]:
    """A recipe, and a folder with all weights of a layer behind the last; ``changes`` are some of them."""
    recipe, source, _ = write_job(folder, family)
    add_depth(source, is_qwen="Qwen" in family, **changes)
    return recipe, source


def add_depth(source: Path, *, is_qwen: bool = False, **changes: torch.Tensor) -> None:
    """Give a folder all weights of a layer behind the last, by the names of DeepSeek or of Qwen."""
    config, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    last = config["num_hidden_layers"]
    config["mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"] = 1
    (source / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    above = f"model.layers.{last - 1}."
    depth = {name.removeprefix(above): weight * 1.1 for name, weight in weights.items() if name.startswith(above)}
    own = {"eh_proj": 0.1 * torch.randn(64, 128)}
    own |= {name: 1 + torch.rand(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    if is_qwen:
        depth = {f"layers.0.{name}": weight for name, weight in depth.items()}
        own = {_OF_QWEN[name]: weight for name, weight in own.items()}
    else:
        own |= {"embed_tokens": weights["model.embed_tokens.weight"], "shared_head.head": weights["lm_head.weight"]}
    depth |= {f"{name}.weight": weight.clone() for name, weight in (own | changes).items()}
    assert len(depth) > 20
    prefix = "mtp." if is_qwen else f"model.layers.{last}."
    depth = {prefix + name: weight for name, weight in depth.items()}
    save_file(weights | depth, source / "model.safetensors", {"format": "pt"})


def loss_of_depth(source: Path) -> float:
    """The mean that a step of all rows logs: DeepSeek's formula, over transformers' layers, for each row by itself."""
    model, weights = read_model(source), weights_in(source)
    last, config = model.config.num_hidden_layers, model.config
    prefix, names = f"model.layers.{last}.", dict(zip(_OF_QWEN, _OF_QWEN, strict=True))
    if "mtp.fc.weight" in weights:
        prefix, names = "mtp.", _OF_QWEN
    own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    of_block = {name.removeprefix("layers.0."): weight for name, weight in own.items()}

    def normed(name: str, rows: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., h]`` by a norm of the depth."""
        layer = type(model.model.norm)(config.hidden_size, eps=config.rms_norm_eps)
        layer.weight.data = own[f"{names[name]}.weight"]
        output: torch.Tensor = layer(rows)
        return output

    twin = copy.deepcopy(model)
    block = twin.model.layers[last - 1]
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.copy_(of_block[name] if name in of_block else _packed_experts(of_block, name))
        for name, buffer in block.named_buffers():
            buffer.copy_(of_block.get(name, buffer))
        twin.model.layers, twin.model.norm = twin.model.layers[last - 1 :], torch.nn.Identity()
        total = torch.zeros(2, dtype=torch.float64)
        for row in rows():
            ids = torch.tensor([row])
            embedded = normed("enorm", model.model.embed_tokens(ids[:, 1:]))
            hidden = normed("hnorm", model.model(ids).last_hidden_state[:, :-1])
            states = torch.cat([embedded, hidden], dim=-1) @ own[f"{names['eh_proj']}.weight"].T
            states = twin.model(inputs_embeds=states, use_cache=False).last_hidden_state[0, :-1]
            logits = model.lm_head(normed("shared_head.norm", states))
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 2:], reduction="sum")
            ratio = (len(row) - 1) / (len(row) - 2)
            total += ratio * torch.tensor([float(loss), len(row) - 2])
    return float(total[0] / total[1])


def _packed_experts(own: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """transformers' tensor of all experts, from the matrices of a folder."""
    parts = ["gate_proj", "up_proj"] if name.endswith("gate_up_proj") else ["down_proj"]
    return torch.stack([torch.cat([own[f"mlp.experts.{one}.{part}.weight"] for part in parts]) for one in range(4)])


def check_depth(family: str, folder: Path, *overrides: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Train a depth for a step that changes nothing, and for another; return the source, and the latter's weights."""
    recipe, source = write_depth_job(folder, family)
    log, expected = folder / "log.jsonl", loss_of_depth(source)
    for still in (True, False):
        exported, rate = folder / f"exported {still}", STILL if still else "optimizer.lr=0.01"
        options = (DEPTH, rate, "batch.max_tokens=200", f"log.metrics={log}", f"checkpoint.export_hf={exported}")
        run_command("train", recipe, "--hf", source, *options, *overrides, code=0)
        found = json.loads(log.read_text())["metrics"]["mtp_1 loss"]
        assert abs(found / expected - 1) < 1e-5, f"{found} instead of {expected}"
        if still:
            assert_same_folder(exported, source)
    return source, weights_in(exported)


def check_depth_with_tensor_parallelism(family: str, folder: Path) -> None:
    """Train a depth on two ranks for a step that changes nothing, and compare gradients with those of one rank.

    It runs in the process of :func:`run_with_engine`.
    """
    from hf_ranks import gradients_with_depth

    forks.PRELOADED[:] = ["te_stand_in", *forks.PRELOADED, "bridge_loaded"]
    recipe, source = write_depth_job(folder, family)
    log, exported = folder / "log.jsonl", folder / "exported"
    options = (DEPTH, STILL, REFERENCE, "model.transformer_impl=transformer_engine", "verify.enabled=false", *TP2_SP)
    written = f"log.metrics={log}", f"checkpoint.export_hf={exported}"
    run_ranks(2, "train", recipe, "--hf", source, *options, *written, "batch.max_tokens=200", code=0)
    assert json.loads(log.read_text())["metrics"]["mtp_1 loss"] == pytest.approx(loss_of_depth(source), rel=1e-5)
    assert_same_folder(exported, source)
    layouts = Layout(), Layout(tp=2, sequence_parallel=True)
    alone, shared = (world(one.tp).run(gradients_with_depth, str(source), one, layout=one)[0] for one in layouts)
    (projection,) = [one for name, one in alone.items() if name.endswith((".eh_proj.weight", "mtp.fc.weight"))]
    assert projection.any()
    assert gradient_errors(shared, alone)["worst_gradient"] <= 1e-5


def train_depth(family: str, folder: Path, steps: int) -> None:
    """Train a depth as Megatron-LM's loop is told to in ``tests/upstream``; its log is in the folder."""
    recipe, source = write_depth_job(folder, family)
    rate = "optimizer.lr=1e-3", "optimizer.lr_decay_style=constant", "optimizer.weight_decay=0.01"
    batch = "data.order=file", "batch.global_batch_size=8", "batch.max_tokens=80", f"train_iters={steps}"
    layers = "model.transformer_impl=transformer_engine", REFERENCE, "verify.enabled=false"
    options = (DEPTH, *rate, *batch, *layers, f"log.metrics={folder / 'log.jsonl'}")
    run_command("train", recipe, "--hf", source, *options, code=0)


REWARD_RECIPE = """
objective: {name: reward_model}
batch: {global_batch_size: 8, max_tokens: 40}
train_iters: 1
compare: false
"""


def write_reward_job(folder: Path) -> Path:
    """A recipe of pairs."""
    pairs = [{"tokens": row, "pair": i // 2, "chosen": i % 2 == 1} for i, row in enumerate(rows()[:8])]
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"data: {{path: {write_rows(folder / 'data.jsonl', pairs)}}}\n{REWARD_RECIPE}")
    return recipe


def saved_classifier(folder: Path, labels: int = 1) -> Any:
    torch.manual_seed(0)
    settings = SIZES | {"num_labels": labels, "pad_token_id": 0}
    model = transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**settings)).float().eval()
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def worst_reward(scores: Path, model: Any) -> float:
    lines = [json.loads(line) for line in scores.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == rows()[:8]
    with torch.no_grad():
        expected = [float(model.score(model.model(torch.tensor([row])).last_hidden_state[0, -1])) for row in rows()[:8]]
    return max(abs(line["reward"] - value) for line, value in zip(lines, expected, strict=True))
