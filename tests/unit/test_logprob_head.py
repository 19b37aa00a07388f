"""The fused head against torch's own log_softmax, sample by sample, and against the path that has the logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.each_tensor import EachTensor
from harness.oracles import sample_lists, worst
from heads import FORKED, HIDDEN, MULTIPLIERS, VOCAB, edge_loss_of, logits_of, naive, parameters, temperatures
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.logprob import (
    Edges,
    Head,
    edge_logprobs,
    head_edge_loss,
    head_logit_losses,
    head_logprobs,
    head_weighted_sum,
)


def fused(hidden, weight, head, *, with_entropy=True):
    return head_logprobs(hidden[head.edges.row], weight, head, with_entropy=with_entropy)


def gradients(outputs, leaves, *, seed=1):
    """Gradients of a random combination of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(
        (output * torch.randn(output.shape, generator=generator, dtype=torch.float64)).sum() for output in outputs
    )
    return torch.autograd.grad(total, leaves)


@given(
    sample_lists(),
    st.integers(0, 3),
    st.sampled_from([1, 2, 3, 5, None]),
    st.sampled_from(MULTIPLIERS),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_values_and_gradients_one_by_one(samples, seed, rows, multiplier, tempered, needed_share):
    layout = fold(samples, pad_to_multiple_of=3)
    needed = np.random.default_rng(seed).random(layout.padded_size) < needed_share
    hidden, weight = parameters(layout, seed=seed)
    temperature = temperatures(layout) if tempered else None
    head = Head(
        edges=Edges.from_layout(layout, needed=needed),
        multiplier=multiplier,
        temperature=temperature,
        head_chunk_rows=rows,
    )
    actual = fused(hidden, weight, head)
    expected = naive(logits_of(hidden, weight, multiplier, temperature), layout, needed)
    for one, other in zip(actual, expected, strict=True):
        assert worst(one, other) < 1e-12
    got = gradients(actual, (hidden, weight))
    if not len(head.edges.token):
        assert not any(grad.any() for grad in got)
        return
    for one, other in zip(got, gradients(expected, (hidden, weight)), strict=True):
        assert worst(one, other) < 1e-12


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("multiplier", MULTIPLIERS)
@pytest.mark.parametrize("tempered", [False, True])
def test_the_weighted_sum_and_its_gradients(multiplier, tempered, rows):
    layout = fold([*FORKED, *(Sample(tokens=[9, branch, 2]) for branch in range(9))], pad_to_multiple_of=8)
    hidden, weight = parameters(layout)
    temperature = temperatures(layout) if tempered else None
    needed = layout.loss_weight != 0
    head = Head(
        edges=Edges.from_layout(layout, needed=needed),
        multiplier=multiplier,
        temperature=temperature,
        head_chunk_rows=rows,
    )
    loss_weight = torch.from_numpy(layout.loss_weight).double()
    total, parts = head_weighted_sum(hidden[head.edges.row], weight, head, edge_weight=loss_weight[head.edges.token])
    logprob, _ = naive(logits_of(hidden, weight, multiplier, temperature), layout)
    assert worst(parts, naive(logits_of(hidden, weight, multiplier, temperature), layout, needed)[0]) < 1e-12
    assert not parts.requires_grad
    expected = torch.dot(logprob, loss_weight)
    assert worst(total, expected) < 1e-12
    for one, other in zip(
        *(torch.autograd.grad(-0.3 * value, (hidden, weight)) for value in (total, expected)), strict=True
    ):
        assert worst(one, other) < 1e-12


def square_entropy(logits):
    """Squared entropy of every row: not linear, and a function of all its logits."""
    logprob = torch.log_softmax(logits, dim=1)
    return (logprob.exp() * logprob).sum(dim=1).square()


def turned_into_gradients(weight):
    """The same in the head's form: by autograd, a chunk at a time."""

    def loss(rows, logits):
        leaf = logits.clone().requires_grad_()
        with torch.enable_grad():
            values = square_entropy(leaf)
            (grad,) = torch.autograd.grad(torch.dot(values, weight[rows].to(values.dtype)), leaf)
        logits.copy_(grad)
        return values.detach()

    return loss


@given(
    sample_lists(), st.integers(0, 3), st.sampled_from([1, 2, 3, 5, None]), st.sampled_from(MULTIPLIERS), st.booleans()
)
def test_losses_of_logits_and_their_gradients(samples, seed, rows, multiplier, tempered):
    layout = fold(samples, pad_to_multiple_of=3)
    needed = np.random.default_rng(seed).random(layout.padded_size) < 0.7
    hidden, weight = parameters(layout, seed=seed)
    temperature = temperatures(layout) if tempered else None
    edges = Edges.from_layout(layout, needed=needed)
    head = Head(edges=edges, multiplier=multiplier, temperature=temperature, head_chunk_rows=rows)
    of_rows = torch.linspace(-1, 2, len(edges.row), dtype=torch.float64)
    gradient, values = head_logit_losses(hidden[edges.row], weight, head, loss=turned_into_gradients(of_rows))
    expected = square_entropy(logits_of(hidden, weight, multiplier, temperature)[edges.row])
    assert gradient == 0
    assert not values.requires_grad
    assert worst(values, expected) < 1e-12
    grads = torch.autograd.grad(-0.3 * gradient, (hidden, weight))
    wanted = torch.autograd.grad(-0.3 * torch.dot(expected, of_rows), (hidden, weight))
    for one, other in zip(grads, wanted, strict=True):
        # The gradient of a nearly certain distribution is the rounding of much larger terms.
        assert (one - other).norm() <= 1e-12 * max(1e-3, other.norm())


def test_only_the_predictors_that_are_needed_are_projected():
    """A NaN in any other row would show."""
    samples = [Sample(tokens=[1, 2, 3, 4], loss_mask=[0, 0, 1, 0]), Sample(tokens=[1, 2, 5], loss_mask=[0, 0, 1])]
    layout = fold(samples, pad_to_multiple_of=8)
    edges = Edges.from_layout(layout, needed=layout.loss_weight != 0)
    assert edges.row.tolist() == [1]
    assert sorted(edges.token_id.tolist()) == [3, 5]
    hidden, weight = parameters(layout)
    with torch.no_grad():
        hidden[[0, 2, 3, 4, 5, 6, 7]] = float("nan")
    logprob, entropy = fused(hidden, weight, Head(edges=edges))
    scores = torch.log_softmax(hidden[1] @ weight.T, dim=0)
    assert worst(logprob[edges.token], scores[edges.token_id]) < 1e-12
    assert entropy.nonzero().flatten().tolist() == [1]
    assert logprob.count_nonzero() == 2
    grad_hidden, grad_weight = gradients((logprob, entropy), (hidden, weight))
    assert grad_hidden.isfinite().all()
    assert grad_weight.isfinite().all()


@pytest.mark.parametrize("samples", [[], [Sample(tokens=[7])], [Sample(tokens=[1, 2], loss_mask=[1, 0])]])
def test_nothing_to_score(samples):
    """A rank without work still takes part: zero gradients, not none, so that hooks run."""
    layout = fold(samples, pad_to_multiple_of=4)
    hidden, weight = parameters(layout)
    head = Head(edges=Edges.from_layout(layout, needed=layout.loss_weight != 0))
    logprob, entropy = fused(hidden, weight, head)
    total, _ = head_weighted_sum(hidden[head.edges.row], weight, head, edge_weight=hidden.new_zeros(0))
    for output in (logprob.sum(), entropy.sum(), total):
        assert output == 0
        grads = torch.autograd.grad(output, (hidden, weight), retain_graph=True)
        assert not any(grad.any() for grad in grads)


def test_only_logprob_or_only_entropy_may_be_used():
    layout = fold(FORKED)
    hidden, weight = parameters(layout)
    head = Head(edges=Edges.from_layout(layout))
    for index in (0, 1):
        got = torch.autograd.grad(fused(hidden, weight, head)[index].sum(), (hidden, weight))
        wanted = torch.autograd.grad(naive(hidden @ weight.T, layout)[index].sum(), (hidden, weight))
        assert all(worst(one, other) < 1e-12 for one, other in zip(got, wanted, strict=True))


def operations(function):
    """How many floating tensors torch made in a call that are not small, by their numbers of elements."""
    made = Counter()
    with EachTensor(lambda one: one.is_floating_point() and one.numel() > VOCAB and made.update([one.numel()])):
        function()
    return made


@pytest.mark.parametrize("with_logits", [False, True])
def test_backward_of_one_output_ignores_the_other(with_logits):
    """Backward of only the log-probabilities is the same without entropies; and the other way round."""
    layout = fold(FORKED)
    hidden, weight = parameters(layout)
    edges = Edges.from_layout(layout)
    logits = (hidden @ weight.T).detach().requires_grad_()

    def scores(with_entropy):
        if with_logits:
            return edge_logprobs(logits, edges, with_entropy=with_entropy)
        return fused(hidden, weight, Head(edges=edges), with_entropy=with_entropy)

    def backward(output):
        leaves = (logits,) if with_logits else (hidden, weight)
        return operations(lambda: torch.autograd.grad(output.sum(), leaves, retain_graph=True))

    rows = len(logits) if with_logits else len(edges.row)
    logprob, entropy = scores(True)
    plain, of_logprob, of_entropy = backward(scores(False)[0]), backward(logprob), backward(entropy)
    assert of_logprob == plain
    both = backward(logprob.sum() + entropy.sum())
    block = rows * VOCAB
    assert of_logprob[block] < both[block]
    assert of_entropy[block] < both[block]


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    layout = fold(FORKED)
    leaves = dict(zip(("hidden", "weight"), parameters(layout), strict=True))
    wanted = gradients(naive(leaves["hidden"] @ leaves["weight"].T, layout)[:1], tuple(leaves.values()))
    head = Head(edges=Edges.from_layout(layout))
    leaves[frozen].requires_grad_(False)
    logprob, _ = fused(leaves["hidden"], leaves["weight"], head, with_entropy=False)
    (free,) = (leaf for leaf in leaves.values() if leaf.requires_grad)
    (grad,) = gradients((logprob,), (free,))
    assert worst(grad, wanted[list(leaves).index("weight" if frozen == "hidden" else "hidden")]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_logprobs_have_the_bits_of_the_path_with_logits(dtype, with_entropy):
    """And do not depend on whether the entropy is requested."""
    layout = fold(FORKED, pad_to_multiple_of=8)
    hidden, weight = parameters(layout, dtype=dtype)
    edges = Edges.from_layout(layout)
    temperature = temperatures(layout).float()
    head = Head(edges=edges, temperature=temperature, head_chunk_rows=100)
    logprob, _ = fused(hidden, weight, head, with_entropy=with_entropy)
    logits = (
        (hidden[edges.row] @ weight.T)
        .new_zeros(layout.padded_size, VOCAB)
        .index_copy(0, edges.row, hidden[edges.row] @ weight.T)
    )
    unfused, _ = edge_logprobs(logits, edges, temperature=temperature, with_entropy=True)
    assert logprob.dtype == torch.float32
    assert torch.equal(logprob, unfused)


def test_half_precision_sums_in_fp32():
    """The gradient of the weight is a sum over chunks, which bf16 would round at each of them."""
    samples = [Sample(tokens=[1, *np.random.default_rng(seed).integers(0, VOCAB, 40)]) for seed in range(20)]
    layout = fold(samples, pad_to_multiple_of=8)
    half = parameters(layout, dtype=torch.bfloat16, scale=0.5)
    double = tuple(leaf.detach().double().requires_grad_() for leaf in half)
    exact = torch.autograd.grad(naive(double[0] @ double[1].T, layout)[0].sum(), double)
    stock = torch.autograd.grad(naive((half[0] @ half[1].T).float(), layout)[0].sum(), half)
    for rows in (1, 7, 1000):
        head = Head(edges=Edges.from_layout(layout), head_chunk_rows=rows)
        logprob, _ = fused(*half, head, with_entropy=False)
        assert logprob.dtype == torch.float32
        grads = torch.autograd.grad(logprob.sum(), half)
        total, _ = head_weighted_sum(
            half[0][head.edges.row], half[1], head, edge_weight=torch.ones(len(head.edges.token))
        )
        summed = torch.autograd.grad(total, half)
        by_rows, _, _ = head_edge_loss(
            half[0][head.edges.row], half[1], head, loss=lambda logprob, entropy: logprob.sum(), with_entropy=True
        )
        for got in (grads, summed, torch.autograd.grad(by_rows, half)):
            for grad, without, wanted in zip(got, stock, exact, strict=True):
                assert grad.dtype == torch.bfloat16
                assert worst(grad, wanted) < 1.5 * worst(without, wanted)


def test_no_temporary_is_larger_than_a_chunk_of_logits():
    """Nor is anything kept for backward that grows with rows times vocabulary."""
    vocab, hidden_size, rows = 997, 4, 8
    layout = fold([Sample(tokens=list(range(1, 200)))], pad_to_multiple_of=8)
    hidden = torch.randn(layout.padded_size, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    edges = Edges.from_layout(layout)
    head = Head(edges=edges, head_chunk_rows=rows)
    sizes = []
    with EachTensor(lambda one: sizes.append(one.untyped_storage().nbytes() // 4 if one.is_floating_point() else 0)):
        logprob, entropy = fused(hidden, weight, head)
        (logprob.sum() + entropy.sum()).backward()
        head_weighted_sum(hidden[edges.row], weight, head, edge_weight=torch.ones(len(edges.token)))[0].backward()
        for of_entropy in (False, True):
            loss = edge_loss_of(edges, of_entropy=of_entropy)
            head_edge_loss(hidden[edges.row], weight, head, loss=loss, with_entropy=True)[0].backward()
        head_logit_losses(hidden[edges.row], weight, head, loss=turned_into_gradients(weight[:, 0]))[0].backward()
    assert max(sizes) == rows * vocab
    assert layout.padded_size * vocab > 20 * max(sizes)


class Buffer:
    """A main_grad, as DDP keeps it."""

    def __init__(self, weight):
        self.grad = torch.full_like(weight, 2.0, dtype=torch.float32)
        self.added = 0

    def buffer(self):
        return self.grad

    def placeholder(self):
        self.added += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_may_be_accumulated_elsewhere(dtype):
    layout = fold(FORKED, pad_to_multiple_of=8)
    hidden, weight = parameters(layout, dtype=dtype)
    edges = Edges.from_layout(layout)
    ones = torch.ones(len(edges.token))
    head = Head(edges=edges, head_chunk_rows=2)

    def sum_of_edges(rows, logits):
        own = edges.of_rows(rows)
        targets = torch.zeros_like(logits)
        targets.index_put_((edges.row_of_edge[own] - rows.start, edges.token_id[own]), ones[own], accumulate=True)
        logits.copy_(targets - targets.sum(dim=1, keepdim=True) * logits.softmax(dim=1))
        return ones.new_zeros(len(logits))

    (expected,) = torch.autograd.grad(3 * fused(hidden, weight, head)[0].sum(), weight)
    for score in (
        lambda head: fused(hidden, weight, head)[0].sum(),
        lambda head: head_weighted_sum(hidden[edges.row], weight, head, edge_weight=ones)[0],
        lambda head: head_edge_loss(hidden[edges.row], weight, head, loss=lambda logprob, _: logprob.sum())[0],
        lambda head: head_logit_losses(hidden[edges.row], weight, head, loss=sum_of_edges)[0],
    ):
        sink = Buffer(weight)
        (3 * score(replace(head, weight_grad=sink))).backward()
        assert sink.added == 1
        assert weight.grad is None
        assert worst(sink.grad - 2.0, expected) < (1e-6 if dtype is torch.float32 else 1e-2)
        with torch.no_grad():
            score(replace(head, weight_grad=sink))
        assert sink.added == 1


def test_forward_forms_no_unneeded_gradients():
    layout = fold(FORKED)
    hidden, weight = parameters(layout)
    edges = Edges.from_layout(layout)
    ones = torch.ones(len(edges.token), dtype=torch.float64)
    shapes = []
    rows = hidden[edges.row]
    with torch.no_grad(), EachTensor(lambda one: shapes.append(one.shape)):
        head_weighted_sum(rows, weight, Head(edges=edges), edge_weight=ones)
        head_edge_loss(rows, weight, Head(edges=edges), loss=lambda *_: pytest.fail("nobody wants gradients"))
        head_logit_losses(rows, weight, Head(edges=edges), loss=lambda _, logits: logits[:, 0])
    assert weight.shape not in shapes


def test_float16_with_gradients_before_loss_scaling_is_rejected():
    layout = fold(FORKED)
    hidden, weight = parameters(layout, dtype=torch.float16)
    edges = Edges.from_layout(layout)
    with pytest.raises(ValueError, match="before the loss is scaled vanish in float16; use bfloat16"):
        head_weighted_sum(hidden[edges.row], weight, Head(edges=edges), edge_weight=torch.ones(len(edges.token)))
    with pytest.raises(ValueError, match="vanish in float16; use bfloat16"):
        head_edge_loss(hidden[edges.row], weight, Head(edges=edges), loss=lambda logprob, _: logprob.sum())
    with pytest.raises(ValueError, match="vanish in float16; use bfloat16"):
        head_logit_losses(hidden[edges.row], weight, Head(edges=edges), loss=lambda _, logits: logits[:, 0])
    assert head_logprobs(hidden[edges.row], weight, Head(edges=edges))[0].dtype == torch.float32


def test_wrong_shapes_are_refused():
    layout = fold(FORKED)
    hidden, weight = parameters(layout)
    head = Head(edges=Edges.from_layout(layout))
    count = len(head.edges.row)
    with pytest.raises(ValueError, match=rf"hidden must be \[{count}, h\], a row for every predictor, not \[1, "):
        head_logprobs(hidden[:1], weight, head)
    with pytest.raises(ValueError, match=rf"weight must be \[vocabulary, {HIDDEN}\], not \[41, 5\]"):
        head_weighted_sum(hidden[head.edges.row], weight[:, 1:], head, edge_weight=hidden.new_zeros(count))
