"""One sample per turn, in groups of unequal sizes, equals complete rollouts in the stock model, in parallel layouts.

The oracle sees one sample a rollout, the folded step one a turn: each weighs as its part of the rollout.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from harness.folded_jobs import VOCAB
from harness.layouts import in_layouts
from harness.weights import assemble
from harness.worlds import Layout, world
from objective_jobs import Job, folded_step, unfolded_step
from rollouts import as_samples, rollouts

# Turns of each rollout of each group: five rollouts and one, six turns and one.
SHAPE = ((1, 6, 2, 3, 1), (4,), (2, 2), (6, 1, 5))
WHOLES, TURNS = as_samples(rollouts(SHAPE, 1, vocab=VOCAB), 1, scale=0.1, around=-math.log(VOCAB))
LONGEST = max(map(len, TURNS))
FP64 = 1e-12
LAYERS = (("num_layers", 2),)
OPTIONS = (("alone", "zero"), ("kl_coef", 0.05), ("clip_eps_low", 0.05), ("clip_eps_high", 0.05))


@functools.cache
def expected(name: str, normalise: str) -> tuple[float, Mapping[str, torch.Tensor]]:
    job = Job(name=name, options=(*OPTIONS, ("normalise", normalise)), config=LAYERS)
    ((loss, parts),) = world(1).run(unfolded_step, job, WHOLES, False, layout=Layout())
    return loss, assemble(parts)


@pytest.mark.parametrize(("name", "whole", "by_turn"), [("grpo", "sample", "rollout"), ("dapo", "token", "token")])
@in_layouts("single", "dp2", "pp2", "tp2-sp")
def test_every_layout(size: int, layout: Layout, name: str, whole: str, by_turn: str) -> None:
    job = Job(name=name, options=(*OPTIONS, ("normalise", by_turn)), max_tokens=LONGEST + 6, config=LAYERS)
    results = world(size).run(folded_step, layout, job, TURNS, layout=layout)
    loss, gradients = expected(name, whole)
    outcomes = [outcome for outcome, _ in results]
    for outcome in outcomes:
        assert outcome.loss == pytest.approx(loss, rel=FP64)
        assert outcome.micro_batches > 1
    folded = assemble(itertools.chain.from_iterable(parts for _, parts in results))
    assert folded.keys() == gradients.keys()
    for parameter, tensor in gradients.items():
        error = torch.linalg.vector_norm(folded[parameter] - tensor) / torch.linalg.vector_norm(tensor)
        assert error <= FP64, f"{parameter}: {error:.2e}"
    if size == 2 and layout == Layout():
        assert outcomes[0].tokens_here != outcomes[1].tokens_here, "unequal ranks"
        assert outcomes[0].groups_here & outcomes[1].groups_here, "groups on both"
