"""No command writes over a file that it reads: checked before the work, for every option that names an output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from harness.commands import run_command

from mcore_prefix_tree.cli.main import app

RECIPE = """
data: {{path: data.jsonl, tokenizer: tokenizer}}
validation: {{path: held_out.jsonl}}
model: {model}
batch: {{global_batch_size: 2, max_tokens: 64}}
objective: {objective}
train_iters: 2
checkpoint: {{save: {run}, pretrained_checkpoint: weights}}
"""
MODEL = "{num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 128}"
# Files of a job whose student distills from a teacher: those of the recipe and those of the teacher's recipe.
JOB = (
    *("student.yaml", "data.jsonl", "held_out.jsonl", "tokenizer/tokenizer.json"),
    *("tokenizer/additional_chat_templates/tools.jinja", "run/latest_checkpointed_iteration.txt"),
    *("run/iter_0000003/metadata.json", "run/iter_0000003/mp_rank_00/model_optim_rng.pt", "weights/release/common.pt"),
    *("projection.safetensors", "teacher.yaml", "taught/iter_0000007/__0_0.distcp", "taught_tokenizer/tokenizer.json"),
)
PROJECTIONS = ("tokenizer/tokenizer.json", "taught_tokenizer/tokenizer.json")
SAMPLES = ("data.jsonl", "tokenizer/tokenizer.json", "student.yaml", "taught/iter_0000007/__0_0.distcp")
UNSAVED = [name for name in JOB if not name.startswith("run/")]
BETWEEN = "--student tokenizer --teacher taught_tokenizer"
# Command, its other arguments, the option or argument of the output, and the files that the command reads.
WRITERS = [
    ("train", "student.yaml", "--plot", JOB),
    ("train", "student.yaml", "log.metrics", JOB),
    ("score", "student.yaml --reference weights", "--output", (*JOB, "weights/iter_0000001/metadata.json")),
    ("bench step", "student.yaml", "--output", UNSAVED),
    ("bench step", "student.yaml", "--plot", UNSAVED),
    ("inspect", "data.jsonl --tokenizer tokenizer --model student.yaml", "--plot", SAMPLES),
    ("plan", "data.jsonl --tokenizer tokenizer --model student.yaml", "--plot", SAMPLES),
    ("xtoken export-teacher", "student.yaml", "--output", JOB),
    ("xtoken build-projection", BETWEEN, "OUTPUT", PROJECTIONS),
    (
        "xtoken apply-exact-map",
        f"{BETWEEN} projection.safetensors",
        "--output",
        (*PROJECTIONS, "projection.safetensors"),
    ),
    (
        "xtoken trim",
        f"{BETWEEN} --top-k 2 projection.safetensors",
        "--output",
        (*PROJECTIONS, "projection.safetensors"),
    ),
]
# Commands that make a folder which must not exist.
FOLDERS = {("export", "path"), ("recipes", "folder")}
CASES = [(f"{command} {arguments}", option, name) for command, arguments, option, names in WRITERS for name in names]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every file that the commands read; none is opened but the recipes."""
    for name in (*JOB, "weights/iter_0000001/metadata.json", "weights/latest_checkpointed_iteration.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}")
    for folder in ("tokenizer", "taught_tokenizer"):
        (tmp_path / folder / "tokenizer_config.json").write_text("{}")
    (tmp_path / "taught" / "latest_checkpointed_iteration.txt").write_text("7")
    objective = (
        "{name: xtoken, teacher_recipe: teacher.yaml, options: {mode: p_kl, projection: projection.safetensors}}"
    )
    (tmp_path / "student.yaml").write_text(RECIPE.format(model=MODEL, objective=objective, run="run"))
    text = RECIPE.format(model=MODEL, objective="{name: sft}", run="taught").replace(
        "tokenizer: t", "tokenizer: taught_t"
    )
    (tmp_path / "teacher.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "option", "name"), CASES)
def test_files_that_are_read_are_kept(job: Path, line: str, option: str, name: str) -> None:
    """Each is named by a symbolic link, since some options take only names that end in one way."""
    link = job / f"link{'.png' if option == '--plot' else '.safetensors' if 'xtoken' in line else '.jsonl'}"
    link.symlink_to(job / name)
    before = (job / name).read_bytes()
    output = {"OUTPUT": [link.name], "log.metrics": [f"log.metrics={link.name}"]}.get(option, [option, link.name])
    done = run_command(*line.split(), *output)
    said = f"log.metrics={link.name}" if option == "log.metrics" else f"{option} {link.name}"
    assert f"{said}: is read by this command, which would replace it; name another file" in done.stderr
    assert done.exit_code == 2
    assert (job / name).read_bytes() == before
    assert link.is_symlink()


def test_names_and_links_of_all_kinds_are_kept(job: Path) -> None:
    target = job / "run" / "iter_0000003" / "metadata.json"
    (job / "folder").symlink_to(target.parent)
    os.link(target, job / "hard.json")
    for path in (target, "run/../run/iter_0000003/metadata.json", "folder/metadata.json", "hard.json"):
        done = run_command("score", "student.yaml", "--output", path)
        assert f"--output {path}: is read by this command" in done.stderr
        assert done.exit_code == 2
    assert target.read_text() == "this is run/iter_0000003/metadata.json"


def test_every_output_of_every_command_is_tried() -> None:
    outputs, folders = set(), set()
    for name, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.name in ("output", "plot"):
                outputs.add((name, parameter.opts[0] if parameter.param_type_name == "option" else "OUTPUT"))
            elif parameter.name in ("path", "folder"):
                folders.add((name, parameter.name))
    assert outputs == {(name, option) for name, _, option, _ in WRITERS if option != "log.metrics"}
    assert folders == FOLDERS


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_teacher_that_cannot_be_read_is_reported_by_its_own_sentence(job: Path) -> None:
    (job / "teacher.yaml").write_text(json.dumps({"data": 3}))
    done = run_command("xtoken", "export-teacher", "student.yaml", "--output", "scored.jsonl", code=2)
    assert "teacher.yaml" in done.stderr
    assert not (job / "scored.jsonl").exists()
