"""Plans by cost: valid, even, near the bound, and the bound below every plan there is."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, product

import numpy as np
import pytest
from harness.oracles import comb, content_of, parent_path, paths_of, sample_lists, samples_through
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.layout import Padding
from mcore_prefix_tree.plan import BudgetError, CostModel, least_makespan, plan_step, report_plan
from mcore_prefix_tree.plan.cost import UNITS_PER_TOKEN
from mcore_prefix_tree.trie import build_trie, sort_samples

MODELS = [
    CostModel(),
    CostModel(token=4.0, pair=1.0),
    CostModel(token=4.0, pair=0.125, micro_batch=40.0),
    CostModel(token=2.0, pair=0.25, scored=16.0),
]
# Its branch points and levels cost, which only the assignment shows.
RECURRENT = CostModel(token=4.0, pair=0.125, segment=32.0, level=8.0, micro_batch=40.0)


@st.composite
def problems(draw, max_samples=12):
    samples = draw(sample_lists(max_samples=max_samples, min_samples=1))
    return samples, {
        "max_tokens": max(map(len, samples)) + draw(st.sampled_from([0, 1, 3, 8, 1000])),
        "dp_size": draw(st.integers(1, 4)),
        "micro_batch_multiple": draw(st.integers(1, 3)),
        "cost_model": draw(st.sampled_from([*MODELS, RECURRENT])),
    }


def cost_of(samples, indices, model):
    """By the oracle: a token sees as many keys as its path is long; it is scored at its first occurrence."""
    paths = samples_through([samples[index] for index in indices])
    scored = sum(map(first_scored_of(samples).__getitem__, indices)) if model.scored else 0
    of_tokens = sum(model.token + model.pair * len(path) for _, path in paths) + model.scored * scored
    segments, levels = segments_of([samples[index] for index in indices])
    return of_tokens + model.segment * segments + model.level * levels + model.micro_batch


def segments_of(samples):
    """Number of segments, each of which ends at a leaf or a branch point, and of their levels, by prefixes."""
    children = Counter(parent_path(path) for path in samples_through(samples))
    branching = {path for path, count in children.items() if path[1] and count > 1}
    leaves = [path for path in samples_through(samples) if not children[path]]
    above = (len({parent_path(path) for path in paths_of(sample)} & branching) for sample in samples)
    return len(leaves) + len(branching), max((1 + count for count in above), default=0)


def first_scored_of(samples):
    """By sample, the scored tokens that it does not share with the sample before, in depth-first order."""
    order, shared = sort_samples(samples)
    return {
        index: sum(weight > 0 for at, weight in enumerate(samples[index].loss_mask) if at >= max(1, start))
        for index, start in zip(order.tolist(), shared.tolist(), strict=True)
    }


@given(problems(), st.booleans())
def test_plans_are_valid(problem, by_tokens):
    samples, options = problem
    options |= {"cost_model": None} if by_tokens else {}
    plan = plan_step(samples, **options)
    assert sorted(chain.from_iterable(chain.from_iterable(plan.micro_batches))) == list(range(len(samples)))
    assert len(plan.micro_batches) == options["dp_size"]
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_batches}
    assert plan.num_micro_batches % options["micro_batch_multiple"] == 0
    for rank, counts in zip(plan.micro_batches, plan.physical_tokens, strict=True):
        for batch, count in zip(rank, counts, strict=True):
            assert count == len(samples_through([samples[index] for index in batch])) <= options["max_tokens"]
    # As many micro-batches as the budget needs, as without a cost model.
    assert plan.num_micro_batches == plan_step(samples, **{**options, "cost_model": None}).num_micro_batches


@given(problems(), st.booleans(), st.integers(0, 1000))
def test_the_order_of_the_samples_does_not_matter(problem, by_tokens, seed):
    samples, options = problem
    options |= {"cost_model": None} if by_tokens else {}
    shuffled = random.Random(seed).sample(samples, len(samples))
    assert content_of(shuffled, plan_step(shuffled, **options)) == content_of(samples, plan_step(samples, **options))


def test_equal_tokens_with_other_masks_cost_the_same_in_any_order():
    """The scored one of two equal samples counts, in any order."""
    scored, unscored = (Sample(tokens=[7] * 5, loss_mask=[0, 0, 0, 0, one]) for one in (1, 0))
    model = CostModel(token=2.0, pair=0.25, scored=16.0)
    for samples in ([scored, unscored], [unscored, scored]):
        report = report_plan(
            samples, plan_step(samples, max_tokens=5, dp_size=1, cost_model=model), model, max_tokens=5
        )
        assert report.ranks[0][0].scored == 1


@given(problems())
def test_reports_match_counts(problem):
    samples, options = problem
    plan, model = plan_step(samples, **options), options["cost_model"]
    report = report_plan(samples, plan, model, max_tokens=options["max_tokens"], padding=Padding(multiple=4))
    for rank, counted in zip(plan.micro_batches, report.ranks, strict=True):
        for batch, one in zip(rank, counted, strict=True):
            layout = fold([samples[i] for i in batch], pad_to_multiple_of=4)
            assert (one.samples, one.tokens) == (len(batch), layout.physical_tokens)
            assert (one.pairs, one.padding) == (layout.visible_pairs, layout.padded_size - layout.physical_tokens)
            assert one.cost == cost_of(samples, batch, model)
            assert (one.segments, one.segment_levels) == segments_of([samples[i] for i in batch])
            assert one.segment_states == layout.counts()["segment_states"]
    assert report.unique_tokens == len(samples_through(samples))
    assert report.repeated_tokens == sum(chain.from_iterable(plan.physical_tokens)) - report.unique_tokens
    assert report.logical_tokens == sum(map(len, samples))
    assert report.slowest == max(report.rank_costs)
    assert report.imbalance >= 1
    assert report.over_lower_bound >= 1 - 1e-9


def conversations_and_groups(prompts, count, turns):
    """Completions of prompts, each of several turns: one sample per turn, with its history, which it does not score."""
    rng = np.random.default_rng(prompts)
    samples = []
    for _ in range(prompts):
        prompt = rng.integers(0, 10**6, rng.integers(5, 50)).tolist()
        for _ in range(count):
            history = list(prompt)
            for _ in range(turns):
                start, own = len(history), rng.integers(1, 30)
                history += rng.integers(0, 10**6, own).tolist()
                samples.append(Sample(tokens=history, loss_mask=[0] * start + [1] * int(own)))
                history += rng.integers(0, 10**6, rng.integers(1, 40)).tolist()
    return samples


@pytest.mark.parametrize(("prompts", "count", "turns"), [(6, 4, 1), (1, 3, 5), (5, 3, 4)])
def test_scoring_cost_counts_the_heads_rows(prompts, count, turns):
    """The count equals the layout's for turns and completions, for any cuts; and plans use it."""
    samples = conversations_and_groups(prompts, count, turns)
    model = CostModel(token=1.0, scored=20.0)
    options = {"max_tokens": 2 * max(map(len, samples)), "dp_size": 3}
    slowest = {}
    for name, by in (("scored", model), ("tokens", CostModel())):
        plan = plan_step(samples, cost_model=by, **options)
        report = report_plan(samples, plan, model, max_tokens=options["max_tokens"])
        for rank, counted in zip(plan.micro_batches, report.ranks, strict=True):
            for batch, one in zip(rank, counted, strict=True):
                layout = fold([samples[i] for i in batch])
                assert one.scored == np.count_nonzero(layout.loss_weight)
        slowest[name] = report.slowest
        assert report.over_lower_bound >= 1 - 1e-9
    assert slowest["scored"] <= slowest["tokens"]


