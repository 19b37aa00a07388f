"""``--prefix-tree-hf``: Megatron-LM's loop trains a Hugging Face folder as ``mcore-prefix-tree train --hf`` does.

Needs core_v0.19.0, and Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from harness.commands import run_command
from harness.hf_sources import CONFIG, write_tensors
from megatron_lm import CPU, ENTRY, megatron, require_checkout, trained

require_checkout()

HAS_BRIDGE = importlib.util.find_spec("megatron.bridge") is not None
needs_bridge = pytest.mark.skipif(not HAS_BRIDGE, reason="Megatron-Bridge is not installed")
BRIDGE, ENGINE = ((str(Path(__file__).with_name(f"{name}_pretrain.py")),) for name in ("bridge", "engine"))
STEPS = 3
JOB = (
    f"--prefix-tree --prefix-tree-max-tokens 80 --seq-length 64 --train-iters {STEPS} --global-batch-size 8 "
    "--lr 1e-3 --lr-decay-style constant --weight-decay 0.01 --adam-beta2 0.95 --attention-dropout 0 "
    "--hidden-dropout 0 --log-interval 1 --eval-interval 1000 --prefix-tree-order file --save-interval 1000 "
    "--ckpt-format torch_dist"
)
EXPERTS = "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"


@needs_bridge
@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [
        ("Qwen3", 1, ""),
        ("Llama 3", 2, TP2),
        pytest.param("Qwen2.5", 2, PP2, marks=pytest.mark.ci),
        pytest.param("Qwen3-MoE", 1, EXPERTS, marks=pytest.mark.ci),
        pytest.param("Qwen3-MoE", 2, f"{EXPERTS} --expert-model-parallel-size 2", marks=pytest.mark.ci),
    ],
)
def test_loop_trains_as_a_recipe_does(family: str, ranks: int, layout: str, tmp_path: Path) -> None:
    """And continues from its own checkpoint, not from the folder."""
    from bridge_models import auto_bridge

    auto_bridge()
    from hf_jobs import write_job

    recipe, source, _ = write_job(tmp_path, family)
    log = tmp_path / "log.jsonl"
    options = ("data.order=file", "batch.global_batch_size=8", "optimizer.lr=1e-3", "optimizer.lr_decay_style=constant")
    further = (f"train_iters={STEPS}", "optimizer.weight_decay=0.01", f"log.metrics={log}", "verify.enabled=false")
    run_command("train", recipe, "--hf", source, *options, *further, code=0)
    expected = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    size = f"--micro-batch-size {4 if '--expert' in layout else 8}"
    data = f"--prefix-tree-hf {source} --prefix-tree-data-path {tmp_path / 'data.jsonl'}"
    saved = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    arguments = (CPU, JOB, size, data, saved, layout)
    first = trained(BRIDGE, *arguments, "--exit-interval 2", ranks=ranks)
    assert f"the weights start from {source}" in first.output
    rest = trained(BRIDGE, *arguments, ranks=ranks)
    assert "the weights start from" not in rest.output
    losses = first.losses | rest.losses
    assert [losses[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-5)


# What GLM-4.5's provider sets, and no argument reads from its folder.
GLM = (
    f"{EXPERTS} --transformer-impl transformer_engine --moe-grouped-gemm --moe-router-dtype fp32 "
    "--moe-router-bias-update-rate 0 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
)


@needs_bridge
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, "", id="one", marks=pytest.mark.ci),
        pytest.param(2, TP2, id="tp2-sp", marks=pytest.mark.slow),
        pytest.param(2, PP2, id="pp2", marks=pytest.mark.slow),
    ],
)
def test_depth_of_a_folder_trains_as_in_a_recipe(ranks: int, layout: str, tmp_path: Path) -> None:
    """A stand-in computes TransformerEngine's layers, which the folder needs, in other processes."""
    from bridge_models import auto_bridge

    auto_bridge()
    from hf_jobs import run_with_engine

    run_with_engine(
        f"from hf_jobs import train_depth; train_depth('GLM-4.5', pathlib.Path(sys.argv[1]), {STEPS})", tmp_path
    )
    steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    data = f"--prefix-tree-hf {tmp_path / 'source'} --prefix-tree-data-path {tmp_path / 'data.jsonl'}"
    settings = (CPU, JOB, "--micro-batch-size 8 --prefix-tree-attention-backend reference", data, GLM)
    run = trained(ENGINE, *settings, layout, ranks=ranks, fork=False)
    assert f"the weights start from {tmp_path / 'source'}" in run.output
    assert [run.losses[step] for step in range(1, STEPS + 1)] == pytest.approx([one["loss"] for one in steps], rel=1e-5)
    last = run.iterations[STEPS]
    assert last["mtp_1 loss"] == pytest.approx(steps[-1]["metrics"]["mtp_1 loss"], rel=1e-5)
    norms = [run.iterations[step]["grad norm"] for step in range(1, STEPS + 1)]
    assert norms == pytest.approx([one["grad_norm"] for one in steps], abs=6e-4)


