"""The fused head and forward-only scoring equal the stock model on unfolded samples, in every parallel layout."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from harness.folded_jobs import Job
from harness.folded_runs import FP64, LONGEST, SAMPLES, check, folded, oracle
from harness.layouts import in_layouts
from harness.worlds import Layout, world
from head_jobs import COLUMNS, ScoringJob, scores_and_first_ratios, scores_and_gradients, stock_scores, uneven_head

from mcore_prefix_tree import Sample
from mcore_prefix_tree.sample import Tempered

WARM = [
    Sample(tokens=s.tokens, loss_mask=s.loss_mask, merge_key=Tempered(temperature=0.7 if i % 3 else 1.3, key=None))
    for i, s in enumerate(SAMPLES)
]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
WAYS = [(way, entropy) for way in ("any loss", "loss by rows", "loss of edges") for entropy in (False, True)]
# No padding, some on the last rank, and all of it with some of the rank before.
PADDINGS = (0, 3, 9)


# Any two of a way, a type and a padding meet.
@pytest.mark.parametrize(
    ("dtype", "limit", "with_entropy", "way", "padding"),
    [
        pytest.param(
            *(dtype, LIMITS[dtype], entropy, way, PADDINGS[(row + column) % 3]),
            marks=[pytest.mark.ci] * (row % len(LIMITS) != column),
        )
        for row, (way, entropy) in enumerate([*WAYS, ("weighted sum", False)])
        for column, dtype in enumerate(LIMITS)
    ],
)
def test_a_vocabulary_in_uneven_parts(
    dtype: torch.dtype, limit: float, with_entropy: bool, way: str, padding: int
) -> None:
    arguments = (dtype, with_entropy, way, padding)
    (whole,) = world(1).run(uneven_head, *arguments, layout=Layout())
    parts = world(len(COLUMNS)).run(uneven_head, *arguments, layout=Layout())
    for total, logprob, entropy, grad_hidden, _ in parts:
        assert error(total, whole[0]) < limit
        assert torch.equal(logprob, parts[0][1]), "all ranks know the same"
        assert error(logprob, whole[1]) < min(limit, 1e-5)
        assert (entropy is None) == (whole[2] is None)
        if entropy is not None:
            assert error(entropy, whole[2]) < min(limit, 1e-5)
        assert error(grad_hidden, whole[3]) < limit
    grad_weight = torch.cat([part[4] for part in parts])
    assert error(grad_weight[: len(whole[4])], whole[4]) < limit
    assert not grad_weight[len(whole[4]) :].any()


@pytest.mark.parametrize(("way", "padding"), [("any loss", 0), ("any loss", 9), ("logits", 0)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_kept_sets_of_a_vocabulary_in_uneven_parts(dtype: torch.dtype, limit: float, way: str, padding: int) -> None:
    arguments = (dtype, True, way, padding, True)
    (whole,) = world(1).run(uneven_head, *arguments, layout=Layout())
    parts = world(len(COLUMNS)).run(uneven_head, *arguments, layout=Layout())
    for total, logprob, entropy, grad_hidden, _ in parts:
        assert torch.equal(logprob, parts[0][1]), "all ranks know the same"
        for one, other in zip((total, logprob, entropy, grad_hidden), whole[:4], strict=True):
            assert error(one, other) < limit
    assert error(torch.cat([part[4] for part in parts])[: len(whole[4])], whole[4]) < limit


# Every layout with each way and with each kind of embeddings; all three together are slow.
@pytest.mark.parametrize(
    ("way", "share_embeddings"),
    [
        pytest.param("logprobs", False, id="logprobs-untied"),
        pytest.param("weighted sum", True, id="weighted sum-tied"),
        pytest.param("logprobs", True, id="logprobs-tied", marks=pytest.mark.slow),
        pytest.param("weighted sum", False, id="weighted sum-untied", marks=pytest.mark.slow),
    ],
)
@in_layouts("tp2-sp", "pp2-vpp2", "dp2", ci=["tp2", "pp2"], slow=["tp2-sp-pp2-vpp2", "tp2-dp2"])
def test_every_parameters_gradient(size: int, layout: Layout, share_embeddings: bool, way: str) -> None:
    job = Job(max_tokens=LONGEST + 10, share_embeddings=share_embeddings, way=way)
    check(folded(size, layout, job), oracle(Job(share_embeddings=share_embeddings)), FP64)


@in_layouts("single", "tp2", "tp2-sp")
def test_a_model_that_gathers_its_logits_is_scored_alike(size: int, layout: Layout) -> None:
    found = [world(size).run(scores_and_gradients, layout, parallel, layout=layout) for parallel in (True, False)]
    for (logprob, grads), (of_whole, grads_of_whole) in zip(*found, strict=True):
        assert torch.equal(logprob, of_whole)
        assert all(torch.equal(*pair) for pair in zip(grads, grads_of_whole, strict=True))


EVERY_LAYOUT = in_layouts("tp2-sp", "dp2", ci=["pp2-vpp2"], slow=["single", "tp2", "pp2", "tp2-pp2"])


@functools.cache
def stock() -> list[tuple[np.ndarray, np.ndarray]]:
    (rows,) = world(1).run(stock_scores, Layout(), ScoringJob(), WARM, layout=Layout())
    return rows


@EVERY_LAYOUT
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits"])
def test_scores_equal_unfolded_samples(size: int, layout: Layout, fused: bool) -> None:
    """On every rank, in the order of the samples, at each sample's temperature."""
    job = ScoringJob(dtype=torch.float64, max_tokens=LONGEST + 10, all_tokens=True, fused=fused)
    for scores, _ in world(size).run(scores_and_first_ratios, layout, job, WARM, layout=layout):
        assert len(scores) == len(WARM)
        for sample, row, (logprobs, entropy) in zip(WARM, scores, stock(), strict=True):
            assert row.scored.tolist() == [False] + [True] * (len(sample) - 1)
            assert np.isnan(row.logprobs[0])
            assert np.isnan(row.entropy[0])
            if len(sample) > 1:
                assert error(torch.from_numpy(row.logprobs[1:]), torch.from_numpy(logprobs)) < 1e-12
                assert error(torch.from_numpy(row.entropy[1:]), torch.from_numpy(entropy)) < 1e-12


