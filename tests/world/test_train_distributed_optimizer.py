"""Saved state of the distributed optimizer. Without FusedAdam it cannot be loaded, so only saving is tested."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.checkpoints import plain_content
from harness.models import LENGTHS, VOCAB, Trainer, build_chunks, forward_step, microbatches, tiny_gpt_config
from harness.worlds import Layout, world
from megatron.core import dist_checkpointing

from mcore_prefix_tree.mcore.checkpoints import checkpoint


def save_twice(folder: Path) -> tuple[bool, list[str], bool]:
    """Whether this rank gathers the optimizer's state, the warnings, and whether all of it is saved."""
    config = tiny_gpt_config(layout=Layout(), dtype=torch.float32)
    trainer = Trainer.of(build_chunks(config, vocab_size=VOCAB, seed=0), distributed_optimizer=True)
    trainer.step(forward_step, microbatches()[dist.get_rank() :: 2], seq_length=max(LENGTHS))
    ours = checkpoint._metadata()
    on_every_rank = ours | {"distrib_optim_fully_reshardable_mem_efficient": False}
    saved, gathered, warned = [], [], []
    with mock.patch.object(logging.Logger, "warning", lambda logger, text, *_: warned.append(text)):
        for name, metadata in (("ours", ours), ("on every rank", on_every_rank)):
            with mock.patch.object(checkpoint, "_metadata", lambda metadata=metadata: metadata):
                state = checkpoint._state(trainer.chunks, trainer.optimizer, is_loading=False)
            gathered.append("param_state" in state["optimizer"])
            if dist.get_rank() == 0:
                (folder / name).mkdir()
            dist.barrier()
            dist_checkpointing.save(state, str(folder / name))
            saved.append(plain_content(folder / name))
    assert gathered[1]
    return gathered[0], [text for text in warned if "differs" in text], same_tensors(*saved)


def same_tensors(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    tensors = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    assert any(name.startswith("optimizer.state.exp_avg_sq.") for name in tensors)
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in tensors)


def test_one_rank_gathers_all_that_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="megatron-core's checkpoint writer needs psutil but does not install it")
    first, second = world(2).run(save_twice, tmp_path, layout=Layout())
    assert first == (True, [], True)
    assert second == (False, [], True)
