"""Chunks of trees above the budget, against stacks and carried tokens found token by token."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from harness.kept_sets import with_sets
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.kept_sets import KeptSets
from mcore_prefix_tree.layout.tree_chunks import (
    count_supervised,
    cut,
    find_carried,
    find_handed_on,
    find_key_nodes,
    find_last_readers,
    find_stack,
    join_scores,
    keep_tokens,
    whole_layouts,
)
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.plan import BudgetError, CostModel, fewest_micro_batches, plan_step, report_plan
from mcore_prefix_tree.plan.carry import WHOLE, TreePart, cut_tree, make_chunks, with_first_pass


def make_samples(rows: list[list[int]]) -> list[Sample]:
    return [Sample(tokens=row, loss_mask=[(at + len(row)) % 3 for at in range(len(row))]) for row in rows]


forests = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=7).map(make_samples)


def ancestors(layout: FlatLayout, token: int) -> list[int]:
    """Return the path above a token, by its predictors."""
    path = []
    while (token := int(layout.predictor[token])) >= 0:
        path.append(token)
    return path[::-1]


def borders_of(layout: FlatLayout, budget: int) -> list[int]:
    chunks = cut_tree(layout.position_ids[: layout.physical_tokens].astype(np.int64), budget)
    return [0, *(chunk.end for chunk in chunks)]


@settings(max_examples=200, deadline=None)
@given(forests, st.integers(1, 12))
def test_chunks_cover_the_tree_under_the_budget(samples: list[Sample], budget: int) -> None:
    layout = fold(samples)
    borders = borders_of(layout, budget)
    sizes = np.diff(borders)
    assert borders[-1] == layout.physical_tokens
    assert (sizes > 0).all()
    assert (sizes <= budget).all()
    assert (2 * sizes[:-1] >= budget).all()


@settings(max_examples=200, deadline=None)
@given(forests, st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_states_of_recurrent_layers_take_room(
    samples: list[Sample], budget: int, state_tokens: int, full: bool
) -> None:
    """A path that joins a chunk counts as so many tokens more, but never as more than it shares."""
    layout = fold(samples)
    position = layout.position_ids[: layout.physical_tokens].astype(np.int64)
    chunks = cut_tree(position, budget, state_tokens=state_tokens, full=full)
    assert [chunk.start for chunk in chunks[1:]] == [chunk.end for chunk in chunks[:-1]]
    for chunk in chunks:
        own = range(chunk.start + 1, chunk.end)
        joins = [int(position[at]) for at in own if position[at] != position[at - 1] + 1]
        assert chunk.tokens == 1 or chunk.tokens + sum(min(state_tokens, depth) for depth in joins) <= budget
    if full:
        assert len(chunks) <= len(cut_tree(position, budget, state_tokens=state_tokens))


@settings(max_examples=200, deadline=None)
@given(forests, st.data())
def test_carried_tokens_are_all_stacks(samples: list[Sample], data: st.DataObject) -> None:
    layout = fold(samples)
    size = layout.physical_tokens
    cuts = data.draw(st.sets(st.integers(1, max(1, size - 1)), max_size=5)) if size > 1 else set()
    borders = [0, *sorted(cuts), size]
    carried = find_carried(layout, borders)
    stacks = [ancestors(layout, start) for start in borders[1:-1]]
    assert [find_stack(layout, start).tolist() for start in borders[1:-1]] == stacks
    assert carried.tolist() == sorted(set(itertools.chain.from_iterable(stacks)))
    # The plan counts them by depths alone.
    chunks = make_chunks(layout.position_ids.astype(np.int64), borders)
    own = [int(((carried >= start) & (carried < end)).sum()) for start, end, *_ in chunks]
    assert [chunk.carried for chunk in chunks] == own
    assert [chunk.stack for chunk in chunks] == [len(ancestors(layout, start)) for start in borders[:-1]]
    handed_on = set(find_handed_on(layout, borders[:-1]).tolist())
    assert [chunk.states for chunk in chunks] == [
        len(handed_on.intersection(ancestors(layout, start))) for start in borders[:-1]
    ]
    # Each chunk's stack runs before it, and no run is earlier than a chunk needs it.
    budget = data.draw(st.integers(1, 6))
    order = carried[np.argsort(-find_last_readers(layout, borders[:-1], carried), kind="stable")]
    kept, waiting = set[int](), set[int]()
    for run in with_first_pass(chunks, budget):
        if run.forward_only:
            assert 0 < run.tokens <= budget
            assert run.stack == len(ancestors(layout, order[run.start]))
            waiting |= {int(order[run.start])}
            kept |= set(order[run.start : run.end].tolist())
        else:
            stack = set(ancestors(layout, run.start))
            assert kept >= stack >= waiting
            waiting = set()
    assert kept == set(carried.tolist())


@settings(max_examples=200, deadline=None)
@given(forests, st.integers(0, 3), st.data())
def test_a_chunk_sees_its_stack_and_itself(samples: list[Sample], padding: int, data: st.DataObject) -> None:
    layout = fold(samples)
    start = data.draw(st.integers(0, layout.physical_tokens - 1))
    end = data.draw(st.integers(start + 1, layout.physical_tokens))
    stack = find_stack(layout, start)
    keys = TreeMetadata.from_nodes(*find_key_nodes(layout, start, end), padded_size=len(stack) + end - start + padding)
    index = np.append(stack, np.arange(start, end))
    query = np.arange(start, end)
    wanted = (index[None] <= query[:, None]) & (query[:, None] < layout.subtree_end[index][None])
    here = np.arange(len(stack), keys.num_tokens)
    seen = (np.arange(keys.num_tokens)[None] <= here[:, None]) & (
        here[:, None] < keys.host_subtree_end[: keys.num_tokens][None]
    )
    np.testing.assert_array_equal(seen, wanted)
    np.testing.assert_array_equal(keys.host_position_ids[: keys.num_tokens], layout.position_ids[index])

    chunk = cut(layout, start, end, padded_size=end - start + padding)
    np.testing.assert_array_equal(chunk.position_ids[: end - start], layout.position_ids[start:end])
    np.testing.assert_array_equal(np.diff(chunk.cu_node_lens).sum(), end - start)
    lens = np.diff(chunk.cu_node_lens)
    first = chunk.cu_node_lens[:-1][lens > 0]
    np.testing.assert_array_equal(chunk.node_depth[lens > 0], chunk.position_ids[first])


@settings(max_examples=200, deadline=None)
@given(forests, st.data())
def test_every_edge_is_scored_in_one_chunk(samples: list[Sample], data: st.DataObject) -> None:
    layout = fold(samples)
    cuts = data.draw(st.sets(st.integers(1, max(1, layout.physical_tokens - 1)), max_size=4))
    borders = [0, *sorted(cuts - {layout.physical_tokens}), layout.physical_tokens]
    predicted = count_supervised(samples, layout)
    assert int(predicted.sum()) == layout.num_supervised
    weight, scored = np.zeros(layout.physical_tokens), np.zeros(layout.physical_tokens, dtype=np.int64)
    times, by_place = np.zeros(layout.logical_tokens, dtype=np.int64), np.argsort(layout.places)
    for start, end in itertools.pairwise(borders):
        chunk = cut(layout, start, end, padded_size=end - start + 2)
        flat = np.concatenate([np.arange(start, end), [-1, -1], chunk.later])
        edges = np.flatnonzero(chunk.has_edge)
        weight[flat[edges]] += chunk.edge_weight[edges]
        scored[flat[edges]] += 1
        np.testing.assert_array_equal(chunk.edge_token_id[edges], layout.input_ids[flat[edges]])
        np.testing.assert_array_equal(chunk.edge_predictor[edges] + start, layout.predictor[flat[edges]])
        found, here = chunk.find_scores(layout.places[by_place])
        times[by_place[found]] += 1
        np.testing.assert_array_equal(flat[here], layout.sample_map[by_place[found]])
        last = chunk.last_tokens
        np.testing.assert_array_equal(flat[last[last >= 0]], layout.last_tokens[last >= 0])
        np.testing.assert_array_equal(last >= 0, (layout.last_tokens >= start) & (layout.last_tokens < end))
    np.testing.assert_array_equal(scored, layout.predictor >= 0)
    np.testing.assert_array_equal(weight, layout.loss_weight)
    np.testing.assert_array_equal(times, layout.predictor[layout.sample_map] >= 0)


@settings(max_examples=200, deadline=None)
@given(forests, st.data())
def test_sets_are_cut_with_their_predictors(samples: list[Sample], data: st.DataObject) -> None:
    layout = fold(with_sets(samples, 9))
    assert layout.kept is not None
    cuts = data.draw(st.sets(st.integers(1, max(1, layout.physical_tokens - 1)), max_size=4))
    borders = [0, *sorted(cuts - {layout.physical_tokens}), layout.physical_tokens]
    times, places = np.zeros(layout.num_places, dtype=np.int64), np.full(layout.logical_tokens, -1)
    by_place = np.argsort(layout.places)
    chunks = [cut(layout, start, end, padded_size=end - start + 2) for start, end in itertools.pairwise(borders)]
    for chunk in chunks:
        here, whole = chunk.scored_places
        times[whole] += chunk.has_edge[here]
        found, mine = chunk.find_scores(layout.places[by_place])
        places[by_place[found]] = whole[np.searchsorted(here, mine)]
        assert len(chunk.edge_weight) == len(chunk.has_edge) == chunk.num_places
        assert chunk.kept is not None
        assert len(chunk.kept) == (whole >= layout.padded_size).sum()
        for edge, (at, place) in enumerate(zip(*chunk.kept_places, strict=True)):
            assert at == len(chunk.edge_token_id) + edge
            assert kept_edge(chunk.kept, edge, chunk.start, chunk.edge_token_id) == kept_edge(
                layout.kept, place - layout.padded_size, 0, layout.input_ids
            )
    np.testing.assert_array_equal(times, layout.has_edge)
    np.testing.assert_array_equal(join_scores(chunks, [one.edge_weight for one in chunks]), layout.edge_weight)
    scored = layout.predictor[layout.sample_map] >= 0
    np.testing.assert_array_equal(places[scored], layout.places[scored])
    assert (places[~scored] == -1).all()


def kept_edge(kept: KeptSets, edge: int, start: int, token_ids: np.ndarray) -> tuple[int, int, list[int]]:
    """Return predictor, token and set of a kept edge."""
    row = kept.distribution[edge]
    ids = kept.token_ids[kept.offsets[row] : kept.offsets[row + 1]].tolist()
    return int(kept.predictor[row]) + start, int(token_ids[kept.token[edge]]), ids


@settings(max_examples=100, deadline=None)
@given(forests, st.integers(1, 6))
def test_carried_tokens_are_a_layout(samples: list[Sample], budget: int) -> None:
    layout = fold(samples)
    borders = borders_of(layout, budget)
    carried = find_carried(layout, borders)
    carried = carried[np.argsort(-find_last_readers(layout, borders[:-1], carried), kind="stable")]
    kept = keep_tokens(layout, carried)
    for place, token in enumerate(carried.tolist()):
        assert carried[ancestors(kept, place)].tolist() == ancestors(layout, token)
    if len(carried):
        nodes = TreeMetadata.from_nodes(*find_key_nodes(kept, 0, len(carried)))
        np.testing.assert_array_equal(nodes.host_subtree_end, kept.subtree_end)


CHAIN = Sample(tokens=list(range(20)), source="chain")
PAIR = [Sample(tokens=[at, *range(6)]) for at in (60, 61)]


def test_chunks_of_a_tree_are_one_whole_layout() -> None:
    one, other = fold([CHAIN]), fold(PAIR)
    chunks = [cut(one, start, end, padded_size=10) for start, end in ((0, 10), (10, 20))]
    assert whole_layouts([*chunks[::-1], other]) == [one, other]


def test_a_sample_above_the_budget_is_carried() -> None:
    with pytest.raises(BudgetError, match=r"chain: 20 tokens do not fit a micro-batch of batch\.max_tokens=8"):
        plan_step([CHAIN], max_tokens=8)
    plan = plan_step([CHAIN, *PAIR], max_tokens=8, over_budget="auto")
    assert plan.micro_batches == (((0,), (0,), (0,), (0,), (0,), (1,), (2,)),)
    assert plan.physical_tokens == ((0, 0, 4, 8, 8, 7, 7),)
    (rank,) = plan.carrying or ()
    chunks = (TreePart(16, 20, 0, 16, states=2), TreePart(8, 16, 8, 8, states=1), TreePart(0, 8, 8, 0))
    passes = (TreePart(0, 8, 0, 0, forward_only=True), TreePart(8, 16, 0, 8, forward_only=True))
    assert rank.runs == (*passes, *chunks, WHOLE, WHOLE)
    assert (rank.held_tokens, plan.carried_tokens) == (16, 16)
    scored = plan_step([CHAIN, *PAIR], max_tokens=8, over_budget="auto", trains=False)
    assert [one.runs for one in scored.carrying or ()] == [(*chunks[::-1], WHOLE, WHOLE)]


def test_one_path_is_held_at_once() -> None:
    """A prompt has four long answers and a run ahead; all others have left or have not come yet."""
    answers = [Sample(tokens=[*range(10), *[100 + at] * 90]) for at in range(4)]
    plan = plan_step(answers, max_tokens=20, over_budget="carry")
    (rank,) = plan.carrying or ()
    assert plan.carried_tokens > 250
    assert 80 <= rank.held_tokens <= 100 + 20


@st.composite
def steps(draw: st.DrawFn) -> list[Sample]:
    """Return groups of rollouts, agents with subagents and long samples, some of which begin alike."""
    rows: list[list[int]] = []
    for number in range(draw(st.integers(1, 5))):
        kind, length = draw(st.sampled_from(["group", "agent", "long"])), draw(st.integers(1, 12))
        history = [*[0] * draw(st.integers(0, 6)), *[1 + number] * length]
        if kind == "long":
            rows.append(history + [100] * draw(st.integers(0, 60)))
        for turn in range(0 if kind == "long" else draw(st.integers(1, 8))):
            answer = [100 + turn] * draw(st.integers(1, 10))
            rows.append(history + answer)
            if kind == "agent":
                history = history + answer + [50] * draw(st.integers(0, 3))
                if draw(st.booleans()):
                    rows.append([90, 91, 92, number, turn, *[60] * draw(st.integers(1, 6))])
    return make_samples(draw(st.permutations(rows)))


@settings(max_examples=250, deadline=None)
@given(
    steps(),
    st.integers(4, 64),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.75, 3.0]),
    st.sampled_from(
        [
            None,
            CostModel(),
            CostModel(pair=0.05, scored=0.3, micro_batch=7.0),
            CostModel(pair=0.01, segment=2.0, level=5.0, state_tokens=3),
        ]
    ),
    st.data(),
)
def test_auto_is_no_slower_than_another_way(
    samples: list[Sample], budget: int, ranks: int, bubble: float, model: CostModel | None, data: st.DataObject
) -> None:
    """The slowest rank costs no more than with ``repeat`` or ``carry``, if these have a plan."""
    limits: dict[str, Any] = {"max_tokens": budget, "dp_size": ranks, "cost_model": model}
    limits |= {"micro_batch_multiple": data.draw(st.integers(1, 3)), "scores_first": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        limits["together"] = data.draw(
            st.lists(st.sampled_from([None, "a", "b"]), min_size=len(samples), max_size=len(samples))
        )
    asked: dict[str, Any] = {"bubble": bubble}
    if data.draw(st.booleans()):
        asked["micro_batches"] = fewest_micro_batches(samples, over_budget="auto", **limits)
    costs = {}
    for way in ("auto", "repeat", "carry"):
        with suppress(BudgetError):
            plan = plan_step(samples, over_budget=way, **limits, **asked)
            seen = sorted(index for rank in plan.micro_batches for own in set(rank) for index in own)
            assert seen == list(range(len(samples)))
            costs[way] = report_plan(samples, plan, model or CostModel(), bubble=bubble).slowest
    assert costs["auto"] == min(costs.values()), costs


def test_other_trees_are_balanced_around_a_carried_one() -> None:
    """An agent's conversation is carried on one rank, so the other one gets more of the small trees."""
    agent = [Sample(tokens=[*range(10 * turn), *[1000 + turn] * 5]) for turn in range(1, 9)]
    others = [Sample(tokens=[2000 + at] * 10) for at in range(30)]
    plan = plan_step([*agent, *others], max_tokens=64, dp_size=2, over_budget="carry", cost_model=CostModel())
    report = report_plan([*agent, *others], plan, CostModel())
    assert report.imbalance < 1.05
    assert plan_step([*agent, *others], max_tokens=64, dp_size=2, over_budget="auto").carrying is not None


