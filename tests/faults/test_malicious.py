"""No file runs code when it is opened, for example a checkpoint or a tokenizer, in any command that reads it."""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fault_cases import ACCEPTED, REFUSED, Case, Runner, Table, make_case
from fault_inputs import RECIPE, ROWS, lines, recipe_bytes
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

pytestmark = pytest.mark.ci


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def torch_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def read_metadata(folder: Path) -> Metadata:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())  # the test's own file
    return metadata


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def replace_object(folder: Path, data: bytes) -> None:
    """Put other bytes in place of the first object of the model that torch unpickles."""
    metadata = read_metadata(folder)
    index = next(
        index
        for index in metadata.storage_data
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata)
    )
    stored = metadata.storage_data[index]
    path = folder / stored.relative_path
    stored.offset, stored.length = path.stat().st_size, len(data)
    with open(path, "ab") as file:
        file.write(data)
    write_metadata(folder, metadata)


def metadata_is_code(folder: Path, marker: Path) -> None:
    write_metadata(folder, Payload(marker))


def metadata_carries_code(folder: Path, marker: Path) -> None:
    metadata = read_metadata(folder)
    metadata.planner_data = Payload(marker)
    write_metadata(folder, metadata)


def metadata_names_code_in_torch(folder: Path, marker: Path) -> None:
    # Payloads that a list of modules would let through: torch's own loader, from a module that metadata comes from.
    evil = marker.with_suffix(".pickle")
    evil.write_bytes(pickle.dumps(Payload(marker)))
    name = b"\x80\x04ctorch.distributed.checkpoint.filesystem\npickle.load\n"
    (folder / ".metadata").write_bytes(name + b"(cbuiltins\nopen\n(V" + str(evil).encode() + b"\nVrb\ntRtR.")


def object_is_code(folder: Path, marker: Path) -> None:
    replace_object(folder, torch_bytes(Payload(marker)))


def object_is_plain_pickle(folder: Path, marker: Path) -> None:
    replace_object(folder, pickle.dumps(Payload(marker)))


def object_is_state_of_fp8(folder: Path, marker: Path) -> None:
    # TransformerEngine would unpickle the bytes of this tensor.
    inner = torch.frombuffer(bytearray(pickle.dumps(Payload(marker))), dtype=torch.uint8)
    replace_object(folder, torch_bytes([inner]))


def common_is_code(folder: Path, marker: Path) -> None:
    torch.save(Payload(marker), folder / "common.pt")


def object_lies_elsewhere(folder: Path, marker: Path) -> None:
    metadata = read_metadata(folder)
    for index, stored in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            stored.relative_path = "../../../../etc/passwd"
    write_metadata(folder, metadata)


def other_backend(folder: Path, marker: Path) -> None:
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')


ATTACKS = [
    metadata_is_code,
    metadata_carries_code,
    metadata_names_code_in_torch,
    object_is_code,
    object_is_plain_pickle,
    object_is_state_of_fp8,
    common_is_code,
    object_lies_elsewhere,
    other_backend,
]
DISTILL = ("objective.name=distill", "objective.options.teacher=full")
SCORED = ("--output", "scored.jsonl")
DOORS = {
    "resume": ("train", "recipe.yaml", "checkpoint.save=runs", "train_iters=2", "--resume"),
    "pretrained": ("train", "recipe.yaml", "checkpoint.pretrained_checkpoint=runs"),
    "score": ("score", "recipe.yaml", "checkpoint.save=runs", *SCORED),
    "reference": ("score", "recipe.yaml", "checkpoint.save=good", "--reference", "runs", *SCORED),
    "teacher": ("train", "recipe.yaml", *DISTILL, "objective.teacher_recipe=teacher.yaml"),
}
FOLDER = "runs/iter_0000001"


def copies(work: Path) -> None:
    """Put a good run next to the attacked one, and the recipe of a teacher whose weights are the latter."""
    (work / "good").symlink_to(work.parents[1] / "bases" / "checkpoint" / "runs")
    (work / "teacher.yaml").write_bytes(recipe_bytes({**RECIPE, "checkpoint": {"save": "runs"}}))


