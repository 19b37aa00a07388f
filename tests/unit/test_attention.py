from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_cases import case_of, random_inputs
from fake_flash_attention import install
from harness.each_tensor import EachTensor
from harness.marks import quick
from harness.oracles import causal_attention, forest_samples, metadata_of, random_forest, sample_lists, worst
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import TreeMetadata, fold
from mcore_prefix_tree.attention import AttentionOptions, Case, check_backend, path, tree_attention
from mcore_prefix_tree.attention.api import BACKENDS, load_backend, supporting
from mcore_prefix_tree.logprob import restore

# Back-ends that meet fp64 tolerances on this machine. The other back-ends have separate tests.
EXACT = supporting(
    Case(
        device=torch.device("cpu"),
        capability=None,
        dtype=torch.float64,
        heads=2,
        kv_heads=1,
        head_dim=8,
        value_dim=8,
        needs_grad=True,
        options=AttentionOptions(softmax_scale=1.0),
    )
)


def run(backend, inputs, grad_out, metadata, scale=0.3):
    """out, dq, dk, dv."""
    out = tree_attention(*inputs, metadata, softmax_scale=scale, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def assert_path_is_reference(metadata, *, limit=1e-12, **shape):
    inputs, grad_out = random_inputs(metadata.padded_size, **shape)
    expected = run("reference", inputs, grad_out, metadata)
    for name, actual, wanted in zip(
        ("out", "dq", "dk", "dv"), run("path", inputs, grad_out, metadata), expected, strict=True
    ):
        error = worst(actual, wanted)
        assert error < limit, f"{name} is off by {error:.2e}"


# The reference defines correctness, so it is held against samples that have never heard of a tree.


@given(sample_lists(min_samples=1, max_samples=6), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.sampled_from([8, 5]))
def test_reference_equals_unfolded_samples(samples, heads, value_dim):
    layout = fold(samples, pad_to_multiple_of=4)
    metadata = TreeMetadata.from_layout(layout)
    inputs, _ = random_inputs(layout.padded_size, heads=heads[0], key_heads=heads[1], value_dim=value_dim)
    generator = torch.Generator().manual_seed(5)

    folded = restore(tree_attention(*inputs, metadata, softmax_scale=0.4, backend="reference"), layout)
    # Every sample sends its own gradient; shared tokens have to receive the sum.
    weights = [torch.randn(row.shape, generator=generator, dtype=row.dtype) for row in folded]
    grads = torch.autograd.grad(sum((row * w).sum() for row, w in zip(folded, weights, strict=True)), inputs)

    expected = [torch.zeros_like(tensor) for tensor in inputs]
    for index in range(len(samples)):
        tokens = torch.from_numpy(layout.sample_tokens(index)).long()
        own = [tensor.detach()[tokens].requires_grad_() for tensor in inputs]
        alone = causal_attention(*own, 0.4)
        assert worst(folded[index], alone) < 1e-12
        for total, grad in zip(expected, torch.autograd.grad(alone, own, weights[index]), strict=True):
            total.index_add_(0, tokens, grad)
    for actual, wanted in zip(grads, expected, strict=True):
        assert worst(actual, wanted) < 1e-12


def test_reference_in_float16_has_its_range():
    """Products of queries and keys may exceed it where scores do not."""
    metadata = metadata_of([3, 2, 2], [-1, 0, 0])
    inputs, _ = random_inputs(metadata.padded_size, dim=256)
    half = [(100 * inputs[0]).half(), (10 * inputs[1]).half(), inputs[2].half()]
    assert not torch.isfinite(torch.einsum("ihd,jhd->hij", 16 * half[0], half[1].repeat_interleave(2, dim=1))).all()
    out = tree_attention(*half, metadata, softmax_scale=1 / 16, backend="reference")
    expected = tree_attention(*(one.double() for one in half), metadata, softmax_scale=1 / 16, backend="reference")
    assert worst(out, expected) < 0.1


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("seed", range(4))
def test_any_query_block(block, seed, monkeypatch):
    monkeypatch.setattr(path, "QUERY_BLOCK", block)
    lens = tuple(sorted({1, max(block - 1, 0), block, block + 1, 2 * block + 1}))
    assert_path_is_reference(metadata_of(*random_forest(seed, nodes=10, node_lens=lens), padding=1), seed=seed)


@pytest.mark.parametrize("backend", EXACT)
def test_padding_without_nodes(backend):
    metadata = TreeMetadata.from_nodes([0], [], padded_size=5)
    inputs, grad_out = random_inputs(5)
    out, grad_query, grad_key, grad_value = run(backend, inputs, grad_out, metadata)
    assert torch.equal(out, inputs[2].repeat_interleave(2, dim=1))
    # The difference of two equal sums, which some processors add up in different orders.
    zero = torch.zeros_like(grad_query)
    torch.testing.assert_close(grad_query, zero, rtol=0, atol=1e-15)
    torch.testing.assert_close(grad_key, zero[:, : grad_key.shape[1]], rtol=0, atol=1e-15)
    torch.testing.assert_close(grad_value, grad_out.unflatten(1, (2, 2)).sum(2), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backend", EXACT)
def test_a_sibling_cannot_be_seen(backend):
    """Change one leaf's keys and values: nothing outside that leaf may move by a bit."""
    metadata = metadata_of([4, 3, 5, 2, 6], [-1, 0, 1, 1, 0], padding=2)
    inputs, _ = random_inputs(metadata.padded_size)
    before = tree_attention(*inputs, metadata, softmax_scale=0.3, backend=backend)
    changed = [tensor.detach().clone() for tensor in inputs]
    for tensor in changed[1:]:
        tensor[7:12] += 100.0
    after = tree_attention(*changed, metadata, softmax_scale=0.3, backend=backend)
    outside = torch.ones(metadata.padded_size, dtype=torch.bool)
    outside[7:12] = False
    assert torch.equal(before[outside], after[outside])
    assert not torch.allclose(before[~outside], after[~outside])


@pytest.mark.ci
@pytest.mark.parametrize("backend", quick("path", of=["path", "cascade"]))
def test_plans_are_not_traced(backend):
    """torch.compile continues after a graph break for NumPy's planning, for every new tree."""

    @torch.compile(backend="eager")
    def layer(query, key, value, metadata):
        for _ in range(2):  # layers
            query = tree_attention(query, key, value, metadata, softmax_scale=0.3, backend=backend)
        return query

    for lens, parents in (([30, 20, 14], [-1, 0, 0]), ([10, 30, 24, 16], [-1, 0, 0, -1]), ([64, 1], [-1, 0])):
        metadata = metadata_of(lens, parents)
        inputs, _ = random_inputs(metadata.padded_size)
        once = tree_attention(*inputs, metadata, softmax_scale=0.3, backend="reference")
        expected = tree_attention(once, *inputs[1:], metadata, softmax_scale=0.3, backend="reference")
        assert worst(layer(*inputs, metadata), expected) < 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_path_in_float32(seed):
    metadata = metadata_of(*random_forest(seed, nodes=20, node_lens=(1, 7, 20, 64)), padding=3)
    inputs, grad_out = random_inputs(metadata.padded_size, dtype=torch.float32, seed=seed)
    doubled = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = run("reference", doubled, grad_out.double(), metadata)
    for actual, wanted in zip(run("path", inputs, grad_out, metadata), expected, strict=True):
        assert actual.dtype == torch.float32
        assert worst(actual, wanted) < 1e-5


@pytest.mark.parametrize("deterministic", [True, False])
def test_path_on_a_gpu_hands_no_window_of_its_bias_to_a_fused_kernel(deterministic, monkeypatch):
    """Those read a mask in aligned vectors. Roots, which need none, may take one where any order of sums will do.

    Otherwise a root is cut in blocks like any other segment: plain matrix products keep a block's scores.
    """
    monkeypatch.setattr(path, "QUERY_BLOCK", 4)
    fused, allowed, rows = path._fused, [], []
    monkeypatch.setattr(
        path, "_fused", lambda device, *, deterministic: fused(torch.device("cuda"), deterministic=deterministic)
    )
    attend = F.scaled_dot_product_attention

    def recorded(*arguments, attn_mask, **options):
        allowed.append((attn_mask is not None, torch.backends.cuda.flash_sdp_enabled()))
        rows.append(arguments[0].shape[2])
        return attend(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    metadata = metadata_of([7, 3, 5, 2], [-1, 0, 0, 2])
    inputs, grad_out = random_inputs(metadata.padded_size)
    options = AttentionOptions(softmax_scale=0.3, deterministic=deterministic)
    out = path.attention(*inputs, metadata, options)
    out.backward(grad_out)
    assert set(allowed) == ({(True, False)} if deterministic else {(False, True), (True, False)})
    assert max(rows) == (4 if deterministic else 7)
    assert worst(out, tree_attention(*inputs, metadata, softmax_scale=0.3, backend="reference")) < 1e-12


# Both sides round to bf16 at other places, so their errors are two draws of the same size and not equal. Measured on
# these forests, path over unfolded: out and dq 0.998 to 1.0001, dk and dv 0.88 to 0.98.
BF16_FACTOR = 1.05


@pytest.mark.parametrize("seed", range(4))
def test_path_in_bf16_is_no_further_from_the_truth_than_unfolded(seed):
    node_lens, node_parent = random_forest(seed, nodes=24, node_lens=(4, 16, 40, 80), root_rate=0.05)
    layout = fold(forest_samples(node_lens, node_parent, inner=False))
    metadata = TreeMetadata.from_layout(layout)
    inputs, grad_out = random_inputs(layout.padded_size, dim=32, dtype=torch.bfloat16, seed=seed)
    doubled = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = run("reference", doubled, grad_out.double(), metadata, scale=32**-0.5)
    folded = run("path", inputs, grad_out, metadata, scale=32**-0.5)

    # Each sample by itself in SDPA. A shared token's output gradient comes through the first sample that has it, so
    # that both sides start from the same bits; the gradients of the inputs are summed over samples in fp64.
    unfolded = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in truth]
    seen = torch.zeros(layout.padded_size, dtype=torch.bool)
    for index in range(layout.num_samples):
        tokens = torch.from_numpy(layout.sample_tokens(index)).long()
        own = [tensor.detach()[tokens].requires_grad_() for tensor in inputs]
        heads = [tensor.transpose(0, 1).unsqueeze(0) for tensor in own]
        alone = F.scaled_dot_product_attention(*heads, is_causal=True, scale=32**-0.5, enable_gqa=True)
        alone = alone.squeeze(0).transpose(0, 1)
        own_grad = grad_out[tokens].masked_fill(seen[tokens][:, None, None], 0)
        seen[tokens] = True
        unfolded[0][tokens] = alone.detach().double()
        for total, grad in zip(unfolded[1:], torch.autograd.grad(alone, own, own_grad), strict=True):
            total.index_add_(0, tokens, grad.double())
    assert seen.all()
    for name, ours, theirs, exact in zip(("out", "dq", "dk", "dv"), folded, unfolded, truth, strict=True):
        assert ours.dtype == torch.bfloat16
        # The result is bf16, so the unfolded side is rounded once as well.
        theirs_error = worst(theirs.bfloat16(), exact)
        assert theirs_error > 1e-4
        assert worst(ours, exact) <= BF16_FACTOR * theirs_error, (name, worst(ours, exact), theirs_error)


def saved_bytes(backend, metadata):
    inputs, _ = random_inputs(metadata.padded_size, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.nbytes) or tensor, lambda t: t):
        tree_attention(*inputs, metadata, softmax_scale=0.3, backend=backend)
    return sum(saved), sum(tensor.nbytes for tensor in inputs)


@pytest.mark.parametrize("seed", range(3))
def test_path_saves_query_key_and_value_and_nothing_else(seed):
    metadata = metadata_of(*random_forest(seed, nodes=40, node_lens=(5, 30)), padding=4)
    saved, inputs = saved_bytes("path", metadata)
    assert saved == inputs
    # The hooks do count: the reference keeps its P x P probabilities.
    assert saved_bytes("reference", metadata)[0] > metadata.padded_size**2


def test_path_never_makes_a_tensor_with_a_number_per_pair(monkeypatch):
    """No temporary of forward or backward is as large as a window of QUERY_BLOCK x (longest path + QUERY_BLOCK)."""
    monkeypatch.setattr(path, "QUERY_BLOCK", 16)
    metadata = metadata_of(*random_forest(2, nodes=60, node_lens=(20, 50), root_rate=0.02))
    inputs, grad_out = random_inputs(metadata.padded_size, heads=2, key_heads=1, dtype=torch.float32)
    sizes = []
    with EachTensor(lambda one: sizes.append(one.untyped_storage().nbytes() // one.element_size())):
        run("path", inputs, grad_out, metadata)
    window = 2 * 16 * (metadata.max_path_len + 16)  # heads x rows x keys
    per_token = 2 * 8 * max(metadata.padded_size, metadata.max_path_len)
    assert max(sizes) <= max(window, per_token)
    assert max(window, per_token) < metadata.padded_size**2 / 10


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_twice(backend, dtype):
    metadata = metadata_of(*random_forest(1, nodes=30, node_lens=(3, 40)), padding=2)
    inputs, grad_out = random_inputs(metadata.padded_size, dtype=dtype)
    first, second = (run(backend, inputs, grad_out, metadata) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", EXACT)
def test_plans_are_shared_by_layers(backend):
    metadata = metadata_of(*random_forest(1))
    inputs, grad_out = random_inputs(metadata.padded_size)
    run(backend, inputs, grad_out, metadata)
    plans = dict(metadata.cache)
    run(backend, inputs, grad_out, metadata)
    assert plans
    assert metadata.cache.keys() == plans.keys()
    assert all(metadata.cache[name] is plan for name, plan in plans.items())


def tensors_in(value):
    """All tensors of a plan, wherever an object keeps them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        parts = list(value)
    else:
        parts = list((value if isinstance(value, dict) else getattr(value, "__dict__", {})).values())
    return [tensor for part in parts for tensor in tensors_in(part)]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_plans_of_the_host_move_to_the_device(backend, tmp_path, monkeypatch):
    """Plans of all back-ends, without a GPU; a device of torch's without memory takes its place."""
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path)
    case = case_of(device="cuda", capability=(10, 0), dtype=torch.bfloat16, window=5)
    metadata = metadata_of(*random_forest(1, nodes=30, node_lens=(3, 40)), padding=2)
    load_backend(backend).plan(metadata, case)
    moved = metadata.with_plans_on("meta")
    assert moved.cache.keys() == metadata.cache.keys()
    assert bool(moved.cache) == (backend != "reference")
    assert all(tensor.device.type == "meta" for tensor in tensors_in(list(moved.cache.values())))
    assert all(tensor.device.type == "cpu" for tensor in tensors_in(list(metadata.cache.values())))
    assert len(tensors_in(list(moved.cache.values()))) > 1 or backend in ("path", "reference")
    moved.cache["rotary"] = "rows"
    assert "rotary" not in metadata.cache
    install(tmp_path)  # its modules are forgotten


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("share", [1, 30, 60, 100])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_reads_the_first_tokens(backend, seed, share):
    """Keys that a chunk reads of others: their own queries give no gradient, whatever their result is."""
    whole = metadata_of(*random_forest(seed, nodes=12, node_lens=(0, 1, 3, 40)), padding=2)
    inputs, grad_out = random_inputs(whole.padded_size, seed=seed)
    unread = whole.num_tokens * share // 100
    grad_out[:unread] = 0
    expected = run("reference", inputs, grad_out, whole)
    found = run(backend, inputs, grad_out, replace(whole, unread=unread, cache={}))
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        rows = slice(unread, None) if name == "out" else slice(None)
        assert (one[rows] - other[rows]).norm() <= 1e-12 * (1 + other[rows].norm()), name


@pytest.mark.parametrize("backend", EXACT)
def test_views_that_are_not_contiguous(backend):
    """Megatron hands over slices of one projection."""
    metadata = metadata_of(*random_forest(6), padding=1)
    random.seed(0)
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(metadata.padded_size, 2, 24, generator=generator, dtype=torch.float64)
    views = [part.requires_grad_() for part in mixed.split(8, dim=2)]
    grad_out = torch.randn(2, metadata.padded_size, 8, generator=generator, dtype=torch.float64).transpose(0, 1)
    copies = [view.detach().contiguous().requires_grad_() for view in views]
    expected = run("reference", copies, grad_out.contiguous(), metadata)
    for actual, wanted in zip(run(backend, views, grad_out, metadata), expected, strict=True):
        assert worst(actual, wanted) < 1e-12


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([(5, 2, 8), (5, 2, 8), (5, 8)], r"\[tokens, heads, head_dim\] tensors, not query \(5, 2, 8\)"),
        ([(5, 1, 2, 8), (5, 2, 8), (5, 2, 8)], r"not query \(5, 1, 2, 8\)"),
        ([(4, 2, 8), (5, 2, 8), (5, 2, 8)], "must all have the 5 tokens of the tree metadata"),
        ([(5, 2, 8), (5, 2, 8), (6, 2, 8)], r"value \(6, 2, 8\) must all have the 5 tokens"),
        ([(6, 2, 8), (6, 2, 8), (6, 2, 8)], "must all have the 5 tokens"),
        ([(5, 4, 8), (5, 2, 8), (5, 1, 8)], "do not fit together"),
        ([(5, 3, 8), (5, 2, 8), (5, 2, 8)], "the heads or head dimensions of query"),
        ([(5, 2, 8), (5, 2, 4), (5, 2, 8)], r"key \(5, 2, 4\).* do not fit together"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, says):
    metadata = metadata_of([3, 2], [-1, 0])
    with pytest.raises(ValueError, match=says):
        tree_attention(*(torch.zeros(shape) for shape in shapes), metadata, softmax_scale=1.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 7}, "backend 'path' does not support window=7 .*; backends that do: .*reference"),
        ({"sinks": torch.zeros(4)}, "backend 'path' does not support sinks .*; backends that do: .*reference"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"sinks": torch.zeros(3)}, r"sinks \(3,\) must have one logit for each of 4 heads"),
        ({"backend": "flash"}, r"attention backend 'flash' does not exist; choose one of .*path, .*reference"),
        ({"dtype": torch.float32}, r"the dtypes torch.float64, torch.float32 and torch.float64: use one"),
    ],
)
def test_options_that_are_not_supported_are_refused(options, says):
    (query, key, value), _ = random_inputs(3)
    key = key.to(options.get("dtype", key.dtype))
    given = {"backend": "path"} | {name: one for name, one in options.items() if name != "dtype"}
    with pytest.raises(ValueError, match=says):
        tree_attention(query, key, value, metadata_of([3], [-1]), softmax_scale=1.0, **given)


