"""Budgets that count the states of recurrent layers: what a path that joins a tree adds to its tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from harness.oracles import parent_path, sample_lists, samples_through
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.plan import BudgetError, CostModel, ModelWork, fewest_micro_batches, plan_step

MODEL = CostModel(token=4.0, pair=0.125, segment=2.0)


def room_of(samples, state_tokens):
    """Tokens, and for each child of a branch point but one as many as it counts, or the path above it has."""
    paths = samples_through(samples)
    children = Counter(parent_path(path) for path in paths)
    joined = sum((count - 1) * min(state_tokens, len(path[1])) for path, count in children.items())
    return len(paths) + joined


@given(
    samples=sample_lists(min_samples=1, max_samples=14),
    state_tokens=st.integers(1, 12),
    slack=st.integers(0, 25),
    dp_size=st.integers(1, 3),
    bubble=st.sampled_from([0.0, 0.5]),
    multiple=st.integers(1, 2),
)
def test_no_micro_batch_exceeds_its_budget(samples, state_tokens, slack, dp_size, bubble, multiple):
    model, max_tokens = replace(MODEL, state_tokens=state_tokens), max(map(len, samples)) + slack
    options = {"max_tokens": max_tokens, "dp_size": dp_size, "micro_batch_multiple": multiple, "cost_model": model}
    plan = plan_step(samples, **options, bubble=bubble)
    batches = list(chain.from_iterable(plan.micro_batches))
    assert sorted(chain.from_iterable(batches)) == list(range(len(samples)))
    assert plan.num_micro_batches == fewest_micro_batches(samples, **options)
    assert plan.num_micro_batches >= plan_step(samples, **options | {"cost_model": MODEL}).num_micro_batches
    for batch, tokens in zip(batches, chain.from_iterable(plan.physical_tokens), strict=True):
        own = [samples[index] for index in batch]
        assert tokens == fold(own).physical_tokens
        assert room_of(own, state_tokens) <= max_tokens


@given(sample_lists(min_samples=2), st.integers(1, 12), st.integers(20, 60))
def test_pairs_keep_to_the_budget(samples, state_tokens, max_tokens):
    model = replace(MODEL, state_tokens=state_tokens)
    pair_of = [index // 2 for index in range(len(samples))]
    try:
        plan = plan_step(samples, max_tokens=max_tokens, dp_size=2, together=pair_of, cost_model=model)
    except BudgetError:
        pairs = [samples[at : at + 2] for at in range(0, len(samples), 2)]
        assert any(room_of(pair, state_tokens) > max_tokens for pair in pairs)
        return
    for batch in chain.from_iterable(plan.micro_batches):
        assert room_of([samples[index] for index in batch], state_tokens) <= max_tokens


def bushy(branches, tokens):
    """A prompt of 100 tokens, and branches that each begin a run of so many tokens after the one before."""
    trunk = list(range(100))
    samples = []
    for branch in range(branches):
        samples.append(Sample(tokens=[*trunk, *[1000 + branch] * tokens]))
        trunk += [2000 + branch] * tokens
    return samples


def test_states_fill_micro_batches():
    """Tokens of twenty branches of 8 fit two micro-batches; each but the first in one counts as 18 tokens more."""
    samples = bushy(20, 8)
    counts = [
        plan_step(samples, max_tokens=350, cost_model=CostModel(state_tokens=state)).num_micro_batches
        for state in (0, 18)
    ]
    assert counts == [2, 4]
    with pytest.raises(BudgetError, match=r"batch.max_tokens=350 \(states of recurrent layers count as 18 tokens for"):
        plan_step(samples, max_tokens=350, micro_batches=2, cost_model=CostModel(state_tokens=18))


def test_turns_and_samples_apart_need_no_states():
    """A sample that another continues makes no branch point, and neither does one that shares nothing."""
    turns = [Sample(tokens=[sample] * turn) for sample in (1, 2) for turn in range(10, 60, 10)]
    model = CostModel(state_tokens=18)
    assert plan_step(turns, max_tokens=100, cost_model=model).num_micro_batches == 1
    together = plan_step(turns, max_tokens=100, cost_model=model, together=[index // 5 for index in range(10)])
    assert together.num_micro_batches == 1


def test_pair_above_the_budget_names_states():
    pair = [Sample(tokens=[1] * 30 + [side] * 10) for side in (2, 3)]
    assert plan_step(pair, max_tokens=50, together=[0, 0], cost_model=CostModel()).num_micro_batches == 1
    with pytest.raises(BudgetError, match=r"max_tokens=50 \(states of recurrent layers count as 18 tokens"):
        plan_step(pair, max_tokens=50, together=[0, 0], cost_model=CostModel(state_tokens=18))


def test_tokens_that_states_of_known_models_count_as():
    """Qwen3-Next-80B-A3B and Nemotron-H-8B, as docs/recurrent.md has them."""
    experts = {"num_moe_experts": 512, "moe_router_topk": 10, "moe_ffn_hidden_size": 512}
    qwen = ModelWork.from_dimensions(
        **{"num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 5120, "vocab_size": 151936},
        **{"num_attention_heads": 16, "num_query_groups": 2, "kv_channels": 256},
        settings={
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": 4,
            "moe_shared_expert_intermediate_size": 512,
            **experts,
        },
    )
    nemotron = ModelWork.from_dimensions(
        **{"num_layers": 52, "hidden_size": 4096, "ffn_hidden_size": 21504, "vocab_size": 131072, "swiglu": False},
        **{"num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128},
        settings={"mamba_num_heads": 128},
        pattern="M" * 24 + "-" * 24 + "*" * 4,
    )
    dense = ModelWork.from_dimensions(
        num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=4, vocab_size=9
    )
    assert [work.state_tokens for work in (qwen, nemotron, dense)] == [18, 24, 0]
    assert [work.state_bytes >> 20 for work in (qwen, nemotron)] == [36 * 2, 24 * 4]
    assert CostModel.from_work(qwen).state_tokens == 18
