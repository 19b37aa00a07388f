"""Critics and reward models in one process: training, checkpoints, scoring and verification, against stock Megatron."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.commands import run_command, write_rows
from harness.marks import quick
from harness.train_jobs import (
    FLOAT64,
    VOCAB,
    assert_resumes,
    batch_of,
    built,
    check_steps,
    checkpoint_content,
    stock_model,
    train,
    world_of_one,
    write_job,
)
from objective_oracles import ValuesAlone, critic_loss, reward_model_loss

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.data import read_samples
from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.loop.jobs import run_once, verify_first
from mcore_prefix_tree.mcore.outputs import ValueLoss, Values
from mcore_prefix_tree.mcore.seam.scalar_output_layer import CHECKPOINT_KEY, with_scalar_head
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.settings import RecipeError, load_recipe

CRITIC = {"gamma": 0.9, "lam": 0.8, "normalise": "sample"}
REWARD_MODEL = {"center_coef": 0.01}
OPTIONS = {"critic": CRITIC, "reward_model": REWARD_MODEL}
ORACLES: dict[str, Any] = {"critic": critic_loss, "reward_model": reward_model_loss}


def rows(seed: int = 0) -> list[dict[str, Any]]:
    """Six pairs over three prompts, each with a rejected line and a chosen one; values and rewards of every line."""
    rng = np.random.default_rng(seed)
    made: list[dict[str, Any]] = []
    for number in range(12):
        if number % 4 == 0:
            prompt = rng.integers(1, VOCAB, size=5).tolist()
        tokens = prompt + rng.integers(1, VOCAB, size=2 + number % 3).tolist()
        made.append(
            {
                "tokens": tokens,
                "loss_mask": [0.0] * 5 + rng.choice([0.5, 1.0], size=len(tokens) - 5).tolist(),
                "reward": float(rng.choice([0.0, 0.25, 1.0])),
                "values": (0.5 * rng.standard_normal(len(tokens))).tolist(),
                "pair": number // 2,
                "chosen": number % 2 == 1,
            }
        )
    return made


def overrides_of(name: str, options: dict[str, Any] | None = None) -> list[str]:
    chosen = OPTIONS[name] if options is None else options
    return [f"objective.name={name}", f"objective.options={json.dumps(chosen)}"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, rows())


def hidden_of(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """``[n, h]``, the stock model's input of its output layer for one unfolded sample."""
    seen: list[torch.Tensor] = []
    hook = model.output_layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.tensor([list(tokens)]), torch.arange(len(tokens))[None], None)
    hook.remove()
    return seen[0][:, 0]


def stock_with(model: torch.nn.Module, state: dict[str, Any]) -> torch.Tensor:
    """Give a stock model the weights of one with a scalar head; that head ``[h]`` apart."""
    weights = {name: value for name, value in state.items() if name != "output_layer.weight"}
    model.load_state_dict(weights | {"output_layer.weight": torch.zeros(VOCAB, 32, dtype=torch.float64)})
    return state["output_layer.weight"].detach().clone()


@pytest.mark.parametrize("name", ["critic", "reward_model"])
def test_every_step_equals_the_stock_models_step(job: Path, name: str) -> None:
    """Losses, gradient norms and weights of six steps in fp64 equal AdamW on unfolded samples."""
    recipe = load_recipe(job, [*FLOAT64, *overrides_of(name)])
    notes = train(recipe)
    with world_of_one(recipe) as place:
        initial = built(recipe, place).state_dict()
        model = stock_model(recipe, place)
        head = stock_with(model, initial).requires_grad_()
        own = [head, *(p for n, p in model.named_parameters() if n != "output_layer.weight")]

        def step(report: Any) -> torch.Tensor:
            world = ValuesAlone(lambda tokens: hidden_of(model, tokens) @ head[0], batch_of(recipe, report.iteration))
            return ORACLES[name](make_objective(name, OPTIONS[name]), world)

        check_steps(recipe, notes.reports, own, step)


