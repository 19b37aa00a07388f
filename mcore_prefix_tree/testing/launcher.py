"""Gloo worlds for tests: megatron-core's parallel state in this process, or in a few that live as long as the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mcore_prefix_tree.testing.emulation import cpu_emulation

SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a world of processes is cut: tensor, pipeline and virtual-pipeline degrees. What is left is data parallel."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel=True needs tp > 1: there is nothing to cut the sequence over")
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1")

    def dp(self, world_size: int) -> int:
        """Return the data-parallel degree that a world of this size leaves.

        Raises:
            ValueError: the world size is not a multiple of ``tp * pp``.
        """
        degree, rest = divmod(world_size, self.tp * self.pp)
        if degree == 0 or rest:
            raise ValueError(f"a world of {world_size} cannot hold tp={self.tp} x pp={self.pp}")
        return degree


@contextmanager
def parallel_state(layout: Layout, *, seed: int = SEED) -> Iterator[None]:
    """Initialise ``megatron.core.parallel_state`` for a layout on the current default process group, and destroy it.

    Args:
        layout: degrees; the data-parallel one follows from the world size.
        seed: handed to ``torch.manual_seed`` and ``model_parallel_cuda_manual_seed``.
    """
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    layout.dp(torch.distributed.get_world_size())
    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
    )
    try:
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        yield
    finally:
        state.destroy_model_parallel()


@contextmanager
def single_process(*, seed: int = SEED) -> Iterator[None]:
    """Emulate the GPU, join a world of one and initialise megatron's parallel state, for the ``with`` block."""
    with cpu_emulation():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            with parallel_state(Layout(), seed=seed):
                yield
        finally:
            torch.distributed.destroy_process_group()
