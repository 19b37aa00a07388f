"""Log-probabilities over kept sets of ids, against torch's log_softmax of each sample with -inf outside its sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.oracles import sample_lists, worst
from heads import MULTIPLIERS, VOCAB, parameters, temperatures
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree import Sample, SamplingMask, fold
from mcore_prefix_tree.logprob import Edges, Head, edge_logprobs, head_logprobs, kept_logits

WHOLE = tuple(range(VOCAB))


def masked(sample, rng):
    """The sample with sets of one id, of some, of all, or none, each with the token that was drawn."""
    rows = []
    for token in sample.tokens.tolist():
        kind = rng.integers(0, 5)
        others = WHOLE if kind == 4 else rng.choice(VOCAB, size=(0, 0, 1, 9)[min(kind, 3)], replace=False).tolist()
        rows.append(None if kind == 0 else sorted({token, *others}, key=lambda one: hash((one, kind))))
    mask = SamplingMask.from_rows(rows)
    return Sample(sample.tokens, loss_mask=sample.loss_mask, merge_key=sample.merge_key, sampling_mask=mask)


def alone(samples, layout, hidden, weight, multiplier, temperature):
    """Log-probability and entropy of every predicted token of each sample, from full logits."""
    found = []
    for index, sample in enumerate(samples):
        flat = layout.sample_tokens(index)
        mask = sample.signals.sampling_mask
        for at in range(1, len(sample)):
            logits = multiplier * (hidden[flat[at - 1]] @ weight.T)
            keep = torch.ones(VOCAB, dtype=torch.bool)
            own = [] if mask is None else mask.token_ids[mask.offsets[at] : mask.offsets[at + 1]]
            if len(own):
                keep = torch.zeros_like(keep).index_fill(0, torch.tensor(own).long(), True)
            logits = logits.masked_fill(~keep, -torch.inf)
            if temperature is not None:
                logits = logits / temperature[flat[at - 1]]
            scores = torch.log_softmax(logits, 0)
            entropy = -(scores.exp() * scores.masked_fill(~keep, 0)).sum()
            found.append((scores[int(sample.tokens[at])], entropy))
    return tuple(map(torch.stack, zip(*found, strict=True))) if found else (hidden.new_empty(0), hidden.new_empty(0))


def per_sample(layout, samples, logprob, entropy):
    """The same from a layout's places; the entropy of a token of a kept set stands at its own place."""
    places = [layout.sample_places(index)[1:].astype(np.int64) for index in range(len(samples))]
    place = torch.from_numpy(np.concatenate([*places, np.empty(0, dtype=np.int64)]))
    flat = [layout.sample_tokens(index)[:-1].astype(np.int64) for index in range(len(samples))]
    above = torch.from_numpy(np.concatenate([*flat, np.empty(0, dtype=np.int64)]))
    return logprob[place], entropy[torch.where(place < layout.padded_size, above, place)]


def scores(way, layout, hidden, weight, multiplier, temperature, **settings):
    edges = Edges.from_layout(layout)
    if way == "fused":
        head = Head(edges=edges, multiplier=multiplier, temperature=temperature, **settings)
        return head_logprobs(hidden[edges.head_row], weight, head, with_entropy=True)
    return edge_logprobs(multiplier * (hidden @ weight.T), edges, temperature=temperature, with_entropy=True)


def compare(samples, way, seed, multiplier, tempered, **settings):
    layout = fold(samples, pad_to_multiple_of=3)
    hidden, weight = parameters(layout, seed=seed)
    temperature = temperatures(layout) if tempered else None
    actual = per_sample(layout, samples, *scores(way, layout, hidden, weight, multiplier, temperature, **settings))
    expected = alone(samples, layout, hidden, weight, multiplier, temperature)
    for one, other in zip(actual, expected, strict=True):
        assert worst(one, other) < 1e-12
    if not len(expected[0]):
        return
    generator = torch.Generator().manual_seed(5)
    factors = [torch.randn(len(expected[0]), generator=generator, dtype=torch.float64) for _ in range(2)]
    got, wanted = (
        torch.autograd.grad(sum(torch.dot(a, b) for a, b in zip(way, factors, strict=True)), (hidden, weight))
        for way in (actual, expected)
    )
    for one, other in zip(got, wanted, strict=True):
        assert worst(one, other) < 1e-12


@pytest.mark.parametrize("way", ["fused", "unfused"])
@given(sample_lists(), st.integers(0, 9), st.sampled_from(MULTIPLIERS), st.booleans(), st.sampled_from([1, 3, None]))
def test_kept_sets_equal_samples_alone(way, samples, seed, multiplier, tempered, rows):
    rng = np.random.default_rng(seed)
    samples = [masked(sample, rng) if rng.random() < 0.8 else sample for sample in samples]
    compare(samples, way, seed, multiplier, tempered, head_chunk_rows=rows)


@pytest.mark.parametrize("way", ["fused", "unfused"])
@pytest.mark.parametrize(("rows", "ids"), [(1, 1), (2, 100), (100, 3)])
def test_kept_sets_are_cut_anywhere(way, rows, ids, monkeypatch):
    monkeypatch.setattr(kept_logits, "_ROWS", rows)
    monkeypatch.setattr(kept_logits, "_IDS", ids)
    rng = np.random.default_rng(1)
    samples = [masked(Sample(rng.integers(0, VOCAB, size=8).tolist()), rng) for _ in range(4)]
    compare(samples, way, 2, 0.25, True)


