"""Folded against unfolded: passes when folding is right, fails when it is broken, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.commands import run_command
from harness.marks import quick
from harness.train_jobs import BATCH, FLOAT64, VOCAB, batch_of, built, resolved, rows, train, world_of_one, write_job
from megatron.core.transformer.mlp import MLP

from mcore_prefix_tree import FlatLayout, fold
from mcore_prefix_tree.attention import path
from mcore_prefix_tree.mcore.engine import folding, step_planner
from mcore_prefix_tree.mcore.engine import verification as engine_verify
from mcore_prefix_tree.mcore.engine.comparison import Comparison
from mcore_prefix_tree.mcore.engine.verification import FACTOR, VerifyReport
from mcore_prefix_tree.mcore.loop import resolve_recipe, trainer
from mcore_prefix_tree.mcore.loop.jobs import VerificationError, compare_first, run_once, verify_first
from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_SPARSE_ATTENTION
from mcore_prefix_tree.plan import CostModel, ModelWork, plan_step
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.settings import load_recipe

ERRORS = ("logprob_error", "entropy_error", "loss_error", "gradient_error")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With weights so large that attention is sharp: nearly uniform attention would forgive a wrong position."""
    path = write_job(tmp_path_factory.mktemp("verify"))
    path.write_text(path.read_text().replace("\nbatch:", "\n  transformer: {init_method_std: 0.3}\nbatch:"))
    assert load_recipe(path).model.transformer == {"init_method_std": 0.3}
    return path


def every_token_at_its_flat_position(layout: FlatLayout) -> FlatLayout:
    return replace(layout, position_ids=np.arange(layout.padded_size, dtype=np.int32))


def every_earlier_token_visible(layout: FlatLayout) -> FlatLayout:
    return replace(layout, subtree_end=np.full_like(layout.subtree_end, layout.padded_size))


def predicted_by_the_left_neighbour(layout: FlatLayout) -> FlatLayout:
    flat = np.arange(layout.padded_size, dtype=np.int32) - 1
    return replace(layout, predictor=np.where(layout.predictor < 0, -1, flat).astype(np.int32))


def counted_once_instead_of_once_per_sample(layout: FlatLayout) -> FlatLayout:
    return replace(layout, loss_weight=np.minimum(layout.loss_weight, 1))


