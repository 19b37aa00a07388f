"""The datasets library itself: its saved folders and its builders' tables are read. There is no network here.

Needs it: ``pip install --no-deps -r requirements/peers.txt``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.commands import write_rows

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from mcore_prefix_tree.data import read_samples  # noqa: E402
from mcore_prefix_tree.data.files import files_of_hub  # noqa: E402
from mcore_prefix_tree.sample import SampleError  # noqa: E402

ROWS = [{"tokens": [1, 2, number], "reward": float(number)} for number in range(7)]


def test_saved_data_sets_are_read(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "saved", num_shards=3)
    assert [one.tokens.tolist() for one in read_samples(tmp_path / "saved")] == [row["tokens"] for row in ROWS]
    saved.select([3, 1]).save_to_disk(tmp_path / "chosen")
    assert [one.signals.reward for one in read_samples(tmp_path / "chosen")] == [3.0, 1.0]
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "both")
    with pytest.raises(SampleError, match="holds the splits train, test; name one"):
        read_samples(tmp_path / "both")


def test_data_sets_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name in the working folder stands for the hub: the library looks there first."""
    (tmp_path / "me" / "data").mkdir(parents=True)
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        write_rows(tmp_path / "me" / "data" / f"{split}.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    files_of_hub.cache_clear()
    assert [one.tokens.tolist() for one in read_samples("hf://me/data")] == [row["tokens"] for row in ROWS]
    assert len(read_samples("hf://me/data:test")) == 2
    with pytest.raises(SampleError, match="hf://me/data:dev: the datasets library cannot load it"):
        read_samples("hf://me/data:dev")


def test_no_script_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "me" / "data").mkdir(parents=True)
    (tmp_path / "me" / "data" / "data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    files_of_hub.cache_clear()
    with pytest.raises(SampleError, match="the datasets library cannot load it"):
        read_samples("hf://me/data")
    assert not (tmp_path / "ran").exists()
