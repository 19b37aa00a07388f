"""Log-probabilities of candidate tokens outside the layout, for example a teacher's, and the choice of candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.oracles import worst

from mcore_prefix_tree.logprob import Edges, Head, edge_logprobs, head_logprobs, top_k, top_logprobs

P, R, K, V, H = 9, 5, 4, 23, 6


def problem() -> tuple[Edges, np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    predictor = np.sort(rng.permutation(P)[:R])
    ids = np.stack([rng.permutation(V)[:K] for _ in range(R)])
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=generator, dtype=torch.float64) for n in (P, V))
    temperature = 0.5 + torch.rand(P, generator=generator, dtype=torch.float64)
    return Edges.of_candidates(predictor, ids, padded_size=P), ids, hidden, weight, temperature


@pytest.mark.parametrize("head_chunk_rows", [2, None])
def test_each_equals_log_softmax_in_value_and_gradient(head_chunk_rows: int | None) -> None:
    edges, ids, hidden, weight, temperature = problem()
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    logits = 0.5 * hidden @ weight.T
    expected = torch.log_softmax(logits / temperature[:, None], dim=1)[edges.row].gather(1, torch.from_numpy(ids))
    grad = torch.linspace(-1, 2, R * K, dtype=torch.float64)
    wanted = torch.autograd.grad(expected.flatten(), inputs, grad, retain_graph=True)

    head = Head(edges=edges, multiplier=0.5, temperature=temperature, head_chunk_rows=head_chunk_rows)
    fused = head_logprobs(hidden[edges.row], weight, head)[0]
    unfused = edge_logprobs(logits, edges, temperature=temperature)[0]
    for actual in (fused, unfused):
        assert worst(actual, expected.flatten()) < 1e-12
        for own, other in zip(torch.autograd.grad(actual, inputs, grad, retain_graph=True), wanted, strict=True):
            assert worst(own, other) < 1e-12


def test_none_are_asked_about() -> None:
    edges = Edges.of_candidates(np.empty(0, np.int64), np.empty((0, 0), np.int32), padded_size=P)
    hidden, weight = torch.randn(P, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    found = head_logprobs(hidden[edges.row], weight, Head(edges=edges))[0]
    assert found.shape == (0,)
    found.sum().backward()
    assert not weight.grad.any()


def test_candidates_have_no_place_in_the_layout() -> None:
    edges = problem()[0]
    with pytest.raises(AssertionError, match="not in the layout"):
        edges.at_tokens(torch.zeros(R * K))


@pytest.mark.parametrize("k", [1, K, V])
@pytest.mark.parametrize("block", [2, 256])
def test_the_likeliest_tokens(k: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k, "ROWS", block)
    edges, _, hidden, weight, temperature = problem()
    logits = hidden @ weight.T
    every = torch.log_softmax(logits / temperature[:, None], dim=1)[edges.row]
    ids, logprobs = top_logprobs(logits, edges.row, k, temperature=temperature)
    wanted, order = every.topk(k, dim=1)
    assert torch.equal(ids, order)
    assert worst(logprobs, wanted) < 1e-12
    of_half = top_logprobs(logits.bfloat16(), edges.row, k)[1]
    assert of_half.dtype == torch.float32


def test_padding_is_no_token_and_takes_no_probability() -> None:
    edges, _, hidden, weight, _ = problem()
    logits = hidden @ weight.T
    logits[:, 20:] += 5
    before = logits.clone()
    ids, logprobs = top_logprobs(logits, edges.row, 20, vocab_size=20)
    wanted, order = torch.log_softmax(logits[:, :20], dim=1)[edges.row].topk(20, dim=1)
    assert torch.equal(ids, order)
    assert worst(logprobs, wanted) < 1e-12
    assert torch.equal(logits, before)


def test_more_candidates_than_the_vocabulary() -> None:
    for k in (0, V + 1):
        with pytest.raises(ValueError, match=f"{k} tokens were asked for, and the vocabulary has {V}"):
            top_logprobs(torch.zeros(P, V), torch.tensor([0]), k)
