"""Multi-token prediction on a tree: the losses of all depths against the stock model on each separate sample."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from harness.carried_trees import carried, small_tree
from harness.in_double import kept_double
from harness.marks import mostly_in_ci
from harness.oracles import worst
from harness.seam_models import (
    DELTA_NET,
    MAMBA,
    RECOMPUTE,
    branching_samples,
    build,
    deep_samples,
    hybrid,
    hybrid_twins,
    local_spec,
    tiny_config,
    with_long_memory,
)
from harness.seam_runs import (
    FP32_INSIDE,
    LATENT,
    MOE,
    SPARSE,
    WINDOWS_AND_SINKS,
    assert_same_gradients,
    supervised,
    take_gradients,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.attention.api import supporting
from mcore_prefix_tree.mcore import with_multi_token, with_prefix_tree, with_scalar_head
from mcore_prefix_tree.mcore.engine.backend import attention_case
from mcore_prefix_tree.mcore.engine.folding import plan_attention
from mcore_prefix_tree.mcore.outputs import WeightedSum
from mcore_prefix_tree.mcore.release import HAS_DEPTHS, NEEDS_DEPTHS
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.validation import check_model

pytestmark = [
    pytest.mark.usefixtures("megatron_on_the_cpu"),
    pytest.mark.filterwarnings("ignore:::megatron"),
    pytest.mark.skipif(not HAS_DEPTHS, reason=f"needs {NEEDS_DEPTHS}"),
]

FULL, TWO = RECOMPUTE["layers"], {"mtp_num_layers": 2}
EXACT = supporting(attention_case(tiny_config(), device=torch.device("cpu")))
TIED = {"share_embeddings_and_output_weights": True}
# name: (fields of the config, arguments of GPTModel)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one depth": ({"mtp_num_layers": 1}, {}),
    "two depths": ({"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}, {}),
    "three depths, tied": ({"mtp_num_layers": 3}, TIED),
    "learned positions": ({"mtp_num_layers": 2}, {"position_embedding_type": "learned_absolute"}),
    "full recompute": (TWO | FULL, {}),
    "detached heads": ({"mtp_num_layers": 2, "mtp_detach_heads": True}, {}),
    "detached heads, tied, full recompute": (TWO | FULL | {"mtp_detach_heads": True}, TIED),
    "mup": ({"mtp_num_layers": 1, "use_mup": True, "mup_width_mult": 2.0}, {}),
    "latent attention": (TWO | LATENT, {}),
    "sparse attention": (TWO | SPARSE, {}),
    "experts": (TWO | MOE, {}),
}


def mtp_twins(config: Any, **model: Any) -> tuple[GPTModel, GPTModel]:
    """A stock model with layers of multi-token prediction and a tree-capable one, with the same weights."""
    spec = local_spec(config)
    block = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    stock = build(config, spec, mtp_block_spec=block, **model)
    tree = build(config, with_prefix_tree(spec), mtp_block_spec=with_prefix_tree(block), **model)
    assert stock.state_dict().keys() == tree.state_dict().keys()
    tree.load_state_dict(stock.state_dict(), strict=True)
    return stock, with_multi_token(tree)


def folded(samples: list[Sample], depths: int, *, padding: int = 3, backend: str = "path") -> MicroBatch:
    padded = fold(samples).physical_tokens + padding
    return MicroBatch.from_layout(fold(samples, padded_size=padded, depths=depths), attention_backend=backend)


def run_separately(model: GPTModel, samples: list[Sample]) -> dict[str, Any]:
    """Gradients by name, and the logged losses of each sample: the stock forward on one sample after the other."""
    logged = []
    for sample in samples:
        ids = torch.tensor(sample.tokens.tolist()).unsqueeze(0)
        mask = torch.tensor([*sample.loss_mask[1:].tolist(), 0.0], dtype=torch.float64).unsqueeze(0)
        positions = torch.arange(len(sample)).unsqueeze(0)
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        losses = model(ids, positions, None, labels=ids.roll(-1, 1), loss_mask=mask)
        (losses * mask).sum().backward()
        logged.append(tracked())
    return {"grads": take_gradients(model), "logged": logged}


def tracked() -> dict[str, torch.Tensor]:
    names = ("loss_values", "correct_values", "total_values")
    return {name: MTPLossLoggingHelper.tracker[name].clone() for name in names}


def assert_trains_as_apart(
    stock: Any, tree: Any, samples: list[Sample], *, depths: int, limit: float = 1e-12, **settings: Any
) -> None:
    """Compare all gradients with those of the stock model on each sample; ``settings`` are of the folded run."""
    with kept_double():
        expected = run_separately(stock, samples)["grads"]
        supervised(tree, folded(samples, depths, **settings), WeightedSum()).backward()
    assert_same_gradients(take_gradients(tree), expected, limit)


@pytest.fixture(autouse=True)
def _fresh_tracker():
    MTPLossLoggingHelper.tracker.clear()
    yield
    MTPLossLoggingHelper.tracker.clear()


# name: (pattern, fields of the config, arguments of HybridModel)
HYBRIDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one depth": ("*-*-/*", {}, {}),
    "two depths of two layers": ("*-*/*-/*-", {"mtp_loss_scaling_factor": 0.7}, {}),
    "no attention": ("*-/-/-", {}, {"position_embedding_type": "none"}),
    "tied, learned positions": ("*-/*/*", {}, TIED | {"position_embedding_type": "learned_absolute"}),
    "detached heads, full recompute": ("*-/*-/*-", {"mtp_detach_heads": True, **FULL}, {}),
    "mup": ("*-/*", {"use_mup": True, "mup_width_mult": 2.0}, {}),
    "latent attention": ("+-/+-/+-", LATENT, {}),
    "sparse attention": ("D-/D-/D-", SPARSE | {"experimental_attention_variant": None}, {}),
    "delta net": ("G-*/*-/*-", DELTA_NET, {}),
    "delta net in the depths": ("G*/G-/G-", DELTA_NET, {}),
    "Mamba in the depths": ("M*/M-/M-", MAMBA, {}),
    "experts": ("*E/*E/*E", MOE, {}),
}


def hybrid_mtp_twins(pattern: str, settings: dict[str, Any], model: dict[str, Any]) -> tuple[Any, Any]:
    main, *depths = pattern.split("/")
    config = tiny_config(num_layers=len(main), mtp_num_layers=len(depths), **settings)
    stock, tree = hybrid_twins(config, pattern, **model)
    assert stock.state_dict().keys() == tree.state_dict().keys()
    return stock, with_multi_token(tree)


def twins_of(pattern, **settings):
    """With two depths, of a GPT without a pattern."""
    if pattern:
        return hybrid_mtp_twins(pattern, settings, {"max_sequence_length": 512})
    return mtp_twins(tiny_config(mtp_num_layers=2, **settings), max_sequence_length=512)


@pytest.mark.parametrize(
    ("pattern", "settings", "arguments", "how"),
    [
        *(pytest.param(None, *one, {}, id=name) for name, one in VARIANTS.items()),
        *(pytest.param(*one, {}, id=f"{one[0]}, {name}") for name, one in HYBRIDS.items()),
        *(pytest.param(None, TWO, {}, {"backend": one}, id=one) for one in EXACT),
        # A depth's window follows the depth's number, as upstream's does.
        *(
            pytest.param(None, TWO | WINDOWS_AND_SINKS[name], {}, {"backend": "reference"}, id=name)
            for name in ("windows in two layers", "learnable sinks")
        ),
    ],
)
def test_depths_are_those_of_separate_samples(pattern, settings, arguments, how):
    if pattern:
        stock, tree = hybrid_mtp_twins(pattern, settings, arguments)
    else:
        stock, tree = mtp_twins(tiny_config(**settings), **arguments)
    limit = FP32_INSIDE if "num_moe_experts" in settings else 1e-12
    assert_trains_as_apart(stock, tree, branching_samples(), depths=tree.config.mtp_num_layers, limit=limit, **how)


BOTH_KINDS = pytest.mark.parametrize("pattern", [None, "*-/*-/*-"], ids=["gpt", "hybrid"])


@BOTH_KINDS
@pytest.mark.parametrize("seed", range(3))
def test_random_forests(seed, pattern):
    stock, tree = twins_of(pattern)
    samples = deep_samples(seed)
    random.Random(seed).shuffle(samples)
    assert_trains_as_apart(stock, tree, samples, depths=2)


@BOTH_KINDS
def test_model_without_a_tree_is_upstreams(pattern):
    samples = branching_samples()[:4]
    expected, found = (run_separately(model, samples)["grads"] for model in twins_of(pattern))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], wanted) for name, wanted in expected.items())


@BOTH_KINDS
def test_frozen_depths_change_nothing(pattern):
    """Without a factor, the main model has the stock gradients, and weight decay reaches no depth."""
    stock, tree = twins_of(pattern, mtp_loss_scaling_factor=0.0)
    with kept_double():
        expected = run_separately(stock, branching_samples())["grads"]
        supervised(tree, folded(branching_samples(), 0), WeightedSum()).backward()
    found = take_gradients(tree)
    for name, wanted in expected.items():
        if name.startswith("mtp."):
            assert found[name] is None
            assert not wanted.any()
        else:
            assert worst(found[name], wanted) < 1e-12, name


CUT = {
    "one depth": ({"mtp_num_layers": 1}, None),
    "three depths, full recompute": ({"mtp_num_layers": 3} | RECOMPUTE["layers"], None),
    "windows": ({"mtp_num_layers": 2, "window_size": (2, 0), "window_attn_skip_freq": 2}, None),
    "latents": ({"mtp_num_layers": 1} | LATENT, None),
    "hybrid": ({}, "*-/*-/*-"),
    "recurrent": (DELTA_NET | MAMBA, "G*/GM/GM"),
}


@pytest.mark.parametrize("name", mostly_in_ci("windows", "hybrid", of=CUT))
def test_trees_in_chunks(name):
    """Rows of a depth read hidden states, keys and states of other chunks."""
    settings, pattern = CUT[name]
    if pattern is None:
        (stock, tree), depths = mtp_twins(tiny_config(num_layers=2, **settings)), settings["mtp_num_layers"]
    else:
        (stock, tree), depths = with_long_memory(hybrid_mtp_twins(pattern, settings, {})), 2
    samples, rng = small_tree(2), random.Random(name)
    places = range(1, fold(samples).physical_tokens)
    with kept_double():
        expected = run_separately(stock, samples)["grads"]
        for cuts in (rng.sample(places, 4), places):
            options = {"backend": "reference", "config": tree.config, "pass_tokens": rng.randint(1, 9)}
            batches = carried(samples, cuts, depths=depths, **options)
            for batch in batches:
                supervised(tree, batch, WeightedSum()).backward()
            assert_same_gradients(take_gradients(tree), expected, 1e-12)
            assert batches[0].packed_seq_params.carry.store.num_bytes == 0


def test_hybrid_models_whose_depths_cannot_be_trained_are_refused():
    config = tiny_config(num_layers=2, mtp_num_layers=1)
    stock = hybrid(config, "*-/*")
    check_model(stock)
    with pytest.raises(ValueError, match="for each"):
        with_multi_token(hybrid(config, "*-"))
    for pattern in ("*-", "*-/*/*"):
        with pytest.raises(NotImplementedError, match="mtp_num_layers=1, but hybrid_layer_pattern="):
            check_model(hybrid(config, pattern))


def test_depths_move_to_the_device():
    batch = folded(branching_samples(), 2)
    plan_attention(batch, "path", (attention_case(tiny_config(), device=torch.device("cpu")),))
    for depth in batch.on("meta").packed_seq_params.depths:
        assert depth.tree_metadata is not None
        tensors = [depth.parent, depth.weight, depth.edges.row, depth.edges.token_id, depth.tree_metadata.subtree_end]
        assert {one.device.type for one in tensors} == {"meta"}
        assert depth.tree_metadata.cache.keys() == batch.packed_seq_params.tree_metadata.cache.keys()


def test_model_with_stock_layers_gets_layers_of_a_tree():
    config = tiny_config(mtp_num_layers=2)
    stock, expected = mtp_twins(config)
    block = get_gpt_mtp_block_spec(config, local_spec(config), use_transformer_engine=False)
    tree = build(config, with_prefix_tree(local_spec(config)), mtp_block_spec=block)
    tree.load_state_dict(stock.state_dict(), strict=True)
    tree = with_multi_token(tree)
    assert tree.state_dict().keys() == stock.state_dict().keys()
    for model in (tree, expected):
        supervised(model, folded(branching_samples(), 2), WeightedSum()).backward()
    assert_same_gradients(take_gradients(tree), take_gradients(expected), 1e-15)


def test_each_sample_logs_what_upstream_logs():
    stock, tree = mtp_twins(tiny_config(mtp_num_layers=2))
    samples = [sample for sample in branching_samples() if len(sample) > 4][:6]
    # Upstream counts a token with half a weight once.
    samples = [Sample(tokens=one.tokens, loss_mask=one.loss_mask > 0) for one in samples]
    with kept_double():
        expected = run_separately(stock, samples)["logged"]
        for sample, wanted in zip(samples, expected, strict=True):
            MTPLossLoggingHelper.clean_metrics_in_tracker()
            supervised(tree, folded([sample], 2), WeightedSum())
            found = tracked()
            assert torch.allclose(found["loss_values"], wanted["loss_values"], rtol=1e-6)
            rates = [one["correct_values"] / one["total_values"].clamp(min=1) for one in (found, wanted)]
            assert torch.allclose(*rates, rtol=1e-6)


@BOTH_KINDS
def test_calls_that_do_not_fit_the_depths_are_refused(pattern):
    _, tree = twins_of(pattern)
    batch = folded(branching_samples(), 2)
    given = {"labels": batch.input_ids, "packed_seq_params": batch.packed_seq_params}
    with pytest.raises(ValueError, match="labels must be None"):
        tree(batch.input_ids, batch.position_ids, None, **given)
    with pytest.raises(ValueError, match="weights of 1 depths, but the model trains 2"):
        supervised(tree, folded(branching_samples(), 1), WeightedSum())
    with torch.no_grad():
        supervised(tree, folded(branching_samples(), 0), WeightedSum())


def test_model_that_is_not_passed_through_is_refused():
    config = tiny_config(mtp_num_layers=1)
    spec = local_spec(config)
    block = with_prefix_tree(get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False))
    tree = build(config, with_prefix_tree(spec), mtp_block_spec=block)
    with pytest.raises(NotImplementedError, match="with_multi_token"):
        supervised(tree, folded(branching_samples(), 1), WeightedSum(fused=False))


def test_models_whose_depths_cannot_be_trained_are_refused():
    config = tiny_config(mtp_num_layers=1)
    spec = local_spec(config)
    block = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    with pytest.raises(ValueError, match=r"mtp_block_spec=get_gpt_mtp_block_spec"):
        with_multi_token(build(config, spec))
    with pytest.raises(NotImplementedError, match="a scalar head predicts no tokens"):
        with_scalar_head(build(config, spec, mtp_block_spec=block))
    tied = build(config, spec, mtp_block_spec=block, share_embeddings_and_output_weights=True)
    tied.config.pipeline_model_parallel_size = 2
    with pytest.raises(NotImplementedError, match="tied embeddings and pipeline stages"):
        with_multi_token(tied)


BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("mtp_use_repeated_layer", True, {}),
        ("dsa_indexer_loss_coeff", 0.1, {}),
        ("dsa_indexer_topk_freq", 2, {}),
        ("moe_aux_loss_coeff", 0.1, MOE | {"moe_router_load_balancing_type": "aux_loss"}),
        ("moe_z_loss_coeff", 0.1, MOE),
        ("moe_router_bias_update_rate", 0.1, MOE | BIASED),
    ],
)
def test_settings_that_do_not_go_with_depths_are_refused(name, value, others):
    config = tiny_config(**others | {"mtp_num_layers": 1, name: value})
    with pytest.raises(NotImplementedError, match=f"mtp_num_layers=1 with {name}={value}: "):
        build(config, with_prefix_tree(local_spec(config)))