def one_edge_missing(layout: FlatLayout) -> FlatLayout:
    weight = layout.loss_weight.copy()
    weight[np.flatnonzero(weight)[len(weight) // 4]] = 0
    return replace(layout, loss_weight=weight)


def one_mask_wrong(layout: FlatLayout) -> FlatLayout:
    weight = layout.loss_weight.copy()
    weight[np.flatnonzero(weight)[len(weight) // 4]] *= 1.5
    return replace(layout, loss_weight=weight)


def one_token_at_another_position(layout: FlatLayout) -> FlatLayout:
    position = layout.position_ids.copy()
    position[np.argmax(layout.loss_weight > 0)] -= 1
    return replace(layout, position_ids=position)


Break = Callable[[FlatLayout], FlatLayout]
# And the back-end that would not notice.
BREAKS: dict[Break, str] = {
    every_token_at_its_flat_position: "path",
    every_earlier_token_visible: "reference",
    predicted_by_the_left_neighbour: "path",
    counted_once_instead_of_once_per_sample: "path",
    one_edge_missing: "path",
    one_mask_wrong: "path",
    one_token_at_another_position: "path",
}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Break], None]:
    """Breaks the layouts that the folded run gets."""

    def apply(change: Break) -> None:
        monkeypatch.setattr(folding, "fold", lambda samples, **options: change(fold(samples, **options)))

    return apply


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Samples share prefixes, each of which determines the next token: nothing is left to learn."""
    rng = np.random.default_rng(3)
    trunks = [[root, *rng.integers(8, VOCAB, size=5).tolist()] for root in range(1, 5)]
    content = [
        {"tokens": trunk + rng.integers(8, VOCAB, size=6).tolist(), "loss_mask": [0] * 7 + [1] * 5}
        for trunk in trunks
        for _ in range(3)
    ]
    content += content[::3]
    return converged(tmp_path_factory.mktemp("certain"), content)


YARN = (
    "model.position_embedding_type=yarn",
    "model.yarn.rotary_scaling_factor=4",
    "model.yarn.original_max_position_embeddings=8",
    "model.yarn.mscale_all_dim=0.5",
)
BALANCED = (
    "model.transformer.num_moe_experts=4",
    "model.transformer.moe_router_load_balancing_type=seq_aux_loss",
    "model.transformer.moe_aux_loss_coeff=0.05",
    "model.transformer.moe_z_loss_coeff=0.01",
)
LATENT = (
    "model.num_query_groups=null",
    "model.transformer.multi_latent_attention=true",
    "model.transformer.q_lora_rank=12",
    "model.transformer.kv_lora_rank=10",
    "model.transformer.qk_head_dim=8",
    "model.transformer.qk_pos_emb_head_dim=4",
    "model.transformer.v_head_dim=6",
    "model.transformer.original_max_position_embeddings=8",
    # Its queries and keys are products of two matrices: 0.3 would leave of bf16 one digit.
    "model.transformer.init_method_std=0.2",
)
SPARSE = (
    *LATENT,
    "model.transformer.experimental_attention_variant=dsa",
    "model.transformer.dsa_indexer_n_heads=2",
    "model.transformer.dsa_indexer_head_dim=8",
    "model.transformer.dsa_indexer_topk=6",
    "model.transformer.dsa_indexer_loss_coeff=0.1",
    "model.transformer.dsa_indexer_rotate_activation=false",
    "model.transformer.dsa_indexer_scoring_relu=false",
)


# name: (dtype, settings, tolerance)
MODELS: dict[str, tuple[str, tuple[str, ...], float]] = {
    "float64": ("float64", (), 1e-12),
    "float32": ("float32", (), 1e-6),
    "experts in float32": ("float32", ("model.transformer.num_moe_experts=4",), 1e-6),
    "experts": ("float64", ("model.transformer.num_moe_experts=4",), 1e-5),
    "balanced experts": ("float64", BALANCED, 1e-5),
    "tied": ("float64", ("model.untie_embeddings_and_output_weights=false", "model.qk_layernorm=true"), 1e-12),
    "learned positions": ("float64", ("model.position_embedding_type=learned_absolute", "model.swiglu=false"), 1e-12),
    "scaled positions": ("float64", ("model.rope_scaling=true", "model.rotary_percent=0.5"), 1e-12),
    "yarn": ("float64", YARN, 1e-12),
    "latent attention": ("float64", LATENT, 1e-12),
    "queries without a latent": ("float64", (*LATENT, "model.transformer.q_lora_rank=null"), 1e-12),
    "sparse attention": ("float64", SPARSE, 1e-5),
    "logits": ("float64", ("fused_head=false",), 1e-12),
    "prompts": ("float64", ("batch.share=prompt",), 1e-12),
    "long prefixes": ("float64", ("batch.min_shared_tokens=7",), 1e-12),
    "buckets": ("float64", ("batch.length_buckets=[17,29,64]",), 1e-12),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    # The other back-end where heads have sizes of their own, and where padding is as long as a bucket.
    [
        *((name, "path") for name in MODELS),
        *((name, "reference") for name in ("float32", "latent attention", "buckets")),
    ],
)
def test_folding_changes_nothing(job: Path, name: str, backend: str) -> None:
    if name == "sparse attention" and not HAS_SPARSE_ATTENTION:
        pytest.skip("it follows a tree since 0.19")
    dtype, overrides, tolerance = MODELS[name]
    recipe = load_recipe(job, [f"model.dtype={dtype}", f"attention_backend={backend}", *overrides])
    report, is_main = run_once(recipe, verify_first)
    assert is_main
    assert report.passed
    assert report.tolerance == tolerance
    for error in ERRORS:
        assert 0 <= getattr(report, error) <= {"float64": tolerance, "float32": 1e-5}[dtype]
    assert report.gradient_error > 0, "two different computations do not agree to the last bit"
    samples = batch_of(recipe, 1)
    plan = plan_step(
        samples,
        max_tokens=recipe.batch.max_tokens,
        cost_model=CostModel.from_work(ModelWork.from_model(recipe.model, fused_head=recipe.fused_head)),
        sharing=recipe.batch.sharing,
    )
    assert (report.samples, report.logical_tokens) == (BATCH, sum(map(len, samples)))
    assert report.physical_tokens == sum(plan.physical_tokens[0]) < report.logical_tokens
    wider = {"float64": "unfolded", "float32": "the same weights in float64, unfolded"}
    assert (report.dtype, report.reference) == (dtype, wider[dtype])


def test_losses_of_experts_that_are_too_strong_are_found(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step_planner.divided_by_tokens
    monkeypatch.setattr(step_planner, "divided_by_tokens", lambda batch, scale: honest(batch, scale / 1.01))
    report, _ = run_once(load_recipe(job, ["model.dtype=float64", *BALANCED]), verify_first)
    assert report.gradient_error > 1e-3
    assert not report.passed


def test_the_loss_that_compares_samples_is_left_out(job: Path) -> None:
    kind = "model.transformer.moe_router_load_balancing_type=[seq_aux_loss, global_aux_loss]"
    coefficients = "model.transformer.moe_aux_loss_coeff=[0.05, 0.5]"
    result = run_command("verify", job, "model.dtype=float64", *BALANCED, kind, coefficients, code=0)
    assert "not compared: global_aux_loss, which a sample by itself does not have" in result.stdout


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples that were drawn from kept ids: one, some, all, or without a mask."""
    rng, content = np.random.default_rng(5), rows()
    for row in content[::2]:
        kinds = rng.integers(0, 4, size=len(row["tokens"])).tolist()
        others = [rng.choice(VOCAB, size=(0, 0, 5, VOCAB)[kind], replace=False).tolist() for kind in kinds]
        kept = [sorted({token, *some}) for token, some in zip(row["tokens"], others, strict=True)]
        row["sampling_mask"] = [ids if kind else None for ids, kind in zip(kept, kinds, strict=True)]
    return write_job(tmp_path_factory.mktemp("masked"), content)


@pytest.mark.parametrize("fused_head", ["true", "false"])
def test_sampling_masks_change_both_sides(masked: Path, fused_head: str, broken: Callable[[Break], None]) -> None:
    recipe = load_recipe(masked, [*FLOAT64, f"fused_head={fused_head}"])
    report, _ = run_once(recipe, verify_first)
    assert all(0 <= getattr(report, name) <= 1e-12 for name in ERRORS)
    broken(lambda layout: replace(layout, kept=None))  # every token from the whole vocabulary
    report, _ = run_once(recipe, verify_first)
    assert not report.passed
    assert all(getattr(report, name) > 1e-3 for name in ERRORS)


def converged(folder: Path, content: list[dict[str, Any]]) -> tuple[Path, str]:
    """A job, and the override that starts it from a float32 model that is nearly certain of all its tokens."""
    job = write_job(folder, content)
    notes = train(job, "train_iters=80", "optimizer.lr=2e-2", f"checkpoint.save={folder / 'saved'}")
    assert notes.losses[-1] < 0.02
    return job, f"checkpoint.pretrained_checkpoint={folder / 'saved'}"


@pytest.mark.ci
def test_training_continues_from_a_loss_near_zero(tmp_path: Path) -> None:
    """Nothing is shared: all differences are the rounding of a stock run of such a model."""
    rng = np.random.default_rng(0)
    alone = [{"tokens": [root, *rng.integers(8, VOCAB, size=12).tolist()]} for root in range(1, 7)]
    job, start = converged(tmp_path, alone)
    for dtype in ((), FLOAT64):
        (report,) = train(job, start, *dtype, "verify.enabled=true", "train_iters=2").verifications
        assert report.passed
        assert report.physical_tokens == report.logical_tokens
        # A constant would not do: there is next to no gradient.
        assert report.gradient_error > {"float32": 1e-5, "float64": 1e-13}[report.dtype]


@pytest.mark.ci
@pytest.mark.parametrize("change", list(BREAKS), ids=lambda change: change.__name__)
def test_broken_folding_is_caught_near_a_loss_of_zero(
    certain: tuple[Path, str], broken: Callable[[Break], None], change: Break
) -> None:
    job, start = certain
    whole_epoch = "batch.global_batch_size=16"
    backend = f"attention_backend={BREAKS[change]}"
    if change in (every_token_at_its_flat_position, every_earlier_token_visible):  # one of each back-end
        assert run_once(load_recipe(job, [start, backend, whole_epoch]), verify_first)[0].passed
    broken(change)
    assert not run_once(load_recipe(job, [start, backend, whole_epoch]), verify_first)[0].passed


def test_masks_that_float32_cannot_add_up(tmp_path: Path) -> None:
    """A sum over the samples of a shared token, rounded to float32, would be 1e-8 off."""
    masks = (0.1, 0.7, 0.3, 0.6)
    shared = [{"tokens": [1, 2, 3, 4, token], "loss_mask": [mask] * 5} for token, mask in enumerate(masks, start=5)]
    report, _ = run_once(
        load_recipe(write_job(tmp_path, shared), [*FLOAT64, "batch.global_batch_size=4"]), verify_first
    )
    assert report.passed
    assert report.tolerance == 1e-12


def test_a_batch_in_which_nothing_is_scored_proves_nothing(tmp_path: Path) -> None:
    unscored = [{"tokens": [1, 2, token], "loss_mask": [1, 0, 0]} for token in range(3, 3 + BATCH)]
    job = write_job(tmp_path, [*unscored, *rows()])
    with pytest.raises(SampleError, match=r"data.jsonl:\d+: neither this nor another sample of the first step has a "):
        run_once(load_recipe(job, ["data.order=file"]), verify_first)


@pytest.mark.parametrize(
    "recompute", [(), ("model.transformer.recompute_granularity=selective",)], ids=["", "recompute"]
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_recipe_controls_deterministic_attention(
    job: Path, deterministic: bool, recompute: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()

    def attention(query: Any, key: Any, value: Any, metadata: Any, options: Any) -> torch.Tensor:
        asked.add(options.deterministic)
        return original(query, key, value, metadata, options)

    original = path.attention
    monkeypatch.setattr(path, "attention", attention)
    settings = ["attention_backend=path", f"deterministic_attention={str(deterministic).lower()}", *recompute]
    report, _ = run_once(load_recipe(job, settings), verify_first)
    assert report.passed
    assert asked == {deterministic}


@pytest.mark.parametrize("model", [(), YARN, LATENT], ids=["rope", "yarn", "latent attention"])
def test_half_precision_limits_follow_the_unfolded_runs_rounding(job: Path, model: tuple[str, ...]) -> None:
    report, _ = run_once(load_recipe(job, ["model.dtype=bfloat16", *model]), verify_first)
    assert report.passed
    assert report.reference == "the same weights in float32, unfolded"
    assert report.unfolded_errors is not None
    for name, (error, limit) in report.checks.items():
        assert limit == FACTOR * report.unfolded_errors[name]
        assert error <= limit
    # Rounding to 8 bits shows, in both runs alike.
    assert 1e-4 < report.gradient_error < 0.1
    assert 1e-4 < report.unfolded_errors["gradient_error"] < 0.1


def test_every_parameter_is_compared(job: Path) -> None:
    recipe = load_recipe(job)
    report, _ = run_once(recipe, verify_first)
    with world_of_one(recipe) as place:
        parameters = [name for name, _ in built(recipe, place).named_parameters()]
    assert report.parameters == len(parameters)
    assert report.worst_parameter.removesuffix(" (rank 0)") in parameters


@pytest.mark.parametrize("dtype", quick("float32", "bfloat16", of=["float64", "float32", "bfloat16"]))
@pytest.mark.parametrize(
    ("change", "backend", "caught"),
    [
        (every_token_at_its_flat_position, "path", ERRORS),
        (every_earlier_token_visible, "reference", ERRORS),
        (predicted_by_the_left_neighbour, "path", ERRORS),
        (counted_once_instead_of_once_per_sample, "path", ("loss_error", "gradient_error")),
    ],
)
def test_broken_folding_is_caught(
    job: Path,
    broken: Callable[[Break], None],
    dtype: str,
    change: Break,
    backend: str,
    caught: tuple[str, ...],
) -> None:
    broken(change)
    whole_epoch = "batch.global_batch_size=16"
    report, _ = run_once(
        load_recipe(job, [f"model.dtype={dtype}", f"attention_backend={backend}", whole_epoch]), verify_first
    )
    assert not report.passed
    above = {name for name, (error, limit) in report.checks.items() if not error <= limit}
    assert above == set(caught)


def test_random_draws_in_training_are_refused(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer without a rate attribute: only a second run detects them."""
    plain = MLP.forward

    def noisy(layer: Any, hidden: torch.Tensor, **options: Any) -> Any:
        return plain(layer, F.dropout(hidden, 0.01, layer.training), **options)

    monkeypatch.setattr(MLP, "forward", noisy)
    result = run_command("train", job, "verify.enabled=true", code=2)
    assert "verify: a second run on the same tokens in training mode gives other answers" in result.output
    assert "step 1" not in result.output


def test_a_nan_does_not_pass(job: Path, broken: Callable[[Break], None]) -> None:
    broken(lambda layout: replace(layout, loss_weight=np.full_like(layout.loss_weight, np.nan)))
    report, _ = run_once(load_recipe(job), verify_first)
    assert np.isnan(report.gradient_error)
    assert not report.passed


def test_nothing_is_trained_when_folding_is_broken(job: Path, broken: Callable[[Break], None], tmp_path: Path) -> None:
    broken(every_token_at_its_flat_position)
    saved = tmp_path / "saved"
    result = run_command("train", job, "verify.enabled=true", f"checkpoint.save={saved}", code=1)
    assert "TOO LARGE" in result.stdout
    assert "step 1" not in result.stdout
    assert list(saved.iterdir()) == []
    report, _ = run_once(load_recipe(job), verify_first)
    assert result.stderr == (
        "error: folded and unfolded runs differ by more than rounding, of the gradients most in "
        f"{report.worst_parameter}; nothing was trained\n"
    )
    with pytest.raises(VerificationError):
        train(job, "verify.enabled=true")


def test_worst_parameter_has_the_wrong_gradient(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is wrong in one parameter, and only in the folded run."""
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    recipe = load_recipe(job, ["attention_backend=path"])
    with world_of_one(recipe) as place:
        model = built(recipe, place)
        weight = dict(model.named_parameters())[name]
        folded_forward = engine_verify.tree_forward

        def forward(model: torch.nn.Module, batch: object, readout: object) -> torch.Tensor:
            # Changes nothing of the output, but the gradient of one weight.
            weight_sum = weight.sum()
            return folded_forward(model, batch, readout) * (1 + weight_sum - weight_sum.detach())

        monkeypatch.setattr(engine_verify, "tree_forward", forward)
        report = resolved(recipe, place).verified([model])
    assert report.worst_parameter == f"{name} (rank 0)"
    assert not report.passed
    assert report.logprob_error <= 1e-5


def test_weights_and_gradients_are_untouched(job: Path) -> None:
    recipe = load_recipe(job, ["attention_backend=path"])
    with world_of_one(recipe) as place:
        model = built(recipe, place)
        before = {name: value.clone() for name, value in model.state_dict().items() if value is not None}
        finalize = place.config.finalize_model_grads_func
        resolved(recipe, place).verified([model])
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert place.config.finalize_model_grads_func is finalize
        # No hook is left that would take the next gradients away.
        model(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), None).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_training_after_verify_has_the_same_bits(job: Path) -> None:
    verified = train(job, "verify.enabled=true", "compare=true")
    skipped = train(job, "verify.enabled=false", "compare=false")
    assert verified.losses == skipped.losses
    assert [report.passed for report in verified.verifications] == [True]
    assert (skipped.verifications, skipped.comparisons) == ([], [])
    assert len(verified.comparisons) == 1


def test_verify_runs_only_on_request_before_the_first_step(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = (f"checkpoint.save={tmp_path / 'saved'}", "verify.enabled=true", "train_iters=2")
    assert len(train(job, *saving).verifications) == 1
    monkeypatch.setattr(resolve_recipe, "verify", None)  # cannot be called
    resumed = train(job, *saving, "train_iters=3", resume=True)
    assert resumed.verifications == []
    assert train(job, "verify.enabled=false", "train_iters=2").verifications == []


def test_the_command_prints_a_table(job: Path) -> None:
    result = run_command("verify", job, code=0)
    assert result.stdout.count("  ok\n") == 4
    assert "TOO LARGE" not in result.stdout


def test_the_limit_can_be_set(job: Path) -> None:
    result = run_command("verify", job, "verify.tolerance=1e-30")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "TOO LARGE" in result.stdout
    assert "1.0e-30" in result.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_json_has_every_field(job: Path, dtype: str) -> None:
    result = run_command("verify", job, "--json", f"model.dtype={dtype}")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert set(report) == {field.name for field in fields(VerifyReport)} | {"passed"}
    assert report["passed"] is True
    assert report["dtype"] == dtype
    assert set(report["unfolded_errors"]) == set(ERRORS)


def test_json_of_a_failure(job: Path, broken: Callable[[Break], None]) -> None:
    broken(every_token_at_its_flat_position)
    result = run_command("verify", job, "--json", "batch.global_batch_size=16", code=1)
    report = json.loads(result.stdout)
    assert report["passed"] is False
    assert report["gradient_error"] > report["tolerance"]


def test_verify_rejects_settings_that_hide_gradients(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(job)
    with world_of_one(recipe) as place:
        model = built(recipe, place)
        place.config.gradient_accumulation_fusion = True
        with pytest.raises(
            ValueError, match=r"gradient_accumulation_fusion=true .* turn it off, or set verify\.enabled"
        ):
            resolved(recipe, place).verified([model])


def check_comparison(comparison: Comparison, logical: int, physical: int) -> None:
    ways = [comparison.folded, *comparison.unfolded]
    assert [way.tokens for way in ways] == [physical, *[logical] * len(comparison.unfolded)]
    assert comparison.stock is not None
    assert comparison.logical_tokens == logical
    assert comparison.fold_ratio == logical / physical > 1
    for way in ways:
        assert all(0 < seconds < 60 for seconds in way.seconds)
        assert way.peak_bytes is None or way.peak_bytes > 0
    assert len({way.name for way in ways}) == len(ways) == 4
    assert 0 < comparison.gain.speedup < 100


def test_comparing_after_training_takes_the_last_batch(job: Path) -> None:
    recipe = load_recipe(job, ["batch.max_tokens=1000", "compare=true", "train_iters=4"])
    samples = batch_of(recipe, 4)
    assert sum(map(len, samples)) != sum(map(len, batch_of(recipe, 1)))
    (comparison,) = train(recipe).comparisons
    check_comparison(comparison, sum(map(len, samples)), fold(samples).physical_tokens)


def test_comparing_leaves_no_gradients_and_no_other_weights(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compare_and_look(chunks: list[torch.nn.Module], *args: object, **options: object) -> Comparison:
        before = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]
        result = honest(chunks, *args, **options)
        after = [parameter for chunk in chunks for parameter in chunk.parameters()]
        seen.extend(
            (bool(torch.equal(a, b)), float(b.main_grad.abs().sum())) for a, b in zip(before, after, strict=True)
        )
        return result

    honest = trainer.compare
    monkeypatch.setattr(trainer, "compare", compare_and_look)
    run_once(load_recipe(job), partial(compare_first, repeats=1), is_trained=True)
    assert seen
    assert set(seen) == {(True, 0.0)}


def test_all_ways_compute_the_same_loss(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that are timed against each other do the same work."""
    from mcore_prefix_tree.mcore.engine import comparison as module

    losses = []

    def run_and_note(*args: object, **options: object) -> list[dict[str, torch.Tensor]]:
        reported = honest(*args, **options)
        total = sum(float(entry["loss_sum"]) for entry in reported)
        losses.append((total, sum(int(entry["num_tokens"]) for entry in reported)))
        return reported

    honest = module.run_schedule
    monkeypatch.setattr(module, "run_schedule", run_and_note)
    run_once(load_recipe(job), partial(compare_first, repeats=1), is_trained=True)
    assert len(losses) in (6, 8), "two runs a way"
    assert len({count for _, count in losses}) == 1
    assert [total for total, _ in losses] == pytest.approx([losses[0][0]] * len(losses), rel=1e-5)
    assert losses[0][0] == pytest.approx(losses[0][1] * np.log(VOCAB), rel=0.3)


def test_json_has_no_nan() -> None:
    """An error that is not a number fails, and stays valid JSON."""
    report = VerifyReport(
        logprob_error=float("nan"),
        entropy_error=0.0,
        loss_error=float("inf"),
        gradient_error=0.0,
        worst_parameter="none",
        tolerance=1e-5,
        reference="unfolded",
        unfolded_errors=None,
        samples=1,
        logical_tokens=1,
        physical_tokens=1,
        parameters=1,
        dtype="float32",
    )
    written = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (written["logprob_error"], written["loss_error"], written["passed"]) == (None, None, False)


@pytest.mark.skipif(not HAS_DELTA_NET, reason="Gated DeltaNet follows a tree since megatron-core 0.19")
@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
def test_states_of_gated_delta_net(lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule computes in fp32, and the gradients of its decays are small rests of large sums."""
    path = write_job(tmp_path)
    sizes = "linear_key_head_dim: 8, linear_value_head_dim: 8, linear_num_key_heads: 2, linear_num_value_heads: 4"
    variant = f"experimental_attention_variant: gated_delta_net, linear_attention_freq: 2, {sizes}"
    path.write_text(path.read_text().replace("\nbatch:", f"\n  transformer: {{{variant}}}\nbatch:"))
    if lost:
        from mcore_prefix_tree.mcore.seam import delta_net

        rule = delta_net._padded_rule
        monkeypatch.setattr(delta_net, "_padded_rule", lambda given, _, batches: rule(given, None, batches))
    result = run_command("verify", path)
    assert result.exit_code == int(lost), result.output
    assert ("TOO LARGE" in result.output) == lost
