from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.each_tensor import EachTensor
from harness.oracles import sample_lists, worst
from heads import FORKED, VOCAB
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.logprob import Edges, edge_logprobs, edges, restore


@pytest.fixture(params=[1, 3, 4, 1024])
def rows(request, monkeypatch):
    monkeypatch.setattr(edges, "ROWS", request.param)
    return request.param


def naive(logits, layout):
    """Token by token, by torch's own log_softmax."""
    logprob = []
    for flat in range(layout.padded_size):
        above = layout.predictor[flat]
        if above < 0:
            logprob.append(logits.new_zeros(()))
        else:
            logprob.append(torch.log_softmax(logits[above], dim=0)[layout.input_ids[flat]])
    entropy = [-(torch.softmax(row, dim=0) * torch.log_softmax(row, dim=0)).sum() for row in logits]
    return torch.stack(logprob), torch.stack(entropy)


def random_logits(layout, *, seed=0, scale=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(layout.padded_size, VOCAB, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_()


def check_against_naive(layout, logits, *, limit):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, layout.padded_size, generator=generator, dtype=torch.float64)
    results = []
    for logprob, entropy in (
        edge_logprobs(logits, Edges.from_layout(layout), with_entropy=True),
        naive(logits, layout),
    ):
        (grad,) = torch.autograd.grad((logprob * weights[0] + entropy * weights[1]).sum(), logits)
        results.append((logprob, entropy, grad))
    for actual, expected in zip(*results, strict=True):
        assert worst(actual, expected) < limit
    assert torch.equal(results[0][0] == 0, torch.from_numpy(layout.predictor < 0))


@given(sample_lists(), st.integers(0, 3), st.sampled_from([1, 2, 3, 5, 1024]))
def test_values_and_gradients_one_by_one(samples, seed, block):
    layout = fold(samples, pad_to_multiple_of=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges, "ROWS", block)
        check_against_naive(layout, random_logits(layout, seed=seed), limit=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype):
    layout = fold([Sample(tokens=[1, 2, branch]) for branch in range(3)])
    logits, scores = random_logits(layout, dtype=dtype), []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            scores.append(edge_logprobs(logits, Edges.from_layout(layout), with_entropy=True))
    grads = [torch.autograd.grad(logprob.sum() + entropy.sum(), logits)[0] for logprob, entropy in scores]
    for off, on in zip((*scores[0], grads[0]), (*scores[1], grads[1]), strict=True):
        assert off.dtype == on.dtype
        assert torch.equal(off, on)


def test_many_rows_and_extreme_logits(rows):
    samples = [Sample(tokens=[1, 2, branch, *range(length)]) for branch in range(7) for length in range(1, 4)]
    layout = fold(samples, pad_to_multiple_of=4)
    check_against_naive(layout, random_logits(layout, scale=300.0), limit=1e-12)


def test_edges_are_all_tokens_but_the_first_of_each_root():
    layout = fold(FORKED, pad_to_multiple_of=16)
    of_layout = Edges.from_layout(layout)
    pairs = set(zip(of_layout.predictor.tolist(), of_layout.token.tolist(), strict=True))
    assert pairs == {(int(p), t) for t, p in enumerate(layout.predictor) if p >= 0}
    assert len(of_layout.token) == layout.physical_tokens - layout.num_trees
    assert (of_layout.predictor.diff() >= 0).all()
    assert torch.equal(of_layout.token_id, torch.from_numpy(layout.input_ids)[of_layout.token])
    assert max(np.bincount(of_layout.predictor.numpy())) == 3


def test_equal_tokens_under_one_predictor_add_up(rows):
    """fold() never makes such edges, but a forest laid out elsewhere may keep duplicate branches apart."""
    layout = fold([Sample(tokens=[3, 5]), Sample(tokens=[3, 6]), Sample(tokens=[3, 7])])
    plain = Edges.from_layout(layout)
    doubled = replace(plain, token_id=torch.tensor([5, 5, 5]))
    logits = random_logits(layout)
    logprob, _ = edge_logprobs(logits, doubled, with_entropy=True)
    weights = torch.tensor([0.0, 1.0, 10.0, 100.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad((logprob * weights).sum(), logits)
    single = torch.log_softmax(logits[0], dim=0)[5]
    (expected,) = torch.autograd.grad(111.0 * single, logits)
    assert worst(logprob[1:], single.expand(3)) < 1e-12
    assert worst(grad, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_entropy_and_in_place_the_result_is_the_same(dtype, rows):
    layout = fold([*FORKED, *(Sample(tokens=[9, branch, 2]) for branch in range(20))], pad_to_multiple_of=8)
    of_layout = Edges.from_layout(layout)
    weights = torch.linspace(0.1, 2.0, layout.padded_size)
    leaf = random_logits(layout, dtype=dtype)
    with_entropy, _ = edge_logprobs(leaf, of_layout, with_entropy=True)
    (expected,) = torch.autograd.grad((with_entropy * weights).sum(), leaf)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    for in_place in (False, True):
        logits = leaf.clone()  # as a model's output: not a leaf, and nothing else reads it
        before, where = logits.detach().clone(), logits.data_ptr()
        logprob = edge_logprobs(logits, of_layout, in_place=in_place)[0]
        assert worst(logprob, with_entropy) < tolerance
        (grad,) = torch.autograd.grad((logprob * weights).sum(), logits)
        # bf16 results may fall on the other side of a rounding boundary.
        assert worst(grad, expected) < (2e-3 if dtype is torch.bfloat16 else tolerance)
        assert (grad.data_ptr() == where) == in_place
        assert torch.equal(logits, before) != in_place


def test_a_second_backward_in_place_is_refused():
    layout = fold(FORKED)
    logits = random_logits(layout).clone()
    logprob = edge_logprobs(logits, Edges.from_layout(layout), in_place=True)[0]
    logprob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprob.sum().backward()


def test_no_temporary_is_as_large_as_the_logits_in_fp32(monkeypatch):
    """Logits are the largest tensor of a step; a copy of them in fp32, or their softmax, would set the peak."""
    monkeypatch.setattr(edges, "ROWS", 8)
    layout = fold([Sample(tokens=list(range(1, 41))), Sample(tokens=[1, *range(2, 42)][::-1])], pad_to_multiple_of=8)
    of_layout = Edges.from_layout(layout)
    logits = random_logits(layout, dtype=torch.bfloat16).detach().clone().requires_grad_().clone()
    sizes = []
    with EachTensor(lambda one: sizes.append(one.untyped_storage().nbytes() // 4 if one.dtype == torch.float32 else 0)):
        edge_logprobs(logits, of_layout, in_place=True)[0].sum().backward()
    assert max(sizes) <= 8 * VOCAB
    assert layout.padded_size * VOCAB > 5 * max(sizes)


def test_only_logprob_or_only_entropy_may_be_used():
    layout = fold(FORKED)
    for index in (0, 1):
        logits = random_logits(layout)
        (grad,) = torch.autograd.grad(
            edge_logprobs(logits, Edges.from_layout(layout), with_entropy=True)[index].sum(), logits
        )
        (expected,) = torch.autograd.grad(naive(logits, layout)[index].sum(), logits)
        assert worst(grad, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_the_fp32_ones_rounded_once(dtype, rows):
    """Reductions of half-precision logits are in fp32, so all that may be lost is the last rounding of the result."""
    layout = fold([Sample(tokens=[1, 2, branch, 3]) for branch in range(30)], pad_to_multiple_of=8)
    half = random_logits(layout, dtype=dtype)
    single = half.detach().float().requires_grad_()
    weights = torch.linspace(0.1, 2.0, layout.padded_size)
    results = []
    for logits in (half, single):
        logprob, entropy = edge_logprobs(logits, Edges.from_layout(layout), with_entropy=True)
        assert logprob.dtype == entropy.dtype == torch.float32
        (grad,) = torch.autograd.grad((logprob * weights + 0.1 * entropy).sum(), logits)
        results.append((logprob, entropy, grad))
    torch.testing.assert_close(results[0][:2], results[1][:2], rtol=1e-6, atol=1e-6)
    assert results[0][2].dtype == dtype
    exact = results[1][2]
    half_ulp = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((results[0][2].float() - exact).abs() <= half_ulp * (1 + 1e-5)).all()


@pytest.mark.parametrize("shape", [(5, VOCAB), (1, 4, VOCAB), (4,)])
def test_wrong_logits_are_refused(shape):
    layout = fold([Sample(tokens=[1, 2, 3, 4])])
    with pytest.raises(ValueError, match=r"logits must be \[4, vocabulary\], not \[\d"):
        edge_logprobs(torch.zeros(shape), Edges.from_layout(layout), with_entropy=True)


def test_layout_of_only_padding():
    layout = fold([], pad_to_multiple_of=4)
    logits = random_logits(layout)
    logprob, _ = edge_logprobs(logits, Edges.from_layout(layout), with_entropy=True)
    (grad,) = torch.autograd.grad(logprob.sum(), logits)
    assert not logprob.any()
    assert not grad.any()


@given(sample_lists())
def test_restore_gives_every_sample_its_own_row(samples):
    layout = fold(samples, pad_to_multiple_of=4)
    rows = restore(torch.from_numpy(layout.input_ids), layout)
    assert [row.tolist() for row in rows] == [sample.tokens.tolist() for sample in samples]


def test_restore_adds_the_gradients_of_shared_tokens():
    layout = fold(FORKED, pad_to_multiple_of=4)
    values = torch.zeros(layout.padded_size, 2, dtype=torch.float64, requires_grad=True)
    rows = restore(values, layout)
    assert [row.shape for row in rows] == [(len(sample), 2) for sample in FORKED]
    weights = [torch.full_like(row, index + 1.0) for index, row in enumerate(rows)]
    (grad,) = torch.autograd.grad(sum((row * w).sum() for row, w in zip(rows, weights, strict=True)), values)
    expected = torch.zeros_like(values)
    for index in range(len(FORKED)):
        for flat in layout.sample_tokens(index):
            expected[flat] += index + 1.0
    assert torch.equal(grad, expected)