def test_few_micro_batches_get_full_chunks() -> None:
    """A fixed number of micro-batches that cheap cuts exceed is met with full chunks, as in `fewest_micro_batches`."""
    samples = [Sample(tokens=[0, *[at] * 5]) for at in range(1, 9)]
    settings = {"max_tokens": 8, "over_budget": "carry"}
    fewest = fewest_micro_batches(samples, **settings)
    assert fewest == 8
    assert plan_step(samples, **settings).num_micro_batches > fewest
    assert plan_step(samples, micro_batches=fewest, **settings).num_micro_batches == fewest
    with pytest.raises(BudgetError, match="7 micro-batches on each of 1 ranks cannot hold"):
        plan_step(samples, micro_batches=7, **settings)


def test_auto_repeats_where_only_that_keeps_to_the_micro_batches() -> None:
    answers = [Sample(tokens=[*range(90), 100 + at, 200 + at]) for at in range(9)]
    assert plan_step(answers, max_tokens=100, over_budget="auto").carrying is not None
    fewest = fewest_micro_batches(answers, max_tokens=100, over_budget="auto")
    assert plan_step(answers, max_tokens=100, over_budget="auto", micro_batches=fewest).carrying is None
    assert fewest < fewest_micro_batches(answers, max_tokens=100, over_budget="carry")


