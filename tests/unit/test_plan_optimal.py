"""Cuts of the depth-first order against all cuts there are."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
from harness.oracles import paths_of, sample_lists, samples_through
from harness.speed import linear_time
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import fold
from mcore_prefix_tree.plan import CostModel, plan_step
from mcore_prefix_tree.plan.cuts import fewest_runs, least_repeating_runs, longest_runs, reach
from mcore_prefix_tree.trie import SHARE_ALL, Sharing, sort_samples

MODEL = CostModel(token=3.0, pair=0.5)


def ordered(samples):
    order, shared = sort_samples(samples)
    return order, shared, np.array([len(samples[i]) for i in order], dtype=np.int64) - shared


def all_cuts(count):
    for inner in chain.from_iterable(combinations(range(1, count), size) for size in range(count)):
        borders = [0, *inner, count]
        yield list(pairwise(borders))


def tokens_of(samples, order, runs):
    """Unique tokens of each run, counted token by token."""
    return [len(samples_through([samples[i] for i in order[start:end]])) for start, end in runs]


@given(sample_lists(max_samples=8, min_samples=1), st.integers(0, 15), st.integers(0, 1 << 30))
def test_the_cost_of_a_cut_may_be_anything(samples, slack, seed):
    budget = max(map(len, samples)) + slack
    order, shared, fresh = ordered(samples)
    price = np.random.default_rng(seed).integers(0, 9, len(samples))
    runs = least_repeating_runs(shared, fresh, budget, repeats=price)
    best = min(
        (sum(int(price[start]) for start, _ in cut), len(cut))
        for cut in all_cuts(len(samples))
        if max(tokens_of(samples, order, cut)) <= budget
    )
    assert (sum(int(price[start]) for start, _ in runs), len(runs)) == best


@given(sample_lists(max_samples=8, min_samples=1), st.integers(0, 9), st.integers(0, 60))
def test_two_budgets_at_once(samples, slack, cost_slack):
    order, shared, fresh = ordered(samples)
    budget = max(map(len, samples)) + slack
    context, path = MODEL.units_of_path(shared), MODEL.units_of_path(shared + fresh)
    limit = int(path.max()) + 1024 * cost_slack

    def fits(cut):
        costs = [int(context[start] + (path - context)[start:end].sum()) for start, end in cut]
        return max(costs) <= limit and max(tokens_of(samples, order, cut)) <= budget

    runs = longest_runs(np.minimum(reach(shared, fresh, budget), reach(context, path - context, limit)))
    assert fits(runs)
    assert len(runs) == min(len(cut) for cut in all_cuts(len(samples)) if fits(cut))


def test_oversized_leaf_gets_its_own_run():
    shared, fresh = np.array([0, 2, 2]), np.array([3, 9, 1])
    assert least_repeating_runs(shared, fresh, 5) == [(0, 1), (1, 2), (2, 3)]
    assert fewest_runs(shared, fresh, 5) == [(0, 1), (1, 2), (2, 3)]


def test_nothing_to_cut():
    none = np.zeros(0, dtype=np.int64)
    assert least_repeating_runs(none, none, 5) == fewest_runs(none, none, 5) == []


def test_cuts_prefer_borders_between_trees():
    """Two trees of 3 x 10 tokens on trunks of 50: filling up the first run would repeat a trunk."""
    shared = np.array([0, 50, 50, 0, 50, 50])
    fresh = np.array([60, 10, 10, 60, 10, 10])
    assert fewest_runs(shared, fresh, 150) == [(0, 5), (5, 6)]
    assert least_repeating_runs(shared, fresh, 150) == [(0, 3), (3, 6)]


@pytest.mark.parametrize("budget", [200_000, 1_000_000, 10**12])
def test_a_comb_a_hundred_thousand_deep_is_cut_in_linear_time(budget):
    count = 100_000
    shared, fresh = np.arange(count), np.full(count, 2)
    with linear_time():
        runs = least_repeating_runs(shared, fresh, budget)
    assert runs[0][0] == 0
    assert runs[-1][1] == count
    assert all(int(shared[a] + fresh[a:b].sum()) <= budget for a, b in runs)


@given(
    sample_lists(max_samples=8, min_samples=1),
    st.integers(0, 6),
    st.integers(1, 3),
    st.sampled_from([None, CostModel(), MODEL]),
    st.sampled_from([SHARE_ALL, Sharing(share="prompt"), Sharing(min_shared_tokens=2)]),
)
def test_every_edge_keeps_its_weight_in_any_plan(samples, slack, dp_size, cost_model, sharing):
    """Scored tokens and their weights do not depend on the budget, so neither does the gradient."""
    budget = max(map(len, samples)) + slack
    plan = plan_step(samples, max_tokens=budget, dp_size=dp_size, cost_model=cost_model, sharing=sharing)
    weights: dict = defaultdict(float)
    supervised = 0
    for batch in chain.from_iterable(plan.micro_batches):
        own = [samples[index] for index in batch]
        layout = fold(own)
        supervised += layout.num_supervised
        seen = {
            flat: path
            for index, sample in enumerate(own)
            for flat, path in zip(layout.sample_tokens(index).tolist(), paths_of(sample), strict=True)
        }
        for flat, path in seen.items():
            weights[path] += float(layout.loss_weight[flat])
    expected: dict = defaultdict(float)
    for sample in samples:
        for path, weight in zip(paths_of(sample)[1:], sample.loss_mask[1:].tolist(), strict=True):
            expected[path] += weight
    assert {path: weight for path, weight in weights.items() if weight} == {k: v for k, v in expected.items() if v}
    assert supervised == fold(samples).num_supervised
