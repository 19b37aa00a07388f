"""Recipes with trees and samples above ``batch.max_tokens``: train, evaluate, verify and score as without a budget."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.commands import write_rows
from harness.in_double import kept_double
from harness.train_jobs import FLOAT64, objective_job, rows, train, write_job

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.data import read_samples
from mcore_prefix_tree.mcore.loop.score_recipe import run_score
from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_DEPTHS, NEEDS_DEPTHS
from mcore_prefix_tree.settings import load_recipe
from mcore_prefix_tree.settings.score_section import ScoreConfig

WIDE = "batch.max_tokens=4096"


def narrow(content: list[dict[str, Any]]) -> str:
    """Return a budget that the longest sample is above."""
    return f"batch.max_tokens={max(len(row['tokens']) for row in content) // 2}"


def close(actual: Any, expected: Any, limit: float = 1e-11) -> bool:
    pair = (np.asarray(values, dtype=float) for values in (actual, expected))
    return bool(np.allclose(*pair, rtol=limit, equal_nan=True))


def with_masks(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows whose tokens were drawn from other sets of ids for every sample, or from the whole vocabulary."""
    rng, made = np.random.default_rng(0), []
    for row in content:
        kinds = [None if kind == 0 else 2 * kind for kind in rng.integers(0, 3, len(row["tokens"])).tolist()]
        pairs = zip(row["tokens"], kinds, strict=True)
        sets = [None if size is None else sorted({token, *rng.choice(64, size).tolist()}) for token, size in pairs]
        made.append(row | {"sampling_mask": [None, *sets[1:]]})
    return made


def with_answers(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with a teacher's tokens, other ones for every sample, and with returns."""
    rng, made = np.random.default_rng(0), []
    for row in content:
        size = len(row["tokens"])
        ids = [rng.permutation(64)[:3].tolist() for _ in range(size)]
        scores = np.log(rng.dirichlet(np.ones(4), size)[:, :3]).tolist()
        teacher = {"token_ids": ids, "logprobs": [[None] * 3, *scores[1:]]}
        made.append(row | {"teacher": teacher, "returns": rng.standard_normal(size).tolist()})
    return made


DEPTHS = ["model.transformer={mtp_num_layers: 2, mtp_loss_scaling_factor: 0.5}"]
STATES = "mamba_state_dim: 8, mamba_head_dim: 8, mamba_num_groups: 2, mamba_num_heads: 4, linear_key_head_dim: 8, "
STATES += "linear_value_head_dim: 8, linear_num_key_heads: 2, linear_num_value_heads: 2"
RECURRENT = ["model.hybrid_layer_pattern='MG*-'", "model.num_layers=4", f"model.transformer={{{STATES}}}"]
needs_depths = pytest.mark.skipif(not HAS_DEPTHS, reason=f"needs {NEEDS_DEPTHS}")
needs_states = pytest.mark.skipif(not HAS_DELTA_NET, reason="Gated DeltaNet follows a tree since megatron-core 0.19")
OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"kl_coef": 0.1, "normalise": "sample"}),
    ("sft", {"normalise": "sample"}),
    ("gspo", {}),
    ("dpo", {}),
    ("kto", {}),
    ("distill", {"normalise": "sample"}),
    ("critic", {"returns": "given", "clip_eps": None}),
]


