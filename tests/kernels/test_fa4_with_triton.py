"""FlashAttention-4's forward with the backward of ``triton``: its log-sum-exp, padding and gradients.

The package is the stand-in of the unit tests, which returns out and log-sum-exp in the package's units.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fake_flash_attention import install
from harness.oracles import metadata_of, random_forest
from kernel_cases import DEVICE, assert_are, make_inputs, norm_of_sink_terms, options_of, run, truth
from torch.utils.checkpoint import checkpoint

from mcore_prefix_tree.attention import Case, fa4, triton_tree
from mcore_prefix_tree.attention.triton_tree import kernel_calls
from mcore_prefix_tree.attention.triton_tree.config import configs_for

HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A Hopper GPU with the package; returns the calls of it."""
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    fa4._visible.cache_clear()
    from flash_attn import cute

    yield cute.calls
    install(tmp_path)  # its modules are forgotten
    fa4._visible.cache_clear()


def forest(**more):
    return metadata_of(*random_forest(3, nodes=7, node_lens=(1, 20, 60)), padding=5).with_plans_on(DEVICE)


def check(calls, metadata, *, window=None, deterministic=True, **shape):
    """Compare all results with the reference in fp64; returns them."""
    inputs, grad_out = make_inputs(metadata, **shape)
    grad_out[: metadata.unread] = 0
    options = options_of(inputs, window=window, deterministic=deterministic)
    results = run(fa4.attend, inputs, grad_out, metadata, options)
    assert [(call["return_lse"], call["backward"]) for call in calls] == [(True, None)]
    expected = truth(inputs, grad_out, replace(metadata, unread=0, cache={}), window=window)
    results[0][: metadata.unread] = expected[0][: metadata.unread]  # undefined
    terms = norm_of_sink_terms(inputs, grad_out, metadata, window=window) if len(inputs) > 3 else 0.0
    assert_are(results, expected, inputs, sink_terms=terms)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "key_heads": 4, "dim": 64},
        {"heads": 4, "key_heads": 2, "dim": 64, "window": 50, "sinks": True},
        {"heads": 4, "key_heads": 1, "dim": 128},
        {"heads": 2, "key_heads": 2, "dim": 192, "value_dim": 128, "sinks": True},
    ],
    ids=str,
)
def test_results_are_those_of_the_reference(calls, shape, dtype):
    check(calls, forest(), dtype=dtype, **shape)


def test_grouped_heads_with_unequal_dims_take_it_in_any_order(calls):
    check(calls, forest(), deterministic=False, heads=4, key_heads=2, dim=192, value_dim=128)


def test_head_dim_256_takes_it_on_blackwell(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: BLACKWELL)
    check(calls, forest(), deterministic=False, dim=256, sinks=True)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("unread", [16, 200, 250])
def test_rows_that_nobody_reads_have_no_gradient(calls, unread, sinks):
    """The forward has tiles of 192 queries, and dQ of 128: it visits rows that the forward left out."""
    metadata = metadata_of([230, 25, 12, 9], [-1, 0, 0, 2], padding=1).with_plans_on(DEVICE)
    metadata = replace(metadata, unread=unread, cache={})
    _, grad_query, *_ = check(calls, metadata, dim=64, sinks=sinks)
    assert not grad_query[:unread].any()


def test_gradients_are_the_bits_of_triton_from_the_same_forward(calls, monkeypatch):
    metadata, scale = forest(), 0.25
    inputs, grad_out = make_inputs(metadata, heads=4, key_heads=2, dim=64, dtype=torch.float16, sinks=True)
    options = options_of(inputs, softmax_scale=scale, deterministic=True)
    read, original = [], kernel_calls.key_value_grads
    monkeypatch.setattr(kernel_calls, "key_value_grads", lambda *given: read.append(given[4]) or original(*given))
    out, *grads = run(fa4.attend, inputs, grad_out, metadata, options)
    query, key, _, sinks = (one.detach().double() for one in inputs)
    scores = torch.einsum("phd,qhd->hpq", query, key.repeat_interleave(2, dim=1)) * scale
    place = torch.arange(metadata.padded_size, device=DEVICE)
    seen = (place <= place[:, None]) & (place[:, None] < metadata.subtree_end)
    lse = torch.logaddexp(scores.masked_fill(~seen, -math.inf).logsumexp(-1), sinks[:, None]).float() * math.log2(
        math.e
    )
    lse = torch.nn.functional.pad(lse, (0, -len(place) % 128), value=math.inf)
    monkeypatch.setattr(kernel_calls, "forward", lambda *_: (out, lse))
    for one, other in zip(
        run(triton_tree.attend_as_tabled, inputs, grad_out, metadata, options)[1:], grads, strict=True
    ):
        assert torch.equal(one, other)
    assert torch.equal(*read)