def attack_checkpoint(attack: Callable[[Path, Path], None], marker: Path, work: Path) -> None:
    copies(work)
    attack(work / FOLDER, marker)


def checkpoints(marker: Path) -> Iterator[Case]:
    def make(name: str, arguments: Any, names: Any = (), prepare: Any = copies, **more: Any) -> Case:
        return make_case("checkpoints", name, arguments, names, base="checkpoint", prepare=prepare, **more)

    for door, arguments in DOORS.items():
        for attack in ATTACKS:
            yield make(
                f"{attack.__name__}, {door}", arguments, ("iter_0000001",), partial(attack_checkpoint, attack, marker)
            )
        for name in ("checksums.json", "metadata.json", "../latest_checkpointed_iteration.txt"):
            files = {f"{FOLDER}/{name}": pickle.dumps(Payload(marker))}
            yield make(f"a pickle as {name}, {door}", arguments, ("runs",), files=files)
        for number, text in enumerate(yaml_payloads(marker)):
            # It is only informative, and an unreadable one is ignored.
            name, files = (
                f"recipe.yaml next to a checkpoint, {number}, {door}",
                {f"{FOLDER}/recipe.yaml": f"seed: {text}\n".encode()},
            )
            yield make(name, arguments, files=files, is_valid=True)


def yaml_payloads(marker: Path) -> list[str]:
    """Texts that construct or call something in a YAML loader that is not safe, or in OmegaConf."""
    return [
        f"!!python/object/apply:os.system ['touch {marker}']",
        f"!!python/object/new:os.system ['touch {marker}']",
        f"!!python/object/apply:subprocess.Popen [['touch', '{marker}']]",
        "!!python/object/new:type {args: [x, !!python/tuple [], {}], state: !!python/name:os.system }",
        "!!python/module:antigravity",
        "!!python/name:os.system",
        f'!!python/object/apply:builtins.eval [\'__import__("os").system("touch {marker}")\']',
        f'\'${{eval:__import__("os").system("touch {marker}")}}\'',
        f"'${{oc.eval:os.system(\"touch {marker}\")}}'",
        f"'${{oc.decode:\"!!python/object/apply:os.system [touch {marker}]\"}}'",
    ]


def recipes(marker: Path) -> Iterator[Case]:
    for number, text in enumerate(yaml_payloads(marker)):
        recipe = recipe_bytes(RECIPE) + f"seed: {text}\n".encode()
        for arguments in (
            ("train", "recipe.yaml"),
            ("inspect", "data.jsonl", "--model", "recipe.yaml"),
            ("train", "good.yaml", *DISTILL, "objective.teacher_recipe=recipe.yaml"),
        ):
            name, files = (
                f"recipe {number}, {' '.join(arguments[:2])}",
                {"recipe.yaml": recipe, "good.yaml": recipe_bytes(RECIPE)},
            )
            yield make_case("recipes", name, arguments, ("recipe.yaml",), base="plain", files=files)
        command = ("train", "recipe.yaml", f"seed={text}")
        yield make_case("recipes", f"override {number}", command, ("seed",), base="plain")


CHAT = ("inspect", "chat.jsonl", "--tokenizer", "tok")
# Ways out of a template's sandbox to a function that runs a command.
ESCAPES = [
    "{{ cycler.__init__.__globals__.os.system(CMD) }}",
    "{{ joiner.__init__.__globals__['os'].system(CMD) }}",
    "{{ namespace.__init__.__globals__.os.popen(CMD).read() }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').system(CMD) }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system(CMD) }}",
    "{{ raise_exception.__globals__['os'].system(CMD) }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == 'Popen' %}{{ c(CMD, shell=True) }}"
    "{% endif %}{% endfor %}",
    "{{ (messages | attr('__class__')).__base__ | attr('__subclasses__')() }}",
    "{% set f = '{0.__class__.__init__.__globals__}'.format %}{{ f(cycler) }}",
    "{% set a = ['__cla', 'ss__'] | join %}{{ ''[a].mro()[1]['__subclasses__']() }}",
    "{{ messages | map('attr', '__class__') | map(attribute='__init__.__globals__') | list }}",
    "{{ ''.format_map({}) }}{{ '{0.__class__}'.format_map({'0': cycler}) }}{{ cycler.reset.__func__.__globals__ }}",
]