def branch(mask, token=3, **fields):
    return Sample([1, 2, token], sampling_mask=SamplingMask.from_rows([None, None, mask]), **fields)


def test_samples_of_one_predictor_keep_their_own_sets():
    samples = [branch([3, 4]), branch([3]), branch([5, 3, 4]), branch(None), branch([3, 4, 5], token=4)]
    layout = fold(samples)
    assert layout.physical_tokens == 4
    assert layout.kept is not None
    assert np.diff(layout.kept.offsets).tolist() == [1, 2, 3]
    last = [int(layout.sample_places(index)[-1]) for index in range(5)]
    assert last[3] < layout.padded_size
    assert len(set(last)) == 5
    for way in ("fused", "unfused"):
        compare(samples, way, 0, 1.0, False)


def test_equal_sets_of_one_predictor_are_scored_once():
    samples = [branch([4, 3]), branch([3, 4], loss_mask=[0, 0, 0.5]), branch([3, 4], token=4)]
    layout = fold(samples)
    assert layout.kept is not None
    assert layout.kept.token_ids.tolist() == [3, 4]
    assert layout.sample_places(0)[-1] == layout.sample_places(1)[-1] != layout.sample_places(2)[-1]
    assert layout.edge_weight[layout.sample_places(0)[-1]] == 1.5


def test_order_of_samples_does_not_change_kept_sets():
    samples = [branch([3, 4]), branch([3]), branch(None), branch([4, 3], token=4)]
    one, other = fold(samples), fold(samples[::-1])
    assert one.kept is not None
    assert other.kept is not None
    for name in ("predictor", "token_ids", "offsets", "distribution", "token", "loss_weight", "whole_weight"):
        assert getattr(one.kept, name).tolist() == getattr(other.kept, name).tolist()


def test_sets_with_equal_digests_are_told_apart(monkeypatch):
    import mcore_prefix_tree.layout.kept_sets as kept_sets

    monkeypatch.setattr(kept_sets, "_mixed", lambda ids: np.zeros(len(ids), dtype=np.uint64))
    for way in ("fused", "unfused"):
        compare([branch([3, 4]), branch([3, 5]), branch([3, 4]), branch([3, 6])], way, 0, 1.0, False)


def test_gradients_touch_kept_columns_alone():
    samples = [branch([3, 4, 7], loss_mask=[0, 0, 1])]
    layout = fold(samples)
    hidden, weight = parameters(layout)
    edges = Edges.from_layout(layout, needed=layout.edge_weight != 0)
    assert edges.head_row.tolist() == [1]
    logprob, _ = head_logprobs(hidden[edges.head_row], weight, Head(edges=edges))
    (grad,) = torch.autograd.grad(logprob.sum(), weight)
    assert grad.any(dim=1).nonzero().flatten().tolist() == [3, 4, 7]


def test_only_scored_samples_sets_are_computed():
    samples = [branch([3, 4]), branch([3, 9], loss_mask=[0, 1, 0]), branch(None, loss_mask=[0, 1, 0])]
    layout = fold(samples)
    edges = Edges.from_layout(layout, needed=layout.edge_weight != 0)
    assert edges.kept is not None
    assert edges.kept.token_id.tolist() == [3, 4]
    assert edges.token.tolist() == [1]


def test_half_precision_kept_logits_sum_in_fp32():
    layout = fold([branch([3, 4, 5])])
    hidden, weight = parameters(layout, dtype=torch.bfloat16)
    for way in ("fused", "unfused"):
        logprob, entropy = scores(way, layout, hidden, weight, 1.0, None)
        assert logprob.dtype == entropy.dtype == torch.float32
        place = int(layout.sample_places(0)[-1])
        wide = torch.log_softmax((hidden.float() @ weight.float().T)[1, [3, 4, 5]], 0)
        assert abs((logprob[place] - wide[0]).item()) < 0.05
        assert all(grad.dtype == torch.bfloat16 for grad in torch.autograd.grad(logprob[place], (hidden, weight)))


def test_weight_gradient_may_go_to_a_sink():
    class Sink:
        grad = torch.zeros(VOCAB, 6)

        def buffer(self):
            return self.grad

        def placeholder(self):
            return None

    layout = fold([branch([3, 4, 5]), branch([3, 9])])
    hidden, weight = parameters(layout, dtype=torch.float32)
    edges = Edges.from_layout(layout)
    grads = []
    for sink in (Sink(), None):
        logprob, _ = head_logprobs(hidden[edges.head_row], weight, Head(edges=edges, weight_grad=sink))
        grads.append(torch.autograd.grad(logprob.sum(), (hidden, weight), allow_unused=True))
    assert grads[0][1] is None
    assert torch.equal(grads[0][0], grads[1][0])
    assert worst(Sink.grad, grads[1][1]) < 1e-6


@pytest.mark.parametrize("way", ["fused", "unfused"])
def test_ids_outside_the_vocabulary_are_refused(way):
    layout = fold([branch([3, VOCAB])])
    with pytest.raises(ValueError, match=f"keeps the id {VOCAB}, outside the model's vocabulary of {VOCAB}"):
        scores(way, layout, *parameters(layout), 1.0, None)


def test_wrong_number_of_hidden_states_is_refused():
    layout = fold([branch([3, 4])])
    hidden, weight = parameters(layout)
    edges = Edges.from_layout(layout)
    with pytest.raises(ValueError, match="a row for every predictor"):
        head_logprobs(hidden[edges.row], weight, Head(edges=edges))
