"""Run stock megatron-core on a machine without a GPU.

Megatron-core writes ``device="cuda"`` and ``torch.cuda.current_device()`` into its source, even where the code itself
would run anywhere. This file answers those calls with the CPU. Nothing in megatron is edited or replaced: what changes,
while the emulation is on, is a short list of ``torch`` functions, each named below with the megatron call site that
needs it, and each put back on exit.

The factories (``torch.zeros`` and friends) are replaced as functions instead of being caught by a
``torch.overrides.TorchFunctionMode``. Both work; a mode is asked about *every* torch call of a step, a replaced factory
only about its own.

This is a tool for tests and for the quickstart. It refuses to start where there is a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

# Every factory to which megatron-core passes a device. The `_like` ones inherit a CPU device and need no entry.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")

_active = False


def _is_cuda(device: object) -> bool:
    """Whether a device argument means a GPU: ``"cuda"``, ``"cuda:0"``, a cuda ``torch.device`` or a bare index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return wrapper


_tensor_to = torch.Tensor.to
_tensor_type = torch.Tensor.type
_module_to = torch.nn.Module.to


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if "device" in kwargs and _is_cuda(kwargs["device"]):
        kwargs["device"] = "cpu"
    elif args and _is_cuda(args[0]):
        args = ("cpu", *args[1:])
    return _tensor_to(self, *args, **kwargs)


def _type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    if dtype is not None:
        return _tensor_type(self, dtype, non_blocking, **kwargs)
    return str(_tensor_type(self)).replace("torch.", "torch.cuda.", 1)


def _module_to_cpu(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    if "device" in kwargs and _is_cuda(kwargs["device"]):
        kwargs["device"] = "cpu"
    elif args and _is_cuda(args[0]):
        args = ("cpu", *args[1:])
    return _module_to(self, *args, **kwargs)


class _Stream:
    """A stream that is always drained: CPU work is finished when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> object:
        return event if event is not None else _Event()

    def synchronize(self) -> None: ...


class _Event:
    """An event that has always happened."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def _cpu_rng_state(device: object = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_cpu_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _cpu_manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _zero(*args: object, **kwargs: object) -> int:
    return 0


def _cuda_patches() -> list[tuple[object, str, object]]:
    """Return ``(owner, attribute, replacement)`` for everything but the factories, with the reason for each."""
    stream = _Stream()
    return [
        # `device=torch.cuda.current_device()` in tensor_parallel/{layers,mappings}.py, p2p_communication.py,
        # param_and_grad_buffer.py, the optimizers. An index, as upstream; the factories map it to the CPU.
        (torch.cuda, "current_device", _zero),
        # tensor_parallel/random.py sets the state inside `_lazy_call(cb)`, which only queues `cb` until CUDA is up.
        (torch.cuda, "is_initialized", lambda: True),
        # `_lazy_init()` in tensor_parallel/random.py (imported from torch.cuda, which reads this flag).
        (torch.cuda, "_initialized", True),
        # The RNG of "the GPU" is the CPU's default generator, because that is what dropout and initialisation draw
        # from here: CudaRNGStatesTracker.fork() and recompute then save and restore the stream that matters.
        (torch.cuda, "get_rng_state", _cpu_rng_state),
        (torch.cuda.random, "get_rng_state", _cpu_rng_state),
        (torch.cuda, "set_rng_state", _set_cpu_rng_state),
        (torch.cuda.random, "set_rng_state", _set_cpu_rng_state),
        (torch.cuda, "manual_seed", _cpu_manual_seed),
        (torch.cuda.random, "manual_seed", _cpu_manual_seed),
        (torch.cuda, "default_generators", (torch.default_generator,)),
        # p2p_communication.py, DistributedDataParallel, timers.py.
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "default_stream", lambda device=None: stream),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (torch.cuda, "set_device", _nothing),
        # training logs and model_parallel memory reports.
        (torch.cuda, "memory_allocated", _zero),
        (torch.cuda, "max_memory_allocated", _zero),
        (torch.cuda, "memory_reserved", _zero),
        (torch.cuda, "max_memory_reserved", _zero),
        (torch.cuda, "reset_peak_memory_stats", _nothing),
        (torch.cuda.nvtx, "range_push", _nothing),
        (torch.cuda.nvtx, "range_pop", _nothing),
        (torch.Tensor, "to", _to),
        (torch.Tensor, "type", _type),
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        (torch.nn.Module, "to", _module_to_cpu),
        (torch.nn.Module, "cuda", lambda self, *args, **kwargs: self),
    ]


@contextmanager
def cpu_emulation(*, force: bool = False) -> Iterator[None]:
    """Answer megatron-core's CUDA calls with the CPU inside the ``with`` block, and put everything back after it.

    Entering it again inside itself is allowed and does nothing.

    Args:
        force: emulate even though this machine has a GPU.

    Raises:
        RuntimeError: there is a GPU and ``force`` is false.
    """
    global _active
    if _active:
        yield
        return
    if torch.cuda.is_available() and not force:
        raise RuntimeError(
            "The CPU emulation of torch.cuda is for machines without a GPU, and this one has one: run Megatron on it "
            "directly, or pass force=True to use the CPU all the same."
        )
    # Megatron first, while the functions are still the real ones: it must not bind a replacement that outlives the
    # block, and the `torch.compile` decorators in it make Dynamo file every `torch` function, once, under one rule.
    importlib.import_module("megatron.core")

    with ExitStack() as stack:
        # `@jit_fuser` is torch.compile: minutes of C++ compilation for nothing that a test measures.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _on_cpu(getattr(torch, name))))
        for owner, name, replacement in _cuda_patches():
            stack.enter_context(mock.patch.object(owner, name, replacement))
        _active = True
        try:
            yield
        finally:
            _active = False


_whole_process = ExitStack()


def enable(*, force: bool = False) -> None:
    """Turn the emulation on for the rest of the process; for workers started by ``torchrun``.

    Raises:
        RuntimeError: there is a GPU and ``force`` is false.
    """
    _whole_process.enter_context(cpu_emulation(force=force))