@pytest.mark.parametrize(
    ("name", "options", "model", "masked"),
    [
        *((*objective, [], False) for objective in OBJECTIVES),
        *(pytest.param(*one, [], True, marks=pytest.mark.ci) for one in OBJECTIVES[:5]),
        (*OBJECTIVES[-1], [], True),
        *(pytest.param(name, {}, DEPTHS, False, marks=needs_depths) for name in ("sft", "gspo")),
        pytest.param("gspo", {}, RECURRENT, False, marks=needs_states),
    ],
)
def test_objectives_do_not_see_the_budget(
    tmp_path: Path, name: str, options: dict[str, Any], model: list[str], masked: bool
) -> None:
    """Nor do further depths and both kinds of recurrent states, which the scoring pass before a step keeps, too."""
    path, settings = objective_job(tmp_path, name, options)
    content = with_answers([json.loads(line) for line in (path.parent / "data.jsonl").read_text().splitlines()])
    budget = narrow(content)
    data = write_rows(path.parent / "data.jsonl", with_masks(content) if masked else content)
    settings += [*FLOAT64, *model, "train_iters=2", f"validation.path={data}"]
    with kept_double():
        wide, cut = (train(path, *settings, size) for size in (WIDE, budget))
    assert close(cut.losses, wide.losses)
    assert close([one.loss for one in cut.evaluations], [one.loss for one in wide.evaluations])
    for one, other in zip(cut.reports, wide.reports, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        names = [name for name in one.metrics if not name.startswith("mtp")]  # logged as means over micro-batches
        assert close([one.metrics[name] for name in names], [other.metrics[name] for name in names])
        assert close(one.grad_norm, other.grad_norm, 1e-6)
        assert one.carried_tokens > other.carried_tokens == 0
        assert one.carried_bytes > 0


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_dtype": "fp64",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.01,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize("name", [pytest.param("sft", marks=pytest.mark.ci), "gspo"])
def test_balanced_experts_do_not_see_the_budget(tmp_path: Path, name: str) -> None:
    """Biases change the routes of the next step; a resumed run goes through the same steps, to the bit."""
    job, options = objective_job(tmp_path, name)
    options += [*FLOAT64, "train_iters=4", *(f"model.transformer.{key}={value}" for key, value in EXPERTS.items())]
    content = [json.loads(line) for line in (job.parent / "data.jsonl").read_text().splitlines()]
    wide, cut = (train(job, *options, size) for size in (WIDE, narrow(content)))
    assert close(cut.losses, wide.losses, 1e-6)
    assert sum(step.carried_tokens for step in cut.reports) > 0
    fixed = train(job, *options, WIDE, "model.transformer.moe_router_bias_update_rate=0")
    assert not close(fixed.losses, wide.losses, 1e-4)
    saved = [*options, narrow(content), f"checkpoint.save={tmp_path / 'runs'}", "checkpoint.save_interval=1"]
    train(job, *saved, stop_after=2)  # before it is saved
    assert train(job, *saved, resume=True).losses == cut.losses[1:]


@pytest.mark.parametrize("has_experts", [False, True], ids=["", "balanced experts, sampling masks"])
def test_verify_passes(tmp_path: Path, has_experts: bool) -> None:
    options = [*FLOAT64, narrow(rows()), "train_iters=2", "verify.enabled=true"]
    options += [f"model.transformer.{key}={value}" for key, value in EXPERTS.items()] if has_experts else []
    job = write_job(tmp_path, with_masks(rows()) if has_experts else rows())
    (report,) = train(load_recipe(job, options)).verifications
    assert report.passed, report.checks


@pytest.mark.parametrize(
    ("name", "options", "columns"),
    [
        ("sft", {"entropy": True}, ["old_logprobs"]),
        ("sft", {"all_tokens": True}, ["old_logprobs"]),
        ("sft", {"teacher_top_k": 3}, ["teacher.token_ids", "teacher.logprobs"]),
        ("sft", {"record_routes": True}, ["old_logprobs", "routes.ids"]),
        ("critic", {"all_tokens": True}, ["values"]),
    ],
)
def test_scores_do_not_see_the_budget(tmp_path: Path, name: str, options: dict[str, bool], columns: list[str]) -> None:
    content = with_answers(rows())
    job = write_job(tmp_path, with_masks(content) if "all_tokens" in options else content)
    saving = ["checkpoint.save=" + str(tmp_path / "runs"), "train_iters=2", *FLOAT64, f"objective.name={name}"]
    saving += ['objective.options={"returns": "given", "clip_eps": null}'] if name == "critic" else []
    if "record_routes" in options:
        saving += [f"model.transformer.{key}={value}" for key, value in EXPERTS.items()]
    train(load_recipe(job, saving))
    found, signals = [], []
    for budget in (WIDE, narrow(rows())):
        output = tmp_path / f"{budget}.jsonl"
        run_score(load_recipe(job, [*saving, budget]), ScoreConfig(output=str(output), **options))
        found.append([json.loads(line) for line in output.read_text().splitlines()])
        signals.append([sample.signals for sample in read_samples(output)])
    for wide, cut in zip(*found, strict=True):
        assert wide.keys() == cut.keys()
        if "entropy" in wide:
            assert close(cut["entropy"], wide["entropy"])
    for one, other in zip(*signals, strict=True):
        for column in columns:
            assert close(attrgetter(column)(other), attrgetter(column)(one))


def test_repeat_keeps_the_error_of_a_long_sample(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=r"batch\.max_tokens is 8"):
        train(load_recipe(write_job(tmp_path), [*FLOAT64, narrow(rows()), "batch.over_budget=repeat"]))