@in_layouts("tp2-sp", "dp2", slow=["single", "tp2", "pp2", "pp2-vpp2", "tp2-pp2"])
@pytest.mark.parametrize(
    ("fused", "dtype"),
    [
        pytest.param(True, torch.bfloat16, id="fused-bfloat16"),
        pytest.param(False, torch.float32, id="logits-float32"),
        pytest.param(True, torch.float32, id="fused-float32", marks=pytest.mark.slow),
        pytest.param(False, torch.bfloat16, id="logits-bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_first_importance_ratios_are_one_to_the_bit(
    size: int, layout: Layout, fused: bool, dtype: torch.dtype
) -> None:
    job = ScoringJob(dtype=dtype, max_tokens=LONGEST + 10, fused=fused, entropy=fused)
    seen = set()
    for scores, ratios in world(size).run(scores_and_first_ratios, layout, job, SAMPLES, layout=layout):
        for sample, row in zip(SAMPLES, scores, strict=True):
            scored = (sample.loss_mask != 0) & (np.arange(len(sample)) > 0)
            assert np.array_equal(row.scored, scored)
            assert np.array_equal(np.isfinite(row.logprobs), scored)
        for index, ratio in ratios:
            seen.add(index)
            assert ratio.dtype == np.float32
            assert (ratio == 1.0).all()
    assert seen == set(range(len(SAMPLES)))


@in_layouts("tp2-sp", ci=["single", "dp2", "pp2-vpp2"], slow=["tp2", "pp2", "tp2-pp2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_importance_ratios_of_trees_above_the_budget_are_one_to_the_bit(
    size: int, layout: Layout, dtype: torch.dtype
) -> None:
    """Scoring runs the first passes of the step, too."""
    job = ScoringJob(dtype=dtype, max_tokens=LONGEST // 2, over_budget="carry")
    found = [ratios for _, ratios in world(size).run(scores_and_first_ratios, layout, job, SAMPLES, layout=layout)]
    assert {index for ratios in found for index, _ in ratios} == set(range(len(SAMPLES)))
    assert all((ratio == 1.0).all() for ratios in found for _, ratio in ratios)


def test_full_recompute_scores_the_same_bits() -> None:
    recompute = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
    job = ScoringJob(dtype=torch.bfloat16, config=recompute)
    ((_, ratios),) = world(1).run(scores_and_first_ratios, Layout(), job, SAMPLES, layout=Layout())
    assert all((ratio == 1.0).all() for _, ratio in ratios)
