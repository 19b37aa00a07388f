"""More than a thousand faulty inputs of every reader and command, from a seed."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fault_cases import Case, make_case
from fault_inputs import MESSAGES, RECIPE, ROWS, STEPS, TOOLS, lines, recipe_bytes
from fault_rules import RECIPE as RECIPE_RULES
from fault_rules import lines_are_valid, metrics_are_valid, record_is_valid

INSPECT = ("inspect", "data.jsonl", "--json")
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 1e300, -1e300, float("nan"), float("inf"), 2**31, 2**63, 10**400),
    *("", "1", "x", "\ud800", [], [None], [[1]], [True], ["1"], {}, {"a": 1}, [[[[1]]]]),
]
ENTRIES: list[Any] = [
    *(None, True, -1, 0, 0.5, 1.0, 1e300, -1e300, float("nan"), float("-inf"), 2**31, 2**64, "1", "x", [1], [], {})
]


class Random(random.Random):
    """A seeded source that cuts lists of cases to size."""

    def some(self, cases: Iterator[Case] | Sequence[Case], count: int) -> list[Case]:
        found = list(cases)
        return self.sample(found, min(count, len(found)))


def all_cases(bases: Path, seed: int = 18) -> list[Case]:
    """Return every case, the same from the same seed; ``bases`` has a checkpoint beside ``fault_inputs``' files."""
    rng = Random(seed)
    return [
        *rng.some(_fields(), 300),
        *_text_of_lines(rng),
        *_packed_lines(rng, bases),
        *rng.some(_messages(), 110),
        *_tables(rng, bases),
        *_columns(),
        *_tokenizers(rng, bases),
        *rng.some(_recipe_values(), 330),
        *_recipe_text(rng),
        *_recipe_contradictions(),
        *_options(),
        *_metrics(rng),
        *_checkpoints(rng, bases),
        *_outputs_and_inputs(),
    ]


