"""Sparse attention along a tree; ``test_folded_is_unfolded.py`` compares more kinds with the stock layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.carried_trees import carried, train
from harness.each_tensor import EachTensor
from harness.in_double import kept_double
from harness.seam_models import RECOMPUTE, deep_samples, tiny_config, twins
from harness.seam_runs import SPARSE, assert_equal, assert_folded_is_unfolded, batch_of, unfolded

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore import fold_inside
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.release import HAS_SPARSE_ATTENTION

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


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    DSAIndexerLossLoggingHelper.tracker.clear()  # as long as the first model has layers
    with kept_double():
        yield
    DSAIndexerLossLoggingHelper.tracker.clear()
    DSAIndexerLossAutoScaler.main_loss_backward_scale = None  # a schedule's has another shape


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


def test_no_tensor_has_all_pairs_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_keys, "_ENTRIES", 2**18)
    monkeypatch.setattr(chosen_keys, "_QUERIES", 64)
    monkeypatch.setattr(chosen_keys, "_KEYS", 256)
    _, tree = twins(tiny_config(**SPARSE | LOSS | {"num_layers": 1}))
    path = list(range(9)) * 200
    samples = [Sample(tokens=[*path, *[end] * 300], loss_mask=[1.0] * 2100) for end in (1, 2, 3)]
    batch = batch_of(samples)
    entries: list[int] = []
    with EachTensor(lambda one: entries.append(one.numel())):
        tree_forward(tree, batch).sum().backward()
    size = batch.layout.padded_size
    assert size > 2600
    assert max(entries) < size**2 / 8
