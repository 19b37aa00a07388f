"""One sample per turn, in groups of unequal sizes, equals complete rollouts in the stock model, in parallel layouts.

The oracle sees one sample a rollout, the folded step one a turn: each weighs as its part of the rollout.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from harness.folded_jobs import VOCAB
from harness.layouts import every_way, in_layouts
from harness.weights import assemble
from harness.worlds import Layout, world
from objective_jobs import Job, Outcome, folded_step, unfolded_step
from rollouts import as_samples, rollouts

# Turns of each rollout of each group: five rollouts and one, six turns and one.
SHAPE = ((1, 6, 2, 3, 1), (4,), (2, 2), (6, 1, 5))
WHOLES, TURNS = as_samples(rollouts(SHAPE, 1, vocab=VOCAB), 1, scale=0.1, around=-math.log(VOCAB))
LONGEST = max(map(len, TURNS))
FP64 = 1e-12
LAYERS = (("num_layers", 2),)
OPTIONS = (("alone", "zero"), ("kl_coef", 0.05), ("clip_eps_low", 0.05), ("clip_eps_high", 0.05))


# Ratios of whole rollouts, and groups that are left out.
SEQUENCES = {
    "gspo": ("gspo", (("filter_groups", True),)),
    "gspo by turn": ("gspo", (("ratio_level", "turn"),)),
    "importance": ("cispo", (("tis_cap", 1.05), ("tis_level", "sequence"), ("off_policy_mask", 0.005))),
    "importance of the engine": ("dapo", (("tis_cap", 1.05), ("tis_level", "sequence"))),
    "divergence": ("grpo", (("on_policy", True), ("kl_importance", "sequence"), ("surrogate_level", "sequence"))),
}


@functools.cache
def expected(
    name: str, normalise: str, options: tuple[tuple[str, object], ...] = ()
) -> tuple[float, Mapping[str, torch.Tensor]]:
    job = Job(name=name, options=(*OPTIONS, ("normalise", normalise), *options), config=LAYERS)
    ((loss, parts),) = world(1).run(unfolded_step, job, WHOLES, False, layout=Layout())
    return loss, assemble(parts)


def check(size: int, layout: Layout, job: Job, wanted: tuple[float, Mapping[str, torch.Tensor]]) -> tuple[Outcome, ...]:
    results = world(size).run(folded_step, layout, job, TURNS, layout=layout)
    loss, gradients = wanted
    outcomes = tuple(outcome for outcome, _ in results)
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
        assert outcomes[0].groups_here & outcomes[1].groups_here or outcomes[0].carried_tokens, "groups on both"
    return outcomes


@pytest.mark.parametrize(("name", "whole", "by_turn"), [("grpo", "sample", "rollout"), ("dapo", "token", "token")])
@in_layouts("single", "dp2", "pp2", "tp2-sp")
def test_every_layout(size: int, layout: Layout, name: str, whole: str, by_turn: str) -> None:
    job = Job(name=name, options=(*OPTIONS, ("normalise", by_turn)), max_tokens=LONGEST + 6, config=LAYERS)
    check(size, layout, job, expected(name, whole))


@pytest.mark.parametrize(
    ("size", "layout", "case"),
    every_way(
        {name: name for name in SEQUENCES},
        quick={"dp2": SEQUENCES, "pp2": {"gspo"}},
        ci={"dp2": SEQUENCES, "pp2": {"importance", "divergence"}, "tp2-sp": {"gspo"}},
    ),
)
@pytest.mark.parametrize("cut", [False, True], ids=["", "trees in chunks"])
def test_a_ratio_of_a_rollout_is_that_of_one_line(size: int, layout: Layout, case: str, cut: bool) -> None:
    """Several micro-batches, ranks and chunks, none of which has all turns of a rollout if trees are cut."""
    name, options = SEQUENCES[case]
    job = Job(name=name, options=(*OPTIONS, ("normalise", "rollout"), *options), config=LAYERS)
    limits = {"max_tokens": LONGEST // 2, "over_budget": "carry"} if cut else {"max_tokens": LONGEST + 6}
    outcomes = check(size, layout, replace(job, **limits), expected(name, "rollout", options))
    assert (outcomes[0].carried_tokens > 0) == cut
