"""Reading JSONL: the samples, and errors that name file, line and field of every kind of bad data."""

import bz2
import gzip
import io
import json
import lzma
import os
import sys

import pytest
from data_sources import CHAT, CharacterTokenizer, message
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.data import ChatMessage, LineOptions, StreamedGroups, Tool, iter_sample_groups, read_samples
from mcore_prefix_tree.data.write import rows_file
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.sample import INT32_MAX, SampleError, Tempered


class ForgetfulTokenizer(CharacterTokenizer):
    """Shows only the last user message and later ones, so the history changes."""

    name = "forgetful"

    def encode_turns(self, messages, tools=()):
        turns = []
        for end, latest in enumerate(messages, start=1):
            if latest.role == "assistant":
                history = messages[:end]
                last_user = max(i for i, earlier in enumerate(history) if earlier.role == "user")
                turns.append(super().encode_turns(history[last_user:])[-1])
        return turns


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines, name="data.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join((x if isinstance(x, bytes) else encode(x)) + b"\n" for x in lines))
        return str(path)

    return write_lines


def encode(line):
    return (line if isinstance(line, str) else json.dumps(line)).encode("utf-8")


def text_of(sample):
    return "".join(chr(token) for token in sample.tokens)


def scored_text(sample):
    return "".join(chr(token) for token, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight)


def test_token_lines(write):
    path = write(
        {"tokens": [3, 1, 4], "loss_mask": [0, 1, 0.5], "merge_key": "policy-7", "reward": 1.0},
        "",
        "  \t ",
        {"tokens": [0]},
    )
    first, second = read_samples(path)
    assert first.tokens.tolist() == [3, 1, 4]
    assert first.loss_mask.tolist() == [0.0, 1.0, 0.5]
    assert first.merge_key == "policy-7"
    assert first.source == f"{path}:1"
    assert (second.tokens.tolist(), second.loss_mask.tolist(), second.merge_key) == ([0], [1.0], None)
    assert second.source == f"{path}:4"  # blank lines count


