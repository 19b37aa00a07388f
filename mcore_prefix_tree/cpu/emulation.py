"""Run stock megatron-core on a machine without a GPU.

Megatron-core writes ``device="cuda"`` and ``torch.cuda.current_device()`` into its source, even in code that would run
on any device. This file answers those calls with the CPU. Megatron's files are not touched: the emulation replaces a
short list of ``torch`` functions (and, in megatron-core, the names that are wrong without TransformerEngine and the
optimizers that it found), each below with the megatron call site that needs it, and restores them on exit.
``torch.cuda.is_available()`` is false, so that code which checks it takes its CPU path. This is a tool for tests and
the quickstart. On a machine with a GPU it refuses to start, or if forced hides the GPU.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mcore_prefix_tree.cpu import state_space

# The factories to which megatron-core passes a GPU. They are replaced as functions; a TorchFunctionMode would do the
# same but is asked about every torch call. Measured on a step of a tiny GPT (4 layers, hidden 64, 32 tokens): 8.8 ms
# bare, 8.5 ms with replaced functions, 10.5 ms under a mode.
_FACTORIES = ("arange", "empty", "empty_like", "ones", "tensor", "zeros")

_active = False


def _is_cuda(device: object) -> bool:
    """Return whether a device argument means a GPU: ``"cuda"``, ``"cuda:0"``, such a ``torch.device`` or an index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(function: Callable[..., Any], position: int | None = None) -> Callable[..., Any]:
    """Wrap a function so that a GPU in ``device=``, or as the positional argument at ``position``, means the CPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            if _is_cuda(kwargs["device"]):
                kwargs["device"] = "cpu"
        elif position is not None and len(args) > position and _is_cuda(args[position]):
            args = (*args[:position], "cpu", *args[position + 1 :])
        return function(*args, **kwargs)

    return wrapper


def _gpu_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type`` so that ``x.type()`` names the GPU tensor type; conversions pass through."""

    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the type name of a tensor ``[...]``, with ``cuda`` in it."""
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return wrapper


def _sizes_as_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``all_to_all_single`` so that sizes given as tensors arrive as lists."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        sizes = ("output_split_sizes", "input_split_sizes")
        lists = {key: kwargs[key].tolist() for key in sizes if isinstance(kwargs.get(key), torch.Tensor)}
        return original(*args, **kwargs | lists)

    return wrapper


def _returns(value: object) -> Callable[..., Any]:
    # A new function at each call: Dynamo refuses one function under two torch names.
    return lambda *args, **kwargs: value


class _Stream:
    """A stream, and its own event: both always done, because work on the CPU is finished when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _get_rng_state(device: object = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    """Set the CPU's generator to a state, uint8 ``[n]``."""
    torch.default_generator.set_state(new_state)


def _is_not_about_rng(record: logging.LogRecord) -> bool:
    # CudaRNGStatesTracker.fork() warns when the CPU's generator moved while it minded the GPU's. Here they are one.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _replacements() -> list[tuple[object, str, object]]:
    """Return ``(owner, attribute, replacement)`` for everything replaced, with the reason for each."""
    stream = _Stream()
    return [
        *((torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES),
        # For machines that have a GPU: dist_checkpointing and fine_grained_activation_offload.py ask.
        (torch.cuda, "is_available", _returns(False)),
        # `device=torch.cuda.current_device()` in tensor_parallel/{layers,mappings}.py, p2p_communication.py,
        # param_and_grad_buffer.py, rotary_pos_embedding.py, ..., and `with torch.device(device)` in
        # yarn_rotary_pos_embedding.py, which takes no index without a GPU.
        (torch.cuda, "current_device", _returns(torch.device("cpu"))),
        # tensor_parallel/random.py sets the RNG state inside `torch.cuda._lazy_call(cb)`, which only queues `cb` until
        # CUDA is initialised.
        (torch.cuda, "_initialized", True),
        # So it does in a process that was forked after something counted GPUs.
        (torch.cuda, "_is_in_bad_fork", _returns(False)),
        # The RNG of "the GPU" is the CPU's default generator, because dropout and initialisation draw from it here:
        # CudaRNGStatesTracker.fork() and recompute then save and restore the stream that matters.
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda.random, "get_rng_state", _get_rng_state),
        (torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed)),
        (torch.cuda, "default_generators", defaultdict(lambda: torch.default_generator)),
        # After messages in p2p_communication.py; before a checkpoint is written in filesystem_async.py.
        (torch.cuda, "synchronize", _returns(None)),
        # moe/token_dispatcher.py copies token counts to the host on a separate stream.
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", _returns(stream)),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        # Freeing a model's buffers in distributed_data_parallel.py and optimizer.py; with `_initialized` set, torch
        # would ask the driver. So it would for the memory that training loops log: all those figures come from here.
        (torch.cuda, "empty_cache", _returns(None)),
        (torch.cuda.memory, "memory_stats", lambda device=None: {}),
        # rotary_pos_embedding.py and moe/router.py. `Module.to` comes here too.
        (torch.Tensor, "to", _on_cpu(torch.Tensor.to, position=1)),
        # language_module.py, for an output layer tied to the embeddings of another stage; optimizer.py. `Module.cuda`
        # comes here too.
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        # `input.new_empty(..., device=torch.cuda.current_device())` in mappings.py, for the tokens of MoE experts.
        (torch.Tensor, "new_empty", _on_cpu(torch.Tensor.new_empty)),
        # moe/token_dispatcher.py turns the sizes into host numbers only if they come from a GPU.
        (torch.distributed, "all_to_all_single", _sizes_as_lists(torch.distributed.all_to_all_single)),
        # `param.type() in ['torch.cuda.HalfTensor', ...]` decides in optimizer.py and distrib_optimizer.py which
        # parameters get an fp32 master copy, and clip_grads.py asserts 'torch.cuda.FloatTensor'.
        (torch.Tensor, "type", _gpu_type_name(torch.Tensor.type)),
    ]


