"""Megatron-Core's process groups in this process only, on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mcore_prefix_tree.cpu.emulation import cpu_emulation

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
