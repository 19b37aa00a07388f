"""Distillation from a teacher's likeliest tokens, or from a second model, in one process, against stock Megatron."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.commands import run_command, write_rows
from harness.in_double import kept_double
from harness.marks import quick
from harness.train_jobs import (
    BATCH,
    FLOAT64,
    VOCAB,
    Notes,
    assert_resumes,
    batch_of,
    built,
    check_steps,
    logits_of,
    rows,
    stock_model,
    stock_twin,
    train,
    world_of_one,
    write_job,
)
from objective_oracles import Alone, full_loss, top_k_loss
from omegaconf import OmegaConf

from mcore_prefix_tree import SampleError
from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.models.build_gpt import transformer_config
from mcore_prefix_tree.mcore.release import HAS_DELTA_NET
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.settings import Recipe, RecipeError, load_recipe

K = 4
OPTIONS = {"divergence": "jsd", "jsd_beta": 0.3, "normalise": "sample"}


def options_of(divergence: str, **more: str) -> dict[str, Any]:
    """These, of another divergence."""
    chosen = {name: value for name, value in OPTIONS.items() if name != "jsd_beta" or divergence == "jsd"}
    return chosen | {"divergence": divergence} | more


def taught(content: list[dict[str, Any]], k: int = K) -> list[dict[str, Any]]:
    """A teacher that is a function of the path, as a model is."""
    made = []
    for row in content:
        tokens = row["tokens"]
        teacher: dict[str, Any] = {"token_ids": [[*range(k)]], "logprobs": [[None] * k]}
        for t in range(1, len(tokens)):
            rng = np.random.default_rng(tokens[:t])
            scores = 2 * rng.standard_normal(VOCAB)
            scores -= np.log(np.exp(scores).sum())
            ids = np.argsort(-scores)[:k]
            teacher["token_ids"].append(ids.tolist())
            teacher["logprobs"].append(scores[ids].tolist())
        made.append(row | {"teacher": teacher})
    return made


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, taught(rows()))


def overrides_of(options: dict[str, Any]) -> list[str]:
    return ["objective.name=distill", f"objective.options={json.dumps(options)}"]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("fused_head", quick(True, of=[True, False]), ids=["fused", "unfused"])
def test_every_step_equals_the_stock_models_step(job: Path, divergence: str, fused_head: bool) -> None:
    """Losses, gradient norms and weights of six steps in fp64 equal AdamW on unfolded samples."""
    options = options_of(divergence)
    recipe = load_recipe(job, [*FLOAT64, *overrides_of(options), f"fused_head={str(fused_head).lower()}"])
    check_divergence_steps(recipe, divergence, lambda world, _: top_k_loss(make_objective("distill", options), world))


def check_divergence_steps(recipe: Recipe, divergence: str, loss_of: Callable[[Any, Any], torch.Tensor]) -> Notes:
    """Train, and take the same steps with the stock model on unfolded samples."""
    notes = train(recipe)
    assert all(divergence in report.metrics for report in notes.reports)
    with world_of_one(recipe) as place:
        model = stock_twin(recipe, place)

        def step(report: Any) -> torch.Tensor:
            return loss_of(Alone(partial(logits_of, model), batch_of(recipe, report.iteration)), place)

        check_steps(recipe, notes.reports, list(model.parameters()), step)
    return notes


@pytest.mark.parametrize("fused_head", ["true", "false"])
def test_top_k_of_the_full_vocabulary_has_no_rest(tmp_path: Path, fused_head: str) -> None:
    """The rest of 1 in single precision is no token: the loss is exactly the divergence from the file's rows."""
    recipe = load_recipe(
        write_job(tmp_path, taught(rows(), VOCAB)),
        [*FLOAT64, *overrides_of({}), "train_iters=2", f"fused_head={fused_head}"],
    )
    loss = train(recipe).losses[0]
    with world_of_one(recipe) as place:
        model, samples = built(recipe, place), batch_of(recipe, 1)
        terms = []
        for sample in samples:
            log_q = torch.log_softmax(logits_of(model, sample.tokens.tolist()), dim=-1)
            for t in np.flatnonzero(sample.loss_mask[1:]) + 1:
                teacher = sample.signals.teacher
                log_p = torch.from_numpy(teacher.logprobs[t].astype(np.float64))
                own = log_q[t - 1, torch.from_numpy(teacher.token_ids[t].astype(np.int64))]
                terms.append(sample.loss_mask[t].item() * (log_p.exp() * (log_p - own)).sum().item())
    assert loss == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_verification_and_comparison_support_distillation(job: Path) -> None:
    notes = train(job, *overrides_of(OPTIONS), "train_iters=2", "verify.enabled=true", "compare=true")
    assert notes.verifications[0].passed
    assert len(notes.comparisons) == 1
    assert run_command("verify", job, *overrides_of(OPTIONS)).exit_code == 0