def test_resumed_run_and_its_checkpoints(job: Path, tmp_path: Path) -> None:
    _, content = assert_resumes(job, tmp_path, *overrides_of("critic"), stop_after=4, interval=3)
    assert content[CHECKPOINT_KEY].shape == (1, 32)
    assert f"optimizer.state.exp_avg.{CHECKPOINT_KEY}" in content
    assert not [name for name in content if "output_layer" in name]


@pytest.fixture
def language_model(job: Path, tmp_path: Path) -> Path:
    """The folder of a supervised run."""
    train(job, "train_iters=2", f"checkpoint.save={tmp_path / 'sft'}")
    return tmp_path / "sft"


@pytest.mark.parametrize("tied", quick(True, of=[False, True]), ids=["untied", "tied"])
def test_a_critic_starts_from_a_language_model(job: Path, tmp_path: Path, tied: bool) -> None:
    source = tmp_path / "sft"
    of_model = [f"model.untie_embeddings_and_output_weights={str(not tied).lower()}"]
    train(job, *of_model, "train_iters=2", f"checkpoint.save={source}")
    starting = [*of_model, *overrides_of("critic"), f"checkpoint.pretrained_checkpoint={source}"]
    notes = train(job, *starting, "verify.enabled=true")
    said = f"the weights start from {source / 'iter_0000002'}, with a new scalar head"
    assert said in notes.messages
    assert notes.verifications[0].passed
    assert run_command("verify", job, *starting).exit_code == 0
    recipe = load_recipe(job, starting)
    with world_of_one(recipe) as place:
        chunk = built(recipe, place)
        head = chunk.output_layer.weight.detach().clone()
        assert not checkpoint.load_pretrained(source, 2, [chunk], model=recipe.model)
        state = chunk.state_dict()
    content = checkpoint_content(source, 2)
    assert torch.equal(state["output_layer.weight"], head)
    assert torch.equal(state["embedding.word_embeddings.weight"], content["embedding.word_embeddings.weight"])
    assert torch.equal(state["decoder.final_layernorm.weight"], content["decoder.final_layernorm.weight"])


def test_a_critic_starts_from_a_reward_model_with_its_head(job: Path, tmp_path: Path) -> None:
    train(job, *overrides_of("reward_model"), "train_iters=2", f"checkpoint.save={tmp_path / 'reward'}")
    starting = [*overrides_of("critic"), f"checkpoint.pretrained_checkpoint={tmp_path / 'reward'}"]
    saving = ["train_iters=1", "optimizer.lr_warmup_steps=0", "optimizer.lr=1e-30", "optimizer.min_lr=0"]
    notes = train(job, *starting, *saving, f"checkpoint.save={tmp_path / 'critic'}")
    assert f"the weights start from {tmp_path / 'reward' / 'iter_0000002'}" in notes.messages
    before, after = (checkpoint_content(tmp_path / name, i) for name, i in (("reward", 2), ("critic", 1)))
    assert torch.equal(before[CHECKPOINT_KEY], after[CHECKPOINT_KEY])


def test_a_policy_starts_from_a_language_model(job: Path, tmp_path: Path, language_model: Path) -> None:
    notes = train(job, "train_iters=2", f"checkpoint.pretrained_checkpoint={language_model}")
    assert f"the weights start from {language_model / 'iter_0000002'}" in notes.messages
    converted = tmp_path / "converted"
    shutil.copytree(language_model / "iter_0000002", converted / "release")
    (converted / checkpoint.TRACKER).write_text("release\n")
    released = train(job, "train_iters=2", f"checkpoint.pretrained_checkpoint={converted}")
    assert f"the weights start from {converted / 'release'}" in released.messages
    assert released.losses == notes.losses
    assert notes.losses[0] < train(job, "train_iters=2").losses[0]


