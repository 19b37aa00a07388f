from __future__ import annotations

import inspect
import logging
import sys

import pytest
import torch
from harness.commands import run_process

from mcore_prefix_tree.cpu import emulation
from mcore_prefix_tree.cpu.emulation import cpu_emulation, single_process


def replaced() -> list[tuple[object, str]]:
    return [(owner, name) for owner, name, _ in emulation._replacements()]


def test_everything_is_put_back() -> None:
    import megatron.core  # noqa: F401

    before = [inspect.getattr_static(owner, name) for owner, name in replaced()]
    own = [name in vars(owner) for owner, name in replaced()]
    with cpu_emulation():
        inside = [inspect.getattr_static(owner, name) for owner, name in replaced()]
        assert all(now is not then for now, then in zip(inside, before, strict=True))
        with cpu_emulation():
            pass
        assert torch.zeros(1, device="cuda").device.type == "cpu", "the inner block switched the outer one off"
    assert all(
        inspect.getattr_static(owner, name) is then for (owner, name), then in zip(replaced(), before, strict=True)
    )
    assert [name in vars(owner) for owner, name in replaced()] == own
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_a_block_with_a_device_obeys_it_within_and_after() -> None:
    """Otherwise Transformers' from_pretrained, which builds a model on "meta", leaves rotary frequencies unset."""
    torch.utils._device._device_constructors.cache_clear()  # as in a new process
    with cpu_emulation(), torch.device("meta"):
        assert {make().device.type for make in (lambda: torch.empty(1), lambda: torch.arange(2))} == {"meta"}
    with torch.device("meta"):
        assert {make().device.type for make in (lambda: torch.empty(1), lambda: torch.arange(2))} == {"meta"}


def test_everything_is_put_back_after_an_error() -> None:
    original = torch.zeros
    with pytest.raises(KeyError), cpu_emulation():
        raise KeyError
    assert torch.zeros is original
    assert not emulation._active


def test_refuses_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    original = torch.zeros
    with pytest.raises(RuntimeError, match="force=True"), cpu_emulation():
        pass
    with pytest.raises(RuntimeError, match="force=True"):
        emulation.enable()
    assert torch.zeros is original
    with cpu_emulation(force=True):
        assert torch.zeros is not original
        assert not torch.cuda.is_available(), "Megatron would take its GPU paths"
    assert torch.cuda.is_available()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0])
def test_a_gpu_means_the_cpu(device: str | torch.device | int) -> None:
    with cpu_emulation():
        made = [
            torch.empty(2, device=device),
            torch.tensor([1.0, 2.0], device=device),
            torch.arange(2, device=device),
            torch.ones(2).to(device),
            torch.ones(2).to(device, torch.float64, True),
            torch.ones(2).to(device=device, dtype=torch.float64),
            torch.ones(2).new_empty(2, device=device),
            torch.nn.Linear(2, 2).to("cuda" if device == 0 else device).weight,
            torch.nn.Linear(2, 2).cuda().weight,
            torch.ones(2).cuda(non_blocking=True),
        ]
        assert {tensor.device.type for tensor in made} == {"cpu"}
        assert made[4].dtype is made[5].dtype is torch.float64
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert torch.ones(2).to("meta").device.type == "meta"
        assert not torch.cuda.is_available()
        assert torch.cuda.max_memory_allocated() == 0


def test_tensor_types_look_like_a_gpus() -> None:
    with cpu_emulation():
        assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.nn.Parameter(torch.ones(1)).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).type(torch.float64).dtype is torch.float64
        assert torch.ones(1).type(dtype="torch.IntTensor").dtype is torch.int32
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_compiled_functions_run_eagerly() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(type(x) is torch.Tensor and not torch.compiler.is_compiling())
        return x * 2

    with cpu_emulation():
        assert torch.compile(function)(torch.ones(1)).item() == 2
    assert seen == [True]


def test_commands_import_no_compiler_on_a_cpu() -> None:
    """Its imports are a third of a command's start. Decorated with and without settings, functions stay as they are."""
    with emulation.eager_functions():
        assert torch.compile(len) is torch.compile(fullgraph=True)(len) is len
    code = "import sys; from mcore_prefix_tree.cli import options as o; o._import_megatron('auto'); print(*sys.modules)"
    done = run_process([sys.executable, "-c", code], code=0)
    imported = done.stdout.split()
    assert "megatron.core.transformer.moe.router" in imported
    assert not [name for name in imported if name.startswith("torch._inductor")]


def test_forked_process_draws_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """If GPUs were counted before the fork, torch would queue Megatron's calls of the generator."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with cpu_emulation():
        tracker = CudaRNGStatesTracker()
        tracker.add("drawn", 7)
        with tracker.fork("drawn"):
            drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_random_numbers_follow_megatrons_tracker(caplog: pytest.LogCaptureFixture) -> None:
    with single_process(), caplog.at_level(logging.WARNING):
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.manual_seed(0)
        undisturbed = torch.rand(6)
        torch.manual_seed(0)
        first = torch.rand(3)
        with get_cuda_rng_tracker().fork():
            forked = torch.rand(3)
        second = torch.rand(3)
        with get_cuda_rng_tracker().fork():
            forked_again = torch.rand(3)
    assert torch.equal(torch.cat([first, second]), undisturbed)
    assert not torch.equal(forked, forked_again)
    assert "CPU RNG state" not in caplog.text


def test_recompute_repeats_dropout() -> None:
    with single_process():
        from megatron.core.tensor_parallel import checkpoint

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x, 0.5) * x

        gradients = []
        for run in (function, lambda x: checkpoint(function, False, x)):
            torch.manual_seed(3)
            x = torch.linspace(1, 2, 64, requires_grad=True)
            run(x).sum().backward()
            gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert 0 < (gradients[0] == 0).sum() < 64


def test_the_router_takes_no_kernel_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TransformerEngine installed: its matrix product wants tensors of a GPU."""
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(moe_utils, "te_general_gemm", lambda *_: None, raising=False)
    with cpu_emulation():
        assert moe_utils.te_general_gemm is None
    assert moe_utils.te_general_gemm is not None
