"""Balancing of experts under folding: losses, gradients and counts are those of each sample alone."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness.added_losses import AddedLosses
from harness.carried_trees import carried, small_tree, train
from harness.folded_jobs import counting_exactly, in_one_row
from harness.in_double import kept_double
from harness.packed_calls import packed, rows_of
from harness.seam_models import EXPERTS, RECOMPUTE, branching_samples, hybrid_twins, tiny_config, twins
from harness.seam_runs import MOE, folded, folded_batch, unfolded
from harness.seam_runs import assert_equal as compare
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.mcore import MicroBatch, fold_inside, tree_forward
from mcore_prefix_tree.mcore.packed import fold_check
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam.experts import Multiplicity, TreeRouterMixin, balancing_by_sample
from mcore_prefix_tree.mcore.seam.hybrid_layers import NEEDS_NEWER

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]

KINDS: dict[str, dict[str, Any]] = {
    "aux loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.05},
    "sequence aux loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.05},
    "both": {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.05, 0.02]},
    "z-loss": {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.01},
    "biases": {
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": 1e-3,
    },
    "all": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.05,
        "moe_z_loss_coeff": 0.01,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": 1e-3,
    },
    "capacity that holds all tokens": {"moe_expert_capacity_factor": 2.0},
}
# Each recomputation with a padded tree or one that is not.
EACH_WAY = [("nothing", 16), ("layers", 1), ("experts", 16)]
WAYS = pytest.mark.parametrize(("recompute", "padding"), EACH_WAY)
# Upstream computes the scores of its losses in fp32.
ROUNDING = 1e-6


@pytest.fixture(autouse=True)
def unscaled(monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(1, dtype=torch.float64))


def gradients_folded(model, layouts):
    model.zero_grad()
    for layout in layouts:
        batch = MicroBatch.from_layout(layout)
        counts = Multiplicity.of(batch.packed_seq_params.tree_metadata)
        logits = tree_forward(model, batch)
        (1e-2 * (logits[0] * counts.of_token[:, None]).sum()).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def counts_of(model):
    """Return how many tokens chose each expert of each router, and forget it."""
    routers = [module for module in model.modules() if getattr(module, "local_tokens_per_expert", None) is not None]
    counts = [router.local_tokens_per_expert.clone() for router in routers]
    for router in routers:
        router.local_tokens_per_expert.zero_()
    return counts


def assert_equal(folded, alone, limit=ROUNDING):
    assert folded.keys() == alone.keys()
    for name, wanted in alone.items():
        error = (folded[name] - wanted).norm() / wanted.norm().clamp_min(1e-12)
        assert error < limit, f"{name} is off by {error:.1e}"


# All kinds at once meet each way, and each kind by itself one; trees are whole or in chunks.
@pytest.mark.parametrize(
    ("kind", "recompute", "padding", "chunks"),
    [
        *((kind, *way, False) for kind, way in zip(KINDS, EACH_WAY * 3, strict=False)),
        *(("all", *way, False) for way in EACH_WAY[:2]),
        *(pytest.param(kind, *way, True, marks=pytest.mark.ci) for kind, way in zip(KINDS, EACH_WAY * 3, strict=False)),
        *(("all", *way, True) for way in EACH_WAY),
        pytest.param("all", "pattern", 1, True, marks=pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=NEEDS_NEWER)),
    ],
)
def test_balancing_is_that_of_each_sample_alone(kind, recompute, padding, chunks):
    """Losses are those of each sample alone, and biases see each token of each sample once."""
    if recompute == "pattern":
        models = hybrid_twins(tiny_config(is_hybrid_model=True, num_layers=4, **MOE | KINDS[kind]), "*E*E")
    else:
        models = twins(tiny_config(**EXPERTS | KINDS[kind] | RECOMPUTE[recompute]))
    stock, tree = (model.train() for model in models)
    samples, rng = small_tree(3) if chunks else branching_samples(), random.Random(f"{kind} {recompute}")
    expected, counts = unfolded(stock, samples), counts_of(stock)
    assert bool(counts) == ("moe_router_enable_expert_bias" in KINDS[kind])
    places = range(1, fold(samples).physical_tokens)
    cuts = [places[:: 1 if recompute == "experts" else 4], rng.sample(places, rng.randint(2, 9))] if chunks else []
    steps = [carried(samples, cut, multiple=rng.randint(1, 4), pass_tokens=rng.randint(1, 9)) for cut in cuts]
    for batches in [*steps, *steps[1:]]:  # a step that is run again
        compare(train(tree, batches), expected, ROUNDING)
        assert all(map(torch.equal, counts_of(tree), counts))
    if not chunks:
        compare(unfolded(tree, samples), expected, ROUNDING)  # without a tree
        assert all(map(torch.equal, counts_of(tree), counts))
        batch = MicroBatch.from_layout(fold(samples, pad_to_multiple_of=padding))
        compare(folded(tree, batch, entropy_weight=0.0), expected, ROUNDING)
        assert all(map(torch.equal, counts_of(tree), counts))


def gradients_in_rows(model, batches):
    """Each micro-batch of the stock model has its samples in one row."""
    model.zero_grad()
    for samples in batches:
        row = in_one_row(samples)
        logits = model(**row)
        (1e-2 * logits[~row["padding_mask"]].sum()).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def step_counts_of(model):
    routers = [module for module in model.modules() if getattr(module, "ga_steps", None) is not None]
    return torch.stack([torch.cat([one.global_tokens_per_expert, one.ga_steps[None]]) for one in routers])


@WAYS
@pytest.mark.parametrize(("score", "limit"), [("softmax", ROUNDING), ("sigmoid", 1e-12)])
def test_the_global_loss_is_that_of_the_same_micro_batches(score, limit, recompute, padding):
    """Upstream resets the counts between the two steps; the second step begins with a micro-batch of padding."""
    balancing = {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0, 0.5]}
    config = tiny_config(**EXPERTS, **balancing, **RECOMPUTE[recompute], moe_router_score_function=score)
    stock, tree = twins(config, position_embedding_type="learned_absolute")
    samples = branching_samples()
    batches = [samples[:5], samples[5:7], samples[7:]]
    with kept_double(), counting_exactly():
        for empty in ([], [fold([], pad_to_multiple_of=4)]):
            rows = gradients_in_rows(stock.train(), batches)
            logged = logged_values("global_load_balancing_loss")
            folded = gradients_folded(
                tree.train(), [*empty, *(fold(one, pad_to_multiple_of=padding) for one in batches)]
            )
            assert_equal(folded, rows, limit)
            torch.testing.assert_close(logged_values("global_load_balancing_loss"), logged)
            assert torch.equal(step_counts_of(tree), step_counts_of(stock))
            assert step_counts_of(tree)[:, -1].tolist() == [3, 3, 3]
            for model in (stock, tree):
                reset_model_temporary_tensors(config, [model])
                assert not step_counts_of(model).any()


def test_the_global_loss_depends_on_how_a_step_is_cut():
    """The test above can fail; without the loss, which a comparison by samples leaves out, nothing depends on it."""
    config = tiny_config(**EXPERTS, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.5)
    _, tree = twins(config)
    samples = branching_samples()

    def gradients(*batches):
        reset_model_temporary_tensors(config, [tree])
        return gradients_folded(tree.train(), [fold(one) for one in batches])

    once, cut = gradients(samples), gradients(samples[:5], samples[5:])
    name = "decoder.layers.0.mlp.router.weight"
    assert (cut[name] - once[name]).norm() > 1e-2 * once[name].norm()
    with balancing_by_sample([tree]):
        assert_equal(gradients(samples[:5], samples[5:]), gradients(samples))
        assert not step_counts_of(tree).any()


def test_the_first_check_leaves_the_global_loss_out(monkeypatch):
    config = tiny_config(**EXPERTS, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=50.0)
    tree = twins(config)[1].train()
    call = packed(rows_of(branching_samples()), gap=1)
    fold_inside(tree, check_first=True)(**call)
    assert step_counts_of(tree)[:, -1].tolist() == [1, 1, 1], "only the trainer's own forward counts"
    monkeypatch.setattr(fold_check, "balancing_by_sample", lambda models: nullcontext())
    with pytest.raises(fold_check.FoldCheckError, match="the gradient of embedding"):
        fold_inside(twins(config)[1].train(), check_first=True)(**call)


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("kind", ["aux loss", "sequence aux loss", "z-loss", "all"])
def test_inside_a_trainers_model_losses_are_what_its_schedule_divides(kind, per_token):
    """The papers' losses of each row: times its tokens for a trainer that divides by tokens, else their mean."""
    of_papers = {"moe_router_score_function": "sigmoid", "moe_router_dtype": "fp64", "moe_router_bias_update_rate": 0.0}
    config = tiny_config(**EXPERTS | KINDS[kind] | of_papers, calculate_per_token_loss=per_token)
    stock, tree = twins(config)
    added = AddedLosses(stock.eval(), vars(config))
    rows, total = rows_of(branching_samples()), 0.0
    with kept_double():
        for row in rows:
            stock(torch.as_tensor(row)[None], torch.arange(len(row))[None], None)
            total = total + len(row) * added.take()
        (total if per_token else total / sum(map(len, rows))).backward()
        (0.0 * fold_inside(tree.train())(**packed(rows))).sum().backward()
    wanted = {name: one.grad for name, one in stock.named_parameters() if one.grad is not None}
    found = {name: one.grad for name, one in tree.named_parameters() if name in wanted}
    assert any("router" in name for name in wanted)
    assert_equal(found, wanted, 1e-12)


