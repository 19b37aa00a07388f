"""Data sets of Hugging Face: saved folders and names on the hub, with a stand-in for the datasets library."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest
from data_sources import write_table

from mcore_prefix_tree.data import LineOptions, StreamedGroups, read_samples
from mcore_prefix_tree.data.files import files_of_hub
from mcore_prefix_tree.sample import SampleError

SHARDS = (("9", [[1, 2]]), ("8", [[3]]))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the datasets library, which records its calls."""
    asked = []
    names = [write_table(tmp_path, pa.table({"tokens": tokens}), "stream", name=name) for name, tokens in SHARDS]
    found = SimpleNamespace(cache_files=[{"filename": name} for name in names])

    def load_dataset(path, name=None, *, split=None, revision=None):
        asked.append((path, name, split, revision))
        if split == "dev":
            raise ValueError('Unknown split "dev". Should be one of ["train"].\nmore')
        return found

    def load_from_disk(path, *, keep_in_memory):
        assert not keep_in_memory, "it has no files then"
        if path.endswith("damaged"):
            raise FileNotFoundError("No such file: 'gone.arrow'")
        return {"train": found, "test": found} if path.endswith("all") else found

    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, load_from_disk=load_from_disk)
    )
    files_of_hub.cache_clear()
    yield asked
    files_of_hub.cache_clear()


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hf://me/rollouts", ("me/rollouts", None, "train", None)),
        ("hf://me/roll.outs-2/main@refs/pr/1:test", ("me/roll.outs-2", "main", "test", "refs/pr/1")),
    ],
)
def test_a_name_on_the_hub(hub, name, asked):
    assert [one.tokens.tolist() for one in read_samples([name])] == [[1, 2], [3]]
    assert len(StreamedGroups(name, LineOptions())) == 2
    assert hub == [asked], "it is loaded once"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hf://me", r"hf://me: is not a name such as hf://OWNER/NAME"),
        ("hf://me/data:train[:1]", "is not a name such as"),
        ("hf://me/data:dev", r'hf://me/data:dev: the datasets library cannot load it: Unknown split "dev"\. .*\]\.$'),
    ],
)
def test_a_name_that_cannot_be_loaded(hub, name, says):
    with pytest.raises(SampleError, match=says):
        read_samples(name)


def save(folder, name="state.json"):
    folder.mkdir(parents=True)
    (folder / name).write_text("{}")
    return folder


def test_a_saved_folder_is_its_files_in_their_order(hub, tmp_path):
    folder = save(tmp_path / "saved")
    assert [one.tokens.tolist() for one in read_samples(folder)] == [[1, 2], [3]]
    assert [line[0].source for line in StreamedGroups(folder, LineOptions())][-1] == f"{tmp_path / '8.arrow'} row 0"
    splits = save(tmp_path / "all", "dataset_dict.json")
    with pytest.raises(SampleError, match=r"all: holds the splits train, test; name one, such as .*all/train$"):
        read_samples(splits)
    with pytest.raises(SampleError, match=r"damaged: the datasets library cannot load it: No such file: 'gone.arrow'$"):
        read_samples(save(tmp_path / "damaged"))


def test_data_sets_without_their_library(tmp_path, monkeypatch):
    files_of_hub.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("hf://me/data", str(save(tmp_path / "saved"))):
        with pytest.raises(ImportError, match=f"{name}: data sets need the datasets library: pip install 'datasets"):
            read_samples(name)