def tokenizers(marker: Path) -> Iterator[Case]:
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    module = f"{code}class Evil:\n    from_pretrained = classmethod(lambda *a, **k: None)\n".encode()
    auto = {"auto_map": {name: ["evil.Evil", "evil.Evil"] for name in ("AutoTokenizer", "AutoProcessor")}}
    auto_config = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}, "model_type": "evil"}
    modules = {f"tok/{name}.py": module for name in ("evil", "__init__", "tokenization_evil", "setup", "conftest")}
    files: dict[str, dict[str, bytes | None]] = {
        "auto_map of the tokenizer": {"tok/tokenizer_config.json": json.dumps(auto).encode()},
        "auto_map with a class": {"tok/tokenizer_config.json": json.dumps(auto | {"tokenizer_class": "Evil"}).encode()},
        "auto_map of the model": {"tok/config.json": json.dumps(auto_config).encode()},
        "auto_map alone": {
            "tok/config.json": json.dumps(auto_config).encode(),
            "tok/tokenizer_config.json": json.dumps(auto).encode(),
            "tok/tokenizer.json": None,
        },
        "a class of a module": {"tok/tokenizer_config.json": b'{"tokenizer_class": "evil.Evil"}'},
        "a pickle as tokenizer.json": {"tok/tokenizer.json": pickle.dumps(Payload(marker))},
        "a pickle as tokenizer.model": {
            "tok/tokenizer.json": None,
            "tok/tokenizer.model": pickle.dumps(Payload(marker)),
        },
        "a pickle as vocabulary": {
            "tok/tokenizer.json": None,
            "tok/vocab.pkl": pickle.dumps(Payload(marker)),
            "tok/vocab.bin": torch_bytes(Payload(marker)),
            "tok/tokenizer_config.json": b'{"tokenizer_class": "TransfoXLTokenizer"}',
        },
        "weights": {"tok/pytorch_model.bin": torch_bytes(Payload(marker))},
    }
    for name, changed in files.items():
        files_of = {**modules, **changed}
        yield make_case("tokenizer folders", name, CHAT, base="tokenizer", files=files_of, is_valid=True)
    command = repr(f"touch {marker}")
    for number, escape in enumerate(ESCAPES):
        template = escape.replace("CMD", command)
        for place in ("tok/chat_template.jinja", "tok/additional_chat_templates/tool_use.jinja"):
            name, changed = f"template {number}, {place}", {place: template.encode()}
            yield make_case("chat templates", name, CHAT, base="tokenizer", files=changed, is_valid=True)


