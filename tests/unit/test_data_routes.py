"""The experts of each token: how records give them, how they are written, and what is wrong with some."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import warnings
import zipfile

import numpy as np
import pytest
from data_sources import CHAT, CharacterTokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, SampleError
from mcore_prefix_tree.data import read_samples
from mcore_prefix_tree.data.fingerprint import check_same_samples
from mcore_prefix_tree.data.packed_arrays import pack_array
from mcore_prefix_tree.data.skipped import Skipped
from mcore_prefix_tree.data.write import make_row, rows_file
from mcore_prefix_tree.utils.ranks import Ranks

TOKENS = {"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}
ROUTES = [[[0, 5], [1, 2]], [[4, 3], [200, 1]], [[5, 2], [3, 0]]]


def packed(routes, dtype="int32", **changes):
    array = np.array(routes, dtype=dtype)
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": dtype, "shape": list(array.shape), "data": data} | changes


def routes_of(sample):
    return sample.signals.routes.ids.tolist()


NONE = [[-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("row", "routes"),
    [
        (TOKENS | {"routed_experts": ROUTES}, [*ROUTES, NONE]),
        (TOKENS | {"routed_experts": [*ROUTES, [[9, 8], [7, 6]]]}, [*ROUTES, NONE]),
        (TOKENS | {"routed_experts": [None, *ROUTES[1:]]}, [NONE, *ROUTES[1:], NONE]),
        (TOKENS | {"routed_experts": packed(ROUTES)}, [*ROUTES, NONE]),
        (TOKENS | {"routed_experts": packed(ROUTES, "uint8")}, [*ROUTES, NONE]),
        (
            {"prompt_tokens": [1, 2], "response_tokens": [3, 4], "routed_experts": packed(ROUTES, "int16")},
            [*ROUTES, NONE],
        ),
        (
            {"prompt_tokens": [1, 2], "response_tokens": [3, 4], "routed_experts": ROUTES[1:]},
            [NONE, NONE, ROUTES[1], NONE],
        ),
        (
            {
                "tokens": [0, 0, 1, 2, 3, 4, 0],
                "attention_mask": [0, 0, 1, 1, 1, 1, 0],
                "routed_experts": [None, None, *ROUTES, None, None],
            },
            [*ROUTES, NONE],
        ),
    ],
    ids=["but the last", "all", "a missing one", "int32", "uint8", "of both", "of the response", "padded"],
)
def test_routes_are_read(read, row, routes):
    (sample,) = read(row)
    assert routes_of(sample) == routes
    assert sample.tokens.tolist() == [1, 2, 3, 4]
    assert not sample.signals.routes.ids.flags.writeable


@pytest.mark.parametrize("name", ["routed.jsonl", "routed.parquet", "routed.arrow"])
def test_routes_are_written_and_read_back(read, tmp_path, name):
    few = [[[0, 1], [2, 3]], None, [[3, 1], [1, 0]]]
    samples = read(TOKENS | {"routed_experts": ROUTES}, TOKENS, TOKENS | {"routed_experts": few})
    with rows_file(tmp_path / name) as writer:
        writer.add([make_row(sample) for sample in samples[:2]])
        writer.add([make_row(sample) for sample in samples[2:]])
    again = read_samples(tmp_path / name)
    assert again[1].signals.routes is None
    for index in (0, 2):
        assert routes_of(again[index]) == routes_of(samples[index])
        assert again[index].signals.routes.ids.dtype == samples[index].signals.routes.ids.dtype


def test_a_table_holds_routes_of_one_model(tmp_path):
    samples = [Sample(tokens=[1, 2], routed_experts=np.zeros((1, layers, 1), dtype=int)) for layers in (1, 2)]
    with (
        pytest.raises(SampleError, match=r"'routed_experts' cannot be a column of a table \(its routes have different"),
        rows_file(tmp_path / "routed.parquet") as writer,
    ):
        writer.add([make_row(sample) for sample in samples])


def test_a_resumed_job_notices_other_routes():
    digests = []
    for expert in (0, 0, 1):
        sample = Sample(tokens=[1, 2], routed_experts=[[[expert]]])
        check_same_samples([[sample]], [], Ranks(size=2, gather=lambda own: digests.append(own) or [own]))
    assert digests[0].crc == digests[1].crc != digests[2].crc


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        ("AAAA", "must be lists [tokens, layers, top-k], or an object with 'data', 'dtype', 'shape'"),
        ({"data": "AAAA"}, "must be lists [tokens, layers, top-k], or an object with 'data', 'dtype', 'shape'"),
        (
            packed(ROUTES, dtype="int32") | {"dtype": "float32"},
            ".dtype' must be one of int8, uint8, int16, int32, int64",
        ),
        (packed(ROUTES, shape="3"), ".shape' must be a list of sizes"),
        (packed(ROUTES, data="?"), ".data' must be the base64 text of the array's bytes"),
        (packed(ROUTES, shape=[4, 2, 2]), ".data' has 48 bytes, but an array of int32 and shape [4, 2, 2] has 64"),
        (ROUTES[:2], "has 2 rows but 'tokens' has 4; there must be one for each, or for each but the last"),
        (packed(ROUTES, shape=[3, 4]), ".shape' must be a list of sizes, [tokens, layers, top-k]"),
    ],
)
def test_malformed_routes_name_the_line(read, routes, says):
    with pytest.raises(SampleError) as caught:
        read(TOKENS, TOKENS | {"routed_experts": routes})
    assert "rollouts.jsonl:2: field 'routed_experts" in str(caught.value)
    assert says in str(caught.value)


def test_routes_go_with_tokens(read):
    with pytest.raises(
        SampleError, match="field 'routed_experts' goes with 'tokens'; it has an entry for each of them"
    ):
        read({"messages": CHAT, "routed_experts": ROUTES}, tokenizer=CharacterTokenizer())


def in_file(**reference):
    return TOKENS | {"routed_experts": {"npz": "routes.npz", "key": "0"} | reference}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_routes_in_a_file_beside_the_lines(tmp_path, read, save):
    (tmp_path / "deeper").mkdir()
    other = [[[7, 6], [1, 2]], *ROUTES[1:]]
    save(tmp_path / "deeper" / "routes.npz", **{"0": np.array(ROUTES), "one": np.array(other, dtype=np.uint8)})
    both = {"prompt_tokens": [1, 2], "response_tokens": [3, 4]}
    both["routed_experts"] = {"npz": "deeper/routes.npz", "key": "0"}
    rows = (in_file(npz="deeper/routes.npz"), in_file(npz="deeper/routes.npz", key="one"), both)
    assert [routes_of(one) for one in read(*rows)] == [[*ROUTES, NONE], [*other, NONE], [*ROUTES, NONE]]


def test_a_file_that_changed_is_read_again(tmp_path, read):
    for routes in (ROUTES, ROUTES[::-1]):
        np.savez_compressed(tmp_path / "routes.npz", **{"0": np.array(routes)})
        assert routes_of(read(in_file())[0]) == [*routes, NONE]


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ({"npz": "missing.npz"}, r"\.npz' names 'missing.npz', which cannot be read \(No such file or directory\)"),
        ({"npz": "."}, r"\.npz' names '.', which cannot be read \(is not a regular file"),
        ({"npz": "../routes.npz"}, r"\.npz' names '../routes.npz', outside the folder of the data; put it there"),
        ({"npz": "/etc/hostname"}, r"\.npz' names '/etc/hostname', outside the folder of the data"),
        ({"npz": "link.npz"}, r"\.npz' names 'link.npz', outside the folder of the data"),
        ({"npz": "a\0b"}, r"\.npz' names 'a\\x00b', which cannot be read"),
        ({"npz": "text.npz"}, r"\.npz' names 'text.npz', which cannot be read"),
        ({"npz": "one.npy"}, r"\.npz' names 'one.npy', which cannot be read \(it is not an .npz file, or is damaged\)"),
        ({"npz": "cut.npz"}, r"\.npz' names 'cut.npz', which cannot be read"),
        (
            {"key": "1"},
            r"\.key' is '1', which 'routes.npz' does not have; it has 3 keys, for example 0, objects, floats",
        ),
        (
            {"key": "objects"},
            r"\.key' names object \(2,\) of 'routes.npz'; it must be integers \[tokens, layers, top-k\]",
        ),
        ({"key": "floats"}, r"\.key' names float64 \(3, 2, 2\) of 'routes.npz'; it must be integers"),
        ({"key": 1}, r"' must name a file and a key of it"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, dict) else "",
)
def test_a_reference_that_is_wrong_names_the_line(tmp_path, read, reference, says):
    folder = tmp_path.parent / f"{tmp_path.name}-outside"
    folder.mkdir()
    np.savez(folder / "routes.npz", **{"0": np.array(ROUTES)})
    (tmp_path / "link.npz").symlink_to(folder / "routes.npz")
    arrays = {"0": np.array(ROUTES), "objects": np.array([{}, None]), "floats": np.array(ROUTES) / 2}
    np.savez(tmp_path / "routes.npz", allow_pickle=True, **arrays)
    np.save(tmp_path / "one.npy", np.array(ROUTES))
    (tmp_path / "text.npz").write_text("routes")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "routes.npz").read_bytes()[:-30])
    with pytest.raises(SampleError, match=rf"rollouts\.jsonl:2: field 'routed_experts{says}"):
        read(TOKENS, in_file(**reference))


@pytest.mark.parametrize("shape", [(1000, 1000, 100), (1, 1000, 100_000)])
def test_an_array_larger_than_its_line_is_not_read(tmp_path, read, monkeypatch, shape):
    np.savez_compressed(tmp_path / "routes.npz", **{"0": np.zeros(shape, dtype=np.int8)})
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    with pytest.raises(SampleError, match=r"rollouts\.jsonl:1: field 'routed_experts\.key' names int8 \(1"):
        read(in_file())


def test_routes_of_new_tokens_name_their_start(read):
    response = {"tokens": TOKENS["tokens"], "loss_mask": TOKENS["loss_mask"]}
    (whole,) = read(response | {"routed_experts": [None, *ROUTES[1:]]})
    for form in ({"ids": ROUTES[1:]}, pack_array(np.array(ROUTES[1:], dtype=np.int16))):
        (sample,) = read(response | {"routed_experts": {"start": 1, **form}})
        assert np.array_equal(sample.signals.routes.ids, whole.signals.routes.ids)
    with pytest.raises(SampleError, match=r"field 'routed_experts\.start' is -1"):
        read(response | {"routed_experts": {"start": -1, "ids": ROUTES[1:]}})


def test_placeholder_in_the_middle_is_warned_of(read, caplog):
    real, placeholder = [[0, 3], [2, 1]], [[0, 1], [0, 1]]
    row = {"tokens": [1, 2, 3, 4, 5]}
    read(row | {"routed_experts": [real, real, real, placeholder, placeholder]})
    assert caplog.messages == []
    read(row | {"routed_experts": [real, placeholder, real, real, None]})
    (said,) = caplog.messages
    assert "rollouts.jsonl:1: field 'routed_experts' sends the token at index 1 to the first experts" in said


def whole_npz(dtype="<i4", size="3"):
    return npz_with(f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({size}, 2, 2), }}\n".encode())


def npz_with(header, body=bytes(48)):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("0.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + body)
    return stream.getvalue()


def flip_bit(places):
    content = bytearray(whole_npz())
    for place in places:
        content[place // 8 % len(content)] ^= 1 << place % 8
    return bytes(content)


DTYPES = st.sampled_from(
    ["<i4", ">i4", "|O", "<M8[s]", "<c8", "<U9", "|V4", "<i3", "i4,i4", "<f4", "|S0", "\\d", "|b1"]
)
SIZES = st.sampled_from(
    ["3", "4", "0", "-1", "True", "1" + "0" * 30, "3.0", "3L", "None", "nan", "(" * 200, "[" * 5000]
)
FILES = (
    st.lists(st.integers(0, 1 << 12), min_size=1, max_size=4).map(flip_bit)
    | st.binary(max_size=900).map(npz_with)
    | st.builds(whole_npz, DTYPES, SIZES)
    | st.integers(0, 200).map(lambda end: whole_npz()[:end])
)
NUMBERS = st.sampled_from([0, 1, 2, 3, -1, True, 1.0, None, "3", [3], 2**31, 2**32, 2**63, 10**30, {}])


def end_in_a_sentence(folder, *records):
    """Read records; each that cannot be read is skipped with one sentence in our words, which names file and line."""
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps({**TOKENS, **record}) + "\n" for record in [*records, {}]))
    skipped = Skipped()
    found = read_samples(path, on_error="skip", skipped=skipped)
    assert len(found) + skipped.count == len(records) + 1
    for sentence in skipped.first:
        assert sentence.startswith(f"{path}:1: field 'routed_experts")
        assert "\n" not in sentence
        assert not any(word in sentence for word in ("allow_pickle", "header", "reshape", "inhomogeneous"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=FILES)
@example(content=npz_with(b"{'descr': '<i4',"))
@example(content=npz_with(b"  {\n x\n   y"))
@example(content=npz_with(b"(" * 900))
@example(content=npz_with(b"-" * 9000 + b"1"))
@example(content=npz_with(b"{'descr': '<i4\0'}"))
def test_any_file_is_read_or_skipped_with_a_sentence(tmp_path, content):
    (tmp_path / "routes.npz").write_bytes(content)
    end_in_a_sentence(tmp_path, in_file())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(NUMBERS, max_size=5) | NUMBERS,
    dtype=st.sampled_from(["int32", "int9", None, [], {}]),
    cut=st.booleans(),
)
@example(shape=[2**32, 2**32], dtype="int32", cut=True)
@example(shape=[[1], [2, 3]], dtype="int32", cut=True)
@example(shape=[1] * 66, dtype="int32", cut=False)
@example(shape=[2**31 - 1, 2**16, 0], dtype="int64", cut=True)
def test_any_packed_array_is_read_or_skipped_with_a_sentence(tmp_path, shape, dtype, cut):
    end_in_a_sentence(
        tmp_path, {"routed_experts": packed(ROUTES, shape=shape) | {"dtype": dtype} | ({"data": ""} if cut else {})}
    )


@pytest.mark.parametrize("kind", ["loop", "fifo", "folder", "encrypted", "bzip2", "twice"])
def test_files_of_every_kind_are_read_or_skipped_with_a_sentence(tmp_path, kind):
    path = tmp_path / "routes.npz"
    if kind == "loop":
        path.symlink_to(path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "encrypted":
        content = bytearray(whole_npz())
        content[6] |= 1
        content[content.find(b"PK\1\2") + 8] |= 1
        path.write_bytes(content)
    else:
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as file:
            warnings.simplefilter("ignore")
            for _ in range(1 + (kind == "twice")):
                file.writestr("0.npy", bytes(100))
    end_in_a_sentence(tmp_path, in_file())