def test_a_router_that_counts_a_shared_token_once_is_wrong(monkeypatch):
    """The tests above can fail."""
    stock, tree = twins(tiny_config(**EXPERTS, **KINDS["all"]))
    alone = unfolded(stock.train())["grads"]
    monkeypatch.setattr(TreeRouterMixin, "tree", property(lambda router: None, lambda router, tree: None))
    once = folded(tree.train(), folded_batch(), entropy_weight=0.0)["grads"]
    errors = [(once[name] - wanted).norm() / wanted.norm() for name, wanted in alone.items() if "router" in name]
    assert min(errors) > 1e-3


def test_a_tree_without_samples_is_refused():
    metadata = TreeMetadata.from_nodes([0, 3, 5], [-1, 0])
    with pytest.raises(ValueError, match=r"balancing of experts needs the samples of a tree: make it with TreeMeta"):
        Multiplicity.of(metadata)


def test_counts_of_a_branching_forest():
    counts = Multiplicity.of(TreeMetadata.from_layout(fold(branching_samples())))
    layout = fold(branching_samples())
    expected = torch.zeros(layout.padded_size)
    for sample in range(layout.num_samples):
        expected[torch.as_tensor(layout.sample_tokens(sample)).long()] += 1
    assert torch.equal(counts.of_token, expected)
    assert counts.logical_tokens == layout.logical_tokens
    assert counts.lengths.tolist() == [len(sample.tokens) for sample in branching_samples()]


