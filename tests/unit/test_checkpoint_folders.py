"""Locations of checkpoints and the choice of one; tests/model tests their contents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from mcore_prefix_tree.settings import RecipeError, load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def checkpoint():
    """The module; it imports megatron."""
    from mcore_prefix_tree.mcore.checkpoints import checkpoint

    return checkpoint


class Stateless:
    """In place of a scheduler."""

    def state_dict(self):
        return {}


@pytest.fixture
def save(checkpoint, monkeypatch):
    """``save(folder, iteration, write)`` in a world of one, with ``write(folder)`` in place of Megatron's writer."""
    from mcore_prefix_tree.cpu.emulation import single_process

    def run(folder, iteration, write):
        monkeypatch.setattr(checkpoint.dist_checkpointing, "save", lambda state, target, **_: write(Path(target)))
        monkeypatch.setattr(checkpoint, "_state", lambda *_, **__: {})
        monkeypatch.setattr(checkpoint, "write_checksums", lambda folder: None)
        progress = checkpoint.Progress(
            iteration=iteration,
            consumed_samples=8,
            data_from=0,
            global_batch_size=4,
            groups_per_step=None,
            seed=1,
            order="shuffled",
            samples_per_epoch=9,
            checksums={},
        )
        with single_process():
            checkpoint.save(folder, [], None, Stateless(), progress, settings=asdict(load_recipe(RECIPE)))

    return run


@pytest.mark.parametrize(
    ("iteration", "name"), [(0, "iter_0000000"), (10, "iter_0000010"), (12_345_678, "iter_12345678")]
)
def test_folders_have_megatrons_names(checkpoint, iteration, name):
    assert checkpoint.iteration_folder("runs/a", iteration) == Path("runs/a") / name


@pytest.mark.parametrize(
    ("text", "iteration", "weights"), [("7", 7, 7), (" 12\n", 12, 12), ("0", 0, 0), (None, None, None)]
)
def test_the_tracker_names_the_iteration(checkpoint, tmp_path, text, iteration, weights):
    assert checkpoint.latest_iteration(tmp_path / "missing") is None
    (tmp_path / "iter_0000004").mkdir()
    if text is not None:
        (tmp_path / TRACKER).write_text(text)
    assert checkpoint.latest_iteration(str(tmp_path)) == iteration
    assert checkpoint.latest_weights(tmp_path) == weights


def test_weights_without_an_iteration(checkpoint, tmp_path):
    """As Megatron-LM's converters leave them; a run cannot continue from them."""
    (tmp_path / TRACKER).write_text("release\n")
    assert checkpoint.latest_weights(tmp_path) == "release"
    assert checkpoint.iteration_folder(tmp_path, "release") == tmp_path / "release"


@pytest.mark.parametrize("content", [b"", b"release", b"-3", b"4.0", b"1 2", "²".encode(), b"\xff\xfe4"])
def test_a_tracker_without_a_number_is_refused(checkpoint, tmp_path, content):
    (tmp_path / TRACKER).write_bytes(content)
    with pytest.raises(RecipeError) as error:
        checkpoint.latest_iteration(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / TRACKER} holds ")
    assert str(error.value).endswith(" instead of an iteration; write the last complete one there")


def test_the_tracker_is_written_after_everything_else(checkpoint, save, tmp_path):
    saved = tmp_path / "not" / "there" / "yet"

    def write(target):
        assert target == saved / "iter_0000002"
        assert target.is_dir()
        assert checkpoint.latest_iteration(saved) is None
        (target / "weights").write_text("2")

    save(saved, 2, write)
    assert checkpoint.latest_iteration(saved) == 2
    assert sorted(path.name for path in saved.iterdir()) == ["iter_0000002", TRACKER]

    def write_next(target):
        assert checkpoint.latest_iteration(saved) == 2
        (target / "weights").write_text("4")

    save(saved, 4, write_next)
    assert checkpoint.latest_iteration(saved) == 4
    assert (saved / "iter_0000002" / "weights").read_text() == "2"


def test_a_save_that_fails_leaves_the_checkpoint_before(checkpoint, save, tmp_path):
    save(tmp_path, 2, lambda target: (target / "weights").write_text("2"))

    def fail(target):
        (target / "weights").write_text("half of 4")
        raise OSError(28, "No space left on device", str(target / "weights"))

    with pytest.raises(checkpoint.SaveError) as error:
        save(tmp_path, 4, fail)
    target = tmp_path / "iter_0000004"
    assert str(error.value).startswith(
        f"checkpoint.save={tmp_path}: iteration 4 could not be written to {target} (OSError: [Errno 28] No space left "
        f"on device: '{target / 'weights'}'; "
    )
    assert str(error.value).endswith(
        " MiB are free); the checkpoint of iteration 2 is whole; make room there and start again with --resume"
    )
    assert checkpoint.latest_iteration(tmp_path) == 2
    assert (tmp_path / "iter_0000002" / "weights").read_text() == "2"

    # Its leftovers do not mix with the next checkpoint of that iteration.
    save(tmp_path, 4, lambda target: (target / "other").write_text("4"))
    assert {path.name for path in (tmp_path / "iter_0000004").iterdir()} == {"other", "recipe.yaml"}


def test_file_in_place_of_a_checkpoint_is_reported(checkpoint, save, tmp_path):
    (tmp_path / "iter_0000004").write_text("not a folder")
    with pytest.raises(checkpoint.SaveError) as error:
        save(tmp_path, 4, lambda target: None)
    assert "FileExistsError" in str(error.value)
    assert "no checkpoint was saved before it" in str(error.value)
    assert (tmp_path / "iter_0000004").read_text() == "not a folder"


def test_a_bug_of_the_writer_is_no_full_disk(save, tmp_path):
    def fail(target):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        save(tmp_path, 4, fail)
