"""Pipeline stages know the shapes of what they receive: only hidden states and gradients are sent."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from harness.folded_jobs import Job, folded_gradients
from harness.folded_runs import FP64, SAMPLES, check, oracle
from harness.layouts import LAYOUTS, shallow
from harness.weights import assemble
from harness.worlds import Layout, world
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mcore_prefix_tree.plan import plan_step

BUDGET = 40


def count_exchanges(layout: Layout, job: Job) -> tuple[Any, int]:
    """Every rank: the gradients of a step, and how often stages asked for shapes, as they do without shapes given."""
    asked = []
    upstream = P2PCommunicator._communicate_shapes

    def ask(*args: Any) -> Any:
        asked.append(args)
        return upstream(*args)

    with mock.patch.object(P2PCommunicator, "_communicate_shapes", ask):
        return folded_gradients(layout, job, SAMPLES), len(asked)


@pytest.mark.parametrize("name", ["pp2", "pp2-vpp2", pytest.param("tp2-sp-pp2-vpp2", marks=pytest.mark.ci)])
def test_stages_ask_for_no_shapes(name: str) -> None:
    size, layout = LAYOUTS[name]
    plan = plan_step(SAMPLES, max_tokens=BUDGET, dp_size=1)
    assert len(set(plan.physical_tokens[0])) > 2, "micro-batches differ in length"
    job = Job(max_tokens=BUDGET, config=shallow(layout))
    results = world(size).run(count_exchanges, layout, job, layout=layout)
    assert [asked for _, asked in results] == [0] * size
    (loss, _, _), _ = results[0]
    parts = [part for (_, own, _), _ in results for part in own]
    check((loss, assemble(parts)), oracle(job), FP64)