def test_teacher_on_unfolded_samples(tmp_path: Path) -> None:
    """Its rows of a shared prefix are equal up to their last digits."""
    content = taught(rows())
    rng = np.random.default_rng(0)
    for row in content:
        for scores in row["teacher"]["logprobs"][1:]:
            scores[:] = [value - 1e-6 * rng.random() for value in scores]
    recipe = load_recipe(write_job(tmp_path, content), [*FLOAT64, *overrides_of(OPTIONS), "train_iters=2"])
    notes = train(recipe)
    with world_of_one(recipe) as place:
        world: Any = Alone(partial(logits_of, built(recipe, place)), batch_of(recipe, 1))
        expected = top_k_loss(make_objective("distill", OPTIONS), world)
    assert notes.losses[0] == pytest.approx(expected.item(), rel=1e-11)


@pytest.mark.parametrize("k", [4, VOCAB])
def test_a_checkpoint_is_a_teacher(tmp_path: Path, k: int) -> None:
    """Its rows equal the stock model's on unfolded samples; from itself it has nothing to learn."""
    job = write_job(tmp_path)
    saving = [*FLOAT64, "train_iters=2", f"checkpoint.save={tmp_path / 'teacher'}"]
    train(job, *saving)
    output = tmp_path / "taught.jsonl"
    run_command("score", job, *saving, "--teacher-top-k", k, "--output", output, code=0)
    recipe = load_recipe(job, saving)
    scored = 0
    with world_of_one(recipe) as place:
        model = stock_model(recipe, place)
        checkpoint.load_weights(tmp_path / "teacher", 2, [model], model=recipe.model)
        for row in map(json.loads, output.read_text().splitlines()):
            assert "old_logprobs" not in row
            with torch.no_grad():
                every = torch.log_softmax(logits_of(model, row["tokens"]), dim=-1)
            for t, weight in enumerate(row["loss_mask"]):
                ids, logprobs = row["teacher"]["token_ids"][t], row["teacher"]["logprobs"][t]
                if t and weight:
                    scored += 1
                    top, wanted = every[t - 1].topk(k)
                    assert ids == wanted.tolist()
                    assert logprobs == pytest.approx(top.tolist(), rel=1e-6)
                else:
                    assert ids is None
                    assert logprobs is None
    assert scored > 20
    distilling = [*FLOAT64, *overrides_of({}), f"data.path={output}", "train_iters=2"]
    notes = train(job, *distilling, f"checkpoint.pretrained_checkpoint={tmp_path / 'teacher'}")
    assert notes.losses[0] == pytest.approx(0, abs=1e-5 if k < VOCAB else 1e-8)  # the file has fp32
    assert train(job, *distilling).losses[0] > 1e-3