def _dumped(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else json.dumps(value)
    return text if len(text) < 40 else f"{text[:37]}..."


# JSON Lines ----------------------------------------------------------------------------------------------------------


def _with_row(row: Any, at: int, name: str, command: Sequence[str] = INSPECT) -> Case:
    rows = copy.deepcopy(ROWS)
    rows[at] = row
    valid, files = record_is_valid(json.loads(json.dumps(row))), {"data.jsonl": lines(rows)}
    return make_case("JSON Lines, fields", name, command, (f"data.jsonl:{at + 1}",), is_valid=valid, files=files)


def _fields() -> Iterator[Case]:
    """A field of a sample with another value, an entry of a list with another one, a list of another length."""
    commands = [INSPECT, ("plan", "data.jsonl", "--max-tokens", "64"), ("inspect", "data.jsonl")]
    for number, field in enumerate(ROWS[0]):
        command = commands[number % len(commands)]
        for value in VALUES:
            yield _with_row({**ROWS[0], field: value}, 0, f"{field} = {_dumped(value)}", command)
        if isinstance(ROWS[0][field], list):
            for value in ENTRIES:
                for at in (0, 3):
                    if at < len(ROWS[0][field]):
                        changed = [*ROWS[0][field]]
                        changed[at] = value
                        yield _with_row({**ROWS[0], field: changed}, 0, f"{field}[{at}] = {_dumped(value)}", command)
            for changed in (ROWS[0][field][:-1], [*ROWS[0][field], 0], [ROWS[0][field]]):
                yield _with_row({**ROWS[0], field: changed}, 0, f"{field} = {_dumped(changed)}", command)
    for part in ("token_ids", "logprobs"):
        for value in ENTRIES:
            for at in (0, 3):
                teacher = copy.deepcopy(ROWS[0]["teacher"])
                teacher[part][at][1] = value
                yield _with_row({**ROWS[0], "teacher": teacher}, 0, f"teacher.{part}[{at}][1] = {_dumped(value)}")
        for value in VALUES:
            teacher = {**ROWS[0]["teacher"], part: value}
            yield _with_row({**ROWS[0], "teacher": teacher}, 0, f"teacher.{part} = {_dumped(value)}")
    for value in VALUES:
        yield _with_row({"tokens": [1, 2, 3], "turn": value}, 3, f"turn = {_dumped(value)}")
        yield (
            _with_row(value, 2, f"a line that is {_dumped(value)}")
            if value is not None
            else _with_row({}, 2, "a line without fields")
        )


def _lines_case(content: bytes, name: str, command: Sequence[str] = INSPECT) -> Case:
    valid, files = lines_are_valid(content), {"data.jsonl": content}
    return make_case("JSON Lines, text", name, command, ("data.jsonl",), is_valid=valid, files=files)


def _mutated(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Bytes with one fault, and its name."""
    at = rng.randrange(len(content))
    kind = rng.choice(["cut", "flip", "flip", "insert", "delete", "double", "zero"])
    if kind == "cut":
        return f"cut at byte {at}", content[:at]
    if kind == "flip":
        bit = rng.randrange(8)
        return f"bit {bit} of byte {at} flipped", content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    if kind == "insert":
        byte = rng.choice([0, 9, 10, 13, 34, 44, 45, 48, 58, 91, 92, 93, 123, 125, 128, 255])
        return f"byte {byte} inserted at {at}", content[:at] + bytes([byte]) + content[at:]
    size = rng.randrange(1, 9)
    if kind == "delete":
        return f"{size} bytes removed at {at}", content[:at] + content[at + size :]
    if kind == "double":
        return f"{size} bytes doubled at {at}", content[: at + size] + content[at:]
    return f"{size} zero bytes at {at}", content[:at] + bytes(size) + content[at + size :]


def _text_of_lines(rng: random.Random) -> Iterator[Case]:
    good = lines(ROWS)
    for _ in range(120):
        name, content = _mutated(rng, good)
        yield _lines_case(content, name)
    text = good.decode().replace('"k"', '"é"')
    for encoding in ("utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig", "utf-7", "cp037"):
        yield _lines_case(text.encode(encoding), f"encoded as {encoding}")
    deep = "[" * 100_000
    row = '{"tokens": [1, 2]}\n'
    for name, content in {
        "empty": "",
        "blank": "\n \n\t\n",
        "CRLF": text.replace("\n", "\r\n"),
        "CR": text.replace("\n", "\r"),
        "no last newline": text[:-1],
        "BOM in line 2": row + "\ufeff" + row,
        "two BOMs": "\ufeff\ufeff" + row,
        "key twice": '{"tokens": [1], "tokens": [2]}\n',
        "key of a teacher twice": '{"tokens": [1], "teacher": {"token_ids": [], "token_ids": []}}\n',
        "two objects in a line": row[:-1] + row,
        "an array of objects": f"[{row[:-1]}, {row[:-1]}]\n",
        "single quotes": row.replace('"', "'"),
        "trailing comma": '{"tokens": [1, 2,]}\n',
        "comment": row[:-1] + " // comment\n",
        "deep list": row + '{"tokens": ' + deep + "\n",
        "deep list, closed": row + '{"tokens": ' + deep + "]" * 100_000 + "}\n",
        "deep unknown field": row + '{"tokens": [1], "x": ' + "[" * 900 + "]" * 900 + "}\n",
        "huge integer": '{"tokens": [' + "9" * 5000 + "]}\n",
        "huge exponent": '{"tokens": [1, 2], "reward": 1e99999}\n',
        "hexadecimal": '{"tokens": [0x10]}\n',
        "leading zero": '{"tokens": [01]}\n',
        "plus sign": '{"tokens": [+1]}\n',
        "NaN token": '{"tokens": [NaN]}\n',
        "lone surrogate as id": '{"tokens": [1, 2], "group": "\\ud800"}\n',
        "lone surrogate as field": '{"tokens": [1, 2], "\\ud800": 1}\n',
        "escaped NUL as id": '{"tokens": [1, 2], "group": "\\u0000"}\n',
        "control character in a string": '{"tokens": [1, 2], "group": "\x01"}\n',
        "line separator": '{"tokens": [1, 2], "group": "\u2028"}\n',
        "long line": '{"tokens": [' + "1, " * 300_000 + "1]}\n",
        "many blank lines": "\n" * 100_000 + row,
        "YAML": "tokens: [1, 2]\n",
        "Python": "{'tokens': (1, 2), 'label': None}\n",
    }.items():
        yield _lines_case(content.encode("utf-8", "surrogatepass"), name)
    for name, raw in {
        "zip": b"PK\x03\x04" + bytes(60),
        "gzip by content": gzip.compress(good),
        "Zstandard by content": b"\x28\xb5\x2f\xfd" + bytes(60),
        "Parquet by content": b"PAR1" + bytes(60),
        "Arrow by content": b"ARROW1" + bytes(60),
        "pickle": b"\x80\x04K\x01.",
        "ELF": b"\x7fELF" + bytes(60),
        "random bytes": random.Random(1).randbytes(400),
        "zero bytes": bytes(400),
    }.items():
        yield _lines_case(raw, name)
    bad = lines([ROWS[1], {"tokens": []}])
    for command in (
        ("plan", "data.jsonl", "--max-tokens", "64"),
        ("train", "recipe.yaml"),
        ("verify", "recipe.yaml"),
        ("bench", "step", "recipe.yaml", "--repeats", "1"),
        ("train", "recipe.yaml", "data.streaming=true"),
        ("train", "recipe.yaml", "data.streaming=true", "data.num_workers=0"),
        ("train", "recipe.yaml", "validation.path=data.jsonl", "data.path=other.jsonl"),
    ):
        for name, content in (("an empty sample", bad), ("a cut file", good[:200]), ("an empty file", b"")):
            case = _lines_case(content, f"{name}, through {' '.join(command[:2])}", command)
            files = {**case.files, "recipe.yaml": recipe_bytes(RECIPE), "other.jsonl": good}
            yield Case(**{**vars(case), "files": files})
    for name, content in (("an empty sample", bad), ("a cut file", good[:200])):
        yield make_case(
            "JSON Lines, text", f"{name}, on standard input", ("inspect", "-"), ("<stdin>:",), stdin=content
        )


def _packed_lines(rng: random.Random, bases: Path) -> Iterator[Case]:
    good = (bases / "gzip" / "data.jsonl.gz").read_bytes()
    faults = [_mutated(rng, good) for _ in range(20)]
    faults += [("half of the file", good[: len(good) // 2]), ("not packed", lines(ROWS)), ("empty", b"")]
    faults += [("junk behind the end", good + b"junk")]
    command, file = ("inspect", "data.jsonl.gz", "--json"), "data.jsonl.gz"
    for name, content in faults:
        files = {file: content}
        yield make_case(
            "JSON Lines, packed", f"gzip: {name}", command, (file,), base="gzip", files=files, same_output=True
        )


# Chat messages -------------------------------------------------------------------------------------------------------

_PATHS: dict[tuple[Any, ...], list[Any]] = {  # of a record, and which of _CHAT_VALUES are valid there
    ("messages",): [],
    **{("messages", at): [] for at in range(5)},
    **{("messages", at, "role"): [] for at in range(5)},
    **{("messages", at, "content"): [[]] * (at in (1, 4)) for at in (0, 1, 3, 4)},
    ("messages", 2, "tool_calls"): [],
    ("messages", 2, "tool_calls", 0): [],
    ("messages", 2, "tool_calls", 0, "function"): [],
    ("messages", 2, "tool_calls", 0, "function", "name"): [],
    ("messages", 2, "tool_calls", 0, "function", "arguments"): [{}, {"a": 1}],
    ("messages", 3, "tool_call_id"): [None],
    ("messages", 3, "name"): [None],
    ("messages", 4, "function_call"): [None],
    ("messages", 4, "reasoning_content"): [None],
    ("messages", 4, "weight"): [None, True, 0, 1.5],
    ("tools",): [None, []],
    ("tools", 0): [],
    ("tools", 0, "function"): [],
    ("tools", 0, "function", "name"): [],
    ("tools", 0, "function", "description"): [None],
    ("tools", 0, "function", "parameters"): [None, {}, {"a": 1}],
    ("loss_mask",): [None],
    ("old_logprobs",): [None],
    ("reward",): [None, 0, 1.5],
}
_CHAT_VALUES: list[Any] = [None, True, 0, 1.5, [], [1], {}, {"a": 1}, "\ud800", 10**400, float("nan")]


def _messages() -> Iterator[Case]:
    for path, valid in _PATHS.items():
        for value in _CHAT_VALUES:
            row: Any = copy.deepcopy({"messages": MESSAGES, "tools": TOOLS})
            holder = row
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = value
            is_valid = any(type(one) is type(value) and one == value for one in valid)
            name, files = f"{'.'.join(map(str, path))} = {_dumped(value)}", {"chat.jsonl": lines([row])}
            command = ("inspect", "chat.jsonl")
            yield make_case("chat messages", name, command, ("chat.jsonl:1",), is_valid=is_valid, files=files)


# Tables --------------------------------------------------------------------------------------------------------------


def _table_rows_are_valid(path: Path) -> bool:
    """Read a table in a separate process, as a damaged one may end it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pa.OSFile(str(path)) as file:
                is_file = file.read(6) == b"ARROW1"
            with pa.OSFile(str(path)) as file:
                reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
                found = reader.read_all()
                found.validate(full=True)
                rows = found.to_pylist()
            status = 0 if rows and all(map(record_is_valid, rows)) else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _tables(rng: random.Random, bases: Path) -> Iterator[Case]:
    """Bytes of tables. A Parquet file has checksums, an Arrow file none, so that its values have to be valid only."""
    for file, count in (("data.parquet", 60), ("data.arrow", 40), ("stream.arrow", 25), ("data.feather", 25)):
        good, checked = (bases / "tables" / file).read_bytes(), file == "data.parquet"
        reader, command = "Parquet" if checked else "Arrow, Feather", ("inspect", file, "--json")
        for _ in range(count):
            name, content = _mutated(rng, good)
            if not checked:
                (bases / "mutated").write_bytes(content)
            more = {"base": "tables", "files": {file: content}, "same_output": checked}
            is_valid = not checked and _table_rows_are_valid(bases / "mutated")
            yield make_case(reader, f"{file}: {name}", command, (file,), is_valid=is_valid, **more)
        for name, content in (("empty", b""), ("text", lines(ROWS)), ("zero bytes", bytes(500)), ("magic", good[:8])):
            yield make_case(reader, f"{file}: {name}", command, (file,), files={file: content})


def _columns() -> Iterator[Case]:
    """Columns of other types, and additional columns."""
    int32, float32 = pa.list_(pa.int32()), pa.list_(pa.float32())
    tokens = pa.array([[1, 2, 3]], type=int32)
    not_utf8 = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    made: dict[str, tuple[dict[str, Any] | pa.Table, bool]] = {
        "tokens of int8": ({"tokens": pa.array([[1, 2, 3]], type=pa.list_(pa.int8()))}, True),
        "tokens of uint64": ({"tokens": pa.array([[1, 2]], type=pa.list_(pa.uint64()))}, True),
        "tokens in a large list": ({"tokens": pa.array([[1, 2]], type=pa.large_list(pa.int32()))}, True),
        "tokens in a fixed list": ({"tokens": pa.array([[1, 2]], type=pa.list_(pa.int32(), 2))}, True),
        "tokens beyond int32": ({"tokens": pa.array([[2**31]], type=pa.list_(pa.int64()))}, False),
        "tokens beyond int64": ({"tokens": pa.array([[2**63]], type=pa.list_(pa.uint64()))}, False),
        "negative tokens": ({"tokens": pa.array([[-1]], type=int32)}, False),
        "tokens of float": ({"tokens": pa.array([[1.0]], type=float32)}, False),
        "tokens of text": ({"tokens": pa.array([["1"]])}, False),
        "tokens of bool": ({"tokens": pa.array([[True]])}, False),
        "tokens of decimals": ({"tokens": pa.array([[Decimal(1)]])}, False),
        "tokens of dates": ({"tokens": pa.array([[1]], type=pa.list_(pa.timestamp("s")))}, False),
        "tokens as text": ({"tokens": pa.array(["1 2 3"])}, False),
        "tokens as bytes": ({"tokens": pa.array([b"123"])}, False),
        "tokens as a number": ({"tokens": pa.array([1])}, False),
        "tokens of nothing": ({"tokens": pa.array([None], type=pa.null())}, False),
        "no tokens": ({"tokens": pa.array([[]], type=int32)}, False),
        "a null among tokens": ({"tokens": pa.array([[1, None]], type=int32)}, False),
        "lists of lists of tokens": ({"tokens": pa.array([[[1]]])}, False),
        "a struct of tokens": ({"tokens": pa.array([{"a": 1}])}, False),
        "a row without tokens": ({"tokens": pa.array([[1], None], type=int32)}, False),
        "no columns": ({}, False),
        "other columns": ({"x": pa.array([1])}, False),
        "no rows": ({"tokens": pa.array([], type=int32)}, False),
        "a column twice": (pa.Table.from_arrays([tokens, tokens], names=["tokens", "tokens"]), False),
        "a mask of text": ({"tokens": tokens, "loss_mask": pa.array([["1", "1", "1"]])}, False),
        "a short mask": ({"tokens": tokens, "loss_mask": pa.array([[1.0]], type=float32)}, False),
        "a mask with null": ({"tokens": tokens, "loss_mask": pa.array([[1.0, None, 1]], type=float32)}, False),
        "a mask with NaN": ({"tokens": tokens, "loss_mask": pa.array([[1.0, float("nan"), 1]])}, False),
        "a mask of half": ({"tokens": tokens, "loss_mask": pa.array([[1, 0, 1]], type=pa.list_(pa.float16()))}, True),
        "a reward of text": ({"tokens": tokens, "reward": pa.array(["1"])}, False),
        "a reward of bool": ({"tokens": tokens, "reward": pa.array([True])}, False),
        "a reward of NaN": ({"tokens": tokens, "reward": pa.array([float("nan")])}, False),
        "a reward as a date": ({"tokens": tokens, "reward": pa.array([1], type=pa.timestamp("s"))}, False),
        "a reward as a duration": ({"tokens": tokens, "reward": pa.array([1], type=pa.duration("s"))}, False),
        "a reward as bytes": ({"tokens": tokens, "reward": pa.array([b"1"])}, False),
        "a group of bytes": ({"tokens": tokens, "group": pa.array([b"g"])}, False),
        "a group as a date": ({"tokens": tokens, "group": pa.array([1], type=pa.date32())}, False),
        "a group as a list": ({"tokens": tokens, "group": pa.array([[1]])}, False),
        "a group of a dictionary": ({"tokens": tokens, "group": pa.array(["g"]).dictionary_encode()}, True),
        "chosen as a number": ({"tokens": tokens, "pair": pa.array(["p"]), "chosen": pa.array([1])}, False),
        "logprobs of text": ({"tokens": tokens, "old_logprobs": pa.array([["-1", "-1", "-1"]])}, False),
        "probabilities": ({"tokens": tokens, "old_logprobs": pa.array([[0.5, 0.5, 0.5]])}, False),
        "messages as text": ({"messages": pa.array(["hi"])}, False),
        "messages of numbers": ({"messages": pa.array([[1]])}, False),
        "a temperature of 0": ({"tokens": tokens, "temperature": pa.array([0.0])}, False),
        "a temperature of text": ({"tokens": tokens, "temperature": pa.array(["1"])}, False),
        "a merge key of bytes": ({"tokens": tokens, "merge_key": pa.array([b"k"])}, False),
        "a teacher of text": ({"tokens": tokens, "teacher": pa.array(["t"])}, False),
        "a teacher of half": ({"tokens": tokens, "teacher": pa.array([{"token_ids": [[1], [2], [3]]}])}, False),
        "text that is not UTF-8": ({"tokens": tokens, "group": not_utf8}, False),
    }
    for name, (columns, is_valid) in made.items():
        content = columns if isinstance(columns, pa.Table) else pa.table(columns)
        for suffix in (".parquet", ".arrow"):
            sink = io.BytesIO()
            try:
                if suffix == ".parquet":
                    pq.write_table(content, sink)
                else:
                    with pa.ipc.new_file(sink, content.schema) as writer:
                        writer.write_table(content)
            except (pa.ArrowException, ValueError):
                continue  # a format that has no such column
            reader, file = "Parquet" if suffix == ".parquet" else "Arrow, Feather", f"data{suffix}"
            files = {file: sink.getvalue()}
            yield make_case(reader, f"{suffix}: {name}", ("inspect", file), (file,), is_valid=is_valid, files=files)


# Tokenizers ----------------------------------------------------------------------------------------------------------

_BAD_TEMPLATES = {
    "syntax": "{% for m in messages %}",
    "unknown tag": "{% nope %}",
    "unknown filter": "{{ messages | nope }}",
    "unclosed": "{{ messages",
    "undefined call": "{{ nope() }}",
    "undefined attribute": "{{ nope.a.b }}",
    "division by zero": "{{ 1 // 0 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "exception": "{{ raise_exception('no') }}",
    "index": "{{ messages[99].content }}",
    "type": "{{ messages + 1 }}",
    "a huge range": "{% for i in range(1000000000) %}x{% endfor %}",
    "clock": "{{ strftime_now('%Y') }}",
    "lipsum": "{{ lipsum() }}",
    "random": "{{ messages | random }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "constant": "always the same",
    "empty": "",
    "no continuation": "{% if add_generation_prompt %}ready?{% else %}x{% endif %}",
    "attribute of a class": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['os'].system('true') }}",
    "format": "{{ '{0.__class__.__init__}'.format(messages) }}",
    "bytes": "\udcff",
}


