"""A mixture of experts, and checkpoints from the folded run to the stock one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from megatron_lm import (
    BATCH,
    CPU,
    ENTRY,
    FOLDED,
    LOSS,
    MODEL,
    STOCK,
    TRAIN,
    UNFOLDED,
    Stock,
    assert_same_tensors,
    objective_words,
    only_checkpoint,
    require_checkout,
    trained,
    write_rollouts,
)

require_checkout()

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
BALANCED = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
)
LAST = 5


@pytest.fixture(scope="module")
def experts(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """Unfolded samples through a stock mixture of experts: checkpoints after the first and the last step, losses."""
    folder = tmp_path_factory.mktemp("experts")
    arguments = (CPU, MODEL, EXPERTS, TRAIN, UNFOLDED, stock.data, f"--save {folder}")
    first = trained(STOCK, *arguments, "--exit-interval 1")
    rest = trained(STOCK, *arguments, f"--load {folder} --exit-interval {LAST}")
    return folder, first.losses | rest.losses


def test_a_mixture_of_experts(stock: Stock, experts: tuple[Path, dict[int, float]], tmp_path: Path) -> None:
    alone, losses = experts
    start = only_checkpoint(alone, 1, tmp_path / "start")
    recipe = (Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.sh").read_text()
    recompute = "--recompute-granularity selective --recompute-modules moe"
    assert re.findall(r"--recompute-\S+ \S+", recipe) == re.findall(r"--recompute-\S+ \S+", recompute)
    *arguments, save = stock.args(tmp_path / "saved")
    run = trained(ENTRY, *arguments, save, EXPERTS, recompute, f"--load {start} --exit-interval {LAST}")
    assert sorted(run.losses) == list(range(2, LAST + 1))
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(losses[iteration], rel=LOSS), iteration
        assert run.iterations[iteration]["fold ratio"] > 1.3
    assert_same_tensors(tmp_path / "saved", alone, LAST)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_balanced_experts(stock: Stock, tmp_path: Path, objective: str) -> None:
    """Losses, biases of experts and weights are those of the stock run, which runs every sample by itself.

    Megatron-LM's own loss is divided by scored tokens, and with it what layers add.
    """
    alone, data, size = tmp_path / "alone", stock.data, ""
    if objective != "sft":
        write_rollouts(tmp_path / "rollouts.jsonl")
        data, size = objective_words(tmp_path / "rollouts.jsonl", objective), f"--micro-batch-size {BATCH}"
    unfolded = (CPU, MODEL, BALANCED, TRAIN, UNFOLDED, size, data, f"--save {alone}")
    trained(STOCK, *unfolded, "--exit-interval 1")
    start = only_checkpoint(alone, 1, tmp_path / "start")
    losses = trained(STOCK, *unfolded, f"--load {alone} --exit-interval {LAST}").losses
    folded = (CPU, MODEL, BALANCED, TRAIN, FOLDED, data, f"--save {tmp_path / 'saved'}")
    run = trained(ENTRY, *folded, f"--load {start} --exit-interval {LAST}")
    assert sorted(run.losses) == sorted(losses)
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(losses[iteration], rel=LOSS, abs=1e-7), iteration
    assert_same_tensors(tmp_path / "saved", alone, LAST)


def test_balancing_that_compares_samples(stock: Stock, tmp_path: Path) -> None:
    """Each step is one micro-batch, in the stock run in one row, whose loss and counts the router forgets after it."""
    alone = tmp_path / "alone"
    balancing = "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.01"
    # Rotary embeddings would number the tokens of the whole row, and upstream counts no biases under a mask of padding.
    model = f"{EXPERTS} {balancing} --position-embedding-type learned_absolute"
    unfolded = (CPU, MODEL, model, TRAIN, UNFOLDED, "--micro-batch-size 16", stock.data, f"--save {alone}")
    losses = trained(STOCK, *unfolded, "--save-interval 1 --exit-interval 3").losses
    start = only_checkpoint(alone, 1, tmp_path / "start")
    *arguments, save = stock.args(tmp_path / "saved")
    run = trained(ENTRY, *arguments, save, model, f"--micro-batch-size 16 --load {start} --exit-interval 3")
    assert sorted(run.losses) == [2, 3]
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(losses[iteration], rel=LOSS), iteration
    assert_same_tensors(tmp_path / "saved", alone, 3)


def test_stock_run_continues_from_a_folded_checkpoint(stock: Stock, base: Path, tmp_path: Path) -> None:
    trained(ENTRY, *stock.args(tmp_path), f"--load {base} --exit-interval 3")
    alone = trained(STOCK, CPU, MODEL, TRAIN, UNFOLDED, stock.data, f"--load {tmp_path} --exit-interval 5")
    assert sorted(alone.losses) == [4, 5]
    for iteration, loss in alone.losses.items():
        assert loss == pytest.approx(stock.losses[iteration], rel=LOSS)
