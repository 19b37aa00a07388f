"""Scores in float32 are as near to float64 as torch's and Megatron's, at rows of which a token is certain.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.losses import vocabulary_divergence
from harness.worlds import Layout, world
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.logprob import (
    Edges,
    Head,
    edge_logprobs,
    head_edge_loss,
    head_logit_losses,
    head_logprobs,
    head_weighted_sum,
    top_logprobs,
)
from mcore_prefix_tree.objectives.divergence import divergence, divergence_gradient_

V = 64
BETA = 0.3
KINDS = ("forward_kl", "reverse_kl", "jsd")
# Samples of one path: every row has one child.
TOKENS = [(7 * t * t + 3 * t) % V for t in range(150)]
LAYOUT = fold([Sample(tokens=TOKENS), Sample(tokens=TOKENS[:90]), Sample(tokens=TOKENS[:90])])

# Of a scalar of each row, value and gradient.
Scores = dict[str, tuple[torch.Tensor, torch.Tensor]]


def certain_logits(shift: float, seed: int) -> torch.Tensor:
    """float64 ``[R, V]`` in which the next token has a probability of 0.999, around ``shift``."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(TOKENS) - 1, V, generator=generator, dtype=torch.float64)
    target = torch.tensor(TOKENS[1:])[:, None]
    others = logits.scatter(1, target, -torch.inf).logsumexp(1, keepdim=True)
    return logits.scatter(1, target, others + torch.tensor(999.0).log()) + shift


