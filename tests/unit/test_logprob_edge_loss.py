"""Losses of edges whose gradients are formed in forward, against the same losses of all log-probabilities at once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from harness.oracles import sample_lists, worst
from heads import MULTIPLIERS, VOCAB, bent, edge_loss_of, logits_of, naive, parameters, temperatures
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.logprob import Edges, Head, head_edge_loss
from mcore_prefix_tree.logprob.head_chunks import cut

PROMPT = [1, 2, 3]


def edges_of_samples(layout, edges):
    """For each sample the edges on its path."""
    edge_of = {token: edge for edge, token in enumerate(edges.token.tolist())}
    return [
        [edge_of[token] for token in layout.sample_tokens(sample).tolist() if token in edge_of]
        for sample in range(layout.num_samples)
    ]


def loss_of_terms(edges, terms, *, of_entropy):
    """Not linear, and of all that each term reads together; a term is a list of edges."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(len(terms), generator=generator, dtype=torch.float64)

    def loss(logprob, entropy):
        total = logprob.new_zeros(())
        for scale, own in zip(weight.to(logprob.dtype), terms, strict=True):
            value = bent(logprob[own]).sum()
            if of_entropy:
                value = value * (1 + entropy[edges.row_of_edge[own]].sum())
            total = total + scale * bent(value)
        return total

    return loss


def rounded_error(actual, expected):
    """As :func:`worst`, but relative to 0.01 at least: numbers of nearly certain tokens are rounded differences."""
    norm = expected.double().norm().item() or 1.0
    return worst(actual, expected) * norm / max(norm, 0.01)


@settings(max_examples=150)
@given(
    sample_lists(),
    st.integers(0, 3),
    st.sampled_from([1, 2, 3, 5, None]),
    st.sampled_from(MULTIPLIERS),
    st.booleans(),
    st.sampled_from(["none", "watched", "in the loss"]),
    st.sampled_from(["rows", "rows, not said", "samples", "pairs"]),
)
def test_losses_and_their_gradients(samples, seed, rows, multiplier, tempered, entropies, reads):
    """Gradients equal those of the loss on all rows at once, for any rows that its terms read together."""
    layout = fold(samples, pad_to_multiple_of=3)
    needed = np.random.default_rng(seed).random(layout.padded_size) < 0.7
    hidden, weight = parameters(layout, seed=seed)
    temperature = temperatures(layout) if tempered else None
    edges = Edges.from_layout(layout, needed=needed)
    of_entropy = entropies == "in the loss"
    if reads.startswith("rows"):
        loss = edge_loss_of(edges, of_entropy=of_entropy)
    else:
        terms = edges_of_samples(layout, edges)
        if reads == "pairs":
            order = np.random.default_rng(seed).permutation(len(terms)).tolist()
            pairs = (order[at : at + 2] for at in range(0, len(order), 2))
            terms = [[edge for sample in pair for edge in terms[sample]] for pair in pairs]
            reader = np.repeat(np.arange(len(terms)), [len(own) for own in terms])
            read = np.array([edge for own in terms for edge in own], dtype=np.int64)
            edges = edges.scored_together(edges.predictor.numpy()[read], reader)
        loss = loss_of_terms(edges, terms, of_entropy=of_entropy)
    head = Head(edges=edges, multiplier=multiplier, temperature=temperature, head_chunk_rows=rows)
    gradient, logprob, entropy = head_edge_loss(
        hidden[edges.row], weight, head, loss=loss, by_rows=reads == "rows", with_entropy=entropies != "none"
    )
    naive_logprob, naive_entropy = naive(logits_of(hidden, weight, multiplier, temperature), layout, needed)
    assert rounded_error(logprob, naive_logprob[edges.token]) < 1e-12
    assert not logprob.requires_grad
    assert (entropy is None) == (entropies == "none")
    if entropy is not None:
        assert rounded_error(entropy, naive_entropy[edges.row]) < 1e-12
        assert not entropy.requires_grad
    assert gradient == 0
    expected = loss(naive_logprob[edges.token], naive_entropy[edges.row])
    grads = torch.autograd.grad(-0.3 * gradient, (hidden, weight))
    if not len(edges.token):
        assert not any(grad.any() for grad in grads)
        return
    for one, other in zip(grads, torch.autograd.grad(-0.3 * expected, (hidden, weight)), strict=True):
        assert rounded_error(one, other) < 1e-12


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    layout = fold([Sample(tokens=[*PROMPT, *range(4, 12)]), Sample(tokens=[*PROMPT, *range(20, 30)])])
    leaves = dict(zip(("hidden", "weight"), parameters(layout), strict=True))
    edges = Edges.from_layout(layout)
    loss = loss_of_terms(edges, edges_of_samples(layout, edges), of_entropy=False)
    wanted = loss(naive(leaves["hidden"] @ leaves["weight"].T, layout)[0][edges.token], None)
    (free,) = leaves.keys() - {frozen}
    (expected,) = torch.autograd.grad(wanted, leaves[free])
    leaves[frozen].requires_grad_(False)
    head = Head(edges=edges, head_chunk_rows=5)
    head_edge_loss(leaves["hidden"][edges.row], leaves["weight"], head, loss=loss)[0].backward()
    assert worst(leaves[free].grad, expected) < 1e-12
    assert leaves[frozen].grad is None


