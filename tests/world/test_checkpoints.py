"""Megatron's distributed checkpoints work under the emulation and move between layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.models import LENGTHS, VOCAB, forward_step, microbatches
from harness.worlds import Layout, world

pytest.importorskip("psutil", reason="megatron-core's checkpoint writer needs psutil but does not install it")

Losses = dict[tuple[int, int], float]  # (step, micro-batch) -> summed loss


def train(layout: Layout, dtype: torch.dtype, seed: int, load: Path | None, save: Path | None) -> Losses:
    """Load; train two steps; given a folder, save there and train two more. Return the last two."""
    from harness.models import Trainer, build_chunks, tiny_gpt_config
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.utils import unwrap_model

    config = tiny_gpt_config(layout=layout, dtype=dtype)
    trainer = Trainer.of(build_chunks(config, vocab_size=VOCAB, seed=seed))

    def state(*, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        bare = unwrap_model(trainer.chunks)
        model = {f"model{i}": c.sharded_state_dict(metadata=metadata) for i, c in enumerate(bare)}
        optimizer = trainer.optimizer.sharded_state_dict(dict(model), is_loading=is_loading, metadata=metadata)
        return {**model, "optimizer": optimizer}

    def two_steps() -> Losses:
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = microbatches()[rank::size]
        return {
            (step, rank + size * i): item["loss"]
            for step in range(2)
            for i, item in enumerate(trainer.step(forward_step, mine, seq_length=max(LENGTHS)))
        }

    if load is not None:
        loaded = dist_checkpointing.load(state(is_loading=True), str(load))
        for i, chunk in enumerate(unwrap_model(trainer.chunks)):
            chunk.load_state_dict(loaded[f"model{i}"])
        trainer.optimizer.load_state_dict(loaded["optimizer"])
    first = two_steps()
    if save is None:
        return first
    dist_checkpointing.save(state(is_loading=False), str(save))
    return two_steps()


def by_microbatch(results: list[Losses]) -> torch.Tensor:
    merged = {key: loss for result in results for key, loss in result.items()}
    assert len(merged) == 2 * len(LENGTHS)
    return torch.tensor([merged[key] for key in sorted(merged)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("saved", "loaded", "dtype", "tolerance"),
    [
        pytest.param(Layout(tp=2), Layout(tp=2), torch.float64, 0, id="tp2-float64", marks=pytest.mark.slow),
        pytest.param(Layout(tp=2), Layout(pp=2), torch.float64, 1e-12, id="tp2-to-pp2-float64"),
        pytest.param(Layout(tp=2), Layout(), torch.float64, 1e-12, id="tp2-to-dp2-float64", marks=pytest.mark.slow),
        pytest.param(Layout(pp=2), Layout(tp=2), torch.float64, 1e-12, id="pp2-to-tp2-float64", marks=pytest.mark.slow),
        pytest.param(Layout(tp=2), Layout(tp=2), torch.bfloat16, 0, id="tp2-bfloat16", marks=pytest.mark.ci),
    ],
)
def test_training_continues_after_loading(
    tmp_path: Path, saved: Layout, loaded: Layout, dtype: torch.dtype, tolerance: float
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    went_on = world(2).run(train, saved, dtype, 0, None, folder, layout=saved)
    resumed = world(2).run(train, loaded, dtype, 1, folder, None, layout=loaded)
    torch.testing.assert_close(by_microbatch(resumed), by_microbatch(went_on), rtol=tolerance, atol=0)