def test_unknown_backend_error_lists_the_backends():
    with pytest.raises(ValueError, match=r"attention backend 'flash' does not exist; choose one of .*path, .*refer"):
        check_backend("flash")


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(
    st.lists(st.sampled_from(DTYPES), min_size=3, max_size=3) | st.sampled_from(DTYPES).map(lambda one: [one] * 3),
    st.sampled_from(DTYPES[2:]),
    st.sampled_from(EXACT),
    st.booleans(),
    st.booleans(),
)
def test_autocast_casts_as_for_sdpa(dtypes, dtype, backend, nested, backward_inside):
    """The same errors, dtypes and values as SDPA's, and the bits of inputs that are cast by hand."""
    metadata = metadata_of([6], [-1])
    inputs = [one.detach().to(kind).requires_grad_() for one, kind in zip(random_inputs(6)[0], dtypes, strict=True)]
    region = ExitStack()
    region.enter_context(torch.autocast("cpu", dtype=dtype))
    region.enter_context(torch.autocast("cpu", enabled=not nested, dtype=dtype))

    def by_sdpa():
        heads = [one.transpose(0, 1)[None] for one in inputs]
        return F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(0, 1)

    with region:
        try:
            expected = by_sdpa()
        except RuntimeError:
            with pytest.raises(ValueError, match="use one"):
                tree_attention(*inputs, metadata, softmax_scale=0.3, backend=backend)
            return
        out = tree_attention(*inputs, metadata, softmax_scale=0.3, backend=backend)
        if not backward_inside:
            region.close()
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert out.dtype == expected.dtype
    assert (out - expected).abs().max() <= 4 * torch.finfo(out.dtype).eps * expected.abs().max()
    cast = [one.detach().to(out.dtype).requires_grad_() for one in inputs]
    wanted = run(backend, cast, torch.ones_like(out), metadata)
    found = [out, *grads]
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(found, wanted, strict=True))
    assert [one.dtype for one in grads] == dtypes


@given(sample_lists(min_samples=1, max_samples=5), st.sampled_from([None, 1, 2, 5]), st.booleans())
def test_reference_with_options_equals_unfolded_samples(samples, window, has_sinks):
    """Row by row, in the words of the options."""
    layout = fold(samples)
    metadata = TreeMetadata.from_layout(layout)
    (query, key, value), _ = random_inputs(layout.padded_size, heads=2, key_heads=1)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64) if has_sinks else None
    options = {"window": window, "sinks": sinks}
    folded = restore(
        tree_attention(query, key, value, metadata, softmax_scale=0.4, backend="reference", **options), layout
    )
    for index, rows in enumerate(folded):
        tokens = torch.from_numpy(layout.sample_tokens(index)).long()
        for i, token in enumerate(tokens):
            seen = tokens[0 if window is None else max(0, i + 1 - window) : i + 1]
            for head in range(2):
                weights = (0.4 * (key[seen, 0] @ query[token, head])).exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].exp())
                assert worst(rows[i, head], (weights / total) @ value[seen, 0]) < 1e-12
