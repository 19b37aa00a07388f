"""Small forests against a trie walked token by token, and small orders against all cuts there are.

Ten million forests where slow tests run, in half an hour on a core. A thousand are folded at once, told apart by their
merge keys, and compared array by array: only the naive trie walks tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain

import numpy as np
import pytest

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.plan.cuts import fewest_runs, least_repeating_runs, smallest_budget

FORESTS = 1000


def random_samples(rng: np.random.Generator) -> list[Sample]:
    """Return up to five samples per forest, of up to seven tokens, which often begin alike, repeat or continue."""
    samples = []
    for forest in range(FORESTS):
        alphabet = int(rng.integers(1, 4))
        for _ in range(int(rng.integers(1, 6))):
            length = int(rng.integers(1, 8))
            mask = rng.integers(0, 3, length) / 2  # halves add up exactly
            samples.append(Sample(tokens=rng.integers(0, alphabet, length), loss_mask=mask, merge_key=forest))
    return [samples[index] for index in rng.permutation(len(samples))]


def naive_trie(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """The node of every sample's every token, one sample after another, and the parent of every node, -1 for a root."""
    numbers: dict[tuple[Hashable, int], int] = {}
    nodes, parents = [], []
    for sample in samples:
        above, place = -1, ("root", sample.merge_key)
        for token in sample.tokens.tolist():
            node = numbers.setdefault((place, token), len(numbers))
            if node == len(parents):
                parents.append(above)
            nodes.append(node)
            above, place = node, node
    return np.array(nodes), np.array(parents)


def check_forests(seed: int) -> None:
    samples = random_samples(np.random.default_rng(seed))
    layout = fold(samples, padded_size=FORESTS * 40)
    nodes, parents = naive_trie(samples)
    flat, lengths = layout.sample_map, np.array([len(sample) for sample in samples])
    starts = np.cumsum(lengths) - lengths

    # One flat place for every naive node, and the other way round.
    place = np.full(len(parents), -1)
    place[nodes] = flat
    np.testing.assert_array_equal(place[nodes], flat)
    np.testing.assert_array_equal(np.sort(place), np.arange(layout.physical_tokens))

    above = np.where(parents < 0, -1, place[parents])
    np.testing.assert_array_equal(layout.predictor[place], above)
    np.testing.assert_array_equal(layout.input_ids[flat], np.concatenate([sample.tokens for sample in samples]))
    depth = np.arange(len(flat)) - np.repeat(starts, lengths)
    np.testing.assert_array_equal(layout.position_ids[flat], depth)

    # Every ancestor is seen, and as many pairs as there are ancestors: so nothing else is.
    ends = np.repeat(flat[starts + lengths - 1], lengths)
    assert (flat <= ends).all()
    assert (layout.subtree_end[flat] > ends).all()
    assert (np.diff(flat)[np.diff(depth) > 0] > 0).all()
    assert layout.visible_pairs == int((layout.position_ids[: layout.physical_tokens].astype(np.int64) + 1).sum())

    weights = np.concatenate([sample.loss_mask for sample in samples])
    weights[starts] = 0
    np.testing.assert_array_equal(
        layout.loss_weight, np.bincount(flat, weights=weights, minlength=layout.padded_size).astype(np.float32)
    )
    # A node of the trie begins where other samples pass than through the token before.
    through = np.bincount(nodes)
    begins = (parents < 0) | (through != through[parents])
    np.testing.assert_array_equal(np.sort(place[begins]), layout.cu_node_lens[:-1])
    node_of = np.searchsorted(layout.cu_node_lens, flat[starts + lengths - 1], side="right") - 1
    np.testing.assert_array_equal(layout.sample_node, node_of)


@pytest.mark.parametrize("rounds", [10, pytest.param(10_000, marks=pytest.mark.slow)])
def test_forests_equal_a_walk_over_their_tokens(rounds: int) -> None:
    for seed in range(rounds):
        check_forests(seed)


def check_cuts(rng: np.random.Generator) -> None:
    """The order of up to seven samples, any that a trie can have, under any budget that holds the longest."""
    count = int(rng.integers(1, 8))
    lengths = rng.integers(1, 9, count)
    shared = rng.integers(0, 9, count)
    shared[0] = 0
    shared[1:] = np.minimum(shared[1:], np.minimum(lengths[1:], lengths[:-1]))
    fresh, budget = lengths - shared, int(lengths.max() + rng.integers(0, 12))
    # Each cut as a row of bits: whether a run begins at a sample.
    begins = (np.arange(1 << (count - 1))[:, None] >> np.arange(count - 1)) & 1
    begins = np.column_stack([np.ones(len(begins), dtype=np.int64), begins]).astype(bool)
    runs = begins.sum(axis=1)
    run_of = np.cumsum(begins, axis=1) - 1 + count * np.arange(len(begins))[:, None]
    tokens = np.where(begins, lengths, fresh)
    sizes = np.bincount(run_of.ravel(), weights=tokens.ravel(), minlength=count * len(begins)).reshape(
        len(begins), count
    )
    largest, total = sizes.max(axis=1), tokens.sum(axis=1)

    fits = largest <= budget
    best = min(zip(total[fits].tolist(), runs[fits].tolist(), strict=True))
    found = least_repeating_runs(shared, fresh, budget)
    assert list(chain.from_iterable(range(*run) for run in found)) == list(range(count))
    of_runs = [int(shared[start] + fresh[start:end].sum()) for start, end in found]
    assert max(of_runs) <= budget
    assert (sum(of_runs), len(found)) == best
    assert len(fewest_runs(shared, fresh, budget)) == runs[fits].min()
    parts = int(rng.integers(1, count + 1))
    assert smallest_budget(shared, fresh, parts, int(total.max())) == largest[runs <= parts].min()


@pytest.mark.parametrize("cases", [2000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_no_cut_is_better(cases: int) -> None:
    rng = np.random.default_rng(cases)
    for _ in range(cases):
        check_cuts(rng)
