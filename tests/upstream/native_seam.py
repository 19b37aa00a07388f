"""Stock layer specs on a patched Megatron-Core, against each sample alone. Run by test_patched_core.py, which puts the
patched copy on the path; nothing collects it by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import test_folded_layouts as layouts
import torch
from folded_jobs import Job
from harness.worlds import Layout
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from oracles import worst
from seam_models import build, local_spec, tiny_config, twins
from test_mcore_seam import (  # noqa: F401
    FP32_INSIDE,
    MOE,
    VARIANTS,
    assert_equal,
    folded,
    folded_batch,
    gradients,
    megatron_on_the_cpu,
    sft_step,
    unfolded,
)

from mcore_prefix_tree.mcore import TreePackedSeqParams, with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.seam import native
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.packed_seq_params import CORE_KNOWS_TREES

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")


def native_twins(settings: dict[str, Any], model_settings: dict[str, Any], **spec: Any) -> tuple[Any, Any]:
    """A stock model, and one of the same specs and weights that is built for trees."""
    config = tiny_config(**settings)
    stock = build(config, local_spec(config, **spec), **model_settings)
    config = tiny_config(attention_backend=AttnBackend.tree, **settings)
    native_model = build(config, local_spec(config, **spec), **model_settings)
    native_model.load_state_dict(stock.state_dict(), strict=True)
    for module in native_model.modules():
        assert not type(module).__name__.startswith("Tree")
    return stock, native_model


def plain(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with Megatron-Core's own class, and nothing said but the tree."""
    metadata = batch.packed_seq_params.tree_metadata
    params: Any = PackedSeqParams(tree_metadata=metadata)
    assert not isinstance(params, TreePackedSeqParams)
    return dataclasses.replace(batch, packed_seq_params=params)


def test_this_core_is_patched() -> None:
    assert CORE_KNOWS_TREES


@pytest.mark.parametrize("make", [folded_batch, lambda: plain(folded_batch())], ids=["subclass", "plain"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if "latent attention" not in name])
def test_folded_is_unfolded(name: str, make: Any) -> None:
    stock, native_model = native_twins(*VARIANTS[name])
    assert_equal(folded(native_model, make()), unfolded(stock), limit=1e-12)


@pytest.mark.parametrize("name", ["rope", "yarn", "learned_absolute", "full recompute"])
def test_tree_capable_specs_still_follow_the_tree(name: str) -> None:
    """Positions are gathered once: by the model, not by the layers again. With and without the setting."""
    settings, model_settings = VARIANTS[name]
    for backend in (AttnBackend.auto, AttnBackend.tree):
        stock, tree = twins(tiny_config(attention_backend=backend, **settings), **model_settings)
        expected = unfolded(stock)
        for make in (folded_batch, lambda: plain(folded_batch())):
            tree.zero_grad()
            assert_equal(folded(tree, make()), expected, limit=1e-12)


def test_latent_attention_follows_trees_in_tree_capable_specs_alone() -> None:
    settings, _ = VARIANTS["latent attention"]
    config = tiny_config(attention_backend=AttnBackend.tree, **settings)
    stock, _ = twins(tiny_config(**settings))
    with pytest.raises(NotImplementedError, match="MLASelfAttention, whose rotary embeddings are not patched"):
        build(config, local_spec(config))
    tree = build(config, with_prefix_tree(local_spec(config)))
    tree.load_state_dict(stock.state_dict(), strict=True)
    expected = unfolded(stock)
    for make in (folded_batch, lambda: plain(folded_batch())):
        tree.zero_grad()
        assert_equal(folded(tree, make()), expected, limit=1e-12)


@pytest.mark.parametrize("backend", ["path", "reference"])
def test_the_micro_batch_chooses_the_attention(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, native_model = native_twins({}, {})
    chosen = set()

    def attend(tree: TreePackedSeqParams, *args: Any, **kwargs: Any) -> torch.Tensor:
        chosen.add(tree.attention_backend)
        return original(tree, *args, **kwargs)

    original = native.attend
    monkeypatch.setattr(native, "attend", attend)
    assert_equal(folded(native_model, folded_batch(backend)), unfolded(stock), limit=1e-12)
    assert chosen == {backend}


def test_mixture_of_experts() -> None:
    stock, native_model = native_twins(MOE, {})
    assert_equal(folded(native_model, folded_batch()), unfolded(stock), limit=FP32_INSIDE)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=2)], ids=str)
