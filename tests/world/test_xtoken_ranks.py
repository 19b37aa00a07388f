"""``train`` with a teacher that has another tokenizer: two ranks report as one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.torchrun_jobs import LAYOUTS, reported, run
from harness.xtoken_recipes import RECIPE, make_tokenizers, write_texts

from mcore_prefix_tree.data import read_samples

pytestmark = pytest.mark.ci
pytest.importorskip("transformers")
FLOAT64 = ("optimizer.clip_grad=0", "attention_backend=path")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The student's recipe and its settings of the teacher; both were trained for two steps."""
    folder = tmp_path_factory.mktemp("xtoken_ranks")
    recipes: dict[str, Path] = {}
    make_tokenizers(folder)
    for name in ("student", "teacher"):
        data = write_texts(folder / f"{name}.jsonl", folder / name)
        recipes[name] = folder / f"{name}.yaml"
        recipes[name].write_text(RECIPE.format(data=data, tokenizer=folder / name, hidden=32))
    for name, recipe in recipes.items():  # pipeline stages would draw other weights than one process
        saved = f"{{save: {folder / f'{name}_runs'}}}"
        assert run(1, "train", recipe, *FLOAT64, "train_iters=2", "seed=3", f"checkpoint={saved}").code == 0
    with recipes["teacher"].open("a") as stream:
        stream.write(f"checkpoint: {{save: {folder / 'teacher_runs'}}}\n")
    options = f"{{mode: p_kl, top_k: 60, ce_weight: 0.5, projection: {folder / 'w.safetensors'}}}"
    objective = f"objective={{name: xtoken, teacher_recipe: {recipes['teacher']}, options: {options}}}"
    start = f"checkpoint.pretrained_checkpoint={folder / 'student_runs'}"
    return [str(recipes["student"]), *FLOAT64, "train_iters=3", objective, start]


@pytest.fixture(scope="module")
def one_process(given: list[str]) -> list[dict[str, float]]:
    """Every step of one process."""
    return reported(run(1, "train", *given))


def test_each_rank_may_hold_the_full_teacher(given: list[str], one_process: list[dict[str, float]]) -> None:
    whole = "objective.teacher_tensor_model_parallel_size=1"
    assert reported(run(2, "train", *given, whole, *LAYOUTS["tensor and sequence"])) == one_process


def test_replicas_may_share_the_parts_of_a_teacher(given: list[str], one_process: list[dict[str, float]]) -> None:
    shared = "objective.teacher_tensor_model_parallel_size=2"
    assert reported(run(2, "train", *given, shared, *LAYOUTS["data"])) == one_process


@pytest.mark.parametrize("layout", ["tensor and sequence", "pipeline"])
def test_two_ranks_report_like_one(given: list[str], one_process: list[dict[str, float]], layout: str) -> None:
    assert [step.keys() >= {"loss", "kd", "ce"} for step in one_process] == [True] * 3
    assert reported(run(2, "train", *given, *LAYOUTS[layout])) == one_process


@pytest.mark.parametrize("layout", ["tensor and sequence", "pipeline"])
def test_two_ranks_do_not_see_the_budget(given: list[str], one_process: list[dict[str, float]], layout: str) -> None:
    cut = ("batch.max_tokens=8", "batch.over_budget=carry")
    done = run(2, "train", *given, *cut, *LAYOUTS[layout])
    assert "carried" in done.out
    assert reported(done) == one_process


@pytest.mark.parametrize("layout", ["tensor_model_parallel_size: 2"])
def test_two_ranks_export_like_one(given: list[str], layout: str, tmp_path: Path) -> None:
    teacher = Path(given[0]).with_name("teacher.yaml").read_text()
    found = []
    for ranks, parallel in ((1, "{}"), (2, f"{{{layout}}}")):
        recipe, output = tmp_path / f"{ranks}.yaml", tmp_path / f"{ranks}.parquet"
        recipe.write_text(f"{teacher}parallel: {parallel}\nattention_backend: path\n")
        asked = [*given, f"objective.teacher_recipe={recipe}", "--top-k", "9", "--output", str(output)]
        assert run(ranks, "xtoken", "export-teacher", *asked).code == 0
        found.append([sample.signals.teacher for sample in read_samples(output)])
    for by_one, together in zip(*found, strict=True):
        assert by_one is not None
        assert together is not None
        assert np.array_equal(by_one.token_ids, together.token_ids)
        for name in ("logprobs", "realised"):
            np.testing.assert_allclose(getattr(together, name), getattr(by_one, name), rtol=1e-12, atol=1e-13)
