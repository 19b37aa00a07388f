"""Full jobs of verl, its own engine and the one that folds inside: the same losses, gradient norms and weights.

Needs packages as old as verl 0.9.1 asks for. In an environment with requirements/test.txt and requirements/bridge.txt,
``pip install --no-deps -r requirements/verl.txt``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata", reason="verl's SFT trainer needs requirements/verl.txt")
if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
from hf_jobs import add_depth
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl_jobs import conversations, model_folder, ppo, prompts, run, sft

pytestmark = pytest.mark.slow
STOCK, FOLDED = "nvidia", "mcore_prefix_tree"
LORA = ("model.lora.rank=8", "model.lora.alpha=16")
OFFLOADED = ("engine.param_offload=True", "engine.optimizer_offload=True")
# The job ends before a last step, which verl would save: the stand-in for grouped layers keeps no extra state.
EXPERTS = (
    "+engine.override_transformer_config.moe_router_load_balancing_type=none",
    "+engine.override_transformer_config.moe_aux_loss_coeff=0",
    *("trainer.total_training_steps=99", "trainer.total_epochs=2"),
)


def compare(stock: list[dict[str, Any]], folded: list[dict[str, Any]], *names: str) -> None:
    """Every step: the same numbers within 1e-6, and the report of the one that folds."""
    assert len(stock) == len(folded) > 1
    for expected, step in zip(stock, folded, strict=True):
        numbers = {name: expected[name] for name in names}
        assert {name: step[name] for name in names} == pytest.approx(numbers, rel=1e-6, abs=1e-6)
        assert not any("fold/" in name for name in expected)


def compare_exports(start: Path, stock: Path, folded: Path) -> None:
    """Exported weights differ by at most 1e-4 of their change in training."""
    before, expected, weights = (load_file(folder / "model.safetensors") for folder in (start, stock, folded))
    assert before.keys() == expected.keys() == weights.keys()
    for name, weight in weights.items():
        update = (expected[name] - before[name]).norm()
        assert update > 0
        assert (weight - expected[name]).norm() <= 1e-4 * update, name


@pytest.mark.parametrize(
    ("ranks", "family", "settings"),
    [
        pytest.param(1, "Qwen3", (), id="one-rank"),
        pytest.param(1, "Qwen3-MoE", EXPERTS, id="experts"),
        pytest.param(1, "Qwen3", LORA, id="lora"),
        pytest.param(1, "Llama 3", OFFLOADED, id="offloading"),
        pytest.param(2, "Qwen3", (), id="dp2"),
        pytest.param(2, "Qwen3", ("engine.tensor_model_parallel_size=2",), id="tp2-sp"),
        pytest.param(2, "Qwen3", ("engine.pipeline_model_parallel_size=2",), id="pp2"),
    ],
)
def test_sft(ranks: int, family: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", family)
    data = conversations(tmp_path / "data.parquet")
    saved = ("checkpoint.save_contents=[model,optimizer,extra,hf_model]", "trainer.save_freq=3")
    saved = () if settings in (LORA, EXPERTS) else saved
    command = sft(ranks, model, data, *settings, *saved)
    stock, folded = (run(command, tmp_path / vendor, vendor=vendor) for vendor in (STOCK, FOLDED))
    compare(stock, folded, "train/loss", "train/grad_norm", "train/lr")
    assert all(step["mtp_losses/fold/fold_ratio"] > 1.2 for step in folded)
    scalars = EventAccumulator(str(tmp_path / FOLDED / "tensorboard")).Reload()
    ratios = [scalar.value for scalar in scalars.Scalars("mtp_losses/fold/fold_ratio")]
    assert ratios == pytest.approx([step["mtp_losses/fold/fold_ratio"] for step in folded], rel=1e-6)
    if saved:
        exports = [next((tmp_path / vendor).glob("checkpoints/**/huggingface")) for vendor in (STOCK, FOLDED)]
        compare_exports(model, *exports)


@pytest.mark.parametrize("job", ["sft", "grpo"])
def test_precision_of_its_own(job: str, tmp_path: Path) -> None:
    """bfloat16, the only one that verl's configuration allows: rounding of both engines is alike, not equal."""
    model, grouped = model_folder(tmp_path / "model"), ()
    if job == "sft":
        command = sft(1, model, conversations(tmp_path / "data.parquet"))
        names, ratio = ("train/loss", "train/grad_norm"), "mtp_losses/fold/fold_ratio"
    else:
        pytest.importorskip("transfer_queue", reason="verl's V1 trainers need requirements/verl.txt")
        command = ppo(1, model, prompts(tmp_path / "prompts.parquet"))
        names, ratio = ("actor/grad_norm", "actor/entropy"), "actor/fold/fold_ratio"
        grouped = ("trainer.v1.trainer_mode=sync_grouped",)
    exact, stock, folded = (
        run([*command, *(grouped if vendor == FOLDED else ())], tmp_path / f"{vendor}-{dtype}", vendor=vendor,
            VERL_CPU_DTYPE=dtype)
        for vendor, dtype in ((STOCK, "float32"), (STOCK, "bfloat16"), (FOLDED, "bfloat16"))
    )  # fmt: skip
    for right, expected, step in zip(exact, stock, folded, strict=True):
        assert step[ratio] > 1.2
        for name in names:
            rounding = abs(expected[name] - right[name])
            assert abs(step[name] - right[name]) <= 2 * rounding + 5e-3 * abs(right[name]), name


