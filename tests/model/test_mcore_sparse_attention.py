"""Sparse attention along a tree is the stock layer on each sample by itself, to fp64's last digits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.carried_trees import assert_equal, carried, small_tree, train, unfolded
from harness.in_double import kept_double
from harness.marks import mostly_in_ci, quick
from harness.seam_models import RECOMPUTE, deep_samples, hybrid_twins, tiny_config, twins
from harness.seam_runs import (
    FP32_INSIDE,
    LATENT_YARN,
    MOE,
    SPARSE,
    assert_folded_is_unfolded,
    batch_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore import fold_inside
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.release import HAS_SPARSE_ATTENTION
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.tree_layers import follow_trees

if not HAS_SPARSE_ATTENTION:
    pytest.skip("sparse attention follows a tree since megatron-core 0.19", allow_module_level=True)

from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)

from mcore_prefix_tree.attention import chosen_keys

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
    "scores of ReLU": ({"dsa_indexer_scoring_relu": True, "dsa_indexer_n_heads": 32}, None, 3),
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


# name: (fields of the config, pattern of a HybridModel)
CUT: dict[str, tuple[dict[str, Any], str | None]] = {
    "few keys": ({"dsa_indexer_topk": 3}, None),
    "few keys, loss": ({"dsa_indexer_topk": 3} | SPARSE_LOSS, None),
    "full recompute": ({"dsa_indexer_topk": 5} | RECOMPUTE["layers"], None),
    "full recompute, loss": ({"dsa_indexer_topk": 5} | LOSS | RECOMPUTE["layers"], None),
    "keys of another layer": ({"num_layers": 4, "dsa_indexer_topk_freq": 2, "dsa_indexer_topk": 4}, None),
    "pattern": ({"dsa_indexer_topk": 4} | LOSS, "D-D"),
}


@pytest.mark.parametrize("name", mostly_in_ci("full recompute, loss", "pattern", of=CUT))
def test_trees_in_chunks(name: str) -> None:
    """The keys of other chunks are scored, chosen and attended to like those of a chunk."""
    settings, pattern = CUT[name]
    config = tiny_config(**SPARSE | {"num_layers": len(pattern or "DD")} | settings)
    stock, tree = twins(config) if pattern is None else hybrid_twins(config, pattern)
    samples, rng = small_tree(2), random.Random(name)
    expected, places = unfolded(stock, samples), range(1, fold(samples).physical_tokens)
    for _ in range(3):
        cuts = rng.sample(places, rng.randint(2, min(9, len(places))))
        assert_equal(train(tree, carried(samples, cuts, pass_tokens=rng.randint(1, 9))), expected, 1e-12)
    assert_equal(train(tree, carried(samples, places)), expected, 1e-12)


def test_chunks_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_keys, "_QUERIES", 32)
    monkeypatch.setattr(chosen_keys, "_KEYS", 16)
    stock, tree = twins(tiny_config(**SPARSE | LOSS | {"dsa_indexer_topk": 20, "num_layers": 2}))
    samples = [one for one in deep_samples(5) if one.tokens[0] == deep_samples(5)[0].tokens[0]]
    size = fold(samples).physical_tokens
    batches = carried(samples, [65, 127, 150, size - 5], pass_tokens=100)
    assert_equal(train(tree, batches), unfolded(stock, samples), 1e-12)


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


def test_choice_of_another_stage_is_refused() -> None:
    _, tree = twins(tiny_config(**SPARSE | {"num_layers": 2, "dsa_indexer_topk_freq": 2}))
    batch = batch_of(deep_samples())
    hidden = torch.zeros(batch.layout.padded_size, 1, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="layer 2 takes the keys of layer 1, which is in another stage"):
        tree.decoder.layers[1].self_attention(hidden, None, packed_seq_params=batch.packed_seq_params)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a tree of a few hundred tokens into many blocks, some of which see nothing of each other."""
    monkeypatch.setattr(chosen_keys, "_QUERIES", 24)
    monkeypatch.setattr(chosen_keys, "_KEYS", 40)
    monkeypatch.setattr(chosen_keys, "_ENTRIES", 3000)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("topk", [1, 12, 1000])
@pytest.mark.parametrize("loss", [LOSS, SPARSE_LOSS], ids=["all keys", "chosen keys"])
def test_blocks_change_nothing(loss: dict[str, Any], topk: int) -> None:
    samples = deep_samples(16)
    blocks = chosen_keys._blocks(batch_of(samples).packed_seq_params.tree_metadata)
    assert len(blocks) > 9
    seen = [sum(run.stop - run.start for run in keys) for _, keys in blocks]
    assert any(count < rows.stop for count, (rows, _) in zip(seen, blocks, strict=True))  # of another tree or branch
    config = tiny_config(**SPARSE | {"num_layers": 1, "dsa_indexer_topk": topk} | loss)
    assert_folded_is_unfolded(*twins(config), samples)


class _Largest(TorchDispatchMode):
    """Remembers the entries of the largest tensor that any operation made."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **kwargs or {})
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor):
                self.entries = max(self.entries, one.numel())
        return made


def test_no_tensor_has_all_pairs_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_keys, "_ENTRIES", 2**18)
    monkeypatch.setattr(chosen_keys, "_QUERIES", 64)
    monkeypatch.setattr(chosen_keys, "_KEYS", 256)
    _, tree = twins(tiny_config(**SPARSE | LOSS | {"num_layers": 1}))
    path = list(range(9)) * 200
    samples = [Sample(tokens=[*path, *[end] * 300], loss_mask=[1.0] * 2100) for end in (1, 2, 3)]
    batch = batch_of(samples)
    with _Largest() as largest:
        tree_forward(tree, batch).sum().backward()
    size = batch.layout.padded_size
    assert size > 2600
    assert largest.entries < size**2 / 8


def test_a_built_layer_follows() -> None:
    stock, tree = twins(tiny_config(**SPARSE))
    follow_trees(stock)
    batch = MicroBatch.from_layout(fold(deep_samples()))
    assert torch.equal(tree_forward(stock, batch), tree_forward(tree, batch))
