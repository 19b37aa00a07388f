"""The fused head and scoring in worlds of gloo processes.

The functions here run inside the processes of :mod:`harness.worlds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from harness.folded_jobs import VOCAB, folding_of, stock_spec, tree_spec
from harness.kept_sets import with_sets
from harness.models import Trainer, build_chunks, tiny_gpt_config
from harness.seam_runs import score_alone
from harness.weights import fill
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.cpu.specs import cpu_spec
from mcore_prefix_tree.layout.tree_chunks import join_scores
from mcore_prefix_tree.logprob import (
    Edges,
    Head,
    edge_logprobs,
    head_edge_loss,
    head_logprobs,
    head_weighted_sum,
    kept_logits,
)
from mcore_prefix_tree.mcore import with_edge_head
from mcore_prefix_tree.mcore.engine.carried_trees import fold_carrying
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.engine.scoring import ScoringStep
from mcore_prefix_tree.mcore.outputs import EdgeLoss, Logprobs
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import LossOutput, LossRows

HIDDEN = 6
COLUMNS = (23, 11, 7)  # of each rank: no two have as many


def head_problem(
    dtype: torch.dtype, padding: int = 0, masked: bool = False
) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layout, hidden states ``[P, h]``, the full weight and temperatures ``[P]``."""
    generator = torch.Generator().manual_seed(3)
    vocabulary = sum(COLUMNS)
    tokens = torch.randint(0, vocabulary - padding, (9, 4), generator=generator).tolist()
    samples = [Sample(tokens=[1, 2, *row]) for row in tokens]
    layout = fold(with_sets(samples, vocabulary - padding) if masked else samples, pad_to_multiple_of=4)
    hidden = torch.randn(layout.padded_size, HIDDEN, generator=generator, dtype=torch.float64)
    weight = 2 * torch.randn(vocabulary, HIDDEN, generator=generator, dtype=torch.float64)
    temperature = 0.5 + torch.rand(layout.padded_size, generator=generator, dtype=torch.float64)
    return layout, hidden.to(dtype), weight.to(dtype), temperature


