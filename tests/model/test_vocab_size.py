"""The output layer of a model whose vocabulary has padding: its logits, for every reader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.folded_jobs import tree_spec
from harness.models import tiny_gpt_config
from harness.worlds import Layout, world
from megatron.core.models.gpt import GPTModel

from mcore_prefix_tree.logprob.edges import mask_padding_
from mcore_prefix_tree.mcore import fold_inside, with_scalar_head, with_vocab_size
from mcore_prefix_tree.mcore.seam.output_layer import unpadded_vocab_size

TOKENS, COLUMNS = 18, 24


def gpt(layout: Layout, **settings: Any) -> Any:
    config = tiny_gpt_config(layout=layout, num_layers=1)
    return GPTModel(config, tree_spec(config, None), COLUMNS, 16, position_embedding_type="rope", **settings).double()


def logits_of(model: Any, **call: Any) -> torch.Tensor:
    ids = torch.arange(6)[None]
    logits: torch.Tensor = model(ids, torch.arange(6)[None], None, **call)[0]
    return logits


def masked_and_not(layout: Layout, gathers: bool) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Logits before and after, and the gradient of the entropies that a trainer makes of them."""
    model = gpt(layout, parallel_output=not gathers)
    before = logits_of(model).detach()
    after = logits_of(with_vocab_size(with_vocab_size(model, TOKENS), TOKENS))
    assert len(model.output_layer._forward_hooks) == 1
    probability = torch.softmax(after, dim=-1)
    (probability * after).sum().backward()
    return before, after.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("size", "gathers"), [(1, False), (1, True), (2, False), (2, True)])
def test_padding_has_no_probability(size: int, gathers: bool) -> None:
    layout = Layout(tp=size)
    found = world(size).run(masked_and_not, layout, gathers, layout=layout)
    before, after = (torch.cat([rank[part] for rank in (found[:1] if gathers else found)], dim=-1) for part in (0, 1))
    assert torch.equal(after[:, :TOKENS], before[:, :TOKENS])
    assert not torch.softmax(after, dim=-1)[:, TOKENS:].any()
    assert all(grad.isfinite().all() for *_, grads in found for grad in grads if grad is not None)


def test_model_without_padding_is_unchanged() -> None:
    assert world(1).run(_hooks, layout=Layout()) == [(0, 0, 0)]


def _hooks() -> tuple[int, ...]:
    models = [with_vocab_size(gpt(Layout()), size) for size in (None, COLUMNS, COLUMNS + 1)]
    assert all(unpadded_vocab_size(model) == COLUMNS for model in models)
    return tuple(len(model.output_layer._forward_hooks) for model in models)


def values_of_a_critic() -> tuple[torch.Tensor, torch.Tensor]:
    model = with_scalar_head(gpt(Layout(), share_embeddings_and_output_weights=False))
    return logits_of(model).detach(), logits_of(with_vocab_size(model, TOKENS)).detach()


def test_values_have_no_padding() -> None:
    ((before, after),) = world(1).run(values_of_a_critic, layout=Layout())
    assert torch.equal(before, after)


def sizes_inside() -> list[int]:
    """As given, as a provider of Megatron-Bridge has it, and unknown."""
    given, provided, unknown = (gpt(Layout()) for _ in range(3))
    provided.config.vocab_size = TOKENS  # such a provider is the configuration of its model
    fold_inside(given, vocab_size=TOKENS)
    return [unpadded_vocab_size(fold_inside(model)) for model in (provided, unknown)] + [unpadded_vocab_size(given)]


def test_folding_inside_finds_the_size() -> None:
    assert world(1).run(sizes_inside, layout=Layout()) == [[TOKENS, COLUMNS, TOKENS]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_has_a_number_for_it(dtype: torch.dtype) -> None:
    logits = mask_padding_(torch.zeros(1, 4, dtype=dtype), 102, 100)
    assert logits[:, :2].eq(0).all()
    assert torch.isfinite(logits.float() / 0.01).all()
    assert (torch.softmax(logits.float(), dim=-1)[:, 2:] == 0).all()
    assert mask_padding_(torch.zeros(1, 4, dtype=dtype), 90, 100).lt(-1000).all()
    assert not mask_padding_(torch.zeros(1, 4, dtype=dtype), 104, 100).any()