def _torch_optimizers() -> list[tuple[object, str, object]]:
    """Return Megatron's stand-ins for the optimizers of TransformerEngine or Apex, whose kernels need a GPU."""
    if not any(map(importlib.util.find_spec, ("transformer_engine", "apex"))):
        return []  # and megatron.core.optimizer need not be imported to see it
    optimizer = importlib.import_module("megatron.core.optimizer")
    if optimizer.USING_PYTORCH_OPTIMIZER:
        return []
    clip_grads, mixed_precision, distributed = (
        importlib.import_module(f"megatron.core.optimizer.{name}")
        for name in ("clip_grads", "optimizer", "distrib_optimizer")
    )
    utils = importlib.import_module("megatron.core.utils")
    found: list[tuple[object, str, object]] = [
        (optimizer, "Adam", torch.optim.AdamW),
        (optimizer, "SGD", torch.optim.SGD),
        (optimizer, "USING_PYTORCH_OPTIMIZER", True),
        (distributed, "HAVE_APEX_OR_TE", False),
        (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
    ]
    for module in (clip_grads, mixed_precision):
        found.append((module, "multi_tensor_applier", utils.local_multi_tensor_applier))
        found.append((module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale))
    if hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):  # since 0.19
        found.append((clip_grads, "multi_tensor_scale_tensor_impl", None))
    return found


