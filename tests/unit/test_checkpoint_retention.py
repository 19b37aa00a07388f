"""Which folders ``checkpoint.keep_last`` removes, and which it never does."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(scope="module")
def remove_older():
    """The function; its room imports megatron."""
    from mcore_prefix_tree.mcore.checkpoints.retention import remove_older

    return remove_older


def write_complete(folder, *iterations):
    """Checkpoints as Megatron leaves them, in outline."""
    for iteration in iterations:
        path = folder / f"iter_{iteration:07d}"
        path.mkdir()
        (path / "__0_0.distcp").write_text("weights")
        (path / "metadata.json").write_text("{}")


def half(folder, iteration):
    write_complete(folder, iteration)
    (folder / f"iter_{iteration:07d}" / "metadata.json").unlink()


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def names(*iterations):
    return [f"iter_{iteration:07d}" for iteration in iterations]


@pytest.mark.parametrize(
    ("keep", "stay"),
    [(1, [50]), (2, [40, 50]), (4, [20, 30, 40, 50]), (5, [10, 20, 30, 40, 50]), (9, [10, 20, 30, 40, 50])],
)
def test_the_newest_stay(remove_older, tmp_path, keep, stay):
    write_complete(tmp_path, 30, 10, 50, 20, 40)
    told = []
    remove_older(tmp_path, 50, keep=keep, say=told.append)
    assert left(tmp_path) == names(*stay)
    assert told == []


def test_numbers_are_compared_and_not_names(remove_older, tmp_path):
    write_complete(tmp_path, 9_999_999, 10_000_000, 10_000_001)
    remove_older(str(tmp_path), 10_000_001, keep=2, say=pytest.fail)
    assert left(tmp_path) == names(10_000_000, 10_000_001)


def test_leftovers_of_a_killed_run_are_removed_and_not_counted(remove_older, tmp_path):
    write_complete(tmp_path, 10, 20, 40)
    half(tmp_path, 15)
    half(tmp_path, 30)
    remove_older(tmp_path, 40, keep=2, say=pytest.fail)
    assert left(tmp_path) == names(20, 30, 40), "that of 30 is not older than the two that stay"


def test_later_checkpoints_stay_and_do_not_count(remove_older, tmp_path):
    """The user has gone back to an earlier one: the newest of this run is not the highest number."""
    write_complete(tmp_path, 10, 20, 30, 90)
    remove_older(tmp_path, 30, keep=1, say=pytest.fail)
    assert left(tmp_path) == names(30, 90)


def test_other_files_and_folders_stay(remove_older, tmp_path):
    saved, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
    saved.mkdir()
    elsewhere.mkdir()
    write_complete(saved, 50)
    write_complete(elsewhere, 3)
    (saved / "iter_0000001").write_text("a file")
    (saved / "iter_0000002").mkdir()
    (saved / "iter_0000002" / "notes.txt").write_text("mine")
    (saved / "iter_0000003").symlink_to(elsewhere / "iter_0000003")
    for other in ("iter_4", "iter_0000005.bak", "release", "best_iter_0000006"):
        write_complete(saved, 7)
        (saved / "iter_0000007").rename(saved / other)
    before = left(saved)
    remove_older(saved, 50, keep=1, say=pytest.fail)
    assert left(saved) == before
    assert left(elsewhere / "iter_0000003") == ["__0_0.distcp", "metadata.json"]


def test_failed_removal_is_reported_and_others_are_removed(remove_older, tmp_path, monkeypatch):
    write_complete(tmp_path, 10, 20, 30)
    honest = shutil.rmtree

    def rmtree(path):
        if path.name == "iter_0000010":
            raise PermissionError(13, "Permission denied", str(path / "__0_0.distcp"))
        honest(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    told = []
    remove_older(tmp_path, 30, keep=1, say=told.append)
    assert left(tmp_path) == names(10, 30)
    assert told == [
        f"checkpoint.keep_last=1: {tmp_path / 'iter_0000010'} could not be removed (Permission denied); remove it by "
        "hand"
    ]
    assert left(tmp_path / "iter_0000010") == ["__0_0.distcp"], "nothing mistakes it for a complete checkpoint"
    monkeypatch.undo()
    remove_older(tmp_path, 30, keep=1, say=pytest.fail)
    assert left(tmp_path) == names(30)


def test_unreadable_folder_is_reported(remove_older, tmp_path):
    told = []
    remove_older(tmp_path / "gone", 10, keep=1, say=told.append)
    assert told == [
        f"checkpoint.keep_last=1: {tmp_path / 'gone'} cannot be read (No such file or directory); all in it stays"
    ]
