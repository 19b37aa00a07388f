from __future__ import annotations

from itertools import chain, combinations, pairwise

import pytest
from harness.oracles import sample_lists, samples_through
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, SampleError
from mcore_prefix_tree.plan import BudgetError, plan_step
from mcore_prefix_tree.trie import sort_samples


def flat(plan):
    """All micro-batches of all ranks."""
    return list(chain.from_iterable(plan.micro_batches))


def physical(samples, indices):
    """Unique tokens of some of the samples, counted by the token-by-token oracle."""
    return len(samples_through([samples[index] for index in indices]))


def smallest_maximum(samples, count):
    """Over all cuts of the depth-first order into at most ``count`` runs, the smallest size of the largest run."""
    order = sort_samples(samples)[0].tolist()
    best = None
    for cuts in chain.from_iterable(combinations(range(1, len(order)), k) for k in range(min(count, len(order)))):
        borders = [0, *cuts, len(order)]
        largest = max(physical(samples, order[a:b]) for a, b in pairwise(borders))
        best = largest if best is None else min(best, largest)
    return best


@given(
    samples=sample_lists(max_samples=7, min_samples=1),
    slack=st.integers(0, 12),
    dp_size=st.integers(1, 3),
    multiple=st.integers(1, 2),
)
def test_largest_micro_batch_is_minimal(samples, slack, dp_size, multiple):
    budget = max(map(len, samples)) + slack
    plan = plan_step(samples, max_tokens=budget, dp_size=dp_size, micro_batch_multiple=multiple)
    count = dp_size * plan.num_micro_batches
    assert max(chain.from_iterable(plan.physical_tokens)) == smallest_maximum(samples, count)
    # And there are as few as the budget allows: one round less would not fit.
    fewer = count - dp_size * multiple
    assert fewer == 0 or smallest_maximum(samples, fewer) > budget


def test_runs_are_dealt_evenly():
    """Loners of 9 to 16 tokens, of which no two fit together: back and forth over the ranks."""
    samples = [Sample(tokens=[length] * length) for length in range(9, 17)]
    plan = plan_step(samples, max_tokens=16, dp_size=4)
    assert all(len(batch) == 1 for batch in flat(plan))
    assert [sum(rank) for rank in plan.physical_tokens] == [16 + 9] * 4


@pytest.mark.parametrize("dp_size", [1, 3])
def test_no_samples_are_micro_batches_of_padding(dp_size):
    plan = plan_step([], max_tokens=8, dp_size=dp_size, micro_batch_multiple=2)
    assert plan.micro_batches == (((), ()),) * dp_size
    assert plan.physical_tokens == ((0, 0),) * dp_size


def test_ranks_without_a_sample_get_padding():
    samples = [Sample(tokens=[1, 2, 3]), Sample(tokens=[1, 2, 4])]
    plan = plan_step(samples, max_tokens=100, dp_size=4)
    assert plan.num_micro_batches == 1
    assert sorted(flat(plan)) == [(), (), (0,), (1,)]
    assert sorted(chain.from_iterable(plan.physical_tokens)) == [0, 0, 3, 3]


def test_sample_of_the_budgets_size_fits_and_a_longer_one_is_named():
    samples = [Sample(tokens=[1] * 5, source="a.jsonl:1"), Sample(tokens=[2] * 6, source="a.jsonl:2 turn 3")]
    assert plan_step(samples, max_tokens=6).physical_tokens == ((6, 5),)
    with pytest.raises(BudgetError) as error:
        plan_step(samples, max_tokens=5)
    assert str(error.value).startswith("a.jsonl:2 turn 3: 6 tokens do not fit")
    assert "of batch.max_tokens=5; raise batch.max_tokens or" in str(error.value)
    assert isinstance(error.value, SampleError)
