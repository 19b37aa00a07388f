"""Multi-token prediction in Megatron-LM's own loop: losses and weights are those of the stock run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from megatron_lm import (
    CPU,
    ENTRY,
    FOLDED,
    HYBRID,
    LOSS,
    MODEL,
    STOCK,
    TRAIN,
    UNFOLDED,
    Stock,
    assert_same_tensors,
    hybrid_model,
    only_checkpoint,
    require_checkout,
    trained,
)

from mcore_prefix_tree.mcore.release import HAS_DEPTHS, NEEDS_DEPTHS

require_checkout()
if not HAS_DEPTHS:
    pytest.skip(f"needs {NEEDS_DEPTHS}", allow_module_level=True)

DEPTHS = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
LAST = 3


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(1, ""), pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.ci)],
    ids=["single", "pp2"],
)
def test_depths_train_as_the_stock_run_trains_them(stock: Stock, tmp_path: Path, ranks: int, layout: str) -> None:
    alone = tmp_path / "alone"
    unfolded = (CPU, MODEL, DEPTHS, TRAIN, UNFOLDED, stock.data, f"--save {alone}")
    trained(STOCK, *unfolded, "--exit-interval 1")
    start = only_checkpoint(alone, 1, tmp_path / "start")
    losses = trained(STOCK, *unfolded, f"--load {alone} --exit-interval {LAST}").losses
    *arguments, save = stock.args(tmp_path / "saved")
    run = trained(ENTRY, *arguments, save, DEPTHS, layout, f"--load {start} --exit-interval {LAST}", ranks=ranks)
    assert sorted(run.losses) == list(range(2, LAST + 1))
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(losses[iteration], rel=LOSS), iteration
    assert_same_tensors(tmp_path / "saved", alone, LAST)
    assert len(re.findall(r"mtp_[12] loss: \d", run.output)) == 2 * len(run.losses)


@pytest.mark.parametrize(
    ("ranks", "pattern", "layout"),
    [
        pytest.param(1, "*-*-/*-/*-", "", id="single"),
        pytest.param(2, "*-|*-/*-/*-", "--pipeline-model-parallel-size 2", id="pp2", marks=pytest.mark.ci),
    ],
)
def test_depths_of_a_hybrid_model(stock: Stock, tmp_path: Path, ranks: int, pattern: str, layout: str) -> None:
    """Megatron-LM counts the depths of a pattern."""
    alone, factor = tmp_path / "alone", "--mtp-loss-scaling-factor 0.5"
    unfolded = (CPU, hybrid_model(pattern.replace("|", "")), factor, TRAIN, UNFOLDED, stock.data, f"--save {alone}")
    trained(STOCK, *unfolded, "--exit-interval 1")
    start = only_checkpoint(alone, 1, tmp_path / "start")
    losses = trained(STOCK, *unfolded, f"--load {alone} --exit-interval {LAST}").losses
    folders = f"--load {start} --save {tmp_path / 'saved'} --exit-interval {LAST}"
    run = trained(HYBRID, CPU, hybrid_model(pattern), factor, TRAIN, FOLDED, stock.data, layout, folders, ranks=ranks)
    assert sorted(run.losses) == list(range(2, LAST + 1))
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(losses[iteration], rel=LOSS), iteration
    assert_same_tensors(tmp_path / "saved", alone, LAST)
    assert len(re.findall(r"mtp_[12] loss: \d", run.output)) == 2 * len(run.losses)
