"""Opening a checkpoint runs nothing: every file of one, through every command that reads weights."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from train_jobs import train, write_job
from typer.testing import CliRunner

from mcore_prefix_tree.cli.main import app


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
    # What a list of modules would let through: torch's own loader, from a module that metadata comes from.
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
DOORS = {
    "resume": lambda job, run: ["train", job, f"checkpoint.save={run}", "train_iters=4", "--resume"],
    "pretrained": lambda job, run: ["train", job, f"checkpoint.pretrained_checkpoint={run}"],
    "score": lambda job, run: ["score", job, f"checkpoint.save={run}", "--output", f"{run}/scored.jsonl"],
    "reference": lambda job, run: [
        *("score", job, f"checkpoint.save={job.parent / 'runs'}"),
        *("--reference", run, "--output", f"{run}/scored.jsonl"),
    ],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose run has saved iteration 1."""
    path = write_job(tmp_path_factory.mktemp("safety"))
    train(path, "train_iters=2", f"checkpoint.save={path.parent / 'runs'}", "checkpoint.save_interval=1")
    return path


@pytest.fixture
def run_folder(job: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder."""
    return shutil.copytree(job.parent / "runs", tmp_path / "runs")


def call(door: str, job: Path, run: Path) -> Any:
    return CliRunner().invoke(app, list(map(str, DOORS[door](job, run))))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("door", DOORS)
def test_malicious_checkpoint_is_rejected(
    door: str, attack: Callable[[Path, Path], None], job: Path, run_folder: Path, tmp_path: Path
) -> None:
    folder, marker = run_folder / "iter_0000002", tmp_path / "executed"
    attack(folder, marker)
    result = call(door, job, run_folder)
    assert not marker.exists()
    assert result.exit_code in (1, 2), result.output
    assert str(folder) in result.output.replace("\n", ""), result.output
    assert "weights_only" not in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("door", DOORS)
def test_honest_checkpoint_is_accepted(door: str, job: Path, run_folder: Path) -> None:
    result = call(door, job, run_folder)
    assert result.exit_code == 0, result.output
