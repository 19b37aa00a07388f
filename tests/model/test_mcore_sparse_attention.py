"""Sparse attention along a tree is the stock layer on each sample by itself, to fp64's last digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.in_double import kept_double
from harness.marks import quick
from harness.seam_models import RECOMPUTE, deep_samples, hybrid_twins, tiny_config, twins
from harness.seam_runs import (
    FP32_INSIDE,
    LATENT_YARN,
    MOE,
    SPARSE,
    assert_folded_is_unfolded,
    batch_of,
)

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore import fold_inside
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.seam.hybrid_layers import HAS_SPARSE_ATTENTION
from mcore_prefix_tree.mcore.seam.layer_specs import check_attention
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch

if not HAS_SPARSE_ATTENTION:
    pytest.skip("sparse attention follows a tree since megatron-core 0.19", allow_module_level=True)

from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)

from mcore_prefix_tree.mcore.seam import sparse_attention

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]

LOSS = {"dsa_indexer_loss_coeff": 0.7}
SPARSE_LOSS = LOSS | {"dsa_indexer_use_sparse_loss": True}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]}
# name: (fields of the config, pattern of a HybridModel, seed of the forest)
VARIANTS: dict[str, tuple[dict[str, Any], str | None, int]] = {
    "YaRN": (LATENT_YARN, None, 1),
    "norms of latents": ({"qk_layernorm": True}, None, 2),
    "queries without a latent": ({"q_lora_rank": None}, None, 3),
    "interleaved positions, fp32 norm": (
        {"dsa_indexer_rope_interleaved": True, "dsa_indexer_k_norm_fp32": True},
        None,
        4,
    ),
    # So many heads that no score is 0 in all of them.
    "scores of ReLU": ({"dsa_indexer_scoring_relu": True, "dsa_indexer_n_heads": 8}, None, 3),
    "full recompute": (RECOMPUTE["layers"] | SPARSE_LOSS, None, 5),
    "selective recompute": (SELECTIVE, None, 6),
    "experts, recompute": (MOE | RECOMPUTE["experts"], None, 7),
    "pattern": ({}, "D-D", 8),
    "pattern with experts and latent attention": (MOE, "DE+", 9),
}


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    DSAIndexerLossLoggingHelper.tracker.clear()  # as long as the first model has layers
    with kept_double():
        yield
    DSAIndexerLossLoggingHelper.tracker.clear()
    DSAIndexerLossAutoScaler.main_loss_backward_scale = None  # a schedule's has another shape


@pytest.mark.parametrize(
    ("topk", "loss"),
    [
        (1, LOSS),
        (12, {}),
        (12, SPARSE_LOSS),
        (130, LOSS),
        (130, SPARSE_LOSS),
        pytest.param(1000, {}, id="more than any path has"),
        pytest.param(1000, SPARSE_LOSS, marks=pytest.mark.slow),
        pytest.param(1, SPARSE_LOSS, marks=pytest.mark.slow),
    ],
)
def test_folded_is_unfolded(topk: int, loss: dict[str, Any]) -> None:
    config = tiny_config(**SPARSE | {"dsa_indexer_topk": topk, "num_layers": 2} | loss)
    assert_folded_is_unfolded(*twins(config), deep_samples(topk))


@pytest.mark.parametrize("name", quick("YaRN", "scores of ReLU", "full recompute", "pattern", of=VARIANTS))
def test_variants(name: str) -> None:
    settings, pattern, seed = VARIANTS[name]
    config = tiny_config(**SPARSE | LOSS | {"num_layers": len(pattern or "DD")} | settings)
    models = twins(config) if pattern is None else hybrid_twins(config, pattern)
    limit = FP32_INSIDE if "num_moe_experts" in settings else 1e-12
    assert_folded_is_unfolded(*models, deep_samples(seed), limit=limit)
    assert list(models[0].state_dict()) == list(models[1].state_dict())


def test_topk_is_as_long_as_a_path() -> None:
    samples = deep_samples(12)
    lengths = {len(sample) for sample in samples}
    assert min(lengths) < 12 < max(lengths)
    topk = sorted(lengths)[len(lengths) // 2]
    config = tiny_config(**SPARSE | LOSS | {"dsa_indexer_topk": topk, "num_layers": 1})
    assert_folded_is_unfolded(*twins(config), samples)


@pytest.mark.parametrize("loss", [{}, SPARSE_LOSS], ids=["no loss", "loss"])
def test_layers_that_take_the_keys_of_another(loss: dict[str, Any]) -> None:
    """The stock model keeps one choice for all samples, so it cannot compute layers again."""
    settings = SPARSE | {"num_layers": 4, "dsa_indexer_topk_freq": 2} | loss
    stock, tree = twins(tiny_config(**settings))[0], twins(tiny_config(**settings | RECOMPUTE["layers"]))[1]
    assert [layer.self_attention.core_attention.indexer is None for layer in tree.decoder.layers] == [0, 1, 0, 1]
    assert_folded_is_unfolded(stock, tree, deep_samples(13))


def test_the_first_check_does_not_know_the_scale_of_the_loss() -> None:
    _, tree = twins(tiny_config(**SPARSE | LOSS | {"num_layers": 1}))
    with pytest.raises(NotImplementedError, match=r"check_first does not support dsa_indexer_loss_coeff=0\.7"):
        fold_inside(tree, check_first=True)


def test_logged_loss_is_the_sum_over_samples() -> None:
    stock, tree = twins(tiny_config(**SPARSE | SPARSE_LOSS | {"num_layers": 2}))
    samples, logged = deep_samples(14), []
    for run in ("stock", "tree"):
        DSAIndexerLossLoggingHelper.tracker.clear()
        if run == "tree":
            tree_forward(tree, batch_of(samples))
        else:
            for sample in samples:
                ids = torch.tensor(sample.tokens.tolist()).unsqueeze(0)
                stock(ids, torch.arange(len(sample)).unsqueeze(0), None)
        logged.append(DSAIndexerLossLoggingHelper.tracker["values"].clone())
    assert logged[0].min() > 0
    torch.testing.assert_close(logged[1], logged[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("padding", [0, 70])
def test_padding_changes_nothing(padding: int) -> None:
    """One token that no sample has would change the loss of the indexer, or be chosen as a key."""
    _, tree = twins(tiny_config(**SPARSE | LOSS | {"num_layers": 1}))
    samples, found = deep_samples(15), []
    for extra in (3, padding):
        layout = fold(samples, padded_size=fold(samples).physical_tokens + extra)
        out = tree_forward(tree, MicroBatch.from_layout(layout))
        out[0, : layout.physical_tokens].sum().backward()
        found.append([parameter.grad.clone() for parameter in tree.parameters()])
        tree.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_layer_without_a_tree_is_upstreams() -> None:
    stock, tree = twins(tiny_config(**SPARSE | LOSS))
    ids = torch.tensor(deep_samples()[0].tokens.tolist()).unsqueeze(0)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    gradients = []
    for model in (stock, tree):
        model(ids, positions, None).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_masks_and_rows_are_refused() -> None:
    _, tree = twins(tiny_config(**SPARSE))
    batch = batch_of(deep_samples())
    layer = tree.decoder.layers[0].self_attention
    hidden = torch.zeros(batch.layout.padded_size, 1, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="attention_mask must be None with a folded micro-batch"):
        layer(hidden, torch.zeros(1, 1, 1, 1, dtype=torch.bool), packed_seq_params=batch.packed_seq_params)


def test_memory_of_large_micro_batches_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse_attention._warn_once.cache_clear()
    _, tree = twins(tiny_config(**SPARSE | {"num_layers": 2}))
    monkeypatch.setattr(sparse_attention, "_LARGE", 4 * 2 * 9**2)
    with pytest.warns(UserWarning, match=r"square .* for micro-batches of 16 tokens; lower the token budget") as told:
        tree_forward(tree, batch_of([Sample(tokens=list(range(9)), loss_mask=[1.0] * 9)]))
    assert len([one for one in told if "sparse attention" in str(one.message)]) == 1
    sparse_attention._warn_once.cache_clear()


def test_stray_layer_is_found() -> None:
    stock, _ = twins(tiny_config(**SPARSE))
    with pytest.raises(
        NotImplementedError, match="self_attention is a AbsorbedMLASelfAttention, which does not follow"
    ):
        check_attention(stock)
