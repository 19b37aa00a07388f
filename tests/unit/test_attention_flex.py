"""FlexAttention on the CPU: forward only, because the CPU has no backward."""

from __future__ import annotations

import re
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch
from attention_cases import case_of, random_inputs
from harness.oracles import metadata_of, random_forest, worst
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from mcore_prefix_tree.attention import AttentionOptions, flex, reference, tree_attention
from mcore_prefix_tree.attention.reference import visibility, window_visibility

# Uncompiled, FlexAttention says that it is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def is_reference(run, metadata, *, dtype=torch.float32, limit=1e-6, **options):
    inputs, _ = random_inputs(metadata.padded_size, dim=16, dtype=dtype)
    options = AttentionOptions(softmax_scale=0.3, **options)
    with torch.no_grad():
        out = run(*inputs, metadata, options)
        expected = reference.attention(*(one.double() for one in inputs), metadata, options)
    assert out.dtype == dtype
    assert worst(out, expected) < limit


def uncompiled(*arguments):
    return flex.attend(flex_attention, *arguments)


def dense(counts, blocks):
    """bool ``[rows, columns]``: which blocks are in a list."""
    size = blocks.shape[-1]
    mask = torch.zeros(size, size, dtype=torch.bool)
    for row, count in enumerate(counts.flatten().tolist()):
        mask[row, blocks[0, 0, row, :count].long()] = True
    return mask


@given(st.integers(0, 10_000), st.sampled_from([None, 1, 40, 150]))
def test_block_mask_marks_blocks_with_visible_pairs(seed, window):
    metadata = metadata_of(*random_forest(seed, nodes=12, node_lens=(0, 1, 60, 130, 200)), padding=seed % 3 + 1)
    mask = flex.build_mask(metadata, window)
    visible = visibility(metadata)
    if window is not None:
        visible &= window_visibility(metadata, window)
    blocks = -(-metadata.padded_size // flex.BLOCK)
    rows = torch.arange(metadata.padded_size) // flex.BLOCK
    pairs = torch.zeros(blocks, blocks, dtype=torch.int64).index_put_(
        (rows[:, None].expand_as(visible), rows[None, :].expand_as(visible)), visible.long(), accumulate=True
    )
    partial = dense(mask.kv_num_blocks, mask.kv_indices)
    full = dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    assert ((partial | full) | (pairs == 0)).all(), "a visible pair is in no block"
    row_counts = rows.bincount()
    assert (pairs[full] == (row_counts[:, None] * row_counts[None, :])[full]).all(), "a full block has a hidden pair"
    assert torch.equal(dense(mask.q_num_blocks, mask.q_indices), partial.T)
    assert torch.equal(dense(mask.full_q_num_blocks, mask.full_q_indices), full.T)
    assert mask.seq_lengths == (metadata.padded_size, metadata.padded_size)


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 50}], ids=str)
def test_options_on_several_blocks(options):
    metadata = metadata_of(*random_forest(4, nodes=12, node_lens=(0, 1, 60, 130)), padding=3)
    assert metadata.padded_size > 2 * flex.BLOCK
    is_reference(uncompiled, metadata, **options)


@pytest.fixture
def eager(monkeypatch):
    """torch.compile traces and guards as ever, but generates no code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    flex._compiled.cache_clear()
    yield
    torch.compiler.reset()
    flex._compiled.cache_clear()


def compiles_once():
    torch._dynamo.utils.counters.clear()
    for seed in range(4):
        metadata = metadata_of(*random_forest(seed, nodes=10, node_lens=(1, 30, 60, 200)), padding=seed)
        assert metadata.padded_size > flex.BLOCK
        is_reference(flex.attention, metadata)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert flex._compiled.cache_info().currsize == 1
    inputs, _ = random_inputs(metadata.padded_size, dim=16, dtype=torch.float32)
    with torch.no_grad():
        out = tree_attention(*inputs, metadata, softmax_scale=0.3, backend="flex")
        expected = tree_attention(*inputs, metadata, softmax_scale=0.3, backend="reference")
    assert worst(out, expected) < 1e-6


def test_compiled_once_for_all_lengths(eager):
    """Through the front door, at several lengths; the second length compiles nothing."""
    compiles_once()


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="torch.compile on the CPU needs a C++ compiler and Python's headers",
)
def test_code_is_generated_once_for_all_lengths():
    torch.compiler.reset()
    flex._compiled.cache_clear()
    compiles_once()


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=3)
def test_more_configurations_than_torch_compiles_of_one_function(eager):
    """A model and its teacher, layers with windows and without: none of them uses up another one's recompilations."""
    metadata = metadata_of(*random_forest(0, nodes=10, node_lens=(1, 30, 60, 200)))
    limit = torch._dynamo.config.recompile_limit
    for step in range(1, limit + 3):
        inputs, _ = random_inputs(metadata.padded_size, dim=8 * step, dtype=torch.float32)
        for options in ({}, {"window": 10 * step}):
            options = AttentionOptions(softmax_scale=0.3, **options)
            with torch.no_grad():
                out = flex.attention(*inputs, metadata, options)
                expected = reference.attention(*(one.double() for one in inputs), metadata, options)
            assert worst(out, expected) < 1e-6
    assert flex._compiled.cache_info().currsize == 2 * (limit + 2)


def test_flex_inside_a_compiled_caller(eager):
    metadata = metadata_of(*random_forest(0, nodes=10, node_lens=(1, 30, 60, 200)))

    def layer(*arguments):
        return flex.attention(*arguments) * 1.0

    metadata.derived("flex window None", lambda metadata: flex.build_mask(metadata, None))
    is_reference(torch.compile(layer, fullgraph=True), metadata)
    assert flex._compiled.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": torch.float32}, "^training with device=cpu"),
        ({"needs_grad": False}, "^dtype=torch.float64"),
        ({"needs_grad": False, "dtype": torch.float32, "sinks": torch.zeros(4)}, "^sinks with device=cpu"),
        ({"needs_grad": False, "dtype": torch.float32, "window": 50}, "^window=50 with device=cpu"),
        ({"device": "cuda", "capability": (9, 0)}, "^dtype=torch.float64"),
        ({"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 8}, "^head_dim=8"),
    ],
)
def test_refusals_name_the_argument(changes, says):
    assert re.search(says, flex.refusal(case_of(**changes)))


def test_supported_gpu_cases_are_accepted():
    for options in ({}, {"window": 7, "sinks": torch.zeros(4)}):
        case = case_of(device="cuda", capability=(8, 0), dtype=torch.bfloat16, head_dim=192, value_dim=128, **options)
        assert flex.refusal(case) is None
