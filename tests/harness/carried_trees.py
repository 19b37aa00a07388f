"""A tree in chunks, as a step of training folds it, and the same samples apart, on the stock model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from harness.seam_models import VOCAB
from harness.seam_runs import sft_step, take_gradients
from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.layout import Padding
from mcore_prefix_tree.layout.tree_chunks import join_scores
from mcore_prefix_tree.mcore.engine.backend import attention_cases_of_model
from mcore_prefix_tree.mcore.engine.carried_trees import fold_carrying
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.outputs import Logprobs
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.plan import Carrying
from mcore_prefix_tree.plan.carry import make_chunks, scored_places, with_first_pass


def small_tree(seed: int) -> list[Sample]:
    """Return the samples of one tree that branches at five levels, with a strict prefix and a duplicate."""
    rng = random.Random(seed)
    samples: list[Sample] = []

    def grow(path: list[int], level: int) -> None:
        path = path + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))]
        if level == 0 or rng.random() < 0.2:
            mask = [rng.choice([0.0, 0.5, 1.0]) for _ in path]
            samples.append(Sample(tokens=path, loss_mask=mask, source=f"sample {len(samples)}"))
        for _ in range(rng.choice([1, 2]) if level else 0):
            grow(path, level - 1)

    grow([rng.randrange(VOCAB)], 5)
    samples += [samples[0], Sample(tokens=samples[-1].tokens[:4])]
    return samples


def carried(
    samples: Sequence[Sample],
    cuts: Sequence[int],
    *,
    multiple: int = 1,
    backend: str = "path",
    pass_tokens: int | None = None,
    trains: bool = True,
    depths: int = 0,
    config: Any = None,
) -> list[MicroBatch]:
    """Fold one tree cut at ``cuts``, as a step of training does, or one of scoring.

    ``config`` is that of a model whose windows are kept.
    """
    device = torch.device("cpu")
    cases = () if config is None else attention_cases_of_model(config, device=device, deterministic=False)
    layout = fold(samples)
    chunks = make_chunks(layout.position_ids.astype(np.int64), [0, *sorted(cuts), layout.physical_tokens])
    largest = max(chunk.end - chunk.start for chunk in chunks)
    folding = Folding(
        max_tokens=largest,
        dp_size=1,
        cost_model=None,
        device=device,
        padding=Padding(multiple=multiple),
        attention_backend=backend,
        attention_cases=cases,
        depths=depths,
    )
    runs = with_first_pass(chunks, pass_tokens or largest) if trains else chunks
    order, runs = tuple(range(len(samples))), tuple(runs)
    rows = [[(order, 0, run) for run in runs]]
    carrying = Carrying(runs=runs, trains=trains, scored=scored_places(rows, 1, trains=trains))
    return fold_carrying(samples, [order] * len(runs), carrying, folding)


def score_in_parts(model: torch.nn.Module, batches: Sequence[MicroBatch]) -> Any:
    """Return the log-probabilities of a tree's tokens, ``[P]``; first passes among its parts score nothing."""
    with torch.no_grad():
        found = [(batch, Logprobs(fused=False).read(tree_forward(model, batch), batch)[0]) for batch in batches]
    chunks = [(batch.layout, scores.numpy()) for batch, scores in found if not batch.forward_only]
    return join_scores(*zip(*chunks, strict=True))


def train(model: torch.nn.Module, batches: Sequence[MicroBatch]) -> dict[str, Any]:
    assert batches[0].packed_seq_params.carry is not None
    store = batches[0].packed_seq_params.carry.store
    steps = [sft_step(model, batch) for batch in batches]
    assert store.num_bytes == 0, "keys, values, states and gradients of every chunk are released after its backward"
    return {
        "loss": sum(loss for loss, _, _ in steps),
        "count": sum(int(tokens) for _, tokens, _ in steps),
        "grads": take_gradients(model),
    }