def test_chunks_stay_on_one_rank_and_ranks_run_forward_together() -> None:
    samples = [CHAIN, *PAIR, Sample(tokens=[99, 98])]
    plan = plan_step(
        samples, max_tokens=8, dp_size=2, over_budget="auto", cost_model=CostModel(), micro_batch_multiple=2
    )
    assert {len(rank) for rank in plan.micro_batches} == {6}, plan
    assert plan.carrying is not None
    (passes,) = {tuple(run.forward_only for run in rank.runs) for rank in plan.carrying}
    assert sum(passes) == 2
    owners = {rank for rank, own in enumerate(plan.micro_batches) if (0,) in own}
    assert len(owners) == 1
    seen = sorted(index for rank in plan.micro_batches for own in set(rank) for index in own)
    assert seen == [0, 1, 2, 3]


def test_trees_of_a_pair_are_carried_together() -> None:
    """A key joins trees, a pair above the budget is carried, and a pair of the others stays in one micro-batch."""
    samples = [CHAIN, Sample(tokens=[99, 98]), *PAIR, Sample(tokens=[97])]
    keys = ["a", "b", None, "a", "b"]
    plan = plan_step(samples, max_tokens=8, over_budget="auto", together=keys)
    (rank,) = plan.carrying or ()
    order = (0, 3)
    assert rank.trees(plan.micro_batches[0]).keys() == {order}
    chunks = sorted(run for run in rank.runs if run.is_chunk)
    assert (chunks[0].start, chunks[-1].end) == (0, 27)
    assert {own for own, run in zip(plan.micro_batches[0], rank.runs, strict=True) if run == WHOLE} == {(4, 1), (2,)}
    sides = [Sample(tokens=[1, *[at] * 5]) for at in (2, 3)]
    assert plan_step(sides, max_tokens=8, over_budget="auto", together=["a", "a"]).carrying is not None
    assert plan_step(sides, max_tokens=11, over_budget="carry", together=["a", "a"]).carrying is None
    with pytest.raises(BudgetError):
        plan_step(sides, max_tokens=8, over_budget="repeat", together=["a", "a"])


def test_a_scoring_pass_runs_the_chunks_in_order_and_costs_a_forward() -> None:
    plan = plan_step(
        [CHAIN, *PAIR], max_tokens=8, dp_size=2, over_budget="carry", scores_first=True, micro_batch_multiple=2
    )
    one, other = plan.carrying or ()
    assert one.scored == other.scored
    assert len(one.scored) == 4, "three chunks, and one to be a multiple of two"
    carrying = one if one.carried_tokens else other
    runs = [run for place in one.scored if (run := carrying.runs[place]).is_chunk]
    assert runs == sorted(run for run in carrying.runs if run.is_chunk)
    assert plan.scored_tokens == len(CHAIN)
    answers = [Sample(tokens=[*range(90), *[100 + at] * 40]) for at in range(4)]
    settings = {"max_tokens": 170, "over_budget": "auto"}
    assert plan_step(answers, **settings).carrying is not None
    assert plan_step(answers, **settings, scores_first=True).carrying is None, "repeating costs less than a forward"
