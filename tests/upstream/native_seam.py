"""Stock layer specs on a patched Megatron-Core, against unfolded samples. Run by test_patched_core.py, which puts the
patched copy on the path; nothing collects it by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from harness import folded_runs
from harness.folded_jobs import Job
from harness.oracles import worst
from harness.seam_models import (
    REFUSED_EXPERT_SETTINGS,
    REFUSED_SETTINGS,
    build,
    config_with,
    ids_of,
    local_spec,
    tiny_config,
    twins,
)
from harness.seam_runs import (
    FP32_INSIDE,
    MOE,
    VARIANTS,
    assert_equal,
    assert_folded_is_unfolded,
    folded,
    folded_batch,
    sft_step,
    take_gradients,
    unfolded,
)
from harness.worlds import Layout
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.tree_attention import check_tree_support, get_tree_attention
from megatron.core.tree_metadata import TreeMetadata as CoreTreeMetadata

from mcore_prefix_tree import TreeMetadata
from mcore_prefix_tree.attention import BACKENDS
from mcore_prefix_tree.mcore import TreePackedSeqParams, with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.seam import native_backends
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.packed_seq_params import CORE_KNOWS_TREES, convert_metadata

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]


def native_twins(settings: dict[str, Any], model_settings: dict[str, Any], **spec: Any) -> tuple[Any, Any]:
    """A stock model twice, with the same weights and no settings for trees: one to fold, one for unfolded samples."""
    config = tiny_config(**settings)
    stock, native_model = (build(config, local_spec(config, **spec), **model_settings) for _ in range(2))
    native_model.load_state_dict(stock.state_dict(), strict=True)
    for module in native_model.modules():
        assert not type(module).__name__.startswith("Tree")
    return stock, native_model


def plain(batch: MicroBatch, backend: str = "path") -> MicroBatch:
    """The micro-batch with Megatron-Core's own classes, with only the tree set."""
    ours = batch.packed_seq_params.tree_metadata
    assert ours is not None
    metadata = CoreTreeMetadata.from_nodes(
        ours.cu_node_lens, ours.node_parent, padded_size=ours.padded_size, attention_backend=backend
    )
    params: Any = PackedSeqParams(tree_metadata=metadata)
    assert not isinstance(params, TreePackedSeqParams)
    return dataclasses.replace(batch, packed_seq_params=params)


def test_this_core_is_patched() -> None:
    assert CORE_KNOWS_TREES


@pytest.mark.parametrize("make", [folded_batch, lambda: plain(folded_batch())], ids=["subclass", "plain"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if "latent attention" not in name])
def test_folded_is_unfolded(name: str, make: Any) -> None:
    stock, native_model = native_twins(*VARIANTS[name])
    assert_equal(folded(native_model, make()), unfolded(stock, entropy_weight=0.1), limit=1e-12)


@pytest.mark.parametrize("name", ["rope", "yarn", "learned_absolute", "full recompute"])
def test_tree_capable_specs_still_follow_the_tree(name: str) -> None:
    """Positions are gathered once: by the model, not by the layers again."""
    settings, model_settings = VARIANTS[name]
    stock, tree = twins(tiny_config(**settings), **model_settings)
    expected = unfolded(stock, entropy_weight=0.1)
    for make in (folded_batch, lambda: plain(folded_batch())):
        tree.zero_grad()
        assert_equal(folded(tree, make()), expected, limit=1e-12)


def test_latent_attention_follows_trees_only_in_tree_capable_specs() -> None:
    settings, _ = VARIANTS["latent attention"]
    config = tiny_config(**settings)
    stock, tree = twins(config)
    with pytest.raises(NotImplementedError, match="prefix trees do not support multi_latent_attention"):
        tree_forward(stock, folded_batch())
    expected = unfolded(stock, entropy_weight=0.1)
    for make in (folded_batch, lambda: plain(folded_batch())):
        tree.zero_grad()
        assert_equal(folded(tree, make()), expected, limit=1e-12)