class Setting:
    """Raw logits in float32, their temperatures, and this rank's columns."""

    def __init__(self, shift: float, *, temperature: bool) -> None:
        self.rank, self.size = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        self.group = parallel_state.get_tensor_model_parallel_group() if self.size > 1 else None
        self.own = slice(self.rank * V // self.size, (self.rank + 1) * V // self.size)
        rows = len(TOKENS) - 1
        generator = torch.Generator().manual_seed(5)
        self.temperature = (0.5 + torch.rand(rows + 1, generator=generator)) if temperature else None
        self.raw, self.teacher = (self._raw(certain_logits(shift, seed)) for seed in (0, 1))
        self.target = torch.tensor(TOKENS[1:])
        self.edges = Edges.from_layout(LAYOUT)
        assert self.edges.row.tolist() == list(range(rows))
        # A head whose products are exact.
        eye = torch.eye(V)[self.own].contiguous().requires_grad_()
        self.weight = eye
        self.head = Head(
            edges=self.edges,
            temperature=self.temperature,
            vocab_start=self.own.start,
            group=self.group,
            head_chunk_rows=64,
        )

    def _raw(self, logits: torch.Tensor) -> torch.Tensor:
        if self.temperature is not None:
            logits = logits * self.temperature[:-1, None].double()
        return logits.float()

    def logits(self, raw: torch.Tensor, *, tempered: bool = True) -> torch.Tensor:
        """Raw logits divided by their temperatures."""
        if tempered and self.temperature is not None:
            raw = raw / self.temperature[:-1, None].to(raw.dtype)
        return raw

    def scored(self, of_raw: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Any:
        """``[R]`` values and, over all ranks, the gradient ``[R, V]`` of their sum at the raw logits."""
        leaf = self.raw.to(dtype).requires_grad_()
        values = of_raw(leaf)
        (grad,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach()[: len(leaf)], grad


def by_torch(setting: Setting, dtype: torch.dtype) -> Scores:
    """Plain forms of everything, over the full vocabulary."""
    teacher = setting.logits(setting.teacher.to(dtype)).log_softmax(1)
    found = {}

    def logprob(raw: torch.Tensor) -> torch.Tensor:
        return setting.logits(raw).log_softmax(1).gather(1, setting.target[:, None])[:, 0]

    def entropy(raw: torch.Tensor) -> torch.Tensor:
        scores = setting.logits(raw).log_softmax(1)
        return -(scores.exp() * scores).sum(1)

    found["logprob"] = setting.scored(logprob, dtype)
    found["entropy"] = setting.scored(entropy, dtype)
    for kind in KINDS:

        def of_kind(raw: torch.Tensor, kind: str = kind) -> torch.Tensor:
            p, q = teacher, setting.logits(raw).log_softmax(1)
            if kind == "forward_kl":
                return (p.exp() * (p - q)).sum(1)
            if kind == "reverse_kl":
                return (q.exp() * (q - p)).sum(1)
            mixture = torch.logaddexp(p + math.log(BETA), q + math.log(1 - BETA))
            return (BETA * p.exp() * (p - mixture) + (1 - BETA) * q.exp() * (q - mixture)).sum(1)

        found[kind] = setting.scored(of_kind, dtype)
    return found


def by_megatron(setting: Setting) -> Any:
    """Log-probabilities by the loss that stock training takes."""

    def logprob(raw: torch.Tensor) -> torch.Tensor:
        shard = setting.logits(raw)[:, setting.own]
        return -vocab_parallel_cross_entropy(shard[:, None].clone(), setting.target[:, None])[:, 0]

    return _over_ranks(setting, setting.scored(logprob, torch.float32))


def _over_ranks(setting: Setting, scored: Any) -> Any:
    values, grad = scored
    if setting.group is not None:
        grad = grad.clone()
        dist.all_reduce(grad, group=setting.group)
    return values, grad


def by_us(setting: Setting) -> dict[str, Scores]:
    """The same by every way of ours that has it."""
    common = {"vocab_start": setting.own.start, "group": setting.group}
    tempered = common | {"temperature": setting.temperature}
    head, edges, weight = setting.head, setting.edges, setting.weight
    after = torch.arange(1, len(TOKENS))

    def shard(raw: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([raw, raw.new_zeros(1, V)])  # of the last token, which predicts nothing
        return rows[:, setting.own]

    def known(with_entropy: bool, by_rows: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def of_edges(logprob: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
            return (logprob if entropy is None else entropy).sum()

        def of_raw(raw: torch.Tensor) -> torch.Tensor:
            zero, logprob, entropy = head_edge_loss(
                raw, weight, head, loss=of_edges, by_rows=by_rows, with_entropy=with_entropy
            )
            # Only the zero has a gradient.
            return torch.cat([logprob if entropy is None else entropy, zero[None]])

        return of_raw

    def full_sum(raw: torch.Tensor) -> torch.Tensor:
        total, logprob = head_weighted_sum(raw, weight, head, edge_weight=torch.ones(len(edges.token_id)))
        return torch.cat([logprob[after], (total - logprob.sum())[None]])

    asked = replace(head, edges=replace(edges, token=None))  # as of tokens that need not be in the layout
    ways: dict[str, dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "logprob": {
            "logits": lambda raw: edge_logprobs(shard(raw), edges, **tempered)[0][after],
            "candidates of logits": lambda raw: edge_logprobs(shard(raw), asked.edges, **tempered)[0],
            "head": lambda raw: head_logprobs(raw, weight, head)[0][after],
            "head's candidates": lambda raw: head_logprobs(raw, weight, asked)[0],
            "weighted sum": full_sum,
            "loss by rows": known(False, True),
            "loss of edges": known(False, False),
        },
        "entropy": {
            "logits": lambda raw: edge_logprobs(shard(raw), edges, **tempered, with_entropy=True)[1][after - 1],
            "head": lambda raw: _entropy(head_logprobs(raw, weight, head, with_entropy=True)[1]),
            "loss by rows": known(True, True),
            "loss of edges": known(True, False),
        },
    }
    teacher = setting.logits(setting.teacher)[:, setting.own]
    for kind in KINDS:

        def of_logits(raw: torch.Tensor, kind: str = kind) -> torch.Tensor:
            own = setting.logits(raw)[:, setting.own]
            return vocabulary_divergence(own, teacher, torch.arange(len(raw)), kind, jsd_beta=BETA, group=setting.group)

        def of_head(raw: torch.Tensor, kind: str = kind) -> torch.Tensor:
            def loss(rows: slice, logits: torch.Tensor) -> torch.Tensor:
                return divergence_gradient_(
                    logits, lambda part: teacher[rows][part].clone(), kind, jsd_beta=BETA, group=setting.group
                )

            zero, values = head_logit_losses(raw, weight, head, loss=loss)
            return torch.cat([values, zero[None]])

        ways[kind] = {"logits": of_logits, "head": of_head}
    found = {
        quantity: {name: _over_ranks(setting, setting.scored(way, torch.float32)) for name, way in of.items()}
        for quantity, of in ways.items()
    }
    _, top = top_logprobs(shard(setting.raw), torch.arange(len(TOKENS) - 1), 1, **tempered)
    found["logprob"]["top"] = top[:, 0], None
    return found


def _entropy(entropy: torch.Tensor | None) -> torch.Tensor:
    assert entropy is not None
    return entropy[: len(TOKENS) - 1]


def errors(shift: float, temperature: bool) -> dict[str, dict[str, tuple[float, float]]]:
    """By quantity and way, the errors of values and gradients: the root mean square over rows, each relative."""
    setting = Setting(shift, temperature=temperature)
    truth, torchs, ours = by_torch(setting, torch.float64), by_torch(setting, torch.float32), by_us(setting)

    def off(value: torch.Tensor | None, exact: torch.Tensor) -> float:
        if value is None:
            return 0.0
        rows = exact.reshape(len(exact), -1)
        relative = (value.double().reshape(rows.shape) - rows).norm(dim=1) / rows.norm(dim=1)
        return float(relative.square().mean().sqrt())

    found = {}
    for quantity, exact in truth.items():
        ways = ours[quantity] | {"torch": torchs[quantity]}
        if quantity == "logprob":
            ways["megatron"] = by_megatron(setting)
        found[quantity] = {way: (off(value, exact[0]), off(grad, exact[1])) for way, (value, grad) in ways.items()}
    return found


def excluded_columns(quantity: str) -> tuple[torch.Tensor, ...]:
    """Values ``[R]`` and gradient ``[R, V]`` with logits of -inf, and both of a vocabulary without these tokens.

    In odd rows, -inf is all that the second rank has.
    """
    setting = Setting(0, temperature=False)
    student, teacher = (certain_logits(0, seed) for seed in (0, 1))
    excluded = torch.rand(student.shape, generator=torch.Generator().manual_seed(2)) < 0.2
    excluded[1::2, V // 2 :] = True
    excluded.scatter_(1, setting.target[:, None] % (V // 2), False)
    plain, plain_grad = [], torch.zeros_like(student)

    leaf = student.masked_fill(excluded, -torch.inf).requires_grad_()
    taught = teacher.masked_fill(excluded, -torch.inf)[:, setting.own]
    row = torch.arange(len(leaf))
    if quantity == "entropy":
        shard = torch.cat([leaf, leaf[:1]])[:, setting.own]
        found = edge_logprobs(
            shard, setting.edges, vocab_start=setting.own.start, group=setting.group, with_entropy=True
        )
        values = found[1][: len(leaf)]
    else:
        values = vocabulary_divergence(leaf[:, setting.own], taught, row, quantity, jsd_beta=BETA, group=setting.group)
    (grad,) = torch.autograd.grad(values.sum(), leaf)
    if setting.group is not None:
        dist.all_reduce(grad, group=setting.group)
    for index, kept in enumerate(~excluded):
        own = student[index, kept].requires_grad_()
        q, p = own.log_softmax(0), teacher[index, kept].log_softmax(0)
        value = -(q.exp() * q).sum() if quantity == "entropy" else divergence(p[None], q[None], quantity, BETA)[0]
        (plain_grad[index, kept],) = torch.autograd.grad(value, own)
        plain.append(value.detach())
    return values.detach(), grad, torch.stack(plain), plain_grad


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("temperature", [False, True])
def test_float32_scores_are_as_exact_as_stock(temperature: bool, tp: int) -> None:
    for shift in (0, 30, 64, 512):
        of_rank = world(tp).run(errors, shift, temperature, layout=Layout(tp=tp))[-1]
        for quantity, ways in of_rank.items():
            stock = [ways.pop(way) for way in ("torch", "megatron") if way in ways]
            for way, found in ways.items():
                of_stock = map(max, zip(*stock, strict=True))
                for what, error, limit in zip(("value", "gradient"), found, of_stock, strict=True):
                    assert error <= 2 * limit, f"{what} of {quantity} by {way}, logits around {shift}"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("quantity", ["entropy", "forward_kl", "reverse_kl", "jsd"])
def test_excluded_tokens_change_nothing(quantity: str, tp: int) -> None:
    for values, grad, expected, wanted in world(tp).run(excluded_columns, quantity, layout=Layout(tp=tp)):
        torch.testing.assert_close(values, expected, rtol=1e-10, atol=0)
        torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-15)