def test_rows_to_come_do_not_reach_the_gradient():
    """Neither a NaN nor an infinity spreads: a chunk takes only the loss of its rows."""
    layout = fold([Sample(tokens=range(1, 13))])
    hidden, weight = parameters(layout)
    edges = Edges.from_layout(layout)
    seen = []

    def loss(logprob, entropy):
        seen.append(logprob.detach().clone())
        known = torch.full_like(logprob, float("nan"))
        known[: 3 * len(seen) - 1] = 1.0
        return torch.dot(known, logprob.exp())

    head = Head(edges=edges, head_chunk_rows=3)
    gradient, logprob, _ = head_edge_loss(hidden[edges.row], weight, head, loss=loss, by_rows=True)
    grads = torch.autograd.grad(gradient, (hidden, weight))
    expected = naive(hidden @ weight.T, layout)[0][edges.token].exp().sum()
    for one, other in zip(grads, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        assert worst(one, other) < 1e-12
    assert len(seen) == 4
    assert torch.equal(seen[-1], logprob)
    assert worst(seen[0][2:], torch.full((9,), -np.log(VOCAB), dtype=torch.float64)) < 1e-15


def test_samples_that_are_not_all_there_do_not_reach_the_gradient():
    layout = fold([Sample(tokens=range(1, 8)), Sample(tokens=range(11, 18)), Sample(tokens=range(21, 28))])
    hidden, weight = parameters(layout)
    edges = Edges.from_layout(layout)
    own = edges_of_samples(layout, edges)

    def loss(logprob, entropy):
        total = logprob.new_zeros(())
        for sample in own:
            to_come = (logprob[sample] == -np.log(VOCAB)).any()
            total = total + logprob[sample].exp().sum().square() * (float("nan") if to_come else 1.0)
        return total

    head = Head(edges=edges, head_chunk_rows=8)
    gradient, _, _ = head_edge_loss(hidden[edges.row], weight, head, loss=loss)
    grads = torch.autograd.grad(gradient, (hidden, weight))
    expected = loss(naive(hidden @ weight.T, layout)[0][edges.token], None)
    assert expected.isfinite()
    for one, other in zip(grads, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        assert worst(one, other) < 1e-12


def projected(layout, edges, *, head_chunk_rows, by_rows=False):
    """How many rows went through each kind of product, by the product's shape."""
    hidden, weight = parameters(layout)
    rows = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.out and args[1].shape[1] == VOCAB:
                rows["logits"] += len(args[0])
            elif func is torch.ops.aten.mm.out:
                rows["of hidden"] += len(args[0])
            elif func is torch.ops.aten.addmm_.default:
                rows["of weight"] += len(args[2])
            return func(*args, **(kwargs or {}))

    head = Head(edges=edges, head_chunk_rows=head_chunk_rows)
    loss = loss_of_terms(edges, edges_of_samples(layout, edges), of_entropy=False)
    with Watch():
        head_edge_loss(hidden[edges.row], weight, head, loss=loss, by_rows=by_rows)[0].backward()
    return dict(rows)


def test_only_rows_that_wait_for_a_later_chunk_are_projected_twice():
    """Rollouts of one prompt, 30 scored tokens each: each fits one chunk; the prompt's last token has to wait."""
    rollouts = [[*PROMPT, *range(5 + 30 * n, 35 + 30 * n)] for n in range(6)]
    masks = [[0] * len(PROMPT) + [1] * 30] * 6
    layout = fold([Sample(tokens=np.array(t) % VOCAB, loss_mask=m) for t, m in zip(rollouts, masks, strict=True)])
    edges = Edges.from_layout(layout, needed=layout.loss_weight != 0)
    rows = len(edges.row)
    assert rows == 1 + 6 * 29
    assert projected(layout, edges, head_chunk_rows=rows) == {"logits": rows, "of hidden": rows, "of weight": rows}
    assert projected(layout, edges, head_chunk_rows=70) == {
        "logits": rows + 1,
        # Together with the rollouts, and by itself at the end.
        "of hidden": rows,
        "of weight": rows,
    }
    half = projected(layout, edges, head_chunk_rows=20)
    # Of each rollout's 29 no more than those need to wait that half a chunk leaves.
    assert rows + 6 * 9 <= half["logits"] <= rows + 1 + 6 * 19
    by_rows = projected(layout, edges, head_chunk_rows=20, by_rows=True)
    assert by_rows == {"logits": rows, "of hidden": rows, "of weight": rows}


def test_pairs_are_kept_in_one_chunk():
    """And all of their rows, since nothing else reads the prompt's last token."""
    pairs = [[[n, *PROMPT, *range(5 + side, 25 + side)] for side in (0, 1)] for n in range(10, 14)]
    samples = [Sample(tokens=tokens, loss_mask=[0] * 4 + [1] * 20) for pair in pairs for tokens in pair]
    layout = fold(samples)
    edges = Edges.from_layout(layout, needed=layout.loss_weight != 0)
    own = edges_of_samples(layout, edges)
    reader = np.repeat(np.arange(8) // 2, [len(sample) for sample in own])
    paired = edges.scored_together(edges.predictor.numpy()[[edge for sample in own for edge in sample]], reader)
    assert len(edges.row) == 4 * 39
    assert cut(paired.host_settled_by, 60) == [slice(start, start + 39) for start in range(0, 156, 39)]
    assert projected(layout, paired, head_chunk_rows=60)["logits"] == 4 * 39


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 30))
def test_chunks_are_all_rows_in_order(ahead, most):
    settled_by = np.minimum(np.arange(len(ahead)) + np.array(ahead, dtype=np.int64), len(ahead) - 1)
    chunks = cut(settled_by, most)
    assert [row for rows in chunks for row in range(rows.start, rows.stop)] == list(range(len(ahead)))
    assert all(0 < rows.stop - rows.start <= most for rows in chunks)
    assert all(rows.stop - rows.start >= most / 2 for rows in chunks[1:])


def test_no_border_between_rows_that_are_scored_together():
    """Samples of 3, 3, 2, 3 and 3 rows, at most 4 at a time; otherwise chunks are full."""
    settled_by = np.array([2, 2, 2, 5, 5, 5, 7, 7, 10, 10, 10, 13, 13, 13])
    assert [(rows.start, rows.stop) for rows in cut(settled_by, 4)] == [(0, 3), (3, 6), (6, 8), (8, 11), (11, 14)]
    assert [(rows.start, rows.stop) for rows in cut(np.arange(14), 4)] == [(0, 2), (2, 6), (6, 10), (10, 14)]
    assert cut(np.empty(0, dtype=np.int64), 4) == []