@pytest.mark.parametrize("make", [folded_batch, lambda name: plain(folded_batch(), name)], ids=["subclass", "plain"])
@pytest.mark.parametrize("backend", ["path", "reference"])
def test_the_micro_batch_chooses_the_attention(backend: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, native_model = native_twins({}, {})
    chosen = set()

    def attend(*args: Any, backend: str, **kwargs: Any) -> torch.Tensor:
        chosen.add(backend)
        return original(*args, backend=backend, **kwargs)

    original = native_backends.tree_attention
    monkeypatch.setattr(native_backends, "tree_attention", attend)
    assert_equal(folded(native_model, make(backend)), unfolded(stock, entropy_weight=0.1), limit=1e-12)
    assert chosen == {backend}


def test_megatron_core_attends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own back-end, which a micro-batch that names none takes."""
    stock, native_model = native_twins({}, {})
    monkeypatch.setattr(native_backends, "tree_attention", None)
    assert_equal(folded(native_model, plain(folded_batch(), "torch")), unfolded(stock, entropy_weight=0.1), limit=1e-12)
    assert CoreTreeMetadata.from_nodes([0, 1], [-1]).attention_backend == "torch"


def test_every_back_end_is_registered() -> None:
    for name in BACKENDS:
        assert get_tree_attention(name) is native_backends.native_attention(name)
    with pytest.raises(ValueError, match=r"was registered as 'nobody'.* path, "):
        get_tree_attention("nobody")


@pytest.mark.parametrize("padded_size", [None, 40])
def test_both_classes_describe_a_tree_equally(padded_size: int | None) -> None:
    ours = folded_batch().packed_seq_params.tree_metadata
    assert isinstance(ours, TreeMetadata)
    assert isinstance(ours, CoreTreeMetadata)
    size = ours.padded_size if padded_size is None else ours.padded_size + padded_size
    core = CoreTreeMetadata.from_nodes(ours.cu_node_lens, ours.node_parent, padded_size=size)
    again = convert_metadata(core)
    assert convert_metadata(core) is again
    for field in dataclasses.fields(CoreTreeMetadata):
        if field.name not in ("cache", "attention_backend", "deterministic"):
            np.testing.assert_array_equal(getattr(again, field.name), getattr(core, field.name), err_msg=field.name)
            assert type(getattr(again, field.name)) is type(getattr(core, field.name))


def test_mixture_of_experts() -> None:
    stock, native_model = native_twins(MOE, {})
    assert_folded_is_unfolded(stock, native_model, limit=FP32_INSIDE)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)], ids=str)
def test_parallel_layouts(layout: Layout) -> None:
    job = Job(max_tokens=folded_runs.LONGEST + 10, native=True)
    folded_runs.check(folded_runs.folded(2, layout, job), folded_runs.oracle(Job()), folded_runs.FP64)


# Of the fields that this release has. A patched Megatron-Core has no sparse attention with trees, and does not compare
# the experts of a token with those of a layer, which is no question of trees.
REFUSED = [
    setting
    for setting in [{"mtp_num_layers": 1}, *REFUSED_SETTINGS, *REFUSED_EXPERT_SETTINGS]
    if not next(iter(setting)).startswith(("dsa_", "moe_router_topk"))
    and set(setting) <= {field.name for field in dataclasses.fields(MLATransformerConfig)}
]


@pytest.mark.parametrize("setting", REFUSED, ids=ids_of(REFUSED))
def test_megatron_core_rejects_the_same_settings_as_this_package(setting: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="prefix trees do not support ") as raised:
        check_tree_support(config_with(**setting))
    assert any(name in str(raised.value) for name in setting)


def test_models_refuse_settings_at_their_first_tree() -> None:
    config = tiny_config()
    stock = build(config, local_spec(config))
    config.hidden_dropout = 0.1
    with pytest.raises(NotImplementedError, match="prefix trees do not support hidden_dropout"):
        tree_forward(stock, folded_batch())


def test_dropout_that_only_a_layer_asks_for_is_refused() -> None:
    core = DotProductAttention(tiny_config(), 3, AttnMaskType.causal, "self", attention_dropout=0.25)
    batch = folded_batch()
    heads = torch.zeros(batch.layout.padded_size, 1, 4, 8)
    with pytest.raises(NotImplementedError, match="attention_dropout"):
        core(heads, heads, heads, None, packed_seq_params=batch.packed_seq_params)


def test_masks_and_batches_are_refused() -> None:
    _, native_model = native_twins({}, {})
    batch = folded_batch()
    with pytest.raises(ValueError, match="attention_mask must be None"):
        native_model(
            batch.input_ids, batch.position_ids, torch.ones(1, 1, 1, 1), packed_seq_params=batch.packed_seq_params
        )
    with pytest.raises(ValueError, match="one row of tokens, not 2"):
        native_model(batch.input_ids.expand(2, -1), batch.position_ids, None, packed_seq_params=batch.packed_seq_params)


def test_the_forward_step_that_megatron_calls() -> None:
    stock, native_model = native_twins({}, {})
    loss, _, _ = sft_step(native_model, folded_batch())
    expected = unfolded(stock)
    assert worst(loss, expected["loss"]) < 1e-12
    for parameter, grad in take_gradients(native_model).items():
        assert worst(grad, expected["grads"][parameter]) < 1e-12, parameter


def test_checkpoints_move_both_ways() -> None:
    config = tiny_config()
    spec = local_spec(config)
    _, native_model = native_twins({}, {})
    tree = build(config, with_prefix_tree(spec))
    assert list(native_model.state_dict()) == list(tree.state_dict())
