"""FLA's functions over the levels of a tree are the rule on each path by itself, to fp64's last digits."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from harness.fla_in_torch import RULE, fla_in_torch
from harness.in_double import kept_double

from mcore_prefix_tree.mcore.release import HAS_DELTA_NET
from mcore_prefix_tree.mcore.seam.levels import Levels

if not HAS_DELTA_NET:
    pytest.skip("Gated DeltaNet follows a tree since megatron-core 0.19", allow_module_level=True)

from harness.delta_rule import deep_forest, level_by_level, make_inputs, on_each_path, parts_of_a_tree, run, worst_error

from mcore_prefix_tree.mcore.seam.delta_levels import check_kernels

FORESTS = {
    "forest": lambda: [deep_forest()],
    "cut inside chunks": lambda: parts_of_a_tree(63, 90),
    "cut at chunks": lambda: parts_of_a_tree(64, 128, 192),
    "many cuts": lambda: parts_of_a_tree(20, 70, 140, 200),
}


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    with kept_double():
        yield


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("reads_out", [True, False], ids=["all", "only states"])
def test_levels_are_paths(forest: str, reads_out: bool) -> None:
    parts = [Levels.of(metadata) for metadata in FORESTS[forest]()]
    for levels in parts:
        if not reads_out and not any(level.kept for level in levels.levels):
            continue
        inputs = make_inputs(levels, torch.float64)
        with fla_in_torch():
            found = run(level_by_level, levels, inputs, reads_out=reads_out)
        assert worst_error(found, run(on_each_path, levels, inputs, reads_out=reads_out)) < 1e-12


def test_parts_read_and_leave_states() -> None:
    parts = [Levels.of(metadata) for name in list(FORESTS)[1:] for metadata in FORESTS[name]()]
    assert any(part.given > 1 and len(part.left_at) > 1 and len(part.levels) >= 5 for part in parts)
    assert len(Levels.of(deep_forest()).levels) > 5


def test_only_the_passes_of_states_are_called_for_each_level() -> None:
    levels = Levels.of(deep_forest())
    with fla_in_torch() as calls:
        run(level_by_level, levels, make_inputs(levels, torch.float64))
    each, once = len(levels.levels), 1
    assert calls == {
        "chunk_local_cumsum": 2,  # forward, and backward from the end
        "chunk_gated_delta_rule_fwd_intra": once,
        "chunk_gated_delta_rule_fwd_h": each + once,  # the backward pass knows all first states
        "chunk_fwd_o": once,
        "recompute_w_u_fwd": once,
        "chunk_bwd_dv_local": once,
        "chunk_gated_delta_rule_bwd_dhu": each,
        "chunk_bwd_dqkwg": once,
        "prepare_wy_repr_bwd": once,
    }


def test_lacking_functions_are_named() -> None:
    """Without a plan of chunks, as before 0.4.2, FLA waits for the device at each level."""
    with fla_in_torch():
        check_kernels()
        rule = sys.modules[RULE]
        rule.chunk_fwd_o = lambda q, k, v, h, g, scale, cu_seqlens: None
        del rule.chunk_bwd_dqkwg
        message = "tree Gated DeltaNet takes .* no chunk_indices in chunk_fwd_o, chunk_bwd_dqkwg; pip install flash-li"
        with pytest.raises(ImportError, match=message):
            check_kernels()


def test_older_functions_solve_chunks_apart() -> None:
    with fla_in_torch():
        del sys.modules[RULE].chunk_gated_delta_rule_fwd_intra
        with pytest.raises(ImportError, match="in chunk_scaled_dot_kkt_fwd, solve_tril; pip install"):
            check_kernels()