@pytest.mark.parametrize("detach", [False, True])
def test_sft_of_a_depth(detach: bool, tmp_path: Path) -> None:
    """A depth that Megatron-Bridge builds; both engines have the micro-batches that verl cuts."""
    model = model_folder(tmp_path / "model", "GLM-4.5")
    add_depth(model)
    command = sft(
        *(1, model, conversations(tmp_path / "data.parquet"), *EXPERTS),
        *("data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=4"),
        *("model.mtp.enable=True", "model.mtp.enable_train=True", f"model.mtp.detach_encoder={detach}"),
        "+engine.override_transformer_config.cross_entropy_loss_fusion=False",  # it rounds gradients to bf16
    )
    stock, folded = (run(command, tmp_path / vendor, vendor=vendor) for vendor in (STOCK, FOLDED))
    compare(stock, folded, "train/loss", "train/grad_norm", "mtp_losses/mtp_1_loss")
    assert all(step["mtp_losses/fold/fold_ratio"] > 1.2 for step in folded)


@pytest.mark.parametrize("ranks", [1, 2])
def test_grpo_with_complete_groups(ranks: int, tmp_path: Path) -> None:
    """Ray workers, rollouts, the V1 trainer: verl's own, and ours that deals complete groups."""
    pytest.importorskip("transfer_queue", reason="verl's V1 trainers need requirements/verl.txt")
    model, data = model_folder(tmp_path / "model"), prompts(tmp_path / "prompts.parquet")
    stock = run(ppo(ranks, model, data), tmp_path / STOCK, vendor=STOCK)
    command = ppo(ranks, model, data, "trainer.v1.trainer_mode=sync_grouped")
    folded = run(command, tmp_path / FOLDED, vendor=FOLDED)
    compare(stock, folded, "actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean")
    assert all(step["actor/fold/fold_ratio"] > 1.5 for step in folded)
    assert all(step["fold/rank_unique_tokens/max"] > 0 for step in folded)


def test_ppo_with_a_critic(tmp_path: Path) -> None:
    """The critic's engine folds too; its head starts at random, from verl's seed."""
    pytest.importorskip("transfer_queue", reason="verl's V1 trainers need requirements/verl.txt")
    model, data = model_folder(tmp_path / "model"), prompts(tmp_path / "prompts.parquet")
    settings = ("algorithm.adv_estimator=gae", f"critic.model.path={model}", "critic.ppo_max_token_len_per_gpu=256")
    command = ppo(1, model, data, *settings, "critic.optim.lr=1e-3")
    stock = run(command, tmp_path / STOCK, vendor=STOCK)
    folded = run([*command, "trainer.v1.trainer_mode=sync_grouped"], tmp_path / FOLDED, vendor=FOLDED)
    critic = ("critic/vf_loss", "critic/grad_norm", "critic/values/mean")
    compare(stock, folded, "actor/pg_loss", "actor/grad_norm", "actor/entropy", *critic)
    assert all(step[f"{role}/fold/fold_ratio"] > 1.5 for step in folded for role in ("actor", "critic"))


# verl's asynchronous buffer samples what is ready. With one batch in flight, both jobs train on the same rows.
ASYNCHRONOUS = {
    "colocate_async": (),
    "separate_async": (
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=random",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "++ray_kwargs.ray_init.num_gpus=2",
    ),
}


@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_grpo_in_asynchronous_modes(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("transfer_queue", reason="verl's V1 trainers need requirements/verl.txt")
    model, data = model_folder(tmp_path / "model"), prompts(tmp_path / "prompts.parquet")
    command = ppo(1, model, data, *ASYNCHRONOUS[mode], f"trainer.v1.{mode}.num_warmup_batches=0")
    quiet = {"VERL_LOGGING_LEVEL": "WARNING"}  # verl 0.9.1 logs hybrid_engine=False with an argument of print
    stock = run([*command, f"trainer.v1.trainer_mode={mode}"], tmp_path / STOCK, vendor=STOCK, **quiet)
    folded = run([*command, f"trainer.v1.trainer_mode={mode}_grouped"], tmp_path / FOLDED, vendor=FOLDED, **quiet)
    compare(stock, folded, "actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean")
    assert all(step["actor/fold/fold_ratio"] > 1.5 for step in folded)
