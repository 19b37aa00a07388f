"""The cut of the visible pairs into triangles and rectangles: every pair once, no other pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from harness.oracles import metadata_of, random_forest, sample_lists
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import TreeMetadata, fold
from mcore_prefix_tree.attention.reference import visibility
from mcore_prefix_tree.attention.spans import cut_into_spans


def times_covered(metadata):
    """int ``[T, T]``: in how many spans each pair is."""
    spans = cut_into_spans(metadata)
    covered = torch.zeros(metadata.num_tokens, metadata.num_tokens, dtype=torch.int64)
    for start, end in zip(spans.runs[:-1], spans.runs[1:], strict=True):
        covered[start:end, start:end] += torch.ones(end - start, end - start, dtype=torch.int64).tril()
    for (q_start, q_end), (k_start, k_end) in zip(spans.queries, spans.keys, strict=True):
        covered[q_start:q_end, k_start:k_end] += 1
    return covered


def visible(metadata):
    """int ``[T, T]``: the mask without its padding."""
    return visibility(metadata)[: metadata.num_tokens, : metadata.num_tokens].long()


@given(sample_lists(min_samples=1), st.integers(1, 4))
def test_every_visible_pair_is_in_one_span(samples, multiple):
    metadata = TreeMetadata.from_layout(fold(samples, pad_to_multiple_of=multiple))
    assert torch.equal(times_covered(metadata), visible(metadata))


@given(st.integers(0, 10_000), st.integers(0, 20), st.integers(1, 3))
def test_empty_nodes_and_many_roots(seed, nodes, padding):
    metadata = metadata_of(*random_forest(seed, nodes=nodes, node_lens=(0, 0, 1, 2, 5), root_rate=0.3), padding=padding)
    assert torch.equal(times_covered(metadata), visible(metadata))


@given(st.integers(0, 10_000), st.integers(0, 100))
def test_queries_that_nobody_reads_are_in_no_span(seed, share):
    metadata = metadata_of(*random_forest(seed, nodes=20, node_lens=(0, 1, 2, 5), root_rate=0.2), padding=1)
    unread = metadata.num_tokens * share // 100
    metadata = replace(metadata, unread=unread, cache={})
    expected = visible(metadata)
    expected[:unread] = 0
    assert torch.equal(times_covered(metadata), expected)


@given(st.integers(0, 10_000), st.integers(0, 40))
def test_spans_of_the_same_depth_are_disjoint_and_ascending(seed, unread):
    metadata = replace(metadata_of(*random_forest(seed, nodes=30, node_lens=(0, 1, 4))), unread=unread, cache={})
    spans = cut_into_spans(metadata)
    for depth in range(int(spans.depth.max(initial=-1)) + 1):
        for side in (spans.queries, spans.keys):
            borders = side[spans.depth == depth].ravel()
            assert len(borders)
            assert (np.diff(borders) >= 0).all()


def test_tree_without_branches_has_only_runs():
    metadata = metadata_of([3, 0, 4, 5, 2], [-1, 0, 1, -1, 3], padding=2)
    spans = cut_into_spans(metadata)
    assert spans.runs.tolist() == [0, 7, 14]
    assert not len(spans.queries)


def test_the_first_child_joins_its_parents_run():
    """A trunk with three children: its run holds the first one, and one rectangle takes the other two."""
    spans = cut_into_spans(metadata_of([10, 3, 4, 5], [-1, 0, 0, 0]))
    assert spans.runs.tolist() == [0, 13, 17, 22]
    assert spans.queries.tolist() == [[13, 22]]
    assert spans.keys.tolist() == [[0, 10]]
    assert spans.depth.tolist() == [0]
