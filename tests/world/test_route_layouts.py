"""A folded step with routes equals the stock model on samples that are routed alike, in every parallel layout."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.folded_jobs import VOCAB, Job, folding_of, tree_spec, unfolded_gradients
from harness.folded_runs import FP32_INSIDE, LONGEST, MOE, SAMPLES, Result, check, folded
from harness.layouts import every_way, in_layouts, shallow
from harness.models import build_chunks, tiny_gpt_config
from harness.routes import with_routes
from harness.torchrun_jobs import TP2, run
from harness.train_jobs import rows, write_job
from harness.weights import assemble
from harness.worlds import Layout, world
from inside_jobs import InsideJob, inside_gradients

from mcore_prefix_tree import Sample
from mcore_prefix_tree.mcore.engine.score_files import score_and_record
from mcore_prefix_tree.mcore.engine.scoring import ScoringStep
from mcore_prefix_tree.mcore.outputs import Logprobs
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam.hybrid_layers import NEEDS_NEWER

RECOMPUTE = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))


def routed(kind: str, depth: tuple[tuple[str, int], ...]) -> list[Sample]:
    """The samples with routes for each layer."""
    return with_routes(SAMPLES, kind, (dict(depth)["num_layers"], 2, 4))


@functools.cache
def by_sample(kind: str, depth: tuple[tuple[str, int], ...]) -> Result:
    """Each routed sample by itself, one process, stock layers."""
    job = Job(config=MOE + depth)
    ((loss, parts),) = world(1).run(unfolded_gradients, Layout(), job, routed(kind, depth), layout=Layout())
    return loss, assemble(parts)


EVERY = {"tp2-sp", "pp2", "pp2-vpp2", "dp2", "ep2"}
IN_CI = {name: {"one token"} if name in ("tp2-sp", "pp2-vpp2") else set() for name in sorted(EVERY)}
IN_CI |= {"tp2-sp-pp2-vpp2": {"missing"}, "single": {"one token"}, "dp4": set()}


@pytest.mark.parametrize(
    ("size", "layout", "kind"),
    every_way({kind: kind for kind in ("one token", "missing")}, quick={name: {"missing"} for name in EVERY}, ci=IN_CI),
)
def test_routes_in_every_layout(size: int, layout: Layout, kind: str) -> None:
    """In micro-batches under a budget, layers recomputed, on ranks with different numbers of tokens."""
    job = Job(config=MOE + RECOMPUTE + shallow(layout), max_tokens=LONGEST + 10)
    check(folded(size, layout, job, routed(kind, shallow(layout))), by_sample(kind, shallow(layout)), FP32_INSIDE)


@pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=NEEDS_NEWER)
def test_routes_of_a_hybrid_model() -> None:
    """It has a row for each layer of its pattern; those without experts read none."""
    samples, job = with_routes(SAMPLES, "one token", (4, 2, 4)), Job(config=MOE, pattern="*E*E", way="weighted sum")
    ((loss, parts),) = world(1).run(unfolded_gradients, Layout(), job, samples, layout=Layout())
    layout = Layout(pp=2)
    check(folded(2, layout, replace(job, pattern="*E|*E"), samples), (loss, assemble(parts)), FP32_INSIDE)


@in_layouts("tp2-sp", "pp2-vpp2", ci=["dp2", "pp2", "ep2"])
def test_routes_inside_the_model(size: int, layout: Layout) -> None:
    """Every stage folds for itself, by the routes of all layers."""
    job = InsideJob(config=MOE + shallow(layout))
    results = world(size).run(inside_gradients, layout, job, routed("one token", shallow(layout)), layout=layout)
    found = results[0][0], assemble(chain.from_iterable(parts for _, parts, _ in results))
    check(found, by_sample("one token", shallow(layout)), FP32_INSIDE)


def recorded(layout: Layout) -> list[np.ndarray]:
    """The experts that the writing rank gets for each sample, ascending."""
    config = tiny_gpt_config(layout=layout, dtype=torch.float64, **dict(MOE), moe_layer_freq=[0, 1, 1, 1])
    chunks = build_chunks(config, tree_spec, vocab_size=VOCAB)
    folding = folding_of(layout, LONGEST + 10)
    step = ScoringStep.plan(SAMPLES, folding, for_main_rank=True)
    _, routes = score_and_record(step, chunks, Logprobs(fused=False), config)
    return [np.sort(one.ids) for one in routes]


@in_layouts("tp2-sp", "pp2-vpp2", "dp2", ci=["ep2", "pp2"])
def test_recorded_routes_in_every_layout(size: int, layout: Layout) -> None:
    (expected,) = world(1).run(recorded, Layout(), layout=Layout())
    found = world(size).run(recorded, layout, layout=layout)
    assert len(expected) == len(SAMPLES)
    np.testing.assert_equal(found[0], expected)
    assert found[1:] == [[]] * (size - 1)
    assert all((one[:-1, 0] == [0, 1]).all() for one in expected), "a dense layer has the first experts"
    assert len({one[:, 1:].tobytes() for one in expected}) > 3


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["parallel.pipeline_model_parallel_size=2"], id="pp2"),
        pytest.param([TP2, "parallel.sequence_parallel=true"], id="tp2-sp", marks=pytest.mark.ci),
    ],
)
def test_verify_replays_routes_in_recomputed_layers(tmp_path: Path, layout: list[str]) -> None:
    """Each stage's stock model finds a micro-batch's routes again in its backward, between other micro-batches."""
    plain = rows()
    routed = with_routes([Sample(tokens=row["tokens"]) for row in plain], "one token", (2, 2, 4))
    for row, sample in zip(plain, routed, strict=True):
        row["routed_experts"] = sample.signals.routes.ids.tolist()
    experts = ("num_moe_experts=4", "moe_router_load_balancing_type=none", "recompute_granularity=full")
    experts += ("recompute_method=uniform", "recompute_num_layers=1")
    job = write_job(tmp_path, plain)
    run(2, "verify", job, *(f"model.transformer.{one}" for one in experts), "model.dtype=float64", *layout, code=0)


def test_routes_change_the_model_that_is_trained() -> None:
    """The test above can fail."""
    wrong = folded(1, Layout(), Job(config=MOE + shallow(Layout())))
    assert abs(wrong[0] - by_sample("one token", shallow(Layout()))[0]) > 1e-4