def test_opcheck(calls):
    metadata = forest()
    inputs, _ = make_inputs(metadata, dim=64, sinks=True)
    options = options_of(inputs, deterministic=True)
    case = replace(Case.of(*inputs[:3], options), capability=HOPPER)
    mask, plan = fa4.plan(metadata, case)
    of_tree = (plan.end, plan.position, [*plan.schedules, *mask.forward[:4], *mask.tensors])
    settings = (configs_for(case).packed, 0.25, None, 0)
    torch.library.opcheck(fa4.fa4_forward, (*inputs, *of_tree, *settings))


def test_whole_groups_of_heads_are_another_launch(calls, monkeypatch):
    monkeypatch.setattr(kernel_calls, "processors", lambda device: 1000)
    divided, original = [], kernel_calls._partial_sums
    monkeypatch.setattr(kernel_calls, "_partial_sums", lambda *given: divided.append(given[1] > 1) or original(*given))
    metadata = forest()
    inputs, grad_out = make_inputs(metadata, heads=4, key_heads=1, dim=16, dtype=torch.float16)
    for attention in (fa4.attend, fa4._attend_whole_groups):
        run(attention, inputs, grad_out, metadata, options_of(inputs, deterministic=True))
    assert divided == [True, True, False, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(calls, reentrant):
    metadata = forest()
    inputs, grad_out = make_inputs(metadata, dim=16)
    options = options_of(inputs, deterministic=True)

    def recomputed(*arguments):
        return checkpoint(fa4.attend, *arguments, use_reentrant=reentrant)

    def outcome(attention):
        for one in inputs:
            one.grad = None
        out = attention(*inputs, metadata, options)
        out.backward(grad_out)
        return [out.detach(), *(one.grad for one in inputs)]

    for one, other in zip(outcome(recomputed), outcome(fa4.attend), strict=True):
        assert torch.equal(one, other)


def test_compiled_as_one_graph(calls):
    metadata = forest()
    inputs, grad_out = make_inputs(metadata, dim=16, heads=4, key_heads=2, sinks=True)

    def attention(query, key, value, sinks):
        options = options_of([query, key, value, sinks], window=9, deterministic=True)
        return 2 * fa4.attend(query, key, value, metadata, options)

    def outcome(function):
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]

    expected = outcome(attention)
    compiled = outcome(torch.compile(attention, fullgraph=True, backend="aot_eager"))
    for actual, wanted in zip(compiled, expected, strict=True):
        assert torch.equal(actual, wanted)


def test_plans_of_both_are_made_ahead(calls):
    """A planning thread makes them on the host; the layer finds all of them."""
    metadata = metadata_of(*random_forest(3, nodes=7, node_lens=(1, 20, 60)), padding=5)
    inputs, grad_out = make_inputs(metadata, dim=64, dtype=torch.float16)
    options = options_of(inputs, deterministic=True)
    case = replace(Case.of(*inputs, options), capability=HOPPER)
    for wants_grad, plans in ((False, 1), (True, 2)):
        metadata.cache.clear()
        fa4.plan(metadata, replace(case, needs_grad=wants_grad))
        assert sum(not name.startswith("blocks") for name in metadata.cache) == plans
    moved = metadata.with_plans_on(DEVICE)
    # The interpreter's launches have no tensor descriptors: the engine is the only difference of its plan.
    before = {name for name in moved.cache if name.startswith("fa4")}
    run(fa4.attend, inputs, grad_out, moved, options)
    assert {name for name in moved.cache if name.startswith("fa4")} == before