def test_invalid_teacher_requests_are_rejected(job: Path, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = run_command(
            "score", job, f"checkpoint.save={tmp_path}", *arguments, "--output", tmp_path / "x.jsonl", code=2
        )
        return str(done.stderr)

    assert "--teacher-top-k=65: it must be from 1 to the vocabulary's 64" in refused("--teacher-top-k", "65")
    assert "'--teacher-top-k': Input should be greater than or equal to 1" in refused("--teacher-top-k", "0")
    assert "objective.name=critic has none" in refused("objective.name=critic", "--teacher-top-k", "2")
    assert "this model gives only teacher" in refused("--teacher-top-k", "2", "--reference", str(tmp_path))


LARGER = {
    "hidden_size": 48,
    "num_layers": 3,
    "ffn_hidden_size": 64,
    "dtype": "float64",
    "transformer": "{init_method_std: 0.3}",  # surer of its predictions than a new student is
}


def recipe_of_teacher(folder: Path, job: Path, **model: Any) -> Path:
    """A separate recipe, with a checkpoint of two steps: a model of another size."""
    path = folder / "teacher.yaml"
    text = job.read_text().replace("  hidden_size: 32\n", "").replace("  num_layers: 2\n", "")
    text = text.replace("  ffn_hidden_size: 48\n", "")
    settings = "".join(f"  {name}: {value}\n" for name, value in (LARGER | model).items())
    text = text.replace("model:\n", f"model:\n{settings}") + f"checkpoint: {{save: {folder / 'teacher'}}}\n"
    path.write_text(text)
    train(path, "train_iters=2", "optimizer.clip_grad=0", "seed=5")
    return path


needs_states = pytest.mark.skipif(not HAS_DELTA_NET, reason="Gated DeltaNet follows a tree since megatron-core 0.19")
STATES = (
    "{mamba_state_dim: 8, mamba_head_dim: 8, mamba_num_groups: 2, mamba_num_heads: 4, linear_key_head_dim: 8, "
    "linear_value_head_dim: 8, linear_num_key_heads: 2, linear_num_value_heads: 2}"
)


def from_model(teacher: Path, divergence: str = "reverse_kl") -> list[str]:
    options = options_of(divergence, teacher="full")
    return [*FLOAT64, *overrides_of(options), f"objective.teacher_recipe={teacher}"]


@pytest.mark.parametrize("divergence", quick("reverse_kl", of=["forward_kl", "reverse_kl", "jsd"]))
def test_every_step_from_a_second_model_is_the_stock_models_step(tmp_path: Path, divergence: str) -> None:
    job = write_job(tmp_path)
    teacher = recipe_of_teacher(tmp_path, job)
    stock: list[torch.nn.Module] = []

    def loss_of(world: Any, place: Any) -> torch.Tensor:
        if not stock:
            recipe = load_recipe(teacher)
            stock.append(
                stock_model(
                    recipe, replace(place, config=transformer_config(recipe.model, recipe.parallel, on_gpu=False))
                )
            )
            checkpoint.load_weights(tmp_path / "teacher", 2, stock, model=recipe.model)
        taught_by: Any = Alone(partial(logits_of, stock[0]), world.samples)
        return full_loss(make_objective("distill", options_of(divergence)), world, taught_by)

    notes = check_divergence_steps(load_recipe(job, from_model(teacher, divergence)), divergence, loss_of)
    assert f"the teacher's weights are {tmp_path / 'teacher' / 'iter_0000002'}" in notes.messages


@pytest.mark.parametrize("pattern", [None, pytest.param("MG*", marks=needs_states)])
def test_a_second_model_reads_trees_in_chunks(tmp_path: Path, pattern: str | None) -> None:
    """The teacher has attention, or recurrent layers, whose states it hands on by itself."""
    job, held_out = write_job(tmp_path), write_rows(tmp_path / "held_out.jsonl", rows(seed=1))
    model = {} if pattern is None else {"hybrid_layer_pattern": f"'{pattern}'", "transformer": STATES}
    settings = [*from_model(recipe_of_teacher(tmp_path, job, **model)), "train_iters=2", f"validation.path={held_out}"]
    with kept_double():
        whole, cut = (train(job, *settings, f"batch.max_tokens={size}") for size in (4096, 8))
    assert cut.losses == pytest.approx(whole.losses, rel=1e-11)
    assert [one.loss for one in cut.evaluations] == pytest.approx([one.loss for one in whole.evaluations], rel=1e-11)
    assert all(step.carried_tokens for step in cut.reports)


def test_a_model_has_nothing_to_learn_from_itself(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    teacher = recipe_of_teacher(tmp_path, job)
    start = f"checkpoint.pretrained_checkpoint={tmp_path / 'teacher'}"
    notes = train(teacher, *from_model(teacher), start, "checkpoint.save=null", "train_iters=2")
    assert abs(notes.losses[0]) < 1e-15
    assert notes.reports[0].grad_norm < 1e-15


@pytest.mark.ci
def test_a_second_model_is_asked_again_after_a_resume(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert_resumes(job, tmp_path, *from_model(recipe_of_teacher(tmp_path, job)), stop_after=3, interval=2)


def test_verification_supports_a_second_model(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    taught_by = from_model(recipe_of_teacher(tmp_path, job))
    assert train(job, *taught_by, "train_iters=2", "verify.enabled=true").verifications[0].passed
    assert run_command("verify", job, *taught_by).exit_code == 0


def test_teacher_recipe_is_required_only_by_its_objective(job: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"yaml: objective.options.teacher: full runs a second model in every step; name"
    ):
        train(job, *overrides_of({"teacher": "full"}))
    with pytest.raises(RecipeError, match=r"yaml: objective.teacher_recipe=x.yaml: only objective.name=distill with"):
        train(job, *overrides_of({}), "objective.teacher_recipe=x.yaml")
    with pytest.raises(RecipeError, match=r"yaml: fused_head=false keeps all logits"):
        train(job, *from_model(job), "fused_head=false")
    with pytest.raises(RecipeError, match=r"^recipe x.yaml does not exist"):
        train(job, *from_model(Path("x.yaml")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("checkpoint: {save: null}", "set its checkpoint.save, the folder of the teacher's checkpoints"),
        ("checkpoint: {save: nowhere}", "the teacher's checkpoint.save=nowhere holds no checkpoint"),
        ("objective: {name: critic}", "its objective.name=critic has no vocabulary to learn from"),
        ("vocab_size: 80", "its model.vocab_size=80, but the student's is 64"),
        (
            "position_embedding_type: learned_absolute, max_position_embeddings: 30",
            "end at model.max_position_embeddings=30, but the student's samples may have batch.max_tokens=40 tokens",
        ),
        ("num_layers: 5", "were trained with model.num_layers=3, and this recipe has 5"),
        ("num_query_groups: 3", "teacher.yaml: model.num_attention_heads=4 is not a multiple of"),
        ("transformer: {fp8: hybrid}", "a teacher computes without FP8; remove its model.transformer.fp8"),
        (
            "transformer: {attention_dropout: 0.1}",
            "of the teacher: prefix-tree training does not support attention_dropout=0.1",
        ),
    ],
)
def test_a_second_model_that_cannot_teach(tmp_path: Path, change: str, says: str) -> None:
    job = write_job(tmp_path)
    teacher = recipe_of_teacher(tmp_path, job)
    content = OmegaConf.load(teacher)
    of_recipe = change.startswith(("checkpoint", "objective"))
    content = OmegaConf.merge(content, OmegaConf.create(change if of_recipe else f"model: {{{change}}}"))
    OmegaConf.save(content, teacher)
    with pytest.raises((RecipeError, NotImplementedError), match=re.escape(says)):
        train(job, *from_model(teacher))


def without_teacher() -> list[dict[str, Any]]:
    content = taught(rows())
    del content[2]["teacher"]
    return content


def foreign_token() -> list[dict[str, Any]]:
    content = taught([{"tokens": row["tokens"]} for row in rows()])
    content[2]["teacher"]["token_ids"][3][0] = VOCAB
    return content


def not_a_number() -> list[dict[str, Any]]:
    content = taught([{"tokens": row["tokens"]} for row in rows()])
    content[2]["teacher"]["logprobs"][3][0] = None
    return content


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (without_teacher(), r"data.jsonl:3: field 'teacher' is missing, and teacher=top_k needs it"),
        ([*taught(rows())[:2], *taught(rows()[2:], 3)], r"data.jsonl:3: field 'teacher' has rows of 3, but .* have 4"),
        (foreign_token(), r"data.jsonl:3: field 'teacher' has \d+ at index 3, outside the model's vocabulary of 64"),
        (not_a_number(), r"data.jsonl:3: field 'teacher' has log-probabilities that are not finite at token 3"),
    ],
    ids=["missing", "another k", "another vocabulary", "not a number"],
)
def test_a_bad_teacher_names_the_sample(tmp_path: Path, content: list[dict[str, Any]], says: str) -> None:
    job = write_job(tmp_path, content)
    with pytest.raises(SampleError, match=says):
        train(job, *overrides_of(OPTIONS), "data.order=file", f"batch.global_batch_size={BATCH}")


def test_a_model_that_has_diverged(job: Path) -> None:
    with pytest.raises(SampleError, match=r"data.jsonl:\d+: the model's output for this sample is NaN or infinite"):
        train(job, *overrides_of(OPTIONS), "model.transformer.init_method_std=1e38")


def test_a_second_model_in_bfloat16(tmp_path: Path) -> None:
    """Megatron casts such a model's output to fp32, and its weights are not fp32."""
    job = write_job(tmp_path)
    teacher = recipe_of_teacher(tmp_path, job, dtype="bfloat16")
    half = [*from_model(teacher), "model.dtype=bfloat16", "optimizer.clip_grad=1", "train_iters=2"]
    start = f"checkpoint.pretrained_checkpoint={tmp_path / 'teacher'}"
    assert abs(train(teacher, *half, start, "checkpoint.save=null").losses[0]) < 1e-6
    assert train(job, *half).losses[0] > 1e-3
