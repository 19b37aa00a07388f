"""Out, dQ, dK, dV and the gradient of the sinks against the fp64 reference, over every shape of tree and of tensor."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from harness.marks import quick
from harness.oracles import metadata_of, random_forest, worst
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    DEVICE,
    INTERPRETED,
    assert_are,
    assert_is_reference,
    make_inputs,
    norm_of_sink_terms,
    options_of,
    run,
    small_configs,
    truth,
    with_engine,
)

from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.attention.parity import check_parity
from mcore_prefix_tree.attention.triton_tree import attend, attend_as_tabled, kernel_calls
from mcore_prefix_tree.attention.triton_tree.config import configs_for

# The interpreter's time grows with the square of the tokens.
IN_SHORT = INTERPRETED and os.environ.get("HYPOTHESIS_PROFILE") != "thorough"


@settings(max_examples=12 if IN_SHORT else settings().max_examples)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(0, 4 if IN_SHORT else 10),
    lens=st.sampled_from([(0, 1, 3), (0, 1, 15, 16, 17, 33), (2, 31, 50), (70,)]),
    roots=st.sampled_from([0.05, 0.5]),
    padding=st.integers(1, 20),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    window=st.sampled_from([None, None, 1, 4, 40]),
    sinks=st.booleans(),
    apart=st.booleans(),
    engine=st.booleans(),
)
def test_random_forests(seed, nodes, lens, roots, padding, heads, window, sinks, apart, engine):
    assert_is_reference(
        metadata_of(*random_forest(seed, nodes=nodes, node_lens=lens, root_rate=roots), padding=padding),
        heads=heads[0],
        key_heads=heads[1],
        dim=16,
        sinks=sinks,
        seed=seed,
        configs=small_configs(apart=apart, engine=engine),
        settings={"window": window},
    )


@pytest.mark.parametrize("border", quick(63, 64, 65, 127, 128, 129, of=[*range(57, 66), *range(120, 131)]))
def test_node_borders_around_block_sizes(border):
    """The trunk ends at the border; below it branch a short, a straddling and an empty node."""
    node_lens = [border, 1, 70, 3, 0, 2, 40]
    metadata = metadata_of(node_lens, [-1, 0, 0, 2, 2, 0, -1], padding=1)
    assert_is_reference(metadata, heads=1, dim=16)


@pytest.mark.parametrize(
    ("unread", "window", "sinks"), [(16, None, False), (50, None, True), (50, 20, False), (70, 20, True)]
)
def test_tokens_whose_result_nobody_reads(unread, window, sinks):
    """Keys of a stack: no program attends for whole blocks of them, and no gradient comes from there."""
    whole = metadata_of([40, 25, 12, 9], [-1, 0, 0, 2], padding=1).with_plans_on(DEVICE)
    inputs, grad_out = make_inputs(whole, dim=16, sinks=sinks)
    grad_out[:unread] = 0
    expected = truth(inputs, grad_out, whole, window=window)
    options = options_of(inputs, window=window)
    found = run(attend, inputs, grad_out, replace(whole, unread=unread, cache={}), options, small_configs())
    assert not found[0][: unread // 32 * 32].any()
    found[0][:unread] = expected[0][:unread]
    terms = norm_of_sink_terms(inputs, grad_out, whole, window=window) if sinks else 0.0
    assert_are(found, expected, inputs, sink_terms=terms)


def test_a_comb_of_depth_300():
    nodes = 600
    parents = [-1] + [node - 1 if node % 2 else node - 2 for node in range(1, nodes)]
    metadata = metadata_of([1 + node % 2 for node in range(nodes)], parents)
    assert metadata.max_path_len >= 300
    assert_is_reference(metadata, heads=1, dim=16)


@pytest.mark.parametrize("ratio", quick(1, 3, 8, of=range(1, 9)))
@pytest.mark.parametrize("key_heads", [1, 3])
def test_grouped_queries(ratio, key_heads):
    metadata = metadata_of(*random_forest(ratio, nodes=4, node_lens=(1, 4, 30)), padding=2)
    assert_is_reference(metadata, heads=ratio * key_heads, key_heads=key_heads, dim=16, configs=small_configs())


@pytest.mark.parametrize(("key_heads", "at_once"), [(16, 8), (9, 3), pytest.param(11, 1, marks=pytest.mark.slow)])
def test_many_key_heads_take_turns(key_heads, at_once):
    assert kernel_calls.kv_heads_at_once(key_heads) == at_once
    metadata = metadata_of(*random_forest(5, nodes=4, node_lens=(1, 4, 30)), padding=2)
    assert_is_reference(metadata, heads=2 * key_heads, key_heads=key_heads, dim=16, configs=small_configs())


@pytest.mark.parametrize(("splits", "key_heads"), [(2, 2), (6, 1), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_a_group_divided_among_programs(splits, key_heads, monkeypatch):
    """The schedule of few key heads on a large GPU."""
    metadata = metadata_of(*random_forest(8, nodes=8, node_lens=(4, 30)), padding=2)
    key_blocks = -(-metadata.padded_size // 32)
    programs = []
    partial_sums = kernel_calls._partial_sums
    monkeypatch.setattr(kernel_calls, "_PROGRAMS_AT_A_TIME", 1)
    monkeypatch.setattr(kernel_calls, "_WARPS_AT_A_TIME", 1)
    monkeypatch.setattr(kernel_calls, "processors", lambda device: splits * key_heads * key_blocks)
    monkeypatch.setattr(kernel_calls, "_partial_sums", lambda *given: programs.append(given[1]) or partial_sums(*given))
    assert_is_reference(
        metadata, heads=6 * key_heads, key_heads=key_heads, dim=24, configs=small_configs(), seed=splits
    )
    assert set(programs) == {splits}


def test_a_group_that_is_not_divided(monkeypatch):
    """As in long batches, for a short one to run the same code: programs write the sums of six heads."""
    metadata = metadata_of(*random_forest(8, nodes=3, node_lens=(4, 30)), padding=2)
    monkeypatch.setattr(kernel_calls, "processors", lambda device: 1000)
    programs = []
    partial_sums = kernel_calls._partial_sums
    monkeypatch.setattr(kernel_calls, "_partial_sums", lambda *given: programs.append(given[1]) or partial_sums(*given))
    for divides, splits in ((True, 6), (False, 1)):
        programs.clear()
        assert_is_reference(
            metadata, heads=12, key_heads=2, dim=24, configs=replace(small_configs(), divides=divides), seed=2
        )
        assert set(programs) == {splits}


@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [
        (8, 8),
        (24, 40),
        (32, 32),
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (64, 128),
        (192, 128),
        (160, 192),
        (256, 256),
    ],
)
@pytest.mark.parametrize("engine", [False, True])
def test_head_dims(dim, value_dim, engine):
    metadata = metadata_of([40, 60, 30, 33], [-1, 0, 0, -1], padding=2)
    inputs, _ = make_inputs(metadata.with_plans_on(DEVICE), dim=dim, value_dim=value_dim)
    configs = configs_for(Case.of(*inputs, options_of(inputs)))
    assert_is_reference(
        metadata,
        heads=2,
        dim=dim,
        value_dim=value_dim,
        configs=with_engine(configs) if engine else configs,
        settings={"window": 70} if engine else {},
    )


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("divided", [False, True])
def test_heads_in_parts(engine, divided, monkeypatch):
    """A head of 160 has three parts, and the last part reaches past its end; the sums in fp32 have full parts."""
    monkeypatch.setattr(kernel_calls, "processors", lambda device: 1000 if divided else 0)
    assert_is_reference(
        metadata_of([20, 30, 13], [-1, 0, 0], padding=2),
        heads=2,
        dim=160,
        value_dim=192,
        sinks=True,
        configs=small_configs(engine=engine),
        settings={"window": 50},
    )


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("engine", [False, True])
def test_launches_that_take_narrow_parts(apart, engine):
    """Head dimensions of one tile or two and a half, in tiles of 16."""
    configs = small_configs(apart=apart, engine=engine)
    narrow = {name: getattr(configs, name)._replace(widest=16) for name in ("forward", "key_value", "query")}
    for dim, value_dim in ((32, 16), (40, 64)):
        assert_is_reference(
            metadata_of(*random_forest(3, nodes=5, node_lens=(1, 15, 33)), padding=2),
            configs=replace(configs, **narrow),
            dim=dim,
            value_dim=value_dim,
        )


@pytest.mark.parametrize("seed", range(3))
def test_float16(seed):
    metadata = metadata_of(*random_forest(seed, nodes=8, node_lens=(1, 20, 50)), padding=3)
    shape = {"heads": 4, "key_heads": 2, "dim": 64, "dtype": torch.float16, "sinks": seed == 1, "seed": seed}
    assert_is_reference(metadata, settings={"window": 60 if seed == 2 else None}, **shape)


@pytest.mark.parametrize("sinks", [False, True])
def test_the_comparison_before_first_use_passes(sinks):
    """As the back-end makes it on a GPU. Sinks bring dQ and dK nearest to its limit."""
    inputs, _ = make_inputs(metadata_of([3], [-1]), dim=64, dtype=torch.float16, sinks=sinks, heads=1)
    case = Case.of(*inputs[:3], options_of(inputs))
    assert case.needs_grad
    check_parity("triton", attend_as_tabled, case)


@pytest.mark.parametrize("scale", [1e-4, 0.05, 1.0])
def test_sinks_with_small_and_large_scores(scale):
    assert_is_reference(
        metadata_of([35, 10, 15], [-1, 0, 0], padding=3),
        dim=16,
        sinks=True,
        configs=small_configs(),
        settings={"softmax_scale": scale},
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"window": 50}])
def test_thousands_of_tokens(settings):
    metadata = metadata_of(*random_forest(4, nodes=60, node_lens=(0, 1, 57, 64, 130)), padding=30)
    assert 2000 < metadata.padded_size < 6000
    assert_is_reference(metadata, heads=2, dim=64, sinks=bool(settings), settings=settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_same_bits_twice(dtype):
    metadata = metadata_of(*random_forest(1, nodes=10, node_lens=(3, 20)), padding=2).with_plans_on(DEVICE)
    inputs, grad_out = make_inputs(metadata, heads=2, dim=32, dtype=dtype, sinks=True)
    options = options_of(inputs, window=50)
    first, second = (run(attend, inputs, grad_out, metadata, options, small_configs()) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_sibling_cannot_be_seen():
    """Change one leaf's keys and values: nothing outside that leaf may move by a bit."""
    metadata = metadata_of([40, 30, 50, 20, 60], [-1, 0, 1, 1, 0], padding=2).with_plans_on(DEVICE)
    inputs, _ = make_inputs(metadata)
    options = options_of(inputs)
    configs = configs_for(Case.of(*inputs, options))
    before = attend(*inputs, metadata, options, configs)
    changed = [tensor.detach().clone() for tensor in inputs]
    for tensor in changed[1:]:
        tensor[70:120] += 100.0
    after = attend(*changed, metadata, options, configs)
    outside = torch.ones(metadata.padded_size, dtype=torch.bool)
    outside[70:120] = False
    assert torch.equal(before[outside], after[outside])
    assert not torch.allclose(before[~outside], after[~outside])