@settings(deadline=None)
@given(
    sample_lists(max_samples=6, min_samples=1), st.integers(1, 3), st.sampled_from([MODELS[0], MODELS[1], MODELS[3]])
)
def test_no_assignment_beats_the_bound_and_plans_come_close(samples, dp_size, model):
    scored = np.array([first_scored_of(samples)[index] for index in range(len(samples))], dtype=np.int64)
    bound = least_makespan(build_trie(samples), model, dp_size=dp_size, scored=scored) * model.token / UNITS_PER_TOKEN
    best = min(
        max(cost_of(samples, [i for i, rank in enumerate(ranks) if rank == one], model) for one in range(dp_size))
        for ranks in product(range(dp_size), repeat=len(samples))
    )
    assert bound <= best + 1e-9
    plan = plan_step(samples, max_tokens=10**6, dp_size=dp_size, cost_model=model)
    slowest = report_plan(samples, plan, model).slowest
    assert best - 1e-9 <= slowest
    if not model.scored:  # otherwise, a sample that another continues could be scored apart from it
        assert slowest <= best * 4 / 3 + 1e-9  # the guarantee of longest-first without sharing


@settings(deadline=None)
@given(sample_lists(max_samples=5, min_samples=1), st.integers(0, 6), st.sampled_from([*MODELS, RECURRENT]))
def test_no_assignment_to_micro_batches_beats_the_bound(samples, slack, model):
    dp_size, micro_batches = 2, 2
    budget = max(map(len, samples)) + slack
    scored = np.array([first_scored_of(samples)[index] for index in range(len(samples))], dtype=np.int64)
    bound = least_makespan(
        build_trie(samples), model, dp_size=dp_size, micro_batches=micro_batches, max_tokens=budget, scored=scored
    )
    for bins in product(range(dp_size * micro_batches), repeat=len(samples)):
        held = [[i for i, one in enumerate(bins) if one == number] for number in range(dp_size * micro_batches)]
        if max(len(samples_through([samples[i] for i in some])) for some in held) <= budget:
            costs = [cost_of(samples, some, model) for some in held]
            slowest = max(costs[0] + costs[1], costs[2] + costs[3])
            assert bound * model.token / UNITS_PER_TOKEN <= slowest * (1 + 1e-9) + model.token / UNITS_PER_TOKEN


