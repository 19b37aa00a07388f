"""Jobs on two ranks train, evaluate and report as one process does, and all ranks report an error together."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.commands import write_rows
from harness.torchrun_jobs import LAYOUTS, TRACKER, VOCAB, Ended, run
from harness.train_jobs import FLOAT64
from harness.train_jobs import write_job as write_sft
from harness.xtoken_recipes import RECIPE as TEXTS
from harness.xtoken_recipes import make_tokenizers, write_texts

from mcore_prefix_tree.data import read_samples

RECIPE = f"""
model:
  {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, vocab_size: {VOCAB}, dtype: float64}}
batch: {{global_batch_size: 8, max_tokens: 30}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1, clip_grad: 0.0}}
train_iters: 4
attention_backend: path
compare: false
verify: {{enabled: false}}
"""
OBJECTIVES = {
    "grpo": "objective={name: grpo, options: {kl_coef: 0.05, entropy_coef: 0.01}}",
    "dpo": "objective={name: dpo, options: {beta: 0.5}}",
    "critic": "objective={name: critic, options: {gamma: 0.9, clip_eps: 0.3}}",
}
WATCHED = {
    "grpo": {"reward", "ratio", "clip_fraction", "kl", "entropy"},
    "dpo": {"accuracy", "margin"},
    "critic": {"value", "return", "value_error", "clip_fraction"},
    "distill": {"reverse_kl"},
    "xtoken": {"kd", "ce"},
    "groups": {"reward", "ratio"},
}


def lines() -> list[dict[str, Any]]:
    """Five groups of four samples, of which each two are a pair."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(20):
        if number % 4 == 0:
            prompt = rng.integers(1, VOCAB, size=6).tolist()
        tokens = prompt + rng.integers(1, VOCAB, size=2 + number % 5).tolist()
        scores = (-math.log(VOCAB) + 0.2 * rng.standard_normal((2, len(tokens)))).tolist()
        made.append(
            {
                "tokens": tokens,
                "loss_mask": [0] * 6 + [1] * (len(tokens) - 6),
                "reward": float(rng.random()),
                "group": number // 4,
                "pair": number // 2,
                "chosen": number % 2 == 0,
                "old_logprobs": scores[0],
                "ref_logprobs": scores[1],
                "values": (0.3 * rng.standard_normal(len(tokens))).tolist(),
            }
        )
    return made


def write_job(folder: Path, content: list[dict[str, Any]]) -> list[str]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"data: {{path: {write_rows(folder / 'data.jsonl', content)}}}\n{RECIPE}")
    return [str(recipe)]


def objective(folder: Path, name: str) -> list[str]:
    """A job that also evaluates: of the held-out pairs, the last part has fewer, and one of two replicas none."""
    held_out = write_rows(folder / "held_out.jsonl", lines()[:10])
    return [*write_job(folder, lines()), OBJECTIVES[name], f"validation={{path: {held_out}, eval_interval: 2}}"]


def groups(folder: Path) -> list[str]:
    """Groups of unequal sizes, one of whose rollouts has two lines."""
    content = lines()
    for number in (4, 5):
        content[number] |= {"rollout": 0, "reward": content[4]["reward"]}
    kept = [line for number, line in enumerate(content) if number not in (3, 9, 10, 11, 17)]
    name = "objective={name: grpo, options: {alone: zero, normalise: rollout, kl_coef: 0.05}}"
    return [*write_job(folder, kept), name, "batch.global_batch_size=null", "batch.groups_per_step=2"]


def distill(folder: Path) -> list[str]:
    """A student, and a teacher of the same vocabulary that was trained for two steps."""
    job, teacher = write_sft(folder), folder / "teacher.yaml"
    teacher.write_text(f"{job.read_text()}checkpoint: {{save: {folder / 'teacher'}}}\n")
    assert run(1, "train", teacher, *FLOAT64, "train_iters=2", "seed=5").code == 0
    name = f"objective={{name: distill, options: {{divergence: reverse_kl, teacher: full}}, teacher_recipe: {teacher}}}"
    return [str(job), *FLOAT64, "train_iters=4", name]


def xtoken(folder: Path) -> list[str]:
    """A student, and a teacher with another tokenizer that was trained for two steps."""
    pytest.importorskip("transformers")
    make_tokenizers(folder)
    recipes = {name: folder / f"{name}.yaml" for name in ("student", "teacher")}
    for name, recipe in recipes.items():
        data = write_texts(folder / f"{name}.jsonl", folder / name)
        recipe.write_text(TEXTS.format(data=data, tokenizer=folder / name, hidden=32) + "attention_backend: path\n")
    with recipes["teacher"].open("a") as stream:
        stream.write(f"checkpoint: {{save: {folder / 'teacher_runs'}}}\n")
    assert run(1, "train", recipes["teacher"], "optimizer.clip_grad=0", "train_iters=2", "seed=3").code == 0
    options = f"{{mode: p_kl, top_k: 60, ce_weight: 0.5, projection: {folder / 'w.safetensors'}}}"
    name = f"objective={{name: xtoken, teacher_recipe: {recipes['teacher']}, options: {options}}}"
    return [str(recipes["student"]), "optimizer.clip_grad=0", "train_iters=4", name]


