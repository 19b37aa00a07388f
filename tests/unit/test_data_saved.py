"""Data sets of Hugging Face: saved folders and names on the hub, without the datasets library or with a stand-in."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest
from data_sources import write_table

from mcore_prefix_tree.data import LineOptions, StreamedGroups, read_samples
from mcore_prefix_tree.data.files import files_of_hub
from mcore_prefix_tree.sample import SampleError


def save(folder, *shards, **state):
    """As ``save_to_disk`` does: streams, and a description that gives their order."""
    folder.mkdir(parents=True)
    files = []
    for number, tokens in enumerate(shards):
        path = write_table(folder, pa.table({"tokens": tokens}), "stream", name=f"{9 - number}")
        files.append({"filename": path.rpartition("/")[2]})
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "a"} | state))
    return folder


def test_a_saved_folder_is_its_files_in_its_order(tmp_path):
    folder = save(tmp_path / "saved", [[1, 2], [3]], [[4]])
    samples = read_samples(folder)
    assert [one.tokens.tolist() for one in samples] == [[1, 2], [3], [4]]
    assert samples[-1].source == f"{folder / '8.arrow'} row 0"
    streamed = StreamedGroups(folder, LineOptions())
    assert [one.tokens.tolist() for line in streamed for one in line] == [[1, 2], [3], [4]]


def test_a_folder_of_splits_names_them(tmp_path):
    save(tmp_path / "all" / "train", [[1]])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SampleError, match=r"all: holds the splits train, test; name one, such as .*all/train$"):
        read_samples(tmp_path / "all")
    assert len(read_samples(tmp_path / "all" / "train")) == 1


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"_data_files": [{"filename": "../other.arrow"}]}, "does not name Arrow files of its folder"),
        ({"_data_files": []}, "does not name Arrow files"),
        ({"_data_files": [3]}, "does not name Arrow files"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow: is missing, but state.json in its folder"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "selects rows of its files; save it again with flatten"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path, state, says):
    with pytest.raises(SampleError, match=says):
        read_samples(save(tmp_path / "saved", [[1]], **state))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_description_that_cannot_be_read(tmp_path, text):
    folder = save(tmp_path / "saved", [[1]])
    (folder / "state.json").write_text(text)
    with pytest.raises(SampleError, match=r"state\.json: (cannot be read|must hold)"):
        read_samples(folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the datasets library, which records its calls."""
    asked = []
    file = write_table(tmp_path, pa.table({"tokens": [[1, 2], [3]]}), "stream")

    def load_dataset(path, name=None, *, split=None, revision=None, trust_remote_code=None):
        asked.append((path, name, split, revision, trust_remote_code))
        if split == "dev":
            raise ValueError('Unknown split "dev". Should be one of ["train"].\nmore')
        return SimpleNamespace(cache_files=[{"filename": file}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    files_of_hub.cache_clear()
    yield asked
    files_of_hub.cache_clear()


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hf://me/rollouts", ("me/rollouts", None, "train", None, False)),
        ("hf://me/roll.outs-2/main@refs/pr/1:test", ("me/roll.outs-2", "main", "test", "refs/pr/1", False)),
    ],
)
def test_a_name_on_the_hub(hub, name, asked):
    assert [one.tokens.tolist() for one in read_samples([name])] == [[1, 2], [3]]
    assert len(StreamedGroups(name, LineOptions())) == 2
    assert hub == [asked], "it is loaded once, and executes no code"


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


def test_the_hub_without_its_library(monkeypatch):
    files_of_hub.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    needed = "hf://me/data: data sets of the hub need the datasets library: pip install 'datasets"
    with pytest.raises(ImportError, match=needed):
        read_samples("hf://me/data")
