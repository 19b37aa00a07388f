"""``xtoken export-teacher``, and training from the rows that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from harness.commands import run_command, write_rows
from harness.train_jobs import FLOAT64, train
from harness.xtoken_recipes import make_student_and_teacher, options, settings

from mcore_prefix_tree.data import load_tokenizer, read_samples
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.settings import RecipeError
from mcore_prefix_tree.xtoken.token_bytes import token_bytes

pytest.importorskip("transformers")
EXPORTED = "objective.options.teacher=top_k"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_student_and_teacher(tmp_path_factory.mktemp("xtoken"))


def run_export(folder: Path, output: Path, *given: str) -> Result:
    recipe = str(folder / "student.yaml")
    return run_command("xtoken", "export-teacher", recipe, *given, "--output", output)


def export(folder: Path, output: Path, *, k: int) -> Path:
    done = run_export(folder, output, *settings(folder, "alm"), "--top-k", str(k))
    assert done.exit_code == 0, done.output
    return output


@pytest.fixture(scope="module")
def all_rows(folder, tmp_path_factory) -> Path:
    """Rows of the full vocabulary, in float64."""
    size = token_bytes(load_tokenizer(str(folder / "teacher"))).vocab_size
    return export(folder, tmp_path_factory.mktemp("rows") / "whole.parquet", k=size)


@pytest.fixture(scope="module")
def lines(folder, tmp_path_factory) -> Path:
    return export(folder, tmp_path_factory.mktemp("rows") / "rows.jsonl", k=20)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("p_kl", {"temperature": 1.5, "ce_weight": 0.5}),
        ("gold", {}),
        ("alm", {"ce_weight": 0.5}),
        pytest.param("h_kl", {"reverse": True}, marks=pytest.mark.slow),
        pytest.param("uld", {}, marks=pytest.mark.slow),
    ],
)
def test_rows_of_the_full_vocabulary_equal_the_teacher(folder, all_rows, mode, changes):
    given = [*settings(folder, mode, **changes), "train_iters=3"]
    asked = train(folder / "student.yaml", *given)
    read = train(folder / "student.yaml", *given, EXPORTED, f"data.path={all_rows}")
    assert read.losses == pytest.approx(asked.losses, rel=1e-12)
    assert not any("the teacher's weights" in text for text in read.messages)


@pytest.mark.parametrize("mode", ["p_kl", "alm"])
def test_training_does_not_see_the_budget(folder, lines, mode):
    longest = max(len(json.loads(line)["tokens"]) for line in lines.read_text().splitlines())
    given = [*settings(folder, mode, ce_weight=0.5), EXPORTED, f"data.path={lines}", "train_iters=3"]
    wide, cut = (train(folder / "student.yaml", *given, f"batch.max_tokens={size}") for size in (2000, longest // 2))
    assert cut.losses == pytest.approx(wide.losses, rel=1e-11)
    assert all(step.carried_tokens > 0 for step in cut.reports)


@pytest.mark.parametrize("mode", ["p_kl", "alm"])
def test_likeliest_tokens_train_equally_for_any_cut_of_a_step(folder, lines, mode):
    given = [*settings(folder, mode), EXPORTED, f"data.path={lines}", "train_iters=3"]
    narrow = train(folder / "student.yaml", *given)
    held_out = [f"validation.path={lines}", "validation.eval_interval=3"]
    wide = train(folder / "student.yaml", *given, *held_out, "batch.max_tokens=2000")
    assert 0 < wide.evaluations[-1].loss < wide.evaluations[0].loss
    assert narrow.losses == pytest.approx(wide.losses, rel=1e-9)
    if mode == "alm":
        asked = train(folder / "student.yaml", *settings(folder, mode), "train_iters=3")
        assert narrow.losses == pytest.approx(asked.losses, rel=1e-5), "float32 in lines"


def test_wrong_rows_are_refused_before_a_step(folder, lines, all_rows, tmp_path):
    rows = [json.loads(line) for line in lines.read_text().splitlines()]

    def refused(number: int | None = None, mode: str = "p_kl", *, path: Path | None = None, **changes: object) -> str:
        if path is None:
            path = tmp_path / "changed.jsonl"
            written = [dict(row) for row in rows]
            if number is not None:
                written[number]["teacher"] = written[number]["teacher"] | changes
            write_rows(path, written)
        with pytest.raises((RecipeError, SampleError, ValueError)) as caught:
            train(folder / "student.yaml", *settings(folder, mode), EXPORTED, f"data.path={path}")
        return str(caught.value)

    assert "changed.jsonl:3: field 'teacher' was exported with another tokenizer (hash 0000" in refused(
        2, tokenizer="0" * 64
    )
    other = rows[3]["teacher"]
    assert "changed.jsonl:2: field 'teacher' was exported for another text" in refused(1, **other)
    short = {name: other[name][:-1] for name in ("tokens", "token_ids", "logprobs", "realised")}
    assert "changed.jsonl:4: field 'teacher' was exported for another text: it differs from the sample's" in refused(
        3, **short
    )
    blank = [None] * len(other["tokens"])
    assert "changed.jsonl:4: field 'teacher' has no row for the teacher's token" in refused(3, realised=blank)
    assert "changed.jsonl:4: field 'teacher.realised' must have a number for each" in refused(3, realised=[None])
    assert "changed.jsonl:4: field 'teacher.tokens' must be a list of token ids" in refused(3, tokens=[])
    one = {name: [row and row[:5] for row in other[name]] for name in ("token_ids", "logprobs")}
    assert "changed.jsonl:4: field 'teacher' has rows of 5 tokens, but those of" in refused(3, **one)
    assert "has rows of 20 tokens, and mode=uld compares all" in refused(mode="uld")
    assert "field 'teacher' is missing, whose rows teacher=top_k reads; `mcore-prefix-tree xtoken" in refused(
        path=folder / "student.jsonl"
    )
    cut = tmp_path / "cut.jsonl"
    cut.write_text(lines.read_text()[:-200])
    assert f"{cut}:{len(rows)}: " in refused(path=cut)
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(all_rows.read_bytes()[:-50])
    assert str(torn) in refused(path=torn)


def test_settings_that_exported_rows_leave_without_effect_are_refused(folder, lines):
    def refused(*overrides: str) -> str:
        given = [*settings(folder), EXPORTED, f"data.path={lines}", *overrides]
        with pytest.raises(RecipeError) as caught:
            train(folder / "student.yaml", *given)
        return str(caught.value)

    assert "top_k=5 has no effect without mode=p_kl and teacher=full" in refused(*options(top_k=5))
    assert "rendering=own has no effect without teacher=full" in refused(*options(rendering="own"))
    assert "objective.options.teachers is gone" in refused(*options(teachers="scores"))
    twice = f"objective.teacher_recipe={json.dumps([str(folder / 'teacher.yaml')] * 2)}"
    files = options(projection=[str(folder / "w.safetensors")] * 2)
    assert "teacher=top_k reads the rows of one teacher, but there are 2" in refused(twice, *files)
    assert "fused_head=false" in refused("fused_head=false")
    distill = ("objective.name=distill", "objective.options={}", "objective.teacher_recipe=null")
    with pytest.raises(SampleError, match="comes from a teacher with another tokenizer; set"):
        train(folder / "student.yaml", *FLOAT64, f"data.path={lines}", *distill)


def test_export_names_mistakes_and_writes_nothing(folder, tmp_path):
    output = tmp_path / "rows.jsonl"

    def refused(*overrides: str, given: list[str] | None = None) -> str:
        done = run_export(folder, output, *(settings(folder, "alm") if given is None else given), *overrides)
        assert done.exit_code != 0
        assert not output.exists()
        return done.output

    assert "objective.name=sft: export-teacher asks a teacher with another tokenizer" in refused(given=[])
    assert "name its recipe with objective.teacher_recipe" in refused("objective.teacher_recipe=null")
    student = folder / "student.yaml"
    assert "names 2 recipes" in refused(f"objective.teacher_recipe=[{student},{student}]")
    assert "rows are exported for the student's text" in refused(*options(rendering="own"))
    assert "is more than the" in refused("--top-k", "100000")
    warm = tmp_path / "warm.jsonl"
    warm.write_text(json.dumps({"tokens": [5, 6, 7], "temperature": 0.5}) + "\n")
    assert "warm.jsonl:1: was drawn at temperature 0.5" in refused(f"data.path={warm}")
    assert "holds no checkpoint" in refused(f"objective.teacher_recipe={empty(folder, tmp_path)}")


def empty(folder: Path, tmp_path: Path) -> Path:
    recipe = tmp_path / "teacher.yaml"
    recipe.write_text((folder / "teacher.yaml").read_text().replace(str(folder / "teacher_runs"), str(tmp_path / "no")))
    return recipe


def test_rows_do_not_see_the_teachers_budget(folder, lines, tmp_path):
    expected = list(read_samples(lines))
    longest = max(len(sample.signals.teacher.tokens) for sample in expected)
    recipe, output = tmp_path / "teacher.yaml", tmp_path / "cut.jsonl"
    recipe.write_text((folder / "teacher.yaml").read_text().replace("max_tokens: 60", f"max_tokens: {longest // 2}"))
    given = [*settings(folder, "alm"), f"objective.teacher_recipe={recipe}", "--top-k", "20"]
    done = run_export(folder, output, *given)
    assert done.exit_code == 0, done.output
    for sample, other in zip(read_samples(output), expected, strict=True):
        rows, wanted = sample.signals.teacher, other.signals.teacher
        assert (rows.tokens == wanted.tokens).all()
        assert (rows.token_ids == wanted.token_ids).all()
        for name in ("logprobs", "realised"):
            np.testing.assert_allclose(getattr(rows, name), getattr(wanted, name), rtol=1e-11)


def test_exported_lines_hold_the_teachers_tokens(folder, lines):
    table = token_bytes(load_tokenizer(str(folder / "teacher")))
    own = token_bytes(load_tokenizer(str(folder / "student")))
    for sample in read_samples(lines):
        teacher = sample.signals.teacher
        assert teacher.tokenizer == table.hash
        texts = [
            spelled.text(0, len(spelled.ends)) for spelled in (own.spell(sample.tokens), table.spell(teacher.tokens))
        ]
        assert texts[0] == texts[1]