JOBS: dict[str, Callable[[Path], list[str]]] = {
    **{name: functools.partial(objective, name=name) for name in OBJECTIVES},
    "groups": groups,
    "distill": distill,
    "xtoken": xtoken,
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    @functools.cache
    def job(name: str) -> list[str]:
        return JOBS[name](tmp_path_factory.mktemp(name))

    return job


def told(folder: Path, done: Ended) -> list[dict[str, Any]]:
    """What a run that is over has logged, but for times and tokens."""
    assert done.code == 0, done.err
    found = []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        kept = {
            name: line[name] for name in ("iteration", "loss", "grad_norm", "lr", "validation_loss") if name in line
        }
        found.append(kept | line.get("metrics", {}) | line.get("validation_metrics", {}))
    return found


@pytest.fixture(scope="module")
def one_process(jobs: Callable[[str], list[str]]) -> Callable[[str], tuple[Path, list[dict[str, Any]]]]:
    """The folder of a job in one process, with its checkpoints, one per step; and its reports."""

    @functools.cache
    def train(name: str) -> tuple[Path, list[dict[str, Any]]]:
        folder = Path(jobs(name)[0]).parent / "alone"
        saving = (f"checkpoint.save={folder}", "checkpoint.save_interval=1", f"log.metrics={folder / 'metrics.jsonl'}")
        return folder, told(folder, run(1, "train", *jobs(name), *saving))

    return train


FIGURES = ("iteration", "loss", "grad_norm", "lr", "validation_loss")
CUT = ("batch.max_tokens=8", "batch.over_budget=carry")


def teacher(ranks: int) -> str:
    return f"objective.teacher_tensor_model_parallel_size={ranks}"


# test_objective_layouts tests an objective's results in each layout; that its head is saved and read in each,
# by a critic's. A job takes half a minute on two cores: each layout once.
CASES: list[Any] = [
    ("grpo", "tensor and sequence", ()),
    ("critic", "pipeline", ()),
    ("dpo", "data", ()),
    ("groups", "data", ("data.streaming=true", "data.num_workers=1")),
]
IN_CI = [
    ("distill", "data", (*CUT, teacher(2))),
    ("distill", "tensor and sequence", (*CUT, teacher(1))),
    ("xtoken", "tensor and sequence", (teacher(1),)),
    ("xtoken", "data", (teacher(2),)),
    ("xtoken", "tensor and sequence", ()),
    ("xtoken", "pipeline", ()),
    ("xtoken", "tensor and sequence", CUT),
    ("xtoken", "pipeline", CUT),
]


@pytest.mark.parametrize(
    ("name", "layout", "more"), [*CASES, *(pytest.param(*case, marks=pytest.mark.ci) for case in IN_CI)]
)
def test_two_ranks_train_and_report_as_one_process(
    jobs: Callable[[str], list[str]], one_process: Any, tmp_path: Path, name: str, layout: str, more: tuple[str, ...]
) -> None:
    """From the first step's checkpoint on: the stages of a pipeline draw separate weights. A stream starts anew."""
    folder, expected = one_process(name)
    arguments = [*jobs(name), *LAYOUTS[layout], *more, f"log.metrics={tmp_path / 'metrics.jsonl'}"]
    if name != "groups":
        shutil.copytree(folder / "iter_0000001", tmp_path / "iter_0000001")
        (tmp_path / TRACKER).write_text("1")
        arguments += [f"checkpoint.save={tmp_path}", "--resume"]
        expected = [line for line in expected if line["iteration"] > 1]
    done = run(2, "train", *arguments)
    actual = told(tmp_path, done)
    assert sum("loss" in line for line in expected) >= 3
    assert sum("validation_loss" in line for line in expected) == 2 * (name in OBJECTIVES)
    assert ("carried" in done.out) == (CUT[0] in more)
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys() >= WATCHED[name]
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.mark.slow
def test_a_critic_starts_from_a_language_model_in_a_pipeline(jobs: Callable[[str], list[str]], tmp_path: Path) -> None:
    """Only the last stage has the head that the checkpoint lacks; all verify their initial weights."""
    (job, *critic) = jobs("critic")
    assert run(1, "train", job, "train_iters=2", f"checkpoint.save={tmp_path}").code == 0
    starting = (f"checkpoint.pretrained_checkpoint={tmp_path}", "verify.enabled=true")
    done = run(2, "train", job, *critic, *LAYOUTS["pipeline"], *starting)
    assert len(done.losses) == 4
    assert f"the weights start from {tmp_path / 'iter_0000002'}, with a new scalar head" in done.out
    assert "values of a sample" in done.out


def test_all_ranks_refuse_a_model_that_has_diverged(jobs: Callable[[str], list[str]]) -> None:
    """Only the last stage sees the log-probabilities; the first one must not wait for ever."""
    wild = ("model.transformer.init_method_std=1e38", "model.dtype=float32", "validation.path=null")
    done = run(2, "train", *jobs("grpo"), *LAYOUTS["pipeline"], *wild, code=2)
    assert done.errors
    assert all("the model's output for this sample is NaN or infinite" in line for line in done.errors)


@pytest.mark.ci
def test_two_ranks_export_a_teachers_rows_like_one(jobs: Callable[[str], list[str]], tmp_path: Path) -> None:
    job = jobs("xtoken")
    recipe = Path(job[0]).with_name("teacher.yaml").read_text()
    found = []
    for ranks in (1, 2):
        path, output = tmp_path / f"{ranks}.yaml", tmp_path / f"{ranks}.parquet"
        path.write_text(f"{recipe}parallel: {{tensor_model_parallel_size: {ranks}}}\n")
        asked = [*job, f"objective.teacher_recipe={path}", "--top-k", "9", "--output", output]
        assert run(ranks, "xtoken", "export-teacher", *asked).code == 0
        found.append([sample.signals.teacher for sample in read_samples(output)])
    for by_one, together in zip(*found, strict=True):
        assert by_one is not None
        assert together is not None
        assert np.array_equal(by_one.token_ids, together.token_ids)
        for name in ("logprobs", "realised"):
            np.testing.assert_allclose(getattr(together, name), getattr(by_one, name), rtol=1e-12, atol=1e-13)