@needs_bridge
@pytest.mark.ci
def test_scalar_head_of_a_folder_trains_and_scores(tmp_path: Path) -> None:
    """As the same recipe, and as transformers' own model."""
    from bridge_models import auto_bridge

    auto_bridge()
    from hf_jobs import saved_classifier, worst_reward
    from hf_jobs import write_reward_job as write_job

    recipe, source, log = write_job(tmp_path), tmp_path / "source", tmp_path / "log.jsonl"
    model = saved_classifier(source)
    options = ("data.order=file", "optimizer.lr=1e-3", "optimizer.lr_decay_style=constant", "verify.enabled=false")
    further = (f"train_iters={STEPS}", "optimizer.weight_decay=0.01", f"log.metrics={log}")
    run_command("train", recipe, "--hf", source, *options, *further, code=0)
    expected = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    data = f"--prefix-tree-hf {source} --prefix-tree-data-path {tmp_path / 'data.jsonl'} --prefix-tree-objective"
    run = trained(BRIDGE, CPU, JOB, "--micro-batch-size 8", f"{data} reward_model", TP2, ranks=2)
    assert f"the weights start from {source}\n" in run.output
    assert [run.losses[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-5)
    scores = tmp_path / "scores.jsonl"
    trained(BRIDGE, CPU, JOB, f"{data} reward_model --prefix-tree-score {scores}", TP2, ranks=2)
    assert worst_reward(scores, model) <= 1e-5
    refused = megatron(BRIDGE, CPU, JOB, "--micro-batch-size 8", f"{data} sft")
    assert "ends in a scalar head, and --prefix-tree-objective sft needs a vocabulary" in refused.output


@needs_bridge
@pytest.mark.parametrize(
    ("settings", "arguments", "says"),
    [
        ({}, "--num-layers 4", "--num-layers=4, but --prefix-tree-hf "),
        ({}, "--mtp-num-layers 1", "--mtp-num-layers=1: depths in folders of llama are not trained"),
        ({}, "--use-checkpoint-args", "both decide the model; give only one of them"),
        ({"architectures": ["UnheardOfForCausalLM"]}, "", "Megatron-Bridge cannot build UnheardOfForCausalLM"),
        ({"model_type": "ernie4_5_moe"}, "", "whose results were never compared with transformers'"),
    ],
)
def test_folders_and_arguments_that_are_refused(
    settings: dict[str, object], arguments: str, says: str, tmp_path: Path
) -> None:
    from hf_folders import saved_model

    saved_model("Llama 3", tmp_path / "source", {})
    config = tmp_path / "source" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    data = f"--prefix-tree-hf {tmp_path / 'source'} --prefix-tree-data-path {config}"
    run = megatron(BRIDGE, CPU, JOB, "--micro-batch-size 8", data, arguments)
    assert run.status != 0
    assert says in run.output
    assert "Traceback" not in run.output.partition("error: ")[2].partition("ChildFailedError")[0].splitlines()[0]


@pytest.mark.skipif(HAS_BRIDGE, reason="Megatron-Bridge is installed")
def test_folder_without_megatron_bridge(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_tensors(tmp_path / "model.safetensors", ["a"])
    data = f"--prefix-tree-hf {tmp_path} --prefix-tree-data-path {tmp_path / 'config.json'}"
    run = megatron(ENTRY, CPU, JOB, "--micro-batch-size 8", data)
    assert run.status != 0
    assert "--prefix-tree-hf needs Megatron-Bridge 0.6 with Python 3.12, megatron-core 0.19" in run.output