def test_checkpoints_of_another_kind_of_model_are_rejected(job: Path, tmp_path: Path, language_model: Path) -> None:
    train(job, *overrides_of("critic"), "train_iters=2", f"checkpoint.save={tmp_path / 'critic'}")
    with pytest.raises(RecipeError, match=r"critic/iter_0000002 is damaged or does not fit .*output_layer\.weight"):
        train(job, f"checkpoint.pretrained_checkpoint={tmp_path / 'critic'}")
    with pytest.raises(RecipeError, match=r"sft/iter_0000002 is damaged or does not fit .*scalar_head\.weight"):
        train(job, *overrides_of("critic"), f"checkpoint.save={language_model}", resume=True)
    scoring = run_command(
        "score",
        job,
        *overrides_of("critic"),
        f"checkpoint.save={language_model}",
        "--output",
        tmp_path / "x.jsonl",
        code=2,
    )
    assert "does not fit this recipe's model" in scoring.stderr
    with pytest.raises(RecipeError, match=r"^checkpoint.pretrained_checkpoint=.*nowhere holds no checkpoint; name"):
        train(job, f"checkpoint.pretrained_checkpoint={tmp_path / 'nowhere'}")


def test_the_loop_of_ppo_closes(job: Path, tmp_path: Path) -> None:
    """A reward model's rewards, a critic's values and the policy's log-probabilities train both, by GAE."""
    content = rows()
    bare = [{key: row[key] for key in ("tokens", "loss_mask")} for row in content]
    fresh = write_job(tmp_path, content)
    for name in ("reward_model", "critic"):
        train(fresh, *overrides_of(name), "train_iters=2", f"checkpoint.save={tmp_path / name}")
    train(fresh, "train_iters=2", f"checkpoint.save={tmp_path / 'policy'}")

    written = write_rows(tmp_path / "rollouts.jsonl", bare)
    for number, (name, folder) in enumerate((("reward_model",) * 2, ("critic",) * 2, ("ppo", "policy"))):
        target = tmp_path / f"scored_{number}.jsonl"
        arguments = (f"objective.name={name}", f"checkpoint.save={tmp_path / folder}", f"data.path={written}")
        run_command("score", fresh, *arguments, "--no-entropy", "--output", target, code=0)
        written = target
    for row in map(json.loads, written.read_text().splitlines()):
        scored = [weight != 0 and t > 0 for t, weight in enumerate(row["loss_mask"])]
        assert isinstance(row["reward"], float)
        for column in ("values", "old_logprobs"):
            assert [value is not None for value in row[column]] == scored

    common = (f"data.path={written}", f"batch.global_batch_size={len(bare)}", "data.order=file", "train_iters=2")
    samples = read_samples(written)
    values = np.concatenate([s.signals.values[np.isfinite(s.signals.values)] for s in samples])
    critic = train(
        fresh, *overrides_of("critic", {}), *common, f"checkpoint.pretrained_checkpoint={tmp_path / 'critic'}"
    )
    first = critic.reports[0].metrics
    assert first["clip_fraction"] == 0, "the old values are the values"
    assert first["value"] == pytest.approx(values.mean(), rel=1e-5)
    policy = train(fresh, "objective.name=ppo", *common, f"checkpoint.pretrained_checkpoint={tmp_path / 'policy'}")
    # Scored and trained in different micro-batches, which round differently.
    assert policy.reports[0].metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert policy.reports[0].metrics["reward"] == pytest.approx(np.mean([s.signals.reward for s in samples]))