@pytest.mark.parametrize("samples", [branching_samples(), [Sample(tokens=range(n)) for n in range(1, 1200)]])
def test_sums_of_samples_are_those_of_their_tokens(samples):
    """Sums over paths of any depth, and their gradients, whatever padding holds."""
    layout = fold(samples)
    layout = fold(samples, padded_size=layout.physical_tokens + 3)
    counts = Multiplicity.of(TreeMetadata.from_layout(layout))
    values = torch.randn(layout.padded_size, 2, dtype=torch.float64)
    values[layout.physical_tokens :] = torch.inf
    values.requires_grad_()
    weights = torch.randn(len(samples), 2, dtype=torch.float64)
    paths = [torch.as_tensor(layout.sample_tokens(at)).long() for at in range(len(samples))]
    expected = torch.stack([values[path].sum(0) for path in paths])
    found = counts.sum_by_sample(counts.node, values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted, got = (torch.autograd.grad((sums * weights).sum(), values)[0] for sums in (expected, found))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_experts_that_are_not_balanced_count_nothing():
    _, tree = twins(tiny_config(**EXPERTS, moe_router_load_balancing_type="none"))
    batch = MicroBatch.from_layout(fold(branching_samples()))
    tree_forward(tree.train(), batch).sum().backward()
    assert "multiplicity" not in batch.packed_seq_params.tree_metadata.cache


def logged_values(name):
    """The sum of what routers logged by layer, since the last call; megatron-core 0.19 moved the log."""
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logging is None:
        return moe_utils.get_moe_layer_wise_logging_tracker().pop(name)["values"]
    return logging.get_moe_metrics_tracker()._metrics.pop(name).values


@pytest.mark.parametrize("per_token", [True, False])
def test_the_z_loss_and_its_log_are_those_of_samples_in_one_row(per_token):
    kind = {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.01}
    config = tiny_config(**EXPERTS, **kind, calculate_per_token_loss=per_token)
    routers = [model.train().decoder.layers[0].mlp.router for model in twins(config)]
    samples, results = branching_samples(), []
    batches = [fold(samples[:6]), fold(samples[6:])]
    hidden = [torch.randn(layout.padded_size, 1, config.hidden_size, dtype=torch.float64) for layout in batches]
    for router in routers:
        gradients = {}
        for layout, values in zip(batches, hidden, strict=True):
            metadata = TreeMetadata.from_layout(layout)
            values = values.clone().requires_grad_()
            if isinstance(router, TreeRouterMixin):
                router.tree = metadata
                probs, _ = router(values)
                probs = probs * Multiplicity.of(metadata).of_token[:, None]
            else:
                tokens = [torch.as_tensor(layout.sample_tokens(sample)).long() for sample in range(layout.num_samples)]
                probs, _ = router(values[torch.cat(tokens)])
            (1e-2 * (probs @ torch.arange(4.0, dtype=torch.float64))).sum().backward()
            gradients[f"{len(gradients)}"] = values.grad
        results.append(gradients | {"log": logged_values("z_loss"), "weight": router.weight.grad})
    assert_equal(results[1], results[0])