@pytest.fixture
def nan_filled():
    """Unwritten memory is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("size", [1, 100, 130])
def test_every_element_is_written(size):
    assert torch.empty(3, device=DEVICE).isnan().all()
    metadata = metadata_of([size], [-1], padding=1)
    assert_is_reference(metadata, dim=24, sinks=True)


@pytest.mark.parametrize("engine", [False, True])
def test_views_of_one_projection(engine):
    """Megatron hands over slices; some are not aligned, and a gradient may be one number, broadcast."""
    metadata = metadata_of(*random_forest(6, nodes=6, node_lens=(5, 20)), padding=1).with_plans_on(DEVICE)
    configs = small_configs(engine=engine)
    for offset in (0, 1):
        mixed = torch.randn(metadata.padded_size, 2, 96 + offset, device=DEVICE)
        views = [part.requires_grad_() for part in mixed[:, :, offset:].split(32, dim=2)]
        grad_out = torch.ones((), device=DEVICE).expand(metadata.padded_size, 2, 32)
        expected = truth([view.contiguous() for view in views], grad_out, metadata)
        results = run(attend, views, grad_out, metadata, options_of(views), configs)
        for actual, wanted in zip(results, expected, strict=True):
            assert worst(actual, wanted) < 1e-6


@pytest.mark.parametrize("engine", [False, True])
def test_offsets_beyond_31_bits(engine):
    """Tokens so far apart in memory that the last one's offset does not fit 32 bits."""
    metadata = metadata_of([30, 20], [-1, 0]).with_plans_on(DEVICE)
    size, stride = metadata.padded_size, 1 << 26
    assert (size - 1) * stride > 1 << 31
    # Pages that are never touched cost nothing on the CPU; on a GPU these are 6.4 GB.
    storage = torch.empty(size * stride, dtype=torch.float16, device=DEVICE)
    views = [storage.as_strided((size, 1, 32), (stride, 32, 1), start) for start in (0, 32, 64)]
    generator = torch.Generator().manual_seed(0)
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator))
    packed = [view.clone() for view in views]
    for tensor in (*views, *packed):
        tensor.requires_grad_()
    grad_out = torch.ones(size, 1, 32, dtype=torch.float16, device=DEVICE)
    far, near = (
        run(attend, inputs, grad_out, metadata, options_of(inputs), small_configs(engine=engine))
        for inputs in (views, packed)
    )
    assert all(torch.equal(one, other) for one, other in zip(far, near, strict=True))