@given(st.lists(st.lists(st.integers(0, INT32_MAX), min_size=1, max_size=20), min_size=1, max_size=5))
def test_tokens_survive_unchanged(rows):
    stdin = io.TextIOWrapper(io.BytesIO(b"\n".join(encode({"tokens": row}) for row in rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        samples = read_samples("-")
    assert [sample.tokens.tolist() for sample in samples] == rows
    assert [sample.source for sample in samples] == [f"<stdin>:{number}" for number in range(1, len(rows) + 1)]


@pytest.mark.parametrize("key", ["adapter-a", 3, 0.7, True, None])
def test_merge_key_is_any_scalar(write, key):
    (sample,) = read_samples(write({"tokens": [1], "merge_key": key}))
    assert sample.merge_key == key
    assert {sample.merge_key: 1}  # hashable


def test_temperature_is_part_of_the_merge_key(write):
    row = {"tokens": [1, 2], "temperature": 0.7}
    plain, keyed, cold = read_samples(write(row, row | {"merge_key": "a"}, {"tokens": [1, 2], "merge_key": "a"}))
    assert plain.merge_key == Tempered(temperature=0.7)
    assert keyed.merge_key == Tempered(temperature=0.7, key="a")
    assert [sample.temperature for sample in (plain, keyed, cold)] == [0.7, 0.7, 1.0]
    chat = {"messages": CHAT, "temperature": 2}
    turns = read_samples(write(chat), tokenizer=CharacterTokenizer(), expand_turns=True)
    assert {sample.temperature for sample in turns} == {2.0}


def test_a_temperature_of_1_is_that_of_a_sample_without(write):
    rows = [{"tokens": [1, 2, leaf], "temperature": 1.0} for leaf in (3, 4)] + [{"tokens": [1, 2, 5]}]
    samples = read_samples(write(*rows, {"tokens": [1, 2, 6], "temperature": 1, "merge_key": "a"}))
    assert [sample.merge_key for sample in samples] == [None, None, None, "a"]
    assert fold(samples[:3]).physical_tokens == 2 + 3


LINES = {
    "no newline at the end": ("a.jsonl", b'{"tokens": [1]}\r\n{"tokens": [2]}'),
    "line separators of Unicode": ("a.jsonl", '{"tokens": [1], "note": "a\u2028b\u0085c"}\n{"tokens": [2]}\n'.encode()),
    "a byte order mark": ("a.jsonl", b'\xef\xbb\xbf{"tokens": [1]}\n{"tokens": [2]}\n'),
    "a name that looks like a glob": ("a[1].jsonl", b'{"tokens": [1]}\n{"tokens": [2]}\n'),
}


@pytest.mark.parametrize("case", LINES)
def test_lines_are_samples(tmp_path, case):
    name, content = LINES[case]
    (tmp_path / name).write_bytes(content)
    samples = read_samples(str(tmp_path / name))
    assert [(sample.tokens.tolist(), sample.source) for sample in samples] == [
        ([number], f"{tmp_path / name}:{number}") for number in (1, 2)
    ]


def test_glob_is_sorted_and_lists_keep_their_order(tmp_path, write):
    for number in (2, 10, 1):
        write({"tokens": [number]}, name=f"shard-{number:02d}.jsonl")
    extra = write({"tokens": [99]}, name="extra.jsonl")
    (tmp_path / "shard-dir.jsonl").mkdir()
    samples = read_samples([extra, str(tmp_path / "shard-*.jsonl")])
    assert [sample.tokens[0] for sample in samples] == [99, 1, 2, 10]


def test_null_is_missing(write):
    path = write({"tokens": [1, 2], "messages": None, "reward": None}, {"messages": CHAT[:2], "loss_mask": None})
    assert [text_of(sample) for sample in read_samples(path, tokenizer=CharacterTokenizer())] == ["\1\2", "UhiAyo\0"]


@pytest.mark.parametrize("suffix", [".gz", ".GZ"])
def test_gzip(tmp_path, suffix):
    path = tmp_path / f"data.jsonl{suffix}"
    path.write_bytes(gzip.compress(b'{"tokens": [7, 8]}\n'))
    (sample,) = read_samples(path)
    assert (sample.tokens.tolist(), sample.source) == ([7, 8], f"{path}:1")
    with pytest.raises(SampleError, match=r"cannot be read from the middle, which streaming does; unpack it"):
        StreamedGroups(path, LineOptions())
    with rows_file(path) as file:
        file.add([{"tokens": [9]}])
    assert read_samples(path)[0].tokens.tolist() == [9]


def test_conversation_is_one_sample_with_every_turn_scored(write):
    path = write({"messages": CHAT})
    (sample,) = read_samples(path, tokenizer=CharacterTokenizer())
    assert text_of(sample) == "UhiAyo\0UokAa\0"  # text after the last assistant turn is dropped
    assert scored_text(sample) == "yo\0a\0"
    assert sample.source == f"{path}:1"


def test_expanded_turns_branch_like_the_conversations(write):
    other = [*CHAT[:3], message("assistant", "b")]
    path = write({"messages": CHAT, "merge_key": 1}, {"tokens": [1, 2]}, {"messages": other})
    groups = list(iter_sample_groups(path, LineOptions(tokenizer=CharacterTokenizer(), expand_turns=True)))
    assert [[text_of(s) for s in group] for group in groups] == [
        ["UhiAyo\0", "UhiAyo\0UokAa\0"],
        ["\1\2"],
        ["UhiAyo\0", "UhiAyo\0UokAb\0"],
    ]
    assert [[scored_text(s) for s in group] for group in groups] == [["yo\0", "a\0"], ["\1\2"], ["yo\0", "b\0"]]
    assert [s.source for s in groups[0]] == [f"{path}:1 turn 0", f"{path}:1 turn 1"]
    assert [s.merge_key for s in groups[0]] == [1, 1]
    assert groups[1][0].source == f"{path}:2"


def test_rewritten_history_only_allows_expanded_turns(write):
    path = write({"messages": CHAT})
    tokenizer = ForgetfulTokenizer()
    with pytest.raises(SampleError) as caught:
        read_samples(path, tokenizer=tokenizer)
    assert str(caught.value) == (
        f"{path}:1: field 'messages' cannot be one sample, because the chat format of tokenizer 'forgetful' rewrites "
        "the history after turn 0; set data.expand_turns, or use a tokenizer that keeps it, such as mistral-v7"
    )
    expanded = read_samples(path, tokenizer=tokenizer, expand_turns=True)
    assert [text_of(s) for s in expanded] == ["UhiAyo\0", "UokAa\0"]


BAD_LINES = {
    "malformed": ('{"tokens": [1}', "not valid JSON"),
    "truncated": ('{"tokens"', "not valid JSON"),
    "deep": ("[" * 100_000, "not valid JSON"),
    "too many digits": ('{"tokens": [' + "9" * 5000 + "]}", "not valid JSON"),
    "no object": ("[1, 2]", "each line must be one JSON object"),
    "twice": ('{"tokens": [1, 2], "note": 1, "tokens": [1]}', "has the field 'tokens' twice; drop one of them"),
    "twice, once null": ('{"reward": 1, "tokens": [1], "reward": null}', "has the field 'reward' twice; drop one of"),
    "neither": ('{"input_ids": [1]}', "none of the fields 'tokens', 'messages', 'conversations'"),
    "both": ('{"tokens": [1], "messages": []}', "the fields 'tokens' and 'messages', and each of them is a sample"),
    "empty": ('{"tokens": []}', "field 'tokens' is empty"),
    "text": ('{"tokens": "abc"}', "field 'tokens' must be a flat list of integers"),
    "null": ('{"tokens": null}', "none of the fields 'tokens', 'messages', 'conversations'"),
    "nested": ('{"tokens": [[1], [2]]}', "field 'tokens' must be a flat list of integers, but index 0 is [1]"),
    "boolean": ('{"tokens": [1, true]}', "field 'tokens' must be a flat list of integers, but index 1 is true"),
    "float": ('{"tokens": [1, 2.0]}', "field 'tokens' must be a flat list of integers, but index 1 is 2.0"),
    "nan": ('{"tokens": [1, NaN]}', "field 'tokens' must be a flat list of integers, but index 1 is NaN"),
    "negative": ('{"tokens": [1, 2, -3]}', "field 'tokens' has -3 at index 2; token ids are 0 to 2147483647"),
    "int32": ('{"tokens": [2147483648]}', "field 'tokens' has 2147483648 at index 0"),
    "huge": ('{"tokens": [1, ' + "9" * 60 + "]}", "field 'tokens' must be a flat list of integers"),
    "vocabulary": ('{"tokens": [1, 100]}', "field 'tokens' has 100 at index 1, outside the model's vocabulary of 100"),
    "too long": ('{"tokens": [1,2,3,4,5,6,7,8,9]}', "the sample has 9 tokens, but batch.max_tokens is 8"),
    "mask length": ('{"tokens": [1, 2], "loss_mask": [1]}', "field 'loss_mask' has 1 entries but 'tokens' has 2"),
    "mask nan": ('{"tokens": [1, 2], "loss_mask": [1, NaN]}', "field 'loss_mask' has nan at index 1"),
    "mask infinite": ('{"tokens": [1], "loss_mask": [Infinity]}', "field 'loss_mask' has inf at index 0"),
    "mask negative": ('{"tokens": [1], "loss_mask": [-1]}', "field 'loss_mask' has -1 at index 0"),
    "mask type": ('{"tokens": [1], "loss_mask": 1}', "field 'loss_mask' must be a flat list of numbers"),
    "mask text": ('{"tokens": [1], "loss_mask": ["1"]}', "field 'loss_mask' must be a flat list of numbers"),
    "mask null": ('{"tokens": [1], "loss_mask": [null]}', "field 'loss_mask' must be a flat list of numbers"),
    "mask ragged": ('{"tokens": [1, 2], "loss_mask": [1, [2]]}', "field 'loss_mask' must be a flat list of numbers"),
    "temperature 0": (
        '{"tokens": [1], "temperature": 0}',
        "field 'temperature' must be greater than or equal to 0.001, not 0",
    ),
    "temperature text": (
        '{"tokens": [1], "temperature": "1"}',
        "field 'temperature' must be a valid number, not \"1\"",
    ),
    "temperature nan": ('{"tokens": [1], "temperature": NaN}', "field 'temperature' must be a finite number, not NaN"),
    "temperature tiny": (
        '{"tokens": [1], "temperature": 1e-310}',
        "field 'temperature' must be greater than or equal to 0.001, not 1e-310",
    ),
    "temperature boolean": (
        '{"tokens": [1], "temperature": true}',
        "field 'temperature' must be a valid number, not true",
    ),
    "temperature huge": (
        '{"tokens": [1], "temperature": 1' + "0" * 400 + "}",
        "field 'temperature' must be a valid number, not 1000",
    ),
    "key list": ('{"tokens": [1], "merge_key": [1]}', "field 'merge_key' must be a string, a finite number"),
    "key object": ('{"tokens": [1], "merge_key": {}}', "field 'merge_key' must be a string, a finite number"),
    "key nan": ('{"tokens": [1], "merge_key": NaN}', "field 'merge_key' must be a string, a finite number"),
    "key infinite": ('{"tokens": [1], "merge_key": Infinity}', "field 'merge_key' must be a string, a finite number"),
    "tools": ('{"messages": [{"role": "assistant", "content": "a"}], "tools": 3}', "field 'tools' must be a list"),
    "chat mask": ('{"messages": [], "loss_mask": []}', "field 'loss_mask' goes with 'tokens'"),
    "chat role": ('{"messages": [{"role": "bot", "content": ""}]}', "field 'messages[0].role' must be 'system', "),
    "chat format": (
        '{"messages": [{"role": "assistant", "content": "unspeakable"}]}',
        "field 'messages' does not fit",
    ),
    "chat too long": (
        '{"messages": [{"role": "assistant", "content": "12345678"}]}',
        "the sample has 10 tokens, but batch.max_tokens is 8",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines_name_file_line_and_field(write, case):
    line, reason = BAD_LINES[case]
    path = write({"tokens": [1]}, "", line, {"tokens": [1]})
    with pytest.raises(SampleError) as caught:
        read_samples(path, tokenizer=CharacterTokenizer(), vocab_size=100, limits={"batch.max_tokens": 8})
    assert str(caught.value).startswith(
        f"{path}:3: {reason}" if not reason.startswith(("the fields", "none")) else f"{path}:3: has"
    )
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_duplicate_keys_inside_a_field_are_ignored(write):
    path = write('{"note": {"a": 1, "a": 2}, "messages": [{"role": "assistant", "content": "a"}]}')
    assert text_of(read_samples(path, tokenizer=CharacterTokenizer())[0]) == "Aa\0"


def test_lines_before_a_bad_one_are_delivered(write):
    groups = iter_sample_groups(write({"tokens": [1]}, "{"))
    assert next(groups)[0].tokens.tolist() == [1]
    with pytest.raises(SampleError, match=r":2: not valid JSON"):
        next(groups)


LINE = b'{"tokens": [7, 8]}\n'
TURNS = encode({"messages": CHAT}) + b"\n"
EXPANDED = {"tokenizer": CharacterTokenizer(), "expand_turns": True, "limits": {"batch.max_tokens": 8}}
# A file's name and content, the start of the error behind the path, and options.
REFUSED = {
    "gzip": ("data.jsonl", gzip.compress(LINE), ":1: the file is compressed; unpack it, or name a gzip file some"),
    "xz": ("data.jsonl", lzma.compress(LINE), ":1: the file is compressed; unpack it, or name a gzip file some"),
    "bzip2": ("data.jsonl", bz2.compress(LINE), ":1: the file is compressed; unpack it, or name a gzip file some"),
    "Parquet": ("data.jsonl", b"PAR1\x15\x04\x15\xe3\n",
                ":1: the file is Parquet, known by its name; call it something.parquet"),
    "Arrow": ("data.jsonl", b"ARROW1\0\0\xff\xff\xff\xff\n",
              ":1: the file is Arrow, known by its name; call it something.arrow"),
    "a stream of Arrow": ("data.jsonl", b"\xff\xff\xff\xff\x90\0\0\0\n",
                          ":1: the file is Arrow, known by its name; call it something.arrow"),
    "cut gzip": ("cut.jsonl.gz", gzip.compress(LINE)[:-6], ": cannot be read after line "),
    "a turn that is too long": (
        "data.jsonl", TURNS, ":1 turn 1: the sample has 13 tokens, but batch.max_tokens is 8; raise batch.max_tokens "
        "or shorten the sample", EXPANDED,
    ),
    "no tokenizer": (
        "data.jsonl", TURNS, ":1: field 'messages' needs a tokenizer; set data.tokenizer, or give 'tokens'",
    ),
    "not UTF-8": (
        "data.jsonl", LINE + b'{"note": "caf\xe9", "tokens": [1]}\n',
        ":2: byte 14 of the line is not UTF-8; convert the file to UTF-8",
    ),
    "blank": ("data.jsonl", b"\n   \n", ": no samples; there are no records"),
    "no file": ("nothing.jsonl", None, ": no such file in "),
    "a glob without a file": ("*.jsonl", None, ": this glob matches no file in "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(tmp_path, case):
    name, content, says, *options = REFUSED[case]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SampleError) as caught:
        read_samples(str(path), **(options[0] if options else {}))
    assert str(caught.value).startswith(f"{path}{says}")
    assert content is not None or str(caught.value).endswith(("; check the path", "; check the pattern"))
    if "Arrow" in case or case == "Parquet":
        with pytest.raises(SampleError) as streamed:
            StreamedGroups(str(path), LineOptions())
        assert str(streamed.value) == str(caught.value) == f"{path}{says}"


def test_folders_and_no_paths_are_refused(tmp_path):
    with pytest.raises(SampleError) as caught:
        read_samples(tmp_path)
    assert str(caught.value) == f"{tmp_path}: is a folder; name its files, for example '{tmp_path / '*.jsonl'}'"
    with pytest.raises(SampleError, match=r"no data paths; give data\.path at least one file"):
        read_samples([])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_file(write):
    path = write({"tokens": [1]})
    os.chmod(path, 0)
    with pytest.raises(SampleError, match=r"data\.jsonl: cannot be read after line 0: .*Permission denied"):
        read_samples(path)


def test_tokenizer_sees_parsed_messages(write):
    seen = []

    class Recorder(CharacterTokenizer):
        def encode_turns(self, messages, tools=()):
            seen.extend([*messages, *tools])
            return super().encode_turns(messages)

    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    read_samples(write({"messages": CHAT[:2], "tools": [tool]}), tokenizer=Recorder())
    assert seen == [
        ChatMessage(role="user", content="hi"),
        ChatMessage(role="assistant", content="yo"),
        Tool(definition=tool),
    ]
