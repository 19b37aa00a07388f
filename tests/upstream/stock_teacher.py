"""Distillation across tokenizers by its formulas: the teacher is megatron-core's stock model, each sample by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness.folded_jobs import stock_spec
from harness.models import build_chunks
from objective_jobs import OneByOne
from xtoken_jobs import unfolded_loss

from mcore_prefix_tree.data import load_tokenizer
from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.models.build_gpt import transformer_config
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.settings import ParallelConfig, load_recipe
from mcore_prefix_tree.xtoken.pairs import Pairing
from mcore_prefix_tree.xtoken.projection_file import read_projection


@functools.cache
def _teacher(path: str) -> OneByOne:
    recipe = load_recipe(path)
    config = transformer_config(recipe.model, ParallelConfig(), on_gpu=False)
    size = load_tokenizer(str(recipe.data.tokenizer)).vocab_size
    (model,) = build_chunks(config, stock_spec, vocab_size=size)
    folder = str(recipe.checkpoint.save)
    iteration = checkpoint.latest_weights(folder)
    assert iteration is not None
    checkpoint.load_weights(folder, iteration, [model], model=recipe.model)
    return OneByOne(model)


@functools.cache
def _both(student: str, path: str, projection: str) -> tuple[Pairing, torch.Tensor, Any]:
    pairing = Pairing(load_tokenizer(student), load_tokenizer(str(load_recipe(path).data.tokenizer)))
    tables = pairing.student, pairing.teacher
    sparse = read_projection(projection, student=tables[0], teacher=tables[1])
    columns = torch.from_numpy(sparse.columns).long()
    weights = torch.from_numpy(sparse.weights).double().where(columns >= 0, 0)
    w = torch.zeros(tables[0].vocab_size, tables[1].vocab_size, dtype=torch.float64)
    w.scatter_add_(1, columns.clamp(min=0), weights)
    return pairing, w, tuple([table.of(token) or None for token in range(table.vocab_size)] for table in tables)


def chunk_loss(
    args: Any, settings: Any, samples: Sequence[Sample], logits_of: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Return the loss of a step; arguments as of the folded run, of one teacher."""
    (path,) = args.prefix_tree_teacher
    pairing, w, token_bytes = _both(args.prefix_tree_tokenizer, path, settings.projection)
    pairs = [pairing.reencode(sample) for sample in samples]
    logits = [logits_of(sample.tokens.tolist()) for sample in samples]
    taught = [_teacher(path).logits(pair.teacher.tokens.tolist()).detach() for pair in pairs]
    return unfolded_loss(settings, pairs, logits, [taught], w=w, token_bytes=token_bytes)
