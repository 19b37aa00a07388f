"""slime's own steps answer the same with its own model and with the one that folds inside.

Needs a checkout of slime in SLIME_PATH.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

if not os.getenv("SLIME_PATH"):
    pytest.skip("SLIME_PATH does not name a checkout of slime", allow_module_level=True)
pytest.importorskip("ray", reason="ray is not installed")
from harness.layouts import in_layouts
from harness.worlds import Layout, WorkerError, world
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from slime_runs import OURS, compare, same_parameters, warnings_of

# slime's head of a critic answers in float32, in which the gradients of a token's rows are then summed.
LIMIT = {"actor": 1e-12, "critic": 1e-6}
ROUNDED = 3e-2


@in_layouts("single", "tp2-sp", "pp2", slow=["dp2"])
@pytest.mark.parametrize("role", LIMIT)
def test_answers_losses_and_gradients(size: int, layout: Layout, role: str) -> None:
    results = world(size).run(compare, layout, role, LIMIT[role], {}, {}, layout=layout)
    names = results[-1]["names"]
    assert ("values 0" in names) == (role == "critic")
    assert ("entropy 0" in names) == (role == "actor")
    assert ("metric value_loss" if role == "critic" else "metric kl_loss") in names
    assert all(result["report"]["fold/fold_ratio"] > 1.3 for result in results)
    (logged,) = (numbers for result in results for numbers in result["logged"])  # once, of all ranks
    assert logged["train/step"] == 6
    assert logged["train/fold/rows"] >= 12
    assert logged["train/fold/fold_ratio"] > 1.3
    assert logged["train/fold/micro_batches"] == 4


@pytest.mark.parametrize("role", LIMIT)
def test_precision_of_its_scripts(role: str) -> None:
    """``--bf16``: both models round, to 8 bits, but not at the same places."""
    (result,) = world(1).run(compare, Layout(), role, ROUNDED, {}, {"bf16": True}, layout=Layout())
    assert result["report"]["fold/fold_ratio"] > 1.3


LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dual-clip": {"eps_clip_c": 3.0, "use_unbiased_kl": False, "rollout_temperature": 1.0},
    "cispo": {"advantage_estimator": "cispo", "use_kl_loss": False, "use_rollout_logprobs": True},
    "sft": {"loss_type": "sft_loss"},
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_without_logits(name: str) -> None:
    """Log-probabilities come from the fused head; slime rounds its logits to float32."""
    if name == "dual-clip" and not Path(os.environ["SLIME_PATH"], "slime", "utils", "accelerator").exists():
        pytest.skip("slime 0.3.1 ignores --eps-clip-c")
    function = "sft_loss" if name == "sft" else "policy_loss"
    ours = {"loss_type": "custom_loss", "custom_loss_function_path": f"{OURS}.{function}"}
    (result,) = world(1).run(compare, Layout(), "actor", 1e-5, ours, LOSSES[name], layout=Layout())
    assert f"metric {'loss' if name == 'sft' else 'pg_loss'}" in result["names"]
    assert result["report"]["fold/expanded_bytes"] > 0  # of the pass that computes old log-probabilities


@in_layouts("tp2-sp", "pp2")
def test_losses_without_logits_in_layouts(size: int, layout: Layout) -> None:
    ours = {"loss_type": "custom_loss", "custom_loss_function_path": f"{OURS}.policy_loss"}
    world(size).run(compare, layout, "actor", 1e-5, ours, {}, layout=layout)


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, True),
        ({"use_rollout_logprobs": True}, False),
        ({"global_batch_size": 12}, False),  # of the second step of a rollout, slime's own loss needs them too
        ({"loss_type": "policy_loss"}, False),
    ],
)
def test_warning_of_a_forward_pass_more(changes: dict[str, Any], warns: bool) -> None:
    ours = {"loss_type": "custom_loss", "custom_loss_function_path": f"{OURS}.policy_loss", "global_batch_size": 24}
    (warnings,) = world(1).run(warnings_of, ours | changes, layout=Layout())
    assert [("--use-rollout-logprobs" in warning) for warning in warnings] == [True] * warns


def test_settings_reach_the_model() -> None:
    ours = {"prefix_tree": {"check_first": True, "attention_backend": "path", "max_tokens": 8}}
    (result,) = world(1).run(compare, Layout(), "actor", 1e-12, ours, {}, layout=Layout())
    assert result["report"]["fold/micro_batches"] == 4
    (logged,) = result["logged"]
    assert logged["train/fold/recomputed_tokens"] > 0


REPLAY: dict[str, Any] = {
    "use_routing_replay": True,
    "use_rollout_routing_replay": True,
    "num_experts": 4,
    "config": {
        "num_moe_experts": 4,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@in_layouts("single", "tp2-sp", "pp2", "ep2")
def test_routes_of_the_rollout(size: int, layout: Layout) -> None:
    """slime's replay gives every router the rows' routes, and ours gives it those of unique tokens."""
    results = world(size).run(compare, layout, "actor", 1e-6, {}, REPLAY, layout=layout)
    assert {"log_probs 0", "ref_log_probs 0", "metric kl_loss"} <= {*results[-1]["names"]}
    assert all(result["report"]["fold/fold_ratio"] > 1.1 for result in results)


def test_routes_are_exact_if_megatron_keeps_its_scores() -> None:
    world(1).run(compare, Layout(), "actor", 1e-12, {}, REPLAY, True, layout=Layout())


def test_a_stage_without_experts_finds_no_routes() -> None:
    both = REPLAY | {"config": REPLAY["config"] | {"moe_layer_freq": [0, 0, 1, 1]}}
    with pytest.raises(WorkerError, match="replay with a pipeline stage that has no experts; remove it"):
        world(2).run(compare, Layout(pp=2), "actor", 1e-6, {}, both, layout=Layout(pp=2))


@pytest.mark.parametrize(
    ("ours", "named"),
    [
        ({"use_routing_replay": True}, "--use-routing-replay without --use-rollout-routing-replay"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        (
            {"loss_type": "custom_loss", "custom_loss_function_path": f"{OURS}.policy_loss", "use_tis": True},
            "--use-tis with this loss",
        ),
    ],
)
def test_refusals_by_name(ours: dict[str, Any], named: str) -> None:
    with pytest.raises(WorkerError, match=f"folding in slime does not support {named}"):
        world(1).run(compare, Layout(), "actor", 1e-12, ours, {}, layout=Layout())


def test_a_spec_that_builds_the_model() -> None:
    world(1).run(compare, Layout(), "actor", 1e-12, {"spec": ("slime_runs", "building_spec")}, {}, layout=Layout())


def test_attention_of_its_own_models() -> None:
    world(1).run(compare, Layout(), "actor", 1e-12, {}, {"spec": ("slime_runs", "minimax_spec")}, layout=Layout())


@pytest.mark.parametrize("experts", [None, 2])
def test_layers_of_slime_itself(experts: int | None) -> None:
    if experts is None:
        try:
            get_gpt_layer_local_spec(moe_use_legacy_grouped_gemm=False)
        except TypeError:
            pytest.skip("slime's dense local layers pass an argument that this megatron-core no longer takes")
    world(1).run(same_parameters, experts, layout=Layout())
