"""Files that never begin or never end, for example FIFOs, devices, lines and blank lines without end."""

from __future__ import annotations

import os
import re
import socket
import threading
from pathlib import Path

import pytest

from mcore_prefix_tree.data import iter_sample_groups, jsonl
from mcore_prefix_tree.data.files import FileIndex
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.settings import RecipeError, load_recipe
from mcore_prefix_tree.utils import inputs

NOBODY = r"no process has opened this FIFO to write to it within 0\.2 s; start its writer first$"


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(inputs, "FIFO_S", 0.2)
    path = tmp_path / "fifo.jsonl"
    os.mkfifo(path)
    return path


def samples(path: Path) -> list[list[int]]:
    return [sample.tokens.tolist() for line in iter_sample_groups(path) for sample in line]


def test_a_fifo_without_a_writer_is_refused(fifo: Path) -> None:
    with pytest.raises(SampleError, match=NOBODY):
        samples(fifo)
    with pytest.raises(RecipeError, match=NOBODY.removesuffix("$")):
        load_recipe(fifo)


def test_nothing_that_is_written_to_a_fifo_is_lost(fifo: Path) -> None:
    rows = "".join(f'{{"tokens": [1, {row}]}}\n' for row in range(1, 500))
    writer = threading.Thread(target=fifo.write_text, args=(rows,))
    writer.start()
    assert samples(fifo) == [[1, row] for row in range(1, 500)]
    writer.join()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_only_a_regular_file_is_read_from_the_middle(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(path := tmp_path / f"fifo{suffix}")
    with pytest.raises(SampleError, match=r"is not a regular file, and cannot be read from the middle"):
        FileIndex([str(path)])
    if suffix != ".jsonl":
        with pytest.raises(SampleError, match=r"is not a regular file"):
            samples(path)


def test_devices_and_sockets_end_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "LINE_BYTES", 1 << 16)
    with pytest.raises(SampleError, match=r"^/dev/zero:1: the line is longer than "):
        samples(Path("/dev/zero"))
    with pytest.raises(RecipeError, match=r"/dev/zero: is larger than 16 MiB"):
        load_recipe("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(SampleError, match=r"socket: cannot be read after line 0: No such device or address"):
            samples(tmp_path / "socket")


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    import gzip

    monkeypatch.setattr(jsonl, "LINE_BYTES", 3 << 20)
    path = tmp_path / f"data.jsonl{ending}"
    content = b'{"tokens": [1]}\n{"tokens": [' + b"1," * (2 << 20) + b"1]}\n"
    path.write_bytes(gzip.compress(content) if ending else content)
    with pytest.raises(SampleError, match=r"data\.jsonl.*:2: the line is longer than 3 MiB; write JSON Lines"):
        samples(path)
    if not ending:
        with pytest.raises(SampleError, match=r"data\.jsonl:2: the line is longer than 3 MiB; write JSON Lines"):
            FileIndex([str(path)])


def test_some_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes((b'{"tokens": [1]}\n' + b"\n" * 1000) * 3)
    assert samples(path) == [[1]] * 3


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"b": {"a": 1, "c": 2, "a": 3}}', '[{"a": 1, "a": 2}]'])
def test_json_with_a_key_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the key 'a' is there twice; remove one"):
        inputs.parse_json(text)


@pytest.mark.parametrize("text", ["{", "", "{'a': 1}", "[" * 100_000], ids=["cut", "empty", "quotes", "deep"])
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r:.60} is not JSON (")):
        inputs.parse_json(text)
