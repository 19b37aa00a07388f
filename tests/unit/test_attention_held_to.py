"""The list that back-ends are held to, for those that run on a CPU: out, dQ, dK, dV and d sinks are the reference's.

The kernels of ``triton`` are held to it in tests/kernels, and GPU back-ends in tests/gpu. FlexAttention has nothing
but a forward here, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from attention_cases import case_of, random_inputs, results
from harness.oracles import metadata_of, random_forest, worst
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from mcore_prefix_tree.attention import AttentionOptions, cascade, flex, path, reference

# Uncompiled, FlexAttention says that it is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@dataclass(frozen=True)
class Method:
    """A back-end."""

    attention: Any
    judge: Any
    trains: bool = True
    dtype: torch.dtype = torch.float64
    limit: float = 1e-12


METHODS = {
    "path": Method(path.attention, path),
    "cascade": Method(cascade.attention, cascade),
    "flex": Method(partial(flex.attend, flex_attention), flex, trains=False, dtype=torch.float32, limit=2e-6),
}
each_method = pytest.mark.parametrize("name", METHODS)


def held_to(name, metadata, *, heads=2, key_heads=1, dim=8, value_dim=None, sinks=False, **options):
    """Compare if the method takes the case; say if it does."""
    method = METHODS[name]
    logits = torch.linspace(-1, 1, heads, dtype=torch.float64).requires_grad_(method.trains) if sinks else None
    asked = AttentionOptions(softmax_scale=dim**-0.5, sinks=logits, **options)
    case = case_of(
        dtype=method.dtype, heads=heads, kv_heads=key_heads, head_dim=dim, value_dim=value_dim, needs_grad=method.trains
    )
    if method.judge.refusal(replace(case, options=asked)):
        return False
    inputs, grad_out = random_inputs(
        metadata.padded_size, heads=heads, key_heads=key_heads, dim=dim, value_dim=value_dim, dtype=method.dtype
    )
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = results(reference.attention, exact, grad_out.double(), metadata, asked)
    if method.trains:
        actual = results(method.attention, inputs, grad_out, metadata, asked)
    else:
        with torch.no_grad():
            actual, expected = [method.attention(*inputs, metadata, asked)], expected[:1]
    assert len(actual) == len(expected)
    for what, one, other in zip(("out", "dq", "dk", "dv", "d sinks"), actual, expected, strict=False):
        error = worst(one, other)
        assert error < method.limit, f"{name}: {what} is off by {error:.2e}"
    return True


def comb(depth):
    """A spine of ``depth`` nodes of one token, with a leaf of two at each."""
    parents = [-1] + [node - 1 if node % 2 else node - 2 for node in range(1, 2 * depth)]
    return metadata_of([1 + node % 2 for node in range(2 * depth)], parents)


FORESTS = {
    "one token": metadata_of([1], [-1]),
    "two tokens, two roots": metadata_of([1, 1], [-1, -1]),
    "leaves of nothing": metadata_of([5, 0, 3, 0, 0, 4, 0], [-1, 0, 0, 2, 2, 2, -1], padding=1),
    "trunks of nothing": metadata_of([0, 3, 0, 2, 4], [-1, 0, 0, 2, 2]),
    "many roots and a ragged tail": metadata_of([1 + index % 5 for index in range(60)], [-1] * 60, padding=7),
    "depth 300": comb(300),
    "a star of 300": metadata_of([9] + [1] * 300, [-1] + [0] * 300, padding=2),
    "3,000 tokens": metadata_of(*random_forest(4, nodes=75, node_lens=(0, 1, 57, 64, 130)), padding=30),
}


@each_method
@pytest.mark.parametrize("forest", FORESTS)
def test_forests(name, forest):
    assert held_to(name, FORESTS[forest], dim=4)


@each_method
@pytest.mark.parametrize("border", [*range(57, 66), *range(120, 131)])
def test_node_borders_around_block_sizes(name, border):
    """The trunk ends at the border; below it branch a short, a straddling and an empty node."""
    assert held_to(name, metadata_of([border, 1, 70, 3, 0, 2, 40], [-1, 0, 0, 2, 2, 0, -1], padding=1))


@each_method
@pytest.mark.parametrize("ratio", range(1, 9))
@pytest.mark.parametrize("key_heads", [1, 3])
def test_grouped_queries(name, ratio, key_heads):
    metadata = metadata_of(*random_forest(ratio, node_lens=(1, 4, 9)), padding=2)
    assert held_to(name, metadata, heads=ratio * key_heads, key_heads=key_heads)


@each_method
@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (8, 5)],
)
def test_head_dims(name, dim, value_dim):
    metadata = metadata_of([20, 30, 15, 16], [-1, 0, 0, -1], padding=2)
    assert held_to(name, metadata, heads=4, key_heads=2, dim=dim, value_dim=value_dim)


# Of the options, which each method takes.
TAKES = {
    "path": set(),
    "cascade": {"sinks"},
    "flex": set(),  # on a CPU
}


@each_method
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(0, 14),
    lens=st.sampled_from([(0, 1, 3), (1, 2, 5), (0, 7, 57, 65)]),
    roots=st.sampled_from([0.05, 0.5]),
    padding=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (8, 1)]),
    dims=st.sampled_from([(8, 8), (8, 16), (32, 32), (24, 16)]),
    window=st.sampled_from([None, None, 1, 4, 40]),
    sinks=st.booleans(),
)
def test_options_on_forests(name, seed, nodes, lens, roots, padding, heads, dims, window, sinks):
    metadata = metadata_of(*random_forest(seed, nodes=nodes, node_lens=lens, root_rate=roots), padding=padding)
    asked = {option for option, value in (("window", window), ("sinks", sinks)) if value}
    taken = held_to(
        name, metadata, heads=heads[0], key_heads=heads[1], dim=dims[0], value_dim=dims[1], sinks=sinks, window=window
    )
    assert taken == (asked <= TAKES[name])