def data(marker: Path) -> Iterator[Case]:
    payload = pickle.dumps(Payload(marker))
    tokens = pa.array([[1, 2, 3]], type=pa.list_(pa.int32()))
    schemas: dict[str, pa.Schema] = {}
    for extension in ("arrow.py_extension_type", "evil", "pickle", "arrow.opaque"):
        metadata = {b"ARROW:extension:name": extension.encode(), b"ARROW:extension:metadata": payload}
        schemas[f"extension {extension}"] = pa.schema([pa.field("tokens", tokens.type, metadata=metadata)])
    pandas = json.dumps({"columns": [{"name": "tokens", "pandas_type": "object", "numpy_type": "object"}]}).encode()
    schemas["metadata of pandas"] = pa.schema(
        [pa.field("tokens", tokens.type)], metadata={b"pandas": pandas, b"pickle": payload}
    )
    tables = {name: pa.Table.from_arrays([tokens], schema=schema) for name, schema in schemas.items()}
    tables["a column of pickles"] = pa.table({"tokens": tokens, "teacher": pa.array([payload])})
    tables["tokens of pickles"] = pa.table({"tokens": pa.array([payload])})
    tables["messages of pickles"] = pa.table({"messages": pa.array([payload])})
    for name, table in tables.items():
        for suffix in (".parquet", ".arrow", ".feather"):
            sink = io.BytesIO()
            if suffix == ".parquet":
                pq.write_table(table, sink)
            else:
                with pa.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(table)
            file, content = f"data{suffix}", sink.getvalue()
            yield make_case("data", f"{name}, {suffix}", ("inspect", file), files={file: content}, is_valid=True)
    text = base64.b64encode(payload).decode()
    for name, row in {
        "a teacher of text": {"teacher": text},
        "a teacher of tags": {"teacher": {"py/reduce": [{"py/type": "os.system"}, [f"touch {marker}"]]}},
        "a group of tags": {"group": f"!!python/object/apply:os.system ['touch {marker}']"},
        "token ids of text": {"teacher": {"token_ids": text, "logprobs": text}},
        "a class": {"__class__": "os.system", "__reduce__": [f"touch {marker}"]},
    }.items():
        command, files = ("inspect", "data.jsonl"), {"data.jsonl": lines([{**ROWS[1], **row}])}
        yield make_case("data", f"{name}, JSON Lines", command, files=files, is_valid=True)
    for suffix in (".jsonl", ".json", ".pkl", ".pt", ".npy", ".npz", ".parquet", ".arrow", ".jsonl.gz"):
        for kind, content in (("pickle", payload), ("torch", torch_bytes(Payload(marker)))):
            file = f"data{suffix}"
            yield make_case("data", f"{kind} named {file}", ("inspect", file), (file,), files={file: content})


def small_files(marker: Path) -> Iterator[Case]:
    tags = {"py/reduce": [{"py/type": "os.system"}, [f"touch {marker}"]]}
    for name, content in (
        ("a pickle", pickle.dumps(Payload(marker))),
        ("tags", json.dumps(tags).encode()),
        ("YAML", b"!!python/name:os.system"),
    ):
        file, command = "metrics.jsonl", ("train", "recipe.yaml", "log.metrics=metrics.jsonl")
        files = {file: content + b"\n"}
        yield make_case("metrics files", f"metrics file: {name}", command, (file,), base="metrics", files=files)


def some_checkpoints(marker: Path) -> Iterator[Case]:
    """Every attack through one door, and a separate one through each other door."""
    of_doors = [door for door in DOORS if door != "resume"]
    for case in checkpoints(marker):
        attack, _, door = case.name.rpartition(", ")
        if door == "resume" or attack == ATTACKS[of_doors.index(door)].__name__:
            yield case


@pytest.mark.parametrize(
    "kind",
    [some_checkpoints, pytest.param(checkpoints, marks=pytest.mark.slow), recipes, tokenizers, data, small_files],
    ids=lambda kind: kind.__name__,
)
def test_malicious_files_run_nothing(kind: Callable[[Path], Iterator[Case]], runner: Runner, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    table, executed = Table(), []
    for case in kind(marker):
        verdict, outcome = runner.judge(case)
        if kind in (tokenizers, data) and verdict in ("wrong refusal", "silent acceptance"):
            # The test is that nothing runs; whether the data next to the payload can be used is tested elsewhere.
            verdict = REFUSED if verdict == "wrong refusal" else ACCEPTED
        table.add(case, verdict, outcome)
        if marker.exists():
            executed.append(case.name)
            marker.unlink()
        assert "weights_only" not in outcome.stderr
    if kind is not some_checkpoints:
        table.write(f"malicious {kind.__name__}", executed=len(executed))
    assert executed == []
    assert table.faults == [], "\n".join(table.faults)


def test_payload_runs_in_an_unsafe_loader(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("door", DOORS)
def test_honest_checkpoint_is_accepted(door: str, runner: Runner) -> None:
    case = Case(name=door, reader="", arguments=DOORS[door], base="checkpoint", prepare=copies, is_valid=True)
    verdict, outcome = runner.judge(case)
    assert verdict == ACCEPTED, outcome.stderr
