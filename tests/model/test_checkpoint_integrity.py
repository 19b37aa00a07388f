"""A checkpoint whose files changed is rejected before a value of it is used."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_command
from harness.train_jobs import train, write_job

from mcore_prefix_tree.mcore.checkpoints import checkpoint

FLIPS = 24


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with two runs, ``a`` and ``b``, that have saved iteration 2."""
    path = write_job(tmp_path_factory.mktemp("integrity"))
    for name in "ab":
        train(path, "train_iters=2", f"checkpoint.save={path.parent / name}", f"seed={ord(name)}")
    return path


@pytest.fixture
def folder(job: Path, tmp_path: Path) -> Path:
    """The checkpoint of a copy of run ``a``."""
    return shutil.copytree(job.parent / "a", tmp_path / "a") / "iter_0000002"


def score(job: Path, run: Path) -> Any:
    output = run.parent / "scored.jsonl"
    output.unlink(missing_ok=True)
    result = run_command("score", job, f"checkpoint.save={run}", "--output", output)
    return result, output.read_text() if output.exists() else None


def test_flipped_bits_are_found_or_change_nothing(job: Path, folder: Path) -> None:
    _, expected = score(job, folder.parent)
    rng = random.Random(5)
    rejected = 0
    names = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".distcp", ".pt")]
    assert len(names) >= 2  # since 0.19 Megatron writes no common.pt
    for name in (".metadata", *names):
        content = (folder / name).read_bytes()
        for _ in range(FLIPS // (1 + len(names))):
            bit = rng.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(flipped)
            result, scored = score(job, folder.parent)
            assert scored is None or scored == expected, (name, bit)
            if result.exit_code:
                rejected += 1
                assert str(folder / name) in result.output.replace("\n", ""), result.output
                assert "Traceback" not in result.output
        (folder / name).write_bytes(content)
    assert rejected > FLIPS // 2


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_10.distcp"])
def test_file_of_another_run_is_rejected(job: Path, folder: Path, name: str) -> None:
    shutil.copy(job.parent / "b" / folder.name / name, folder / name)
    result, scored = score(job, folder.parent)
    assert result.exit_code == 1 or result.exit_code == 2
    assert scored is None
    assert f"{name} changed after this checkpoint was written" in result.output.replace("\n", "")


def test_missing_file_is_named(job: Path, folder: Path) -> None:
    (folder / "__0_10.distcp").unlink()
    result, _ = score(job, folder.parent)
    assert "__0_10.distcp is missing" in result.output.replace("\n", "")


def test_damaged_checksums_are_named(job: Path, folder: Path) -> None:
    (folder / "checksums.json").write_text("[]")
    result, _ = score(job, folder.parent)
    assert "checksums.json is damaged" in result.output.replace("\n", "")


def test_checkpoint_without_checksums_is_read(job: Path, folder: Path) -> None:
    _, expected = score(job, folder.parent)
    (folder / "checksums.json").unlink()
    assert score(job, folder.parent)[1] == expected


def test_every_file_that_is_read_has_a_checksum(folder: Path) -> None:
    files = json.loads((folder / "checksums.json").read_text())["files"]
    assert set(files) == {path.name for path in folder.iterdir()} - {"checksums.json", "recipe.yaml"}


OTHER_FUNCTIONS = [
    "model.rotary_base=500000",
    "model.rotary_percent=0.5",
    "model.position_embedding_type=none",
    "model.rope_scaling=true",
    "model.untie_embeddings_and_output_weights=false",
    "model.swiglu=false",
    "model.transformer.layernorm_epsilon=1e-3",
    "model.transformer.softmax_scale=0.7",
    "model.vocab_size=65",
]
DOORS = {
    "score": lambda job, run: ["score", job, f"checkpoint.save={run}", "--output", f"{job.parent}/scored.jsonl"],
    "pretrained": lambda job, run: ["train", job, f"checkpoint.pretrained_checkpoint={run}", "train_iters=2"],
    "resume": lambda job, run: ["train", job, f"checkpoint.save={run}", "train_iters=3", "--resume"],
}


@pytest.mark.parametrize("setting", OTHER_FUNCTIONS)
@pytest.mark.parametrize("door", DOORS)
def test_weights_of_another_function_are_rejected(job: Path, folder: Path, door: str, setting: str) -> None:
    result = run_command(*DOORS[door](job, folder.parent), setting)
    key, value = setting.split("=")
    assert result.exit_code in (1, 2)
    assert f"trained with {key}=" in result.output
    assert f"and this recipe has {value}" in result.output.replace("True", "true").replace("False", "false").replace(
        "0.001", "1e-3"
    )


def test_weights_of_other_shapes_name_the_changed_settings(job: Path, folder: Path) -> None:
    """The recipe left the size to Megatron, so the settings alone do not contradict each other."""
    result = run_command(*DOORS["resume"](job, folder.parent), "model.kv_channels=6")
    assert result.exit_code in (1, 2)
    said = " ".join(result.output.split())
    assert "does not fit this recipe's model" in said
    assert "changed since it was saved: model.kv_channels None -> 6" in said.rpartition("error:")[2]


def test_setting_that_keeps_the_function_is_accepted(job: Path, folder: Path) -> None:
    same = ["model.transformer.layernorm_epsilon=1e-5", "model.transformer.recompute_granularity=selective"]
    run_command(*DOORS["score"](job, folder.parent), *same, code=0)


def test_damaged_recipe_in_a_checkpoint_blocks_nothing(job: Path, folder: Path) -> None:
    (folder / "recipe.yaml").write_text("model: [")
    resume = ["train", str(job), f"checkpoint.save={folder.parent}", "seed=97", "train_iters=3", "--resume"]
    for words in (list(map(str, DOORS["score"](job, folder.parent))), resume):
        run_command(*words, code=0)


def run(job: Path, saved: Path, *words: str) -> Any:
    return run_command("train", job, f"checkpoint.save={saved}", "seed=97", "train_iters=3", *words)


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_checkpoint_without_a_tracker_is_kept(job: Path, folder: Path, resume: tuple[str, ...]) -> None:
    (folder.parent / "latest_checkpointed_iteration.txt").unlink()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    result = run(job, folder.parent, *resume)
    assert result.exit_code in (1, 2)
    assert "holds iter_0000002, but no latest_checkpointed_iteration.txt" in result.output
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_later_checkpoint_than_the_tracker_is_kept(job: Path, folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("iter_0000003"))
    result = run(job, folder.parent, "--resume")
    assert result.exit_code in (1, 2)
    assert "holds iter_0000003, but its tracker names 2" in result.output


def test_unfinished_save_is_replaced(job: Path, folder: Path) -> None:
    killed = Path(shutil.copytree(folder, folder.with_name("iter_0000003")))
    (folder.parent / ".iter_0000003.saving").touch()
    (killed / "common.pt").write_bytes(b"half")
    assert run(job, folder.parent, "--resume").exit_code == 0
    assert score(job, folder.parent)[0].exit_code == 0
    assert not (folder.parent / ".iter_0000003.saving").exists()


def test_foreign_file_in_an_unfinished_save_is_kept(job: Path, folder: Path) -> None:
    killed = folder.with_name("iter_0000003")
    killed.mkdir()
    (killed / "notes.txt").write_text("mine")
    result = run(job, folder.parent, "--resume")
    assert result.exit_code in (1, 2)
    assert "notes.txt would be removed" in result.output.replace("\n", "")
    assert (killed / "notes.txt").read_text() == "mine"


def test_key_of_a_newer_version_blocks_no_resume(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = checkpoint.dist_checkpointing.save

    def newer(state: dict[str, Any], *words: Any, **options: Any) -> Any:
        return written({**state, "progress": {**state["progress"], "of_a_newer_version": 1}}, *words, **options)

    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", newer)
    train(job, "train_iters=2", f"checkpoint.save={tmp_path}", "seed=97")
    monkeypatch.undo()
    result = run(job, tmp_path, "--resume")
    assert result.exit_code == 0, result.output