@pytest.mark.parametrize("name", ["critic", "reward_model"])
def test_scores_equal_the_stock_model_on_unfolded_samples(job: Path, tmp_path: Path, name: str) -> None:
    saving = [*FLOAT64, *overrides_of(name), f"checkpoint.save={tmp_path / 'runs'}"]
    train(job, *saving, "train_iters=2")
    output = tmp_path / "scored.jsonl"
    run_command("score", job, *saving, "--all-tokens", "--output", output, code=0)
    recipe = load_recipe(job, saving)
    with world_of_one(recipe) as place:
        trained, model = built(recipe, place), stock_model(recipe, place)
        checkpoint.load_weights(tmp_path / "runs", 2, [trained], model=recipe.model)
        head = stock_with(model, trained.state_dict())
        for row in map(json.loads, output.read_text().splitlines()):
            with torch.no_grad():
                values = (hidden_of(model, row["tokens"]) @ head[0]).tolist()
            if name == "critic":
                assert row["values"][0] is None
                assert row["values"][1:] == pytest.approx(values[:-1], rel=1e-11)
            else:
                assert row["reward"] == pytest.approx(values[-1], rel=1e-11)
    refused = run_command("score", job, *saving, "--reference", tmp_path / "runs", "--output", output, code=2)
    assert "--reference adds ref_logprobs to those of a policy, but this model gives only" in refused.stderr


@pytest.mark.parametrize("name", ["critic", "reward_model"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_verification_compares_values(job: Path, name: str, dtype: str) -> None:
    recipe = load_recipe(job, [*overrides_of(name), f"model.dtype={dtype}", "optimizer.clip_grad=0"])
    report, _ = run_once(recipe, verify_first)
    assert report.passed
    assert report.checks.keys() == {"value_error", "loss_error", "gradient_error"}
    assert report.logprob_error is None
    assert report.unfolded_errors is not None


def test_verification_detects_wrong_values(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(read: Any) -> Any:
        return lambda self, output, batch: read(self, output.roll(1, dims=1), batch)

    for readout in (Values, ValueLoss):
        monkeypatch.setattr(readout, "read", shifted(readout.read))
    report, _ = run_once(load_recipe(job, overrides_of("critic")), verify_first)
    assert not report.passed
    assert min(report.value_error, report.loss_error, report.gradient_error) > 1e-3
    done = run_command("verify", job, *overrides_of("critic"), code=1)
    assert "values of a sample" in done.output


@pytest.mark.parametrize("name", quick("critic", of=["critic", "reward_model"]))
def test_comparison_supports_scalar_heads(job: Path, name: str) -> None:
    notes = train(job, *overrides_of(name), "train_iters=2", "compare=true")
    assert notes.comparisons[0].stock is not None


def without(field: str, line: int) -> list[dict[str, Any]]:
    content = rows()
    del content[line][field]
    return content


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("critic", without("values", 3), r"data.jsonl:4: field 'values' is missing, and a critic needs it"),
        ("critic", without("reward", 3), r"data.jsonl:4: field 'reward' is missing, and returns=gae needs it"),
        ("reward_model", rows()[:-1], r"data.jsonl:11: pair 5 has 1 sample; a pair is two samples, one of them chosen"),
        (
            "reward_model",
            [row | {"chosen": True} for row in rows()],
            r"data.jsonl:2: pair 0 already has a chosen sample, .*data.jsonl:1",
        ),
    ],
)
def test_missing_fields_are_reported_with_their_sample(
    tmp_path: Path, name: str, content: list[dict[str, Any]], says: str
) -> None:
    job = write_job(tmp_path, content)
    with pytest.raises(SampleError, match=says):
        train(job, *overrides_of(name), "data.order=file")


@pytest.mark.parametrize("name", ["critic", "reward_model"])
def test_a_model_that_has_diverged(job: Path, name: str) -> None:
    with pytest.raises(SampleError, match=r"data.jsonl:\d+: the model's output for this sample is NaN or infinite"):
        train(job, *overrides_of(name), "model.transformer.init_method_std=1e38")


def test_a_tied_model_takes_no_scalar_head(job: Path) -> None:
    recipe = load_recipe(job, ["model.untie_embeddings_and_output_weights=false"])
    with (
        world_of_one(recipe) as place,
        pytest.raises(NotImplementedError, match="share_embeddings_and_output_weights=False"),
    ):
        with_scalar_head(built(recipe, place))
