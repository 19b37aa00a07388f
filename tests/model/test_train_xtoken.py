"""``objective.name=xtoken`` from recipe to weights: a student learns from a teacher with another tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.commands import run_command, write_rows
from harness.marks import mostly_in_ci
from harness.tokenizer_folders import PLAIN, make_folder
from harness.train_jobs import FLOAT64, train
from harness.xtoken_recipes import make_student_and_teacher, options, settings

from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.settings import RecipeError

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_student_and_teacher(tmp_path_factory.mktemp("xtoken"))


CUT = {"p_kl": {"top_k": 50, "ce_weight": 0.5}, "h_kl": {}, "alm": {"teacher_weights": [0.5, 1.5]}}


@pytest.mark.parametrize("over_budget", mostly_in_ci("carry", of=["carry", "auto"]))
@pytest.mark.parametrize("mode", mostly_in_ci("p_kl", "alm", of=CUT))
def test_training_evaluation_and_verification_do_not_see_the_budget(folder, mode, over_budget):
    longest = max(len(json.loads(line)["tokens"]) for line in (folder / "student.jsonl").read_text().splitlines())
    held_out = [f"validation.path={folder / 'student.jsonl'}", "validation.eval_interval=2", "verify.enabled=true"]
    given = [*settings(folder, mode, **CUT[mode]), *held_out, "train_iters=3"]
    if "teacher_weights" in CUT[mode]:
        given += [f"objective.teacher_recipe={json.dumps([str(folder / 'teacher.yaml')] * 2)}"]
    wide, cut = (
        train(folder / "student.yaml", *given, f"batch.max_tokens={size}", f"batch.over_budget={way}")
        for size, way in ((2000, "repeat"), (longest // 2, over_budget))
    )
    assert cut.losses == pytest.approx(wide.losses, rel=1e-11)
    assert [one.loss for one in cut.evaluations] == pytest.approx([one.loss for one in wide.evaluations], rel=1e-11)
    for one, other in zip(cut.reports, wide.reports, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-11)
        assert one.carried_tokens > 0
        assert one.carried_bytes > 0
    (report,) = cut.verifications
    assert report.passed, report.checks


def test_hidden_states_are_held_like_keys_and_values(folder):
    """A token's two layers have keys and values of 2 heads of 8; its last hidden state has 32 numbers."""
    given = ("batch.max_tokens=8", "train_iters=2")
    across = train(folder / "student.yaml", *settings(folder), *given)
    supervised = train(folder / "student.yaml", *FLOAT64, *given)
    for one, other in zip(across.reports, supervised.reports, strict=True):
        assert one.carried_tokens == other.carried_tokens > 0
        assert one.carried_bytes == other.carried_bytes * (2 * 2 * 2 * 8 + 32) // (2 * 2 * 2 * 8)


def test_a_teacher_may_read_conversations_in_its_own_chat_format(folder, tmp_path):
    """The same turns behind another prompt: the alignment is the same, the teacher's logits are not."""
    rows = [
        {"messages": [{"role": "user", "content": "look up the parcel"}, {"role": "assistant", "content": text}]}
        for text in ("it is lost", "it is lost sorry", "no", "bye bye", "you are terse", "the parcel is lost")
    ]
    data = write_rows(tmp_path / "chats.jsonl", rows)
    (tmp_path / "teacher").mkdir()
    other = PLAIN.replace("{{ m.role }}", "{{ m.role | upper }}").replace("assistant:", "ASSISTANT:")
    make_folder(tmp_path / "teacher", other, prepend_space=True)
    teacher = tmp_path / "teacher.yaml"
    recipe = (folder / "teacher.yaml").read_text()
    teacher.write_text(recipe.replace(f"tokenizer: {folder / 'teacher'}", f"tokenizer: {tmp_path / 'teacher'}"))
    found = {}
    for name, path, rendering in (
        ("same format", folder / "teacher.yaml", "own"),
        ("student's", teacher, "student"),
        ("own", teacher, "own"),
    ):
        given = [*settings(folder, rendering=rendering), f"objective.teacher_recipe={path}", f"data.path={data}"]
        found[name] = train(folder / "student.yaml", *given, "train_iters=2").losses
    assert found["same format"] == pytest.approx(found["student's"], rel=1e-12)
    assert abs(found["own"][0] / found["student's"][0] - 1) > 1e-6


