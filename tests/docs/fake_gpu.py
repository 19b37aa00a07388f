"""A fake H100: ``torch.cuda`` as a driver would answer it, with all tensors on the CPU.

A ``.pth`` file of an environment imports it at the start of every Python. It patches modules once they are imported.
Kernels for a GPU are replaced by equal computations on a CPU, so that everything around them runs. The environment
variables ``FAKE_GPU_CRASH``, ``FAKE_GPU_HANG`` and ``FAKE_GPU_MEMORY`` make the part that they name fail.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

MEMORY = 80 << 30
_FACTORIES = (
    *("arange", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "rand", "randn", "randn_like"),
    *("randint", "tensor", "as_tensor", "zeros", "zeros_like", "eye", "linspace", "scalar_tensor", "randperm"),
)


def is_cuda(device):
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, int):
        return not isinstance(device, bool)
    return getattr(device, "type", None) == "cuda"


def on_cpu(function, position=None):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if position is not None and len(args) > position and is_cuda(args[position]):
            args = (*args[:position], "cpu", *args[position + 1 :])
        kwargs.pop("non_blocking", None) if position is not None else None
        return function(*args, **kwargs)

    return wrapper


class Event:
    def __init__(self, *args, **kwargs):
        self.time = 0.0

    def record(self, *args):
        self.time = time.perf_counter()

    def elapsed_time(self, other):
        return max(1e-6, other.time - self.time) * 1e3

    def synchronize(self):
        pass

    def wait(self, *args):
        pass

    def query(self):
        return True


class Stream:
    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


def patch_torch(torch):
    gives = lambda value: lambda *args, **kwargs: value  # noqa: E731
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.to = on_cpu(torch.Tensor.to, position=1)
    type_name = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **kwargs: (
        type_name(self, *args, **kwargs) if args or kwargs else type_name(self).replace("torch.", "torch.cuda.", 1)
    )
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    for name in ("new_empty", "new_zeros", "new_full", "new_tensor", "new_ones"):
        setattr(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))

    class Generator(torch.Generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls, "cpu")

    torch.Generator = Generator
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132,
        shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, warp_size=32,
    )  # fmt: skip
    cuda = torch.cuda
    for name, value in {
        "is_available": gives(True),
        "is_initialized": gives(True),
        "init": gives(None),
        "device_count": gives(1),
        "current_device": gives(0),
        "set_device": gives(None),
        "device": lambda *args, **kwargs: nullcontext(),
        "get_device_name": gives(properties.name),
        "get_device_capability": gives((9, 0)),
        "get_device_properties": gives(properties),
        "mem_get_info": gives((MEMORY - (2 << 30), MEMORY)),
        "memory_allocated": gives(0),
        "memory_reserved": gives(0),
        "max_memory_allocated": gives(1 << 20),
        "max_memory_reserved": gives(1 << 20),
        "reset_peak_memory_stats": gives(None),
        "memory_stats": lambda *args, **kwargs: {},
        "empty_cache": gives(None),
        "synchronize": gives(None),
        "_sleep": gives(None),
        "is_current_stream_capturing": gives(False),
        "is_bf16_supported": gives(True),
        "set_sync_debug_mode": gives(None),
        "get_rng_state": lambda *args, **kwargs: torch.default_generator.get_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.default_generator.set_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
        "default_generators": defaultdict(lambda: torch.default_generator),
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": gives(Stream()),
        "default_stream": gives(Stream()),
        "_initialized": True,
        "_is_in_bad_fork": gives(False),
        "_lazy_call": lambda call, **kwargs: call(),
    }.items():
        setattr(cuda, name, value)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.memory.memory_stats = cuda.memory_stats
    torch.version.cuda = "13.0"


def patch_distributed(distributed):
    start = distributed.init_process_group
    new_group = distributed.new_group

    def init(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return start("gloo", *args, **kwargs)

    def group(*args, **kwargs):
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return new_group(*args, **kwargs)

    distributed.init_process_group = init
    distributed.new_group = group
    distributed.barrier = lambda *args, **kwargs: None


def reference():
    from mcore_prefix_tree.attention import reference as module

    return module.attention


def patch_triton_tree(module):
    def attend(query, key, value, metadata, options, *more):
        if os.environ.get("FAKE_GPU_CRASH") == "triton" and options.deterministic:
            os.kill(os.getpid(), 11)
        if os.environ.get("FAKE_GPU_HANG") == "triton" and options.deterministic:
            time.sleep(600)
        if os.environ.get("FAKE_GPU_MEMORY") == "triton" and options.deterministic:
            import torch

            raise torch.OutOfMemoryError("CUDA out of memory")
        return reference()(query, key, value, metadata, options)

    module.attend_as_tabled = module._attend_whole_groups = attend
    # Triton's interpreter has no bfloat16, and nothing of it runs here.
    module.refusal = lambda case: None


def patch_flex(module):
    module.attention = lambda *args: reference()(*args)


PATCHES = {
    "torch": patch_torch,
    "torch.distributed": patch_distributed,
    "mcore_prefix_tree.attention.triton_tree": patch_triton_tree,
    "mcore_prefix_tree.attention.flex": patch_flex,
}


class Loader(importlib.abc.Loader):
    def __init__(self, inner, patch):
        self.inner, self.patch = inner, patch

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        self.patch(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = Loader(spec.loader, PATCHES[name])
                return spec
        return None


sys.meta_path.insert(0, Finder())