def _tokenizers(rng: random.Random, bases: Path) -> Iterator[Case]:
    reader, command = "tokenizers and chat templates", ("inspect", "chat.jsonl", "--tokenizer", "tok")

    def case(name: str, files: dict[str, bytes | None], is_valid: bool = False) -> Case:
        return make_case(reader, name, command, ("'tok'",), is_valid=is_valid, base="tokenizer", files=files)

    yield case("unchanged", {}, True)
    for name, template in _BAD_TEMPLATES.items():
        yield case(f"template: {name}", {"tok/chat_template.jinja": template.encode("utf-8", "surrogateescape")})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        good = (bases / "tokenizer" / "tok" / file).read_bytes()
        broken = {
            "cut": good[: len(good) // 2],
            "a list": b"[]",
            "a number": b"1",
            "null": b"null",
            "empty": b"",
            "text": b"hello",
            "binary": rng.randbytes(300),
            "zero bytes": bytes(300),
            "UTF-16": good.decode().encode("utf-16"),
            "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "not UTF-8": good[:1] + b'"\xff": 1,' + good[1:],
        }
        for name, content in broken.items():
            yield case(f"{file}: {name}", {f"tok/{file}": content})
    whole = json.loads((bases / "tokenizer" / "tok" / "tokenizer.json").read_bytes())
    for key, values in {
        "model": [None, 1, "x", [], {}, {"type": "Nope"}, {"type": "BPE", "vocab": 1, "merges": []}],
        "added_tokens": [1, "x", {}, [1], [{}], [{"id": -1, "content": "a"}]],
        "pre_tokenizer": [1, {"type": "Nope"}],
        "decoder": [1, {"type": "Nope"}],
        "normalizer": [1, {"type": "Nope"}],
    }.items():
        for value in values:
            content = json.dumps({**whole, key: value}).encode()
            yield case(f"tokenizer.json: {key} = {_dumped(value)}", {"tok/tokenizer.json": content})
    config = json.loads((bases / "tokenizer" / "tok" / "tokenizer_config.json").read_bytes())
    for value in (None, 1, True, "", [], {}, [1], [{}], [{"name": "default"}], {"default": 1}, {"x": "y"}):
        content = json.dumps({**config, "chat_template": value}).encode()
        files = {"tok/tokenizer_config.json": content, "tok/chat_template.jinja": None}
        yield case(f"tokenizer_config.json: chat_template = {_dumped(value)}", files)
    yield case("no tokenizer.json", {"tok/tokenizer.json": None})
    for name, text in {
        "not JSON": "{",
        "a list": "[]",
        "a keyword of transformers": '{"tokenize": true}',
        "a wrong date": '{"strftime_now": "tomorrow"}',
        "a number": "1",
        "deep": "[" * 100_000,
        "NUL": '{"a": "\\u0000"}',
    }.items():
        option, names = "--chat-template-kwargs", (("--chat-template-kwargs", "chat_template_kwargs"),)
        asked = (*command, option, text)
        yield make_case(reader, f"{option}: {name}", asked, names, is_valid=name == "NUL", base="tokenizer")


# Recipes -------------------------------------------------------------------------------------------------------------

_RECIPE_VALUES: list[Any] = [
    *(None, True, -1, 0, 2, 1.5, 0.5, -0.5, float("nan"), float("inf"), "", "abc", [], [1], {}, {"a": 1}, [None])
]


def _changed(key: str, value: Any) -> dict[str, Any]:
    recipe = copy.deepcopy(RECIPE)
    holder = recipe
    *sections, name = key.split(".")
    for section in sections:
        holder = holder.setdefault(section, {})
    holder[name] = value
    return recipe


def _recipe_values() -> Iterator[Case]:
    for key, rule in RECIPE_RULES.items():
        values = [*_RECIPE_VALUES, "shuffled"] if not rule("abc") else _RECIPE_VALUES
        for value in values:
            yield make_case(
                "recipes, values",
                f"{key} = {_dumped(value)}",
                ("train", "recipe.yaml"),
                ((key.rpartition(".")[2], key, str(value)),),
                is_valid=rule(value),
                base="plain",
                files={"recipe.yaml": recipe_bytes(_changed(key, value))},
            )


def _recipe_text(rng: random.Random) -> Iterator[Case]:
    good = recipe_bytes(RECIPE)

    def case(name: str, content: bytes, names: Sequence[str] = ("recipe.yaml",), is_valid: bool = False) -> Case:
        files, command = {"recipe.yaml": content}, ("train", "recipe.yaml")
        return make_case("recipes, text", name, command, names, is_valid=is_valid, base="plain", files=files)

    for _ in range(40):
        at = rng.randrange(1, len(good) - len(b"compare: false\nverify:\n  enabled: false\n"))
        yield case(f"cut at byte {at}", good[:at], names=())
    for _ in range(25):
        at = rng.randrange(len(good))
        byte = bytes([rng.choice([0, 1, 7, 127, 128, 255])])
        # YAML has no such characters, but for the last three after others of UTF-8, and those two in comments.
        if byte != b"\x7f":
            yield case(f"byte {byte!r} inserted at {at}", good[:at] + byte + good[at:])
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [*{before}, *{before}, *{before}, *{before}, *{before}, *{before}, *{before}, *{before}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for name, text in {
        "empty": "",
        "a list": "[]",
        "a number": "1",
        "a string": "recipe",
        "null": "null",
        "no colon": "data\n",
        "JSON": "{",
        "deep": "a: " + "[" * 20_000,
        "deep mappings": "{a: " * 3000 + "1" + "}" * 3000,
        "a bomb of aliases": bomb,
        "an unknown alias": "data: *nope\n",
        "an alias in itself": "data: &a {x: *a}\n",
        "Python object": "data: !!python/object:os.system {}\n",
        "Python call": "data: !!python/object/apply:os.system ['true']\n",
        "an unknown tag": "data: !nope {}\n",
        "binary": "data: !!binary nope%\n",
        "two documents": "a: 1\n---\nb: 2\n",
        "interpolation": "data: {path: '${nope}'}\n",
        "interpolation of itself": "data: {path: '${data.path}'}\n",
        "an unknown resolver": "data: {path: '${nope:1}'}\n",
        "an open interpolation": "data: {path: '${'}\n",
        "environment": "data: {path: '${oc.env:NOPE_NOT_THERE}'}\n",
        "a list as a key": "? [a]\n: 1\n",
        "a number as a key": "1: 2\n",
        "null as a key": "null: 2\n",
        "a date as a key": "2026-11-23: 2\n",
        "bytes as a key": "!!binary aGk=: 2\n",
    }.items():
        yield case(name, text.encode(), names=("recipe.yaml",))
    for encoding in ("utf-16-le", "utf-32", "cp037"):
        yield case(f"encoded as {encoding}", good.decode().encode(encoding))
    for name, raw in {
        "pickle": b"\x80\x04K\x01.",
        "zero bytes": bytes(100),
        "random bytes": rng.randbytes(200),
        "not UTF-8": good + b"# \xff\n",
    }.items():
        yield case(name, raw)
    yield case("with a BOM", b"\xef\xbb\xbf" + good, names=(), is_valid=True)
    yield case("CRLF", good.replace(b"\n", b"\r\n"), names=(), is_valid=True)
    unknown = {**RECIPE, "x": 1}
    for command in (
        *(("train", "recipe.yaml"), ("verify", "recipe.yaml")),
        *(("score", "recipe.yaml", "--output", "out.jsonl"), ("bench", "step", "recipe.yaml")),
        *(("inspect", "data.jsonl", "--model", "recipe.yaml"), ("plan", "data.jsonl", "--model", "recipe.yaml")),
    ):
        for name, content in (
            ("unknown key", recipe_bytes(unknown)),
            ("not YAML", b"{"),
            ("empty", b""),
            ("wrong type", recipe_bytes(_changed("seed", "abc"))),
            ("missing section", recipe_bytes({key: one for key, one in RECIPE.items() if key != "batch"})),
            ("binary", bytes(range(256))),
        ):
            yield Case(**{**vars(case(f"{name}, through {' '.join(command[:2])}", content)), "arguments": command})
        absent = [word.replace("recipe.yaml", "nope.yaml") for word in command]
        yield make_case("recipes, text", f"no recipe, through {command[0]}", absent, ("nope.yaml",), base="plain")


def _recipe_contradictions() -> Iterator[Case]:
    """Settings that are wrong together, or overrides that are none; others are in model/test_train_refusals.py."""
    for overrides, *names in (
        ("batch.groups_per_step=2", "groups_per_step"),
        ("data.order=folded data.streaming=true", "order=folded"),
        ("fused_head=false head_chunk_rows=8", "head_chunk_rows"),
        ("model.num_attention_heads=3", "num_attention_heads"),
        ("model.hidden_size=33", "hidden_size"),
        ("optimizer.lr_warmup_steps=1", "lr_warmup_steps"),
        ("optimizer.lr_warmup_steps=1 optimizer.lr_warmup_fraction=0.5", "lr_warmup_fraction"),
        ("objective.name=nope", "objective.name"),
        ("objective.name=grpo", "group"),
        ("objective.name=dpo", "pair"),
        ("objective.name=kto", "label"),
        ("objective.name=distill", "teacher"),
        ("objective.name=critic", ("returns", "reward", "values")),
        ("objective.name=distill objective.options.teacher=full", "teacher_recipe"),
        ("objective.options.nope=1", "nope"),
        ("objective.teacher_recipe=nope.yaml", "teacher_recipe"),
        ("objective.name=distill objective.options.teacher=full objective.teacher_recipe=nope.yaml", "nope.yaml"),
        ("objective.name=distill objective.options.teacher=full objective.teacher_recipe=data.jsonl", "data.jsonl"),
        ("objective.name=distill objective.options.teacher=full objective.teacher_recipe=recipe.yaml", "recipe.yaml"),
        ("model.vocab_size=10", "vocabulary"),
        ("batch.length_buckets=[0]", "length_buckets"),
        ("batch.length_buckets=[64,32]", "length_buckets"),
        ("attention_backend=triton", "triton"),
        ("data.chat_template_kwargs.a=1", "chat_template_kwargs"),
        ("validation.path=-", "validation.path"),
        ("validation.path=nope.jsonl", "nope.jsonl"),
        ("log.metrics=x.txt", "log.metrics"),
        ("log.metrics=/proc/nope/x.jsonl", "log.metrics"),
        ("checkpoint.save=/proc/nope", "checkpoint.save"),
        ("checkpoint.pretrained_checkpoint=nope", "pretrained_checkpoint"),
        ("checkpoint.pretrained_checkpoint=data.jsonl", "pretrained_checkpoint"),
        ("--resume", "checkpoint.save"),
        ("--new-data", "--resume"),
        ("=1", "=1"),
        ("train_iters=1=2", "train_iters"),
        ("train_iters.x=1", "train_iters"),
        ("data=1", "data"),
        ("data.path.x=1", "data.path"),
        ("..=1", ".."),
        ("model.transformer=1", "model.transformer"),
        ("optimizer=[1]", "optimizer"),
        ("seed={", "seed"),
        ("seed=[1", "seed"),
        ("seed='", "seed"),
    ):
        command = ("train", "recipe.yaml", *overrides.split())
        yield make_case("recipes, contradictions", overrides, command, names, base="plain")


# Options -------------------------------------------------------------------------------------------------------------


def _no(word: str) -> bool:
    return False


def _zero(word: str) -> bool:
    return word == "0"


def _options() -> Iterator[Case]:
    words = ("", "x", "-1", "0", "1.5", "1e3", "nan", "0x10", "--", "\u0663x")
    inspect, plan = ("inspect", "data.jsonl"), ("plan", "data.jsonl")
    numbers: list[tuple[Sequence[str], str, Callable[[str], bool]]] = [
        (inspect, "--trees", _zero),
        (inspect, "--global-batch-size", _no),
        ((*inspect, "--global-batch-size", "2"), "--seed", _zero),
        (inspect, "--min-shared-tokens", _zero),
        (plan, "--max-tokens", _no),
        ((*plan, "--max-tokens", "64"), "--dp", _no),
        ((*plan, "--max-tokens", "64"), "--micro-batches", _no),
        ((*plan, "--max-tokens", "64"), "--length-buckets", _no),
        ((*inspect, "--global-batch-size", "2"), "--order", _no),
        (inspect, "--share", _no),
        (inspect, "--on-error", _no),
        (inspect, "--tokenizer", _no),
        (inspect, "--model", _no),
        ((*plan, "--max-tokens", "64"), "--plot", _no),
        (("bench", "step", "recipe.yaml"), "--repeats", _no),
        (("score", "recipe.yaml", "checkpoint.save=nope", "--output", "o.jsonl"), "--teacher-top-k", _no),
        (("score", "recipe.yaml", "checkpoint.save=nope"), "--output", _no),
    ]
    for command, option, rule in numbers:
        for word in words:
            yield make_case(
                f"options of {command[0]}",
                f"{option} {word!r}",
                (*command, f"{option}={word}"),
                ((option, "checkpoint.save", "nope", f"'{word}'", f"{word}:", "recipe", "length_buckets"),),
                is_valid=rule(word),
                base="plain",
            )
    for command in ("train", "verify", "inspect", "plan", "score", "bench", "bench step", "nope"):
        words = command.split()
        reader = f"options of {words[0]}" if command != "nope" else "options of all"
        for rest in (["--nope"], ["recipe.yaml", "--nope"], ["-x"]):
            names = (("nope", "-x", "missing", "recipe.yaml"),)
            yield make_case(reader, f"{command} {' '.join(rest)}", [*words, *rest], names, base="plain")
        if command not in ("bench", "nope", "verify"):  # which checks the installation then
            yield make_case(reader, f"{command} without arguments", words, (("RECIPE", "FILE", "--output"),))
    for rest in (["--nope"], ["-x"], ["nope"], [""], ["--version=1"]):
        yield make_case("options of all", f"no command, {rest[0]!r}", rest, (rest[0].split("=")[0],))
    files = ("nope.jsonl", ".", "*.nope", "", "/", "/dev/null", "\x01", "a" * 300, "nope/nope.jsonl", "recipe.yaml")
    for file in files:
        for command in ("inspect", "plan"):
            words = [command, file, *(["--max-tokens", "64"] if command == "plan" else [])]
            yield make_case(f"options of {command}", f"{command} {file[:20]!r}", words, (file[:20],), base="plain")


# Small files ---------------------------------------------------------------------------------------------------------


def _changed_json(value: Any, values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each part of a JSON value replaced by each of some values."""
    paths: list[tuple[Any, ...]] = [()]
    for path in paths:
        part = value
        for step in path:
            part = part[step]
        if isinstance(part, dict):
            paths += [(*path, key) for key in part]
        elif isinstance(part, list):
            paths += [(*path, at) for at in range(min(len(part), 2))]
    for path in paths:
        for one in values:
            changed = copy.deepcopy(value)
            if not path:
                yield f"all = {_dumped(one)}", one
                continue
            holder = changed
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = one
            yield f"{'.'.join(map(str, path))} = {_dumped(one)}", changed
        if path and isinstance(path[-1], str):
            changed = copy.deepcopy(value)
            holder = changed
            for step in path[:-1]:
                holder = holder[step]
            del holder[path[-1]]
            yield f"without {'.'.join(map(str, path))}", changed


def _metrics(rng: Random) -> Iterator[Case]:
    good = lines(STEPS)
    faults = [_mutated(rng, good) for _ in range(25)]
    values = [None, True, 0, -1, 1.5, "1", [], {}, 10**400]
    faults += [
        (name, lines([STEPS[0], one]))
        for name, one in _changed_json(STEPS[1], values)
        if "iteration" in name or "all" in name
    ]
    faults += [("binary", bytes(range(256))), ("deep", b"[" * 100_000 + b"\n"), ("a recipe", recipe_bytes(RECIPE))]
    file, command = "metrics.jsonl", ("train", "recipe.yaml", "log.metrics=metrics.jsonl")
    for name, content in faults:
        is_valid, files = metrics_are_valid(content), {file: content}
        yield make_case("metrics files", name, command, (file,), is_valid=is_valid, base="metrics", files=files)


CHECKPOINT = "runs/iter_0000001"
TRACKER = "runs/latest_checkpointed_iteration.txt"


def _checkpoints(rng: Random, bases: Path) -> Iterator[Case]:
    folder = bases / "checkpoint"
    score = ("score", "recipe.yaml", "checkpoint.save=runs", "--output", "scored.jsonl")
    resume = ("train", "recipe.yaml", "checkpoint.save=runs", "train_iters=2", "--resume")
    start = ("train", "recipe.yaml", "checkpoint.pretrained_checkpoint=runs")
    doors = [score, resume, start]
    number = 0

    def case(
        name: str, file: str, content: bytes | None, is_valid: bool, names: Sequence[Any], door: Any = None, **more: Any
    ) -> Case:
        nonlocal number
        number += 1
        name, files = f"{file.rpartition('/')[2]}: {name}", {file: content}
        door = door or doors[number % len(doors)]
        return make_case("checkpoints", name, door, names, is_valid=is_valid, base="checkpoint", files=files, **more)

    for content in (
        *(b"", b" ", b"x", b"-1", b"1.0", b"1e0", b"0x1", b"\xef\xbb\xbf1", b"\x00", b"\xff\xfe1\x00", b"1 1", b"2"),
        *(b"0", b"99999999999999999999", b"9" * 5000, b"release", b"\xd9\xa1", b"../x", b"1\n2\n", b"iter_0000001"),
    ):
        yield case(f"{content[:20]!r}", TRACKER, content, False, (("latest_checkpointed_iteration.txt", "runs"),))
    for content in (b"1\n", b" 1 ", b"0000001", b"1\r\n"):
        yield case(f"{content!r}", TRACKER, content, True, ())
    manifest = json.loads((folder / CHECKPOINT / "checksums.json").read_bytes())
    broken = [("empty", b""), ("cut", json.dumps(manifest).encode()[:50]), ("binary", bytes(range(256)))]
    broken += [("deep", b"[" * 100_000), ("UTF-16", json.dumps(manifest).encode("utf-16"))]
    changed = [(name, json.dumps(one).encode()) for name, one in _changed_json(manifest, [None, 1, "x", [], {}, ["x"]])]
    names = (("checksums.json", "iter_0000001"),)
    for name, content in [*broken, *rng.sample(changed, 20)]:
        # An encoding that JSON may have is no damage.
        yield case(name, f"{CHECKPOINT}/checksums.json", content, name == "UTF-16", names)
    for name, content in [
        *[("empty", b""), ("cut", b'{"sharded'), ("binary", bytes(range(256))), ("deep", b"[" * 100_000)],
        *[("a list", b"[]"), ("null", b"null"), ("zarr", b'{"sharded_backend": "zarr"}')],
        *[("a list as backend", b'{"sharded_backend": []}'), ("UTF-16", "{}".encode("utf-16"))],
    ]:
        yield case(name, f"{CHECKPOINT}/metadata.json", content, False, (("metadata.json", "iter_0000001"),))
    for file, count in ((".metadata", 16), ("common.pt", 8), ("__0_0.distcp", 12)):
        if file == "common.pt" and not (folder / CHECKPOINT / file).exists():
            continue  # megatron-core 0.19 writes none
        good = (folder / CHECKPOINT / file).read_bytes()
        for _ in range(count):
            name, content = _mutated(rng, good)
            # Bytes between the archives of tensors mean nothing, so that their fault may change nothing.
            scored = {"door": score, "same_output": True} if file == "__0_0.distcp" else {}
            if content != good:
                yield case(name, f"{CHECKPOINT}/{file}", content, False, ("iter_0000001",), **scored)
        yield case("missing", f"{CHECKPOINT}/{file}", None, False, ("iter_0000001",))
        yield case("empty", f"{CHECKPOINT}/{file}", b"", False, ("iter_0000001",))
    # The recipe is only informative: an unreadable one blocks nothing, and another model is rejected.
    written = (folder / CHECKPOINT / "recipe.yaml").read_bytes()
    for name, content in [
        *[("empty", b""), ("a list", b"[]"), ("not YAML", b"{"), ("binary", bytes(range(256)))],
        *[("a model that is a list", b"model: []"), ("deep", b"[" * 5000)],
        *[("UTF-16", written.decode().encode("utf-16"))],
        *[("Python object", b"model: !!python/object:os.system {}"), ("an unknown section", written + b"x: 1\n")],
        *[("an alias in itself", b"model: &a {x: *a}\n"), ("a number as a key", b"model: {1: 2}\n1: 2\n")],
        *[("an interpolation", b"seed: ${nope}\n")],
    ]:
        yield case(name, f"{CHECKPOINT}/recipe.yaml", content, True, ())


def _outputs_and_inputs() -> Iterator[Case]:
    """Inputs of score, and names of its output."""
    base = ("score", "recipe.yaml", "checkpoint.save=runs")
    to = (*base, "--output", "o.jsonl")
    itself = ("score", "recipe.yaml", f"checkpoint.save={CHECKPOINT}", "--output", "o.jsonl")
    critic = (*to, "objective.name=critic")
    for name, arguments, *names in (
        ("a folder as output", (*base, "--output", "runs"), "--output"),
        ("no such folder", (*base, "--output", "nope/o.jsonl"), "--output"),
        ("text as output", (*base, "--output", "o.txt"), "--output"),
        ("a device as output", (*base, "--output", "/dev/null"), "--output"),
        ("the data as output", (*base, "--output", "data.jsonl"), "--output"),
        ("no reference", (*to, "--reference", "nope"), "nope"),
        ("a file as reference", (*to, "--reference", "data.jsonl"), "data.jsonl"),
        ("a checkpoint as reference", (*to, "--reference", CHECKPOINT), "iter_0000001"),
        ("a checkpoint as folder", itself, "iter"),
        ("no checkpoint.save", ("score", "recipe.yaml", "--output", "o.jsonl"), "checkpoint.save"),
        ("top k beyond the vocabulary", (*to, "--teacher-top-k", "65"), "--teacher-top-k"),
        ("another vocabulary", (*to, "model.vocab_size=63"), "vocab_size"),
        ("another size", (*to, "model.hidden_size=64"), "hidden_size"),
        ("another number of layers", (*to, "model.num_layers=3"), "num_layers"),
        ("a scalar head", critic, ("critic", "iter_0000001", "runs")),
        ("top k of a critic", (*critic, "--teacher-top-k", "2"), "--teacher"),
    ):
        yield make_case("options of score", name, arguments, names, base="checkpoint")
    for name, row in (
        ("an empty sample", {"tokens": []}),
        ("outside the vocabulary", {"tokens": [64]}),
        ("messages without a tokenizer", {"messages": MESSAGES}),
    ):
        files = {"data.jsonl": lines([ROWS[1], row])}
        yield make_case("options of score", name, to, ("data.jsonl:2",), base="checkpoint", files=files)