def test_one_teacher_twice_is_that_teacher(folder):
    one = settings(folder)
    path = folder / "teacher.yaml"
    files = [str(folder / "w.safetensors")] * 2
    two = [
        *settings(folder, projection=files, teacher_weights=[0.25, 0.75]),
        f"objective.teacher_recipe={json.dumps([str(path)] * 2)}",
    ]
    found = [train(folder / "student.yaml", *given, "train_iters=2").losses for given in (one, two)]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_verification_supports_a_teacher(folder):
    assert run_command("verify", folder / "student.yaml", *settings(folder)).exit_code == 0


def test_mistakes_are_named_before_a_step(folder, tmp_path):
    def refused(*overrides: str) -> str:
        with pytest.raises((RecipeError, SampleError, ValueError)) as caught:
            train(folder / "student.yaml", *overrides)
        return str(caught.value)

    good = settings(folder)
    assert "student.yaml: objective.name=xtoken learns from a model with" in refused(*FLOAT64, "objective.name=xtoken")
    assert "objective.options.projection is missing, which mode=gold" in refused(
        *settings(folder, "alm"), "objective.options.mode=gold"
    )
    assert "data.tokenizer is missing" in refused(*good, "data.tokenizer=null", "model.vocab_size=500")
    assert "fused_head=false keeps all logits of the student, and objective.name=xtoken" in refused(
        *good, "fused_head=false"
    )
    assert "objective.options.top_k=4000 is more than the" in refused(*good, *options(top_k=4000))
    assert "theta=2.0 has no effect without mode=alm" in refused(*good, *options(theta=2.0))
    assert "teacher_weights has 2 numbers, but there are 1 teachers" in refused(*good, *options(teacher_weights=[1, 2]))
    assert "kd_weight=0 and ce_weight=0 leave no loss" in refused(*good, *options(kd_weight=0))
    assert "greater than or equal to 0" in refused(*good, *options(teacher_weights=[-1]))
    missing = tmp_path / "missing.safetensors"
    assert f"objective.options.projection={missing}: no such file" in refused(
        *settings(folder, projection=str(missing))
    )
    assert "was built for another student's tokenizer" in refused(*good, f"data.tokenizer={folder / 'teacher'}")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((folder / "w.safetensors").read_bytes()[:-100])
    assert f"{broken}: is damaged" in refused(*settings(folder, projection=str(broken)))
    warm = tmp_path / "warm.jsonl"
    warm.write_text(json.dumps({"tokens": [5, 6, 7], "temperature": 0.5}) + "\n")
    warmed = (f"data.path={warm}", "batch.global_batch_size=1")
    assert "warm.jsonl:1: was drawn at temperature 0.5" in refused(*good, *warmed)
    short = tmp_path / "short.yaml"
    learned = "  position_embedding_type: learned_absolute\n  max_position_embeddings: 4\n  dtype:"
    short.write_text((folder / "teacher.yaml").read_text().replace("  dtype:", learned))
    assert f"of the teacher's tokens, but model.max_position_embeddings of {short} is 4; raise" in refused(
        *good, f"objective.teacher_recipe={short}"
    )
    cut = "objective.teacher_tensor_model_parallel_size"
    assert f"{cut}=2 does not divide the 1 ranks of a pipeline stage" in refused(*good, f"{cut}=2")
    assert f"{cut}=3 is neither 1" in refused(*good, f"{cut}=3", "parallel.tensor_model_parallel_size=2")
    sft = ("objective.name=sft", "objective.options={}", "objective.teacher_recipe=null", f"{cut}=2")
    assert "applies only to teachers that run in every step" in refused(*FLOAT64, *sft)
    distill = ("objective.name=distill", *options(teacher="full"), 'objective.teacher_recipe=["a.yaml", "b.yaml"]')
    assert "distill has one teacher" in refused(*FLOAT64, *distill)
