"""Routes of experts: samples share a token only while their routes agree, and get their own routes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, SampleError, fold, plan_step
from mcore_prefix_tree.signals import RoutedExperts
from mcore_prefix_tree.trie import Sharing, build_trie

LAYERS, TOP_K, EXPERTS = 2, 2, 4


def routes_of(rng: np.random.Generator, length: int) -> np.ndarray:
    return np.stack([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(length)])


def routed(tokens: list[int], routes: np.ndarray | None, **fields) -> Sample:
    return Sample(tokens=tokens, routed_experts=routes, **fields)


def random_samples(seed: int, kind: str) -> list[Sample]:
    """A forest of few tokens whose engines agree, differ at one token of a sample, at any token, or everywhere."""
    rng = np.random.default_rng(seed)
    by_prefix: dict[tuple[int, ...], np.ndarray] = {}
    samples = []
    for index in range(int(rng.integers(1, 12))):
        tokens = rng.integers(2, size=rng.integers(1, 7)).tolist()
        rows = [by_prefix.setdefault(tuple(tokens[: t + 1]), routes_of(rng, 1)[0]).copy() for t in range(len(tokens))]
        for t in range(len(tokens)):
            if kind == "everywhere" or (kind == "anywhere" and rng.random() < 0.2):
                rows[t] = routes_of(rng, 1)[0]
            elif kind == "missing" and rng.random() < 0.3:
                rows[t] = np.full_like(rows[t], -1)
        if kind == "one token":
            rows[int(rng.integers(len(tokens)))] = routes_of(rng, 1)[0]
        given = np.stack(rows) if kind != "missing" or rng.random() < 0.8 else None
        if given is not None and rng.random() < 0.5:
            given = given[:-1]
        key = "other" if index % 5 == 4 else None
        samples.append(routed(tokens, given, merge_key=key, loss_mask=rng.integers(2, size=len(tokens))))
    return samples


def paths(sample: Sample) -> list[tuple]:
    """Prefixes of (token, route) pairs, the last token without a route."""
    routes = sample.signals.routes
    rows = [None] * len(sample) if routes is None else [None if row.min() < 0 else row.tobytes() for row in routes.ids]
    if routes is not None:
        assert routes.ids.dtype == np.int8
    pairs = list(zip(sample.tokens.tolist(), rows, strict=True))
    return [(sample.merge_key, *pairs[: t + 1]) for t in range(len(pairs))]


def count_unique(samples: list[Sample]) -> int:
    """Tokens of a naive trie of pairs, in which a last token takes a child with its token if there is one."""
    inner = {path for sample in samples for path in paths(sample)[:-1]}
    tokens_below = {(*path[:-1], path[-1][0]) for path in inner}
    last = {paths(sample)[-1] for sample in samples}
    return len(inner) + sum((*path[:-1], path[-1][0]) not in tokens_below for path in last)


KINDS = ("agree", "one token", "anywhere", "everywhere", "missing")


@given(st.integers(0, 2**32), st.sampled_from(KINDS))
@settings(max_examples=400)
def test_samples_share_a_token_only_while_their_routes_agree(seed, kind):
    samples = random_samples(seed, kind)
    layout = fold(samples, pad_to_multiple_of=4)
    assert layout.physical_tokens == count_unique(samples)
    for index, sample in enumerate(samples):
        flat = layout.sample_tokens(index)
        assert layout.input_ids[flat].tolist() == sample.tokens.tolist()
        assert layout.position_ids[flat].tolist() == list(range(len(sample)))
        if layout.routes is not None:
            own = sample.signals.routes
            wanted = np.full((len(sample), LAYERS, TOP_K), -1) if own is None else own.ids
            assert np.array_equal(layout.routes[flat][:-1], wanted[:-1])
    if layout.routes is not None:
        assert (layout.routes[layout.physical_tokens :] == -1).all()
    shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
    again = fold(shuffled, pad_to_multiple_of=4)
    assert np.array_equal(again.input_ids, layout.input_ids)
    assert np.array_equal(again.routes, layout.routes)


@given(st.integers(0, 2**32), st.sampled_from(KINDS))
def test_first_samples_routes_share_as_without_routes(seed, kind):
    samples = random_samples(seed, kind)
    layout = fold(samples, trie=build_trie(samples, Sharing(use_first_samples_routes=True)))
    plain = [Sample(tokens=one.tokens, merge_key=one.merge_key) for one in samples]
    assert layout.physical_tokens == fold(plain).physical_tokens
    if layout.routes is None:
        return
    of_token: dict[int, set[bytes]] = {}
    for index, sample in enumerate(samples):
        own = sample.signals.routes
        for t, flat in enumerate(layout.sample_tokens(index).tolist()):
            row = np.full((LAYERS, TOP_K), -1, dtype=np.int8) if own is None else own.ids[t]
            of_token.setdefault(flat, set()).add(row.tobytes())
    assert all(layout.routes[flat].tobytes() in rows for flat, rows in of_token.items())


@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.integers(7, 20))
def test_micro_batches_of_a_plan_hold_the_tokens_that_it_counts(seed, kind, max_tokens):
    samples = random_samples(seed, kind)
    plan = plan_step(samples, max_tokens=max_tokens)
    for indices, counted in zip(plan.micro_batches[0], plan.physical_tokens[0], strict=True):
        assert fold([samples[i] for i in indices]).physical_tokens <= counted <= max_tokens


def test_equal_digests_do_not_make_routes_equal(monkeypatch):
    monkeypatch.setattr(RoutedExperts, "digest", property(lambda one: np.minimum(one.ids[:, 0, 0].view(np.uint8), 1)))
    a, b = np.array([[[1, 2]], [[1, 2]], [[1, 3]]]), np.array([[[1, 2]], [[1, 3]], [[1, 3]]])
    layout = fold([routed([5, 6, 7, 8], a), routed([5, 6, 7, 9], b)])
    assert layout.physical_tokens == 7


def test_small_experts_take_a_byte_and_agree_with_wider_ones():
    narrow, wide = np.zeros((3, 1, 1), dtype=np.int64), np.array([[[0]], [[0]], [[300]]])
    samples = [routed([1, 2, 3, 4], narrow), routed([1, 2, 3, 5], wide)]
    assert [one.signals.routes.ids.dtype for one in samples] == [np.int8, np.int16]
    layout = fold(samples)
    assert layout.routes.dtype == np.int16
    assert layout.physical_tokens == 6


def test_null_is_a_token_without_a_route():
    sample = routed([1, 2, 3], [[[0, 1]], None])
    assert sample.signals.routes.ids.tolist() == [[[0, 1]], [[-1, -1]], [[-1, -1]]]


@pytest.mark.parametrize(
    ("routes", "fault"),
    [
        ([[0, 1], [1, 2]], r"must be integers \[tokens, layers, top-k\]"),
        ([[[0], [1]], [[0, 1]]], r"must be integers \[tokens, layers, top-k\]"),
        ([[[0.5]], [[1.0]]], r"must be integers \[tokens, layers, top-k\]"),
        ([[[0]]], "has 1 rows but 'tokens' has 3; there must be one for each, or for each but the last"),
        ([[[0]]] * 4, "has 4 rows but 'tokens' has 3"),
        ([[[-2]], [[0]]], "has expert -2; experts are 0 to 32767, or -1 in all entries of a token without a route"),
        ([[[40000]], [[0]]], "has expert 40000"),
    ],
)
def test_malformed_routes_name_the_sample(routes, fault):
    with pytest.raises(SampleError, match=rf"^rollouts\.jsonl:3: field 'routed_experts' {fault}"):
        routed([1, 2, 3], routes, source="rollouts.jsonl:3")


def test_routes_of_two_models_are_refused():
    samples = [routed([1, 2], [[[0, 1]]], source="a:1"), routed([1, 2], [[[0, 1], [0, 1]]], source="a:2")]
    with pytest.raises(SampleError, match=r"^a:2: field 'routed_experts' has 2 layers of 2 experts, but 1 layers of 2"):
        fold(samples)
