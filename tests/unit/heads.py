"""Small heads for tests of them, and torch's own results for their logits."""

from __future__ import annotations

import torch

from mcore_prefix_tree import Sample

VOCAB, HIDDEN = 41, 6

FORKED = [
    Sample(tokens=[1, 2, 3]),
    Sample(tokens=[1, 2, 4, 5]),
    Sample(tokens=[1, 2, 40], loss_mask=[0, 0.5, 0]),
    Sample(tokens=[1, 2]),
    Sample(tokens=[7]),
    Sample(tokens=[1, 2, 3], merge_key="warm"),
    Sample(tokens=[1, 2, 3]),
]
MULTIPLIERS = [1.0, 0.25]


def parameters(layout, *, seed=0, dtype=torch.float64, scale=2.0):
    """Hidden states ``[P, h]`` and weight ``[V, h]``."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (layout.padded_size, HIDDEN), (VOCAB, HIDDEN)
    return tuple(
        (scale * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for size in sizes
    )


def temperatures(layout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 0.3 + torch.rand(layout.padded_size, generator=generator, dtype=torch.float64)


def logits_of(hidden, weight, multiplier, temperature=None):
    """Results of a model with these logits, in plain torch."""
    logits = multiplier * (hidden @ weight.T)
    return logits if temperature is None else logits / temperature[:, None]


def naive(logits, layout, needed=None):
    """Token by token: log-probability and entropy, 0 if not requested."""
    logprob = [logits.new_zeros(())] * layout.padded_size
    entropy = [logits.new_zeros(())] * layout.padded_size
    for flat in range(layout.padded_size):
        above = layout.predictor[flat]
        if above >= 0 and (needed is None or needed[flat]):
            scores = torch.log_softmax(logits[above], dim=0)
            logprob[flat] = scores[layout.input_ids[flat]]
            entropy[above] = -(scores.exp() * scores).sum()
    return torch.stack(logprob), torch.stack(entropy)


def bent(values):
    """Not linear, with slopes between 0.7 and 1.3: gradients at a slope near zero would be rounding errors."""
    return values + 0.3 * values.sin()


def edge_loss_of(edges, *, of_entropy):
    """Not linear, and of all edges of a row and its entropy together."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(len(edges.row), generator=generator, dtype=torch.float64)

    def loss(logprob, entropy):
        per_row = logprob.new_zeros(len(edges.row)).index_add(0, edges.row_of_edge, bent(logprob))
        if of_entropy:
            per_row = per_row * (1 + entropy) + entropy.square()
        return torch.dot(weight.to(logprob.dtype), bent(per_row))

    return loss