@given(sample_lists(min_samples=1), st.integers(0, 9))
def test_single_rank_repeats_as_little_as_possible(samples, slack):
    """One rank: no other way to cut the order into so few micro-batches costs less."""
    model, budget = MODELS[1], max(map(len, samples)) + slack
    plan = plan_step(samples, max_tokens=budget, cost_model=model)
    plain = plan_step(samples, max_tokens=budget)
    assert report_plan(samples, plan, model).slowest <= report_plan(samples, plain, model).slowest


def test_a_tree_that_fits_is_not_cut():
    samples = [Sample(tokens=[*[prompt] * 50, 100 + leaf, *[7] * 9]) for prompt in range(6) for leaf in range(4)]
    plan = plan_step(samples, max_tokens=10**6, dp_size=3, cost_model=CostModel())
    assert plan.physical_tokens == ((2 * 90,),) * 3


def test_plan_cuts_the_tree_that_is_cheapest_to_repeat():
    """Three trees on two ranks: one has to be cut, and one of them has almost nothing in common."""
    samples = [
        Sample(tokens=[*[prompt] * shared, *[100 + leaf] * (60 - shared)])
        for prompt, shared in enumerate((50, 50, 2))
        for leaf in range(6)
    ]
    plan = plan_step(samples, max_tokens=10**6, dp_size=2, cost_model=CostModel())
    cut = [
        p for p in range(3) if len({r for r, rank in enumerate(plan.micro_batches) for i in rank[0] if i // 6 == p}) > 1
    ]
    assert cut == [2]
    assert sum(map(sum, plan.physical_tokens)) == 2 * (50 + 60) + (2 + 6 * 58) + 2


@given(problems(), st.sampled_from([0.5, 1.0, 3.0]))
def test_a_pipeline_counts_the_largest_micro_batch_more(problem, bubble):
    samples, options = problem
    model, multiple = options["cost_model"], options["micro_batch_multiple"]
    plan = plan_step(samples, **options, bubble=bubble)
    assert sorted(chain.from_iterable(chain.from_iterable(plan.micro_batches))) == list(range(len(samples)))
    assert plan.num_micro_batches % multiple == 0
    assert max(map(max, plan.physical_tokens)) <= options["max_tokens"]

    def judged(plan):
        return report_plan(samples, plan, model, max_tokens=options["max_tokens"], bubble=bubble)

    costs = [[cost_of(samples, batch, model) for batch in rank] for rank in plan.micro_batches]
    assert judged(plan).slowest == pytest.approx(max(sum(rank) + bubble * max(rank) for rank in costs))
    assert judged(plan).over_lower_bound >= 1 - 1e-9


def test_a_pipeline_gets_even_micro_batches():
    """Without one, a rank computes the prompt once; with one, its stages would wait for the only micro-batch."""
    samples = [Sample(tokens=[*range(20), *[100 + leaf] * 15]) for leaf in range(8)]
    options = {"max_tokens": 1000, "micro_batches": 4, "cost_model": CostModel()}
    alone, staged = (plan_step(samples, **options, bubble=bubble) for bubble in (0.0, 3.0))
    assert sorted(alone.physical_tokens[0]) == [0, 0, 0, 20 + 8 * 15]
    assert staged.physical_tokens[0] == (20 + 2 * 15,) * 4


@settings(deadline=None)
@given(sample_lists(max_samples=5, min_samples=1), st.sampled_from([0.5, 3.0]), st.sampled_from([*MODELS, RECURRENT]))
def test_no_assignment_in_a_pipeline_beats_the_bound(samples, bubble, model):
    micro_batches = 3
    plan = plan_step(samples, max_tokens=10**6, micro_batches=micro_batches, cost_model=model, bubble=bubble)
    report = report_plan(samples, plan, model, bubble=bubble)
    for bins in product(range(micro_batches), repeat=len(samples)):
        held = [[i for i, one in enumerate(bins) if one == number] for number in range(micro_batches)]
        costs = [cost_of(samples, some, model) for some in held]
        assert report.lower_bound <= (sum(costs) + bubble * max(costs)) * (1 + 1e-9) + model.token / UNITS_PER_TOKEN


def test_ranks_are_balanced_by_segments():
    """Forty branches of a token cost less than one sample of 650, but twice as much if a segment costs half a chunk."""
    samples = [Sample(tokens=[1, 10 + leaf]) for leaf in range(40)] + [Sample(tokens=[2] * 650)]
    next_to_the_long = []
    for segment in (0.0, 32.0):
        plan = plan_step(samples, max_tokens=1000, dp_size=2, cost_model=CostModel(segment=segment))
        ranks = [list(chain.from_iterable(rank)) for rank in plan.micro_batches]
        next_to_the_long.append(next(len(rank) - 1 for rank in ranks if 40 in rank))
    assert next_to_the_long[0] == 0
    assert 9 <= next_to_the_long[1] <= 11


def test_ranks_are_balanced_by_levels():
    """Two combs of ten levels and two samples, as many tokens on each rank: the combs belong on two ranks."""

    def comb_of(key, tokens):
        run = tokens // 19
        trunk, samples = [key] * (tokens - 18 * run), []
        for level in range(9):
            samples.append(Sample(tokens=[*trunk, *[100 + level] * run]))
            trunk += [200 + level] * run
        return [*samples, Sample(tokens=trunk)]

    samples = [*comb_of(1, 100), *comb_of(2, 60), Sample(tokens=[3] * 90), Sample(tokens=[4] * 70)]
    model, reports = CostModel(level=5.0), []
    for planned_with in (CostModel(), model):
        plan = plan_step(samples, max_tokens=100, dp_size=2, cost_model=planned_with)
        reports.append(report_plan(samples, plan, model, max_tokens=100))
    assert [sum(one.segment_levels for one in rank) for rank in reports[0].ranks] == [20, 2]
    assert reports[0].slowest == 160 + 20 * 5
    assert reports[1].slowest <= 220


def grpo(prompts, completions, seed=0):
    """Groups of completions on separate prompts: lengths spread over a factor of ten."""
    rng = np.random.default_rng(seed)
    samples = []
    for prompt in range(prompts):
        head = np.full(int(rng.integers(50, 500)), prompt)
        tails = [np.full(int(rng.lognormal(4.5, 0.7)) + 1, 1000 + one) for one in range(completions)]
        samples += [Sample(tokens=np.concatenate([head, tail])) for tail in tails]
    return samples


@pytest.mark.parametrize(("dp_size", "max_tokens"), [(2, 4096), (8, 2048), (8, 10**6), (32, 4096)])
def test_real_shapes_come_within_a_few_per_cent(dp_size, max_tokens):
    samples, model = grpo(32, 8), CostModel(token=100.0, pair=0.1)
    plan = plan_step(samples, max_tokens=max_tokens, dp_size=dp_size, cost_model=model)
    report = report_plan(samples, plan, model, max_tokens=max_tokens)
    assert report.over_lower_bound < 1.08
    plain = plan_step(samples, max_tokens=max_tokens, dp_size=dp_size)
    assert report.slowest < report_plan(samples, plain, model).slowest


def test_cheap_micro_batches_are_first_and_last():
    samples = [Sample(tokens=[length] * length) for length in range(9, 17)]
    plan = plan_step(samples, max_tokens=16, dp_size=1, cost_model=CostModel())
    sizes = list(plan.physical_tokens[0])
    top = sizes.index(16)
    assert sizes[:top] == sorted(sizes[:top])
    assert sizes[top:] == sorted(sizes[top:], reverse=True)
    assert {sizes[0], sizes[-1]} == {9, 10}


def pipeline_seconds(costs, stages):
    """One forward, one backward (1F1B): a micro-batch's forward takes its cost on every stage, its backward twice."""
    todo = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, len(costs))
        order = [("forward", i) for i in range(ahead)]
        for i in range(len(costs)):
            order += [("forward", ahead + i)] * (ahead + i < len(costs)) + [("backward", i)]
        todo.append(order)
    done: dict = {}
    clock, at = [0.0] * stages, [0] * stages
    while any(at[stage] < len(todo[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(todo[stage]):
                what, i = todo[stage][at[stage]]
                if what == "forward":
                    needs = (what, i, stage - 1) if stage else None
                else:
                    needs = (what, i, stage + 1) if stage < stages - 1 else ("forward", i, stage)
                if needs is not None and needs not in done:
                    break
                begin = max(clock[stage], 0.0 if needs is None else done[needs])
                clock[stage] = done[what, i, stage] = begin + costs[i] * (1 if what == "forward" else 2)
                at[stage] += 1
    return max(clock)


@pytest.mark.parametrize("stages", [2, 4])
def test_order_of_micro_batches_shortens_a_pipeline(stages):
    """By more than a tenth against chance, and by some against largest first, over many sets of costs."""
    assert pipeline_seconds([1.0] * 8, stages) == 3 * (8 + stages - 1)
    rng = np.random.default_rng(0)
    by_chance = falling = ours = 0.0
    for _ in range(50):
        lengths = sorted(int(rng.lognormal(4, 0.5)) + 1 for _ in range(8))
        samples = [Sample(tokens=np.full(length, index)) for index, length in enumerate(lengths)]
        plan = plan_step(samples, max_tokens=max(lengths), micro_batches=8, cost_model=CostModel())
        sizes = list(plan.physical_tokens[0])
        ours += pipeline_seconds(sizes, stages)
        by_chance += pipeline_seconds(rng.permutation(sizes).tolist(), stages)
        falling += pipeline_seconds(sorted(sizes, reverse=True), stages)
    assert ours < 0.9 * by_chance
    assert ours < 0.98 * falling


def test_asked_for_micro_batches():
    samples = [Sample(tokens=[length] * 10) for length in range(4)]
    plan = plan_step(samples, max_tokens=40, dp_size=2, micro_batches=2, cost_model=CostModel())
    assert plan.physical_tokens == ((10, 10), (10, 10))
    with pytest.raises(BudgetError, match=r"1 micro-batches on each of 2 ranks .* with batch.max_tokens=10; 2 can"):
        plan_step(samples, max_tokens=10, dp_size=2, micro_batches=1)
    with pytest.raises(ValueError, match="micro_batches=3 must be a positive multiple of micro_batch_multiple=2"):
        plan_step(samples, max_tokens=10, micro_batches=3, micro_batch_multiple=2)


def test_no_samples_are_padding():
    plan = plan_step([], max_tokens=8, dp_size=2, cost_model=CostModel())
    assert plan.micro_batches == (((),), ((),))
    report = report_plan([], plan, CostModel(), padding=Padding(multiple=8))
    assert (report.slowest, report.lower_bound, report.padding) == (0, 0, 16)
    assert report.imbalance == report.over_lower_bound == 1


def test_deep_and_wide_forests_are_planned():
    star = [Sample(tokens=[7, 7, 7, leaf]) for leaf in range(20_000)]
    for samples, budget in ((comb(1500), 2000), (star, 1000)):
        plan = plan_step(samples, max_tokens=budget, dp_size=4, cost_model=MODELS[1])
        assert sorted(chain.from_iterable(chain.from_iterable(plan.micro_batches))) == list(range(len(samples)))
        assert max(chain.from_iterable(plan.physical_tokens)) <= budget
        assert report_plan(samples, plan, MODELS[1], max_tokens=budget).over_lower_bound < 1.1
