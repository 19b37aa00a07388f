"""Which device a rank takes, and how long ranks wait for each other."""

from __future__ import annotations

import importlib.util
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.train_jobs import train, world_of_one, write_job
from megatron.core import optimizer, parallel_state

from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.loop.session import _device_index
from mcore_prefix_tree.settings import RecipeError, load_recipe


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"),
    [(None, 1, 0), ("3", 8, 3), ("7", 8, 7), pytest.param("3", 1, 0, id="srun --gpus-per-task=1")],
)
def test_a_rank_takes_the_gpu_of_its_place_on_the_machine(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, visible: int, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    for variable in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert _device_index() == index


@pytest.mark.parametrize("gpus", [4, pytest.param(1, id="torchrun with one GPU")])
def test_more_ranks_than_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(gpus))
    if gpus == 1:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(RecipeError) as error:
        _device_index()
    assert str(error.value) == (
        f"LOCAL_RANK={gpus} on {socket.gethostname()}, but torch sees {gpus} of its GPUs; start no more ranks on a "
        "machine than it has GPUs, or set device=cpu"
    )


@pytest.fixture
def fused_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if megatron-core had been imported with TransformerEngine: its optimizers are kernels that want a GPU."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as mixed_precision

    def kernel(*args: object, **more: object) -> None:
        pytest.fail("a kernel of a GPU on the CPU")

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "transformer_engine" or find_spec(name))
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    for module, names in (
        (optimizer, ("Adam", "SGD")),
        (clip_grads, ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl")),
        (mixed_precision, ("multi_tensor_applier", "multi_tensor_scale_impl")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, kernel)


@pytest.mark.parametrize("setting", ["model.dtype=float32", "model.dtype=bfloat16"])
def test_training_on_the_cpu_does_not_change_gpu_optimizers(
    tmp_path: Path, setting: str, request: pytest.FixtureRequest
) -> None:
    job = write_job(tmp_path)
    bare = train(job, setting, "device=cpu")
    request.getfixturevalue("fused_optimizers")
    fused = optimizer.Adam
    assert train(job, setting, "device=cpu").losses == bare.losses
    assert optimizer.Adam is fused, "put back"


def timeouts() -> list[timedelta]:
    """Timeouts of all ranks together, and of one of Megatron's groups."""
    groups = (dist.group.WORLD, parallel_state.get_data_parallel_group())
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_ranks_use_the_recipes_timeout(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    with world_of_one(load_recipe(job, ["distributed_timeout_minutes=47"])):
        assert timeouts() == [timedelta(minutes=47)] * 2
    with world_of_one(load_recipe(job)):
        assert timeouts() == [timedelta(minutes=30)] * 2, "torch's for gloo, and Megatron's"


def test_a_folder_that_is_shared_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with world_of_one(load_recipe(write_job(tmp_path))):
        checkpoint.make_folder(folder)
    assert list(folder.iterdir()) == []
