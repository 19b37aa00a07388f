import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from harness.groups import forget_losses, share_groups_of_one
from hypothesis import settings

from mcore_prefix_tree.cpu.emulation import eager_functions

# Shells start background jobs with Ctrl-C ignored, and nohup ignores SIGHUP. Commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tensors here are small, and more threads than free cores make them slower by an order of magnitude.
torch.set_num_threads(1)
share_groups_of_one()

# Machines that run tests are busy; a slow example is not a failure. Time limits are in the tests that are about time.
settings.register_profile("quick", deadline=None, print_blob=True, max_examples=10)
settings.register_profile("thorough", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Tests are of the CPU, on every machine, but for those of these folders when they are named, as scripts/gpu_check does.
_ON_GPU = [Path(__file__).with_name(name) for name in ("gpu", "kernels")]

# Files of a minute and more come first, and the folders with such: at the end of a run one of those would keep one
# worker busy and leave the others idle.
_LONGEST = ["test_page_runs.py", "torchrun", "faults", "kernels", "upstream", "world", "model"]

_imported = 0  # modules at the last freeze


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files, and the folders with such, first."""
    folders = [item.path.relative_to(Path(__file__).parent).parts[0] for item in items]
    order = {name: position for position, name in enumerate(_LONGEST)}
    positions = [
        order.get(item.path.name, order.get(folder, len(order))) for item, folder in zip(items, folders, strict=True)
    ]
    items[:] = [item for _, item in sorted(zip(positions, items, strict=True), key=lambda pair: pair[0])]


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let test files that import Megatron do so without torch's compiler, as commands do on a CPU."""
    with nullcontext() if torch.cuda.is_available() else eager_functions():
        yield


def pytest_collection_finish() -> None:
    _freeze_imported()


def pytest_runtest_logfinish() -> None:
    """Free a test's leftovers."""
    # What a module's fixture holds has to be found when it ends.
    if len(sys.modules) > _imported + 100 and not torch.distributed.is_initialized():
        _freeze_imported()
    forget_losses()


@pytest.fixture(scope="module")
def megatron_on_the_cpu() -> Iterator[None]:
    """Let a module build Megatron's models in this process; it requests this with ``usefixtures``."""
    # Not at the top: machines that run only tests/kernels need no Megatron.
    from megatron.core.tensor_parallel import random

    from mcore_prefix_tree.cpu.emulation import cpu_emulation, single_process

    # Megatron compiles C++ for this at the first recomputation, for 50 CPU-seconds.
    random._share_storage_ext = SimpleNamespace(share_storage=_copy_storage)
    with cpu_emulation(force=True), single_process():
        yield


def _copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the data that Megatron's extension would share, below the tensors and autograd as it does."""
    data = source.untyped_storage()
    target.untyped_storage().resize_(data.nbytes())
    target.untyped_storage().copy_(data)


def _freeze_imported() -> None:
    """Keep imported objects out of every later garbage collection, which takes 0.3 s with those of Megatron.

    What is left of a test goes first: no collection finds it later.
    """
    global _imported
    gc.collect()
    gc.freeze()
    _imported = len(sys.modules)


def pytest_configure(config: pytest.Config) -> None:
    """Hide this machine's GPUs, before anything looks for them: with a GPU, Megatron on the CPU is rejected.

    Extensions of torch are compiled in a folder of this run, which its workers share: torch waits for ever for the lock
    of a run that was killed.
    """
    if not hasattr(config, "workerinput"):
        folder = TemporaryDirectory(prefix="torch_extensions-", ignore_cleanup_errors=True)
        os.environ["TORCH_EXTENSIONS_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
    named = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    if not all(any(path.resolve().is_relative_to(folder) for folder in _ON_GPU) for path in named):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
