"""Predicted times of attention: the counts are those of the algorithm, and the sums those of the block lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from attention_bench.workloads import chains, standard_workloads
from harness.commands import run_command, write_rows

from mcore_prefix_tree import Sample
from mcore_prefix_tree.bench.predicted_attention import (
    CHIPS,
    WAITING,
    Chip,
    attention_case,
    count_loops,
    find_measured,
    makespan,
    predict,
    predict_step,
    tile_costs,
)
from mcore_prefix_tree.metadata import TreeMetadata

CASE = attention_case(64, 8, 128)
ALONE = Chip(name="one processor", processors=1, peak=1.0)
CPU = torch.device("cpu")


def test_counts_of_a_tile_equal_a_hand_count() -> None:
    """A multiply-add is two operations of 4,096 in a clock; 16 exponentials take one."""
    (forward,), (key_value,), (query,) = (tile_costs(CASE, name) for name in ("forward", "key_value", "query"))
    for tiles, products, queries, keys in ((forward, 2, 128, 64), (key_value, 4, 64, 128), (query, 3, 128, 64)):
        assert {tile.products for tile in tiles} == {2 * products * queries * keys * 128 / 4096}
        # The forward also rescales: two rows of each thread of 8 warps.
        rescaled = 2 * 8 * 32 if tiles is forward else 0
        assert {tile.exponentials for tile in tiles} == {(queries * keys + rescaled) / 16}
        diagonal, full, tail = tiles
        assert diagonal.instructions >= tail.instructions > full.instructions


def test_only_innermost_loops_with_products_are_counted() -> None:
    code = """
.L_x_0:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT ;
        /*0020*/              @!P1 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   MUFU.EX2 R1, R1 ;
        /*0040*/              @!P2 FADD R1, R1, R2 ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
.L_x_3:
        /*0060*/                   FADD R1, R1, R2 ;
        /*0070*/               @P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9], R16 ;
        /*0090*/              @!P1 BRA `(.L_x_2) ;
        /*00a0*/                   BRA `(.L_x_1) ;
"""
    (found,) = count_loops(code, warps=8)
    assert found == (2 * 2 * 64 * 128 * 16 / 4096, 2 * 8, 2 * 5)


def test_one_causal_sequence_takes_its_triangle_of_tiles() -> None:
    blocks = 6
    diagonal, full, _ = tile_costs(CASE, "forward")[0]
    # Two tiles of 64 keys for one of 128 queries.
    clocks = 64 * (2 * blocks * diagonal.clocks + blocks * (blocks - 1) * full.clocks)
    sequence = predict(chains(np.array([128 * blocks]), CPU), CASE, ALONE)
    assert sequence.forward == pytest.approx(WAITING * clocks / ALONE.clocks)
    # A chain of nodes is the same sequence, and samples that share nothing are as many of it.
    nodes = TreeMetadata.from_nodes(np.cumsum([0, 100, 500, 168]), np.array([-1, 0, 1]))
    assert predict(nodes, CASE, ALONE) == sequence
    unshared = predict(chains(np.array([128 * blocks] * 3), CPU), CASE, ALONE)
    assert unshared[:2] == pytest.approx([3 * time for time in sequence[:2]])


def test_time_grows_with_visible_pairs() -> None:
    times = [sum(predict(chains(np.array([1000 * n]), CPU), CASE, CHIPS["h100"])[:2]) for n in range(1, 9)]
    assert times == sorted(set(times))
    assert times[-1] / times[3] > 3  # pairs grow fourfold


def test_programs_start_on_the_first_free_processor() -> None:
    assert makespan(np.array([5.0, 4.0, 3.0, 3.0]), 2) == 8.0


def test_predictions_are_near_every_measured_forest() -> None:
    """Within 3 %; the factor is fitted to the first of them. Those of the H200 had another launch of the forward."""
    times = [predict(work.folded(CPU), CASE, CHIPS["h100"]) for work in standard_workloads()]
    measured = [time for time in times if time.measured is not None]
    assert len(measured) >= 2
    for time in measured:
        assert time.forward + time.backward == pytest.approx(time.measured, rel=0.03)


def test_measurement_replaces_a_prediction() -> None:
    prompt = list(range(4096))
    samples = [Sample(tokens=[*prompt, *[5000 + answer] * 1024]) for answer in range(16)]
    forest = standard_workloads()[0].folded(CPU)
    for chip in CHIPS.values():
        folded, *others = predict_step(samples, 32768, CASE, chip)
        assert folded[:3] == ("folded", "both", "measured")
        assert {row[2] for row in others} == {"predicted"}
        assert find_measured(forest, CASE, chip) == folded[3]
        assert find_measured(forest, attention_case(32, 8, 128), chip) is None
    half = list(predict_step(samples, 32768, attention_case(32, 8, 128), CHIPS["h100"]))
    assert {row[2] for row in half} == {"predicted"}


def test_command_says_that_its_figures_are_predicted(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"tokens": [1] * 300 + [n] * 200} for n in range(4)])
    words = ("bench", "attention", data, "--max-tokens", 4096, "--predict")
    said = run_command(*words, "h100")
    assert said.exit_code == 0, said.output
    rows = [line.split() for line in said.output.splitlines() if "folded" in line.split()[0]]
    assert [row[2] for row in rows] == ["predicted"] * 6
    assert "fitted to a forest" in said.output
    for wrong in (
        ["b200"],
        ["h100", "--heads", "64,7,128"],
        ["h100", "--heads", "64,8"],
        ["h100", "--heads", "8,8,130"],
    ):
        refused = run_command(*words, *wrong)
        assert refused.exit_code == 2
        assert wrong[-1].split(",")[-1] in refused.output