def uneven_head(
    dtype: torch.dtype, with_entropy: bool, way: str, padding: int = 0, masked: bool = False
) -> tuple[Any, ...]:
    """Scores, the summed gradient of the hidden states, and this rank's of its columns.

    So many of the last ranks' columns are padding, which the oracle does not have.
    """
    layout, hidden, weight, temperature = head_problem(dtype, padding, masked)
    rank, size = dist.get_rank(), dist.get_world_size()
    # A single rank has all columns: the oracle.
    start, stop = (0, len(weight) - padding) if size == 1 else (sum(COLUMNS[:rank]), sum(COLUMNS[: rank + 1]))
    hidden.requires_grad_()
    own = weight[start:stop].clone().requires_grad_()
    with mock.patch.object(kept_logits, "_ROWS", 3):
        edges = Edges.from_layout(layout)
    head = Head(
        edges=edges,
        multiplier=0.5,
        temperature=temperature,
        vocab_start=start,
        group=None if size == 1 else dist.group.WORLD,
        head_chunk_rows=5,
        vocab_size=len(weight) - padding if padding and size > 1 else None,
    )
    weights = torch.linspace(-1, 2, layout.num_places, dtype=torch.float64)
    entropy = None

    def loss(logprob: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        weighed = torch.dot(logprob, weights.to(logprob.dtype))
        return weighed if entropy is None else weighed + (entropy * weights.flip(0)).sum()

    if way == "weighted sum":
        total, logprob = head_weighted_sum(hidden[edges.row], own, head, edge_weight=weights[edges.token])
    elif way in ("loss by rows", "loss of edges"):

        def of_edges(per_edge: torch.Tensor, per_row: torch.Tensor | None) -> torch.Tensor:
            return loss(edges.at_tokens(per_edge), None if per_row is None else edges.at_rows(per_row))

        total, per_edge, per_row = head_edge_loss(
            hidden[edges.row], own, head, loss=of_edges, by_rows=way == "loss by rows", with_entropy=with_entropy
        )
        logprob, entropy = edges.at_tokens(per_edge), None if per_row is None else edges.at_rows(per_row)
        total = total + loss(logprob, entropy)
    elif way == "logits":
        logits = head.multiplier * (hidden @ own.T)
        split: Any = {"temperature": temperature, "vocab_start": start, "group": head.group}
        logprob, entropy = edge_logprobs(logits, edges, with_entropy=with_entropy, **split)
        total = loss(logprob, entropy)
    else:
        logprob, entropy = head_logprobs(hidden[edges.head_row], own, head, with_entropy=with_entropy)
        total = loss(logprob, entropy)
    grad_hidden, grad_weight = torch.autograd.grad(total, (hidden, own))
    if size > 1:
        dist.all_reduce(grad_hidden)
    return total.detach(), logprob.detach(), None if entropy is None else entropy.detach(), grad_hidden, grad_weight


@dataclass(frozen=True, kw_only=True)
class ScoringJob:
    """How samples are scored, and with which head."""

    max_tokens: int = 10_000
    dtype: torch.dtype = torch.float32
    fused: bool = True
    all_tokens: bool = False
    entropy: bool = True
    config: tuple[tuple[str, Any], ...] = ()
    vocab_size: int = VOCAB
    over_budget: str = "repeat"


class Seen:
    """The part of an objective that a readout uses; keeps its last log-probabilities."""

    terms = "sample"
    reports_entropy = False

    def loss(self, scores: torch.Tensor, entropy: None, rows: Any) -> Any:
        self.logprob = scores.detach()
        return LossOutput(loss=scores.sum())


def scores_and_first_ratios(layout: Any, job: ScoringJob, samples: Sequence[Sample]) -> tuple[Any, list[Any]]:
    """Every rank: all samples' scores, and on its last stage the ratios of the first training step that follows."""
    config = tiny_gpt_config(layout=layout, dtype=job.dtype, **dict(job.config))
    chunks = build_chunks(config, tree_spec, vocab_size=job.vocab_size)
    trainer = Trainer.of([with_edge_head(chunk) for chunk in chunks])
    scored_only = not job.all_tokens
    folding = folding_of(layout, job.max_tokens, only_supervised=scored_only, over_budget=job.over_budget)
    step = ScoringStep.plan(samples, folding, all_tokens=job.all_tokens)
    scores = step.score(trainer.chunks, Logprobs(entropy=job.entropy, fused=job.fused))

    plan, rank = folding.plan(samples), parallel_state.get_data_parallel_rank()
    trained = fold_carrying(samples, plan.micro_batches[rank], plan.carrying_of(rank), folding)
    batches = [replace(batch, rows=LossRows(count=0)) for batch in trained]
    objective: Any = Seen()
    readout = EdgeLoss(objective=objective, fused=job.fused)  # the output that a nonlinear objective uses
    logprobs: list[Any] = []

    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)

        def loss_func(output: torch.Tensor) -> Any:
            loss = readout.read(output, batch).loss
            logprobs.append(objective.logprob.numpy())
            return loss, torch.ones((), dtype=torch.int), None

        return tree_forward(model, batch, readout), loss_func

    trainer.backward(forward_step, batches, seq_length=1)
    ratios = []
    for tree, of_tree, indices in step.joined(logprobs, join_scores):
        for place, index in enumerate(indices):
            own, scored = of_tree[tree.sample_places(place)], scores[index].scored
            ratios.append((index, np.exp(own[scored] - scores[index].logprobs[scored])))
    return scores, ratios


def stock_scores(layout: Any, job: ScoringJob, samples: Sequence[Sample]) -> list[tuple[np.ndarray, np.ndarray]]:
    """One process, stock specs, each sample by itself: log-probabilities and entropies of its predicted tokens."""
    config = tiny_gpt_config(layout=layout, dtype=torch.float64, **dict(job.config))
    (model,) = build_chunks(config, stock_spec, vocab_size=job.vocab_size)
    with torch.no_grad():
        found = [score_alone(model, sample) for sample in samples]
    return [(logprob.numpy(), entropy[:-1].numpy()) for logprob, entropy in found]


def scores_and_gradients(layout: Any, parallel_output: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Unfused log-probabilities of a ``GPTModel``, and the gradients of their sum."""
    config = tiny_gpt_config(layout=layout)
    model = GPTModel(
        config,
        cpu_spec(tree_spec(config, None), config),
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=parallel_output,
    ).to(config.params_dtype)
    fill([model], seed=0)
    batch = MicroBatch.from_layout(fold([Sample(tokens=[1, 2, 3]), Sample(tokens=[1, 2, 4, 5])], pad_to_multiple_of=2))
    logprob, _ = Logprobs(fused=False).read(tree_forward(model, batch), batch)
    return logprob.detach(), list(torch.autograd.grad(logprob.sum(), list(model.parameters())))