def _without_transformer_engine() -> list[tuple[object, str, object]]:
    """Return replacements for code of megatron-core that fails without TransformerEngine, or on CPU tensors."""
    moe_utils, latent, extension = (
        importlib.import_module(f"megatron.core.{name}")
        for name in ("transformer.moe.moe_utils", "transformer.multi_latent_attention", "extensions.transformer_engine")
    )
    found: list[tuple[object, str, object]] = []
    if getattr(moe_utils, "te_general_gemm", True) is not None:
        # The router checks that it `is not None`, but without TransformerEngine the name is undefined.
        found.append((moe_utils, "te_general_gemm", None))
    if latent.HAVE_TE and not extension.HAVE_TE:
        # MultiLatentAttention asks whether its projection is a TELinear, of which only a stand-in was imported.
        found.append((latent, "HAVE_TE", False))
    name = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
    absorbed = importlib.import_module(name) if importlib.util.find_spec(name) else None
    if getattr(absorbed, "Linear", True) is None:
        # With TransformerEngine alone it knows projections that all ranks hold in full.
        layers = importlib.import_module("megatron.core.post_training.modelopt.layers")
        found.append((absorbed, "Linear", layers.Linear))
    depths = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    if hasattr(depths, "is_inference_column_parallel_linear") and not extension.HAVE_TE:
        # Since 0.20, depths ask whether a layer is one of two classes, which are mocks without TransformerEngine.
        found.append((depths, "is_inference_column_parallel_linear", _returns(False)))
    return found


def _without_fla() -> list[tuple[object, str, object]]:
    """Return stand-ins for the kernels of FLA that Gated DeltaNet of megatron-core 0.19 calls: Triton needs a GPU."""
    found = importlib.util.find_spec("megatron.core.ssm.gated_delta_net")
    if found is None or found.submodule_search_locations is None:
        return []  # older layers, which cannot follow a tree
    common, gdn = (importlib.import_module(f"megatron.core.ssm.gated_delta_net.{name}") for name in ("common", "gdn"))
    return [
        (common, "HAVE_FLA", True),
        (common, "l2norm", _l2norm),
        (gdn, "causal_conv1d", _causal_conv1d),
        (gdn, "chunk_gated_delta_rule", gdn.torch_chunk_gated_delta_rule),
    ]


def _l2norm(x: torch.Tensor, eps: float = 1e-6, **_: Any) -> torch.Tensor:
    """Return ``[..., D]`` with rows of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None, **given: Any
) -> tuple[torch.Tensor, None]:
    """Return the convolution of ``[b, s, D]`` with ``[D, W]``, each token with those before it, and no state."""
    if any(given.values()):
        raise NotImplementedError(f"on a CPU the convolution of Gated DeltaNet takes no {', '.join(given)}")
    return state_space.convolve(x.transpose(1, 2), weight, bias, activation).transpose(1, 2), None


@contextmanager
def eager_functions() -> Iterator[None]:
    """Let ``torch.compile`` return functions as they are inside the block, and run those that it compiled eagerly.

    Megatron's ``@jit_fuser`` is ``torch.compile``: minutes of C++ compilation for nothing that a CPU run measures. The
    compiler's imports alone take 2 s in each process, so that commands import Megatron inside such a block.
    """
    compiled = "torch._dynamo" in sys.modules
    with (
        mock.patch.object(torch, "compile", lambda model=None, **_: (lambda given: given) if model is None else model),
        torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
    ):
        yield


def _forget_torch_functions() -> None:
    # Dynamo files every torch function by identity when something is first decorated; make it forget ours.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.trace_rules.clear_lru_cache()  # type: ignore[no-untyped-call]


@contextmanager
def cpu_emulation(*, force: bool = False) -> Iterator[None]:
    """Answer megatron-core's CUDA calls with the CPU inside the ``with`` block, and restore everything after it.

    Entering it again inside itself does nothing. On a machine with a GPU it raises RuntimeError unless ``force`` is
    true.
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
    # Megatron first, while the functions are still the real ones: it must not bind one that outlives the block.
    with eager_functions():
        importlib.import_module("megatron.core")
    # So must PyTorch, which collects the factories that `with torch.device(...)` obeys at its first use.
    with torch.device("cpu"):
        torch.empty(0)
    with ExitStack() as stack:
        stack.enter_context(eager_functions())
        stack.callback(_forget_torch_functions)
        for owner, name, replacement in [*_torch_optimizers(), *_replacements()]:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        for owner, name, replacement in [*_without_transformer_engine(), *_without_fla(), *state_space.stand_ins()]:
            stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        logger = logging.getLogger("megatron.core.tensor_parallel.random")
        logger.addFilter(_is_not_about_rng)
        stack.callback(logger.removeFilter, _is_not_about_rng)
        _active = True
        try:
            yield
        finally:
            _active = False


