"""A folded step with routes equals the stock model on samples that are routed alike, in every parallel layout."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from harness.folded_jobs import Job, unfolded_gradients
from harness.folded_runs import FP32_INSIDE, LONGEST, MOE, SAMPLES, Result, check, folded
from harness.layouts import in_layouts
from harness.routes import with_routes
from harness.weights import assemble
from harness.worlds import Layout, world

from mcore_prefix_tree.mcore.seam.hybrid_layers import HAS_HYBRID_MODEL, NEEDS_NEWER

SHAPE = (4, 2, 4)
RECOMPUTE = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))


@functools.cache
def routed_oracle(kind: str) -> Result:
    """Each routed sample by itself, one process, stock layers."""
    samples = with_routes(SAMPLES, kind, SHAPE)
    ((loss, parts),) = world(1).run(unfolded_gradients, Layout(), Job(config=MOE), samples, layout=Layout())
    return loss, assemble(parts)


@pytest.mark.parametrize("kind", ["one token", "missing"])
@in_layouts("tp2-sp", "pp2", "pp2-vpp2", "dp2", "ep2", ci=["single", "tp2-sp-pp2-vpp2"], slow=["dp4"])
def test_routes_in_every_layout(size: int, layout: Layout, kind: str) -> None:
    """In micro-batches under a budget, layers recomputed, on ranks with different numbers of tokens."""
    job = Job(config=MOE + RECOMPUTE, max_tokens=LONGEST + 10)
    check(folded(size, layout, job, with_routes(SAMPLES, kind, SHAPE)), routed_oracle(kind), FP32_INSIDE)


@pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=NEEDS_NEWER)
def test_routes_of_a_hybrid_model() -> None:
    """It has a row for each layer of its pattern; those without experts read none."""
    samples, job = with_routes(SAMPLES, "one token", SHAPE), Job(config=MOE, pattern="*E*E", way="weighted sum")
    ((loss, parts),) = world(1).run(unfolded_gradients, Layout(), job, samples, layout=Layout())
    layout = Layout(pp=2)
    check(folded(2, layout, replace(job, pattern="*E|*E"), samples), (loss, assemble(parts)), FP32_INSIDE)


def test_routes_change_the_model_that_is_trained() -> None:
    """The test above can fail."""
    wrong = folded(1, Layout(), Job(config=MOE))
    assert abs(wrong[0] - routed_oracle("one token")[0]) > 1e-4
