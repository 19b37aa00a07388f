from __future__ import annotations

import random

import pytest
from harness.oracles import comb, sample_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.plan import BudgetError, CostModel, fewest_micro_batches, plan_step

COST = CostModel(token=100.0, pair=1.0)


def micro_batches(plan):
    return [batch for rank in plan.micro_batches for batch in rank]


@settings(max_examples=150)
@given(
    samples=sample_lists(),
    seed=st.integers(0, 99),
    max_tokens=st.integers(30, 80),
    dp_size=st.integers(1, 3),
    with_cost=st.booleans(),
)
def test_a_cluster_is_never_cut_and_no_budget_exceeded(samples, seed, max_tokens, dp_size, with_cost):
    rng = random.Random(seed)
    keys = [rng.choice([None, "a", "b", 3]) for _ in samples]
    try:
        plan = plan_step(
            samples, max_tokens=max_tokens, dp_size=dp_size, together=keys, cost_model=COST if with_cost else None
        )
    except BudgetError:
        for key in set(keys) - {None}:
            own = [sample for sample, of in zip(samples, keys, strict=True) if of == key]
            if fold(own).physical_tokens > max_tokens:
                return
        raise
    fewest = fewest_micro_batches(samples, max_tokens=max_tokens, dp_size=dp_size, together=keys)
    assert fewest == plan.num_micro_batches
    batches = micro_batches(plan)
    assert sorted(index for batch in batches for index in batch) == list(range(len(samples)))
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_batches}
    for key in set(keys) - {None}:
        holding = {n for n, batch in enumerate(batches) for index in batch if keys[index] == key}
        assert len(holding) == 1
    for batch, tokens in zip(batches, [t for rank in plan.physical_tokens for t in rank], strict=True):
        assert fold([samples[index] for index in batch]).physical_tokens == tokens <= max_tokens


def test_pairs_under_one_prompt_that_interleave_can_be_cut_apart():
    """In depth-first order the chosen completions come before the rejected ones, so no run of samples would do."""
    prompt = [1] * 50
    samples = [Sample(tokens=[*prompt, side, pair, *[9] * 8]) for pair in range(4) for side in (2, 3)]
    pair_of = [index // 2 for index in range(8)]
    plan = plan_step(samples, max_tokens=50 + 2 * 10 * 2, dp_size=2, together=pair_of)
    assert plan.num_micro_batches == 1
    assert sorted(map(sorted, micro_batches(plan))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_without_keys_the_samples_are_free():
    samples = comb(40)
    free = plan_step(samples, max_tokens=60, dp_size=2, together=[None] * 40)
    plain = plan_step(samples, max_tokens=60, dp_size=2)
    assert free.num_micro_batches == plain.num_micro_batches
    assert max(map(max, free.physical_tokens)) == max(map(max, plain.physical_tokens))


def test_a_pair_beyond_the_budget_is_named():
    samples = [Sample(tokens=[1] * 6 + [end] * 4, source=f"pairs.jsonl:{end}") for end in (2, 3)]
    assert plan_step(samples, max_tokens=14, together=["p", "p"]).physical_tokens == ((14,),)
    with pytest.raises(
        BudgetError,
        match=r"^pairs.jsonl:2 and pairs.jsonl:3 stay together, and their 14 unique tokens do not fit a micro-batch of "
        r"batch.max_tokens=13; raise batch.max_tokens or shorten the samples$",
    ):
        plan_step(samples, max_tokens=13, together=["p", "p"])
    assert plan_step(samples, max_tokens=13, together=["p", "q"]).num_micro_batches == 2


def test_too_few_micro_batches_are_refused_and_enough_are_used():
    samples = [Sample(tokens=[number, *[5] * 9]) for number in range(8)]
    keys = [number // 2 for number in range(8)]
    with pytest.raises(BudgetError, match="1 micro-batches on each of 2 ranks cannot hold these samples"):
        plan_step(samples, max_tokens=20, dp_size=2, together=keys, micro_batches=1)
    plan = plan_step(samples, max_tokens=20, dp_size=2, together=keys, micro_batches=3, cost_model=COST)
    assert plan.num_micro_batches == 3
    assert sorted(map(sum, plan.physical_tokens)) == [40, 40]