class _AnyLayer(ModuleType):
    """A package that has a class of every name with a capital, and a package of every other."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self).update(__path__=[], __spec__=ModuleSpec(name, None), __version__="2.9.0")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {}) if name[0].isupper() else _AnyLayer(f"{self.__name__}.{name}")


@contextmanager
def transformer_engine_names() -> Iterator[None]:
    """Let Megatron-Bridge be imported under emulation: it names TransformerEngine's layers, and there is no CPU build.

    Models have Megatron-Core's local layers, which looked for TransformerEngine when they were imported.
    """
    if not _active or importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    names = {name: _AnyLayer(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
    # The classes of Megatron-Core's wrappers, for which it looks, are none.
    vars(importlib.import_module("megatron.bridge.peft.utils"))["HAVE_TE"] = False


_whole_process = ExitStack()


def enable() -> None:
    """Turn the emulation on for the rest of the process; raises RuntimeError if there is a GPU."""
    _whole_process.enter_context(cpu_emulation())


def _training_replacements() -> list[tuple[object, str, object]]:
    """Return further replacements for ``megatron.training`` of a Megatron-LM checkout."""
    initialize = importlib.import_module("megatron.training.initialize")
    training = importlib.import_module("megatron.training.training")
    replacements: list[tuple[object, str, object]] = []
    if importlib.util.find_spec("megatron.legacy") is not None:  # gone since core_v0.19
        # _compile_dependencies() in initialize.py builds kernels with nvcc that only legacy models call.
        replacements.append((importlib.import_module("megatron.legacy.fused_kernels"), "load", _returns(None)))
    return [
        *replacements,
        # initialize_megatron() in initialize.py asserts that there is a GPU; this is its own way to go without one.
        (training, "initialize_megatron", functools.partial(training.initialize_megatron, allow_no_cuda=True)),
        # _initialize_distributed() in initialize.py sets up the parallel state only if there are devices.
        (torch.cuda, "device_count", _returns(1)),
        (torch.cuda, "set_device", _returns(None)),
        # get_device_arch_version() in training/utils.py, which validate_args() asks under tensor parallelism; before
        # architecture 10 it also wants CUDA_DEVICE_MAX_CONNECTIONS=1. With a grouped GEMM it asks for both numbers.
        (torch.cuda, "get_device_properties", _returns(SimpleNamespace(major=10, minor=0))),
        # set_jit_fusion_options() in initialize.py warms up compiled functions, which nothing here uses, with
        # draws in the size of a micro-batch: they would move the generator that draws the weights.
        (initialize, "_warmup_jit_function", _returns(None)),
        # Resuming a run, in training/checkpointing.py.
        (torch.cuda, "set_rng_state", _set_rng_state),
    ]


def enable_training() -> None:
    """Do as :func:`enable`, and let ``megatron.training.pretrain`` of the Megatron-LM on the path run too."""
    enable()
    for owner, name, replacement in _training_replacements():
        _whole_process.enter_context(mock.patch.object(owner, name, replacement))


SEED = 1234


@contextmanager
def single_process() -> Iterator[None]:
    """Emulate the GPU, join a world of one and initialise megatron's parallel state, for the ``with`` block."""
    with cpu_emulation():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            torch.manual_seed(SEED)
            model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
            gc.collect()  # models and optimizers keep Megatron's groups, and their threads, in reference cycles