def test_parallel_layouts(layout: Layout) -> None:
    job = Job(max_tokens=layouts.LONGEST + 10, native=True, config=(("attention_backend", AttnBackend.tree),))
    layouts.check(layouts.folded(2, layout, job), layouts.oracle(Job()), layouts.FP64)


def test_a_model_that_was_not_built_for_trees_refuses_one() -> None:
    config = tiny_config()
    stock = build(config, local_spec(config))
    with pytest.raises(ValueError, match=r"attention_backend=auto.* set attention_backend=AttnBackend\.tree"):
        tree_forward(stock, folded_batch())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
    ],
    ids=["attention_dropout", "hidden_dropout", "context_parallel_size"],
)
def test_settings_are_refused_when_the_model_is_built(settings: dict[str, Any], sentence: str) -> None:
    config = tiny_config(attention_backend=AttnBackend.tree, **settings)
    with pytest.raises(NotImplementedError, match=sentence):
        build(config, local_spec(config))


def test_positions_layers_and_models_are_refused_by_name() -> None:
    config = tiny_config(attention_backend=AttnBackend.tree, mrope_section=[2, 1, 1])
    with pytest.raises(NotImplementedError, match="mrope"):
        build(config, local_spec(config), position_embedding_type="mrope")

    class OtherAttention(MegatronModule):
        pass

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = OtherAttention
    with pytest.raises(NotImplementedError, match="OtherAttention as core_attention"):
        build(tiny_config(attention_backend=AttnBackend.tree), spec)

    class OtherModel:
        config = tiny_config(attention_backend=AttnBackend.tree)

    with pytest.raises(NotImplementedError, match=r"OtherModel.*only GPTModel"):
        native.check_language_model(OtherModel())


def test_dropout_that_only_a_layer_asks_for_is_refused() -> None:
    config = tiny_config(attention_backend=AttnBackend.tree)
    core = DotProductAttention(config, 3, AttnMaskType.causal, "self", attention_dropout=0.25)
    batch = folded_batch()
    heads = torch.zeros(batch.layout.padded_size, 1, 4, 8)
    with pytest.raises(NotImplementedError, match=r"attention_dropout=0\.25 of layer 3"):
        core(heads, heads, heads, None, packed_seq_params=batch.packed_seq_params)


def test_masks_and_batches_are_refused() -> None:
    _, native_model = native_twins({}, {})
    batch = folded_batch()
    with pytest.raises(ValueError, match="attention_mask must be None"):
        native_model(
            batch.input_ids, batch.position_ids, torch.ones(1, 1, 1, 1), packed_seq_params=batch.packed_seq_params
        )
    with pytest.raises(ValueError, match="batch size 1, not 2"):
        native_model(batch.input_ids.expand(2, -1), batch.position_ids, None, packed_seq_params=batch.packed_seq_params)


def test_positions_are_gathered_outside_of_the_cache() -> None:
    rope = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    table = rope(16)
    size = rope._cached_forward.cache_info().currsize
    for _ in range(3):
        position_ids = torch.randint(0, 16, (20,), dtype=torch.int32)
        assert torch.equal(rope(16, position_ids=position_ids), table[position_ids])
    assert rope(16) is table
    assert rope._cached_forward.cache_info().currsize == size
    rope.forward.cache_clear()
    assert rope._cached_forward.cache_info().currsize == 0
    assert torch.equal(rope(16), table)


def test_positions_are_refused_under_context_parallelism() -> None:
    class Two:
        def size(self) -> int:
            return 2

    rope = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    with pytest.raises(AssertionError, match="without context parallelism"):
        rope(16, packed_seq=True, cp_group=Two(), position_ids=torch.arange(16))


def test_the_table_is_sized_by_the_longest_path() -> None:
    metadata = folded_batch().packed_seq_params.tree_metadata
    assert metadata is not None
    rope = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    params = PackedSeqParams(tree_metadata=metadata)
    assert rope.get_rotary_seq_len(None, None, None, tiny_config(), params) == metadata.max_path_len


def test_the_forward_step_that_megatron_calls() -> None:
    stock, native_model = native_twins({}, {})
    loss, _, _ = sft_step(native_model, folded_batch())
    expected = unfolded(stock, entropy_weight=0.0)
    assert worst(loss, expected.loss) < 1e-12
    for parameter, grad in gradients(native_model).items():
        assert worst(grad, expected.grads[parameter]) < 1e-12, parameter


def test_checkpoints_move_both_ways() -> None:
    config = tiny_config()
    spec = local_spec(config)
    _, native_model = native_twins({}, {})
    tree = build(config, with_prefix_tree(spec))
    assert list(native_model.state_dict()) == list(tree.state_dict())
