"""A tree in chunks that read each other's keys and values trains as the stock model on separate samples."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from harness.carried_trees import carried, score_in_parts, small_tree, train
from harness.folded_jobs import counting_exactly
from harness.in_double import kept_double
from harness.oracles import worst
from harness.seam_models import tiny_config, twins
from harness.seam_runs import FP32_INSIDE, LATENT, MOE, assert_equal, score_alone, sft_step, unfolded
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore.engine.carried_trees import fold_carrying
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.seam.experts import Multiplicity
from mcore_prefix_tree.objectives import Objective, make_objective
from mcore_prefix_tree.plan.carry import make_chunks
from mcore_prefix_tree.settings import RecipeError
from mcore_prefix_tree.settings.sample_source import Cutting, choose_cutting, why_not_carried

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]
FP64 = 1e-12


def test_every_place_of_a_cut() -> None:
    samples = small_tree(1)
    stock, tree = twins(tiny_config(num_layers=2))
    expected = unfolded(stock, samples)
    size = fold(samples).physical_tokens
    assert size > 40
    for cut in range(1, size):
        assert_equal(train(tree, carried(samples, [cut])), expected, FP64)


@pytest.mark.parametrize("seed", range(2, 5))
def test_random_cuts_of_random_trees(seed: int) -> None:
    samples, rng = small_tree(seed), random.Random(seed)
    stock, tree = twins(tiny_config())
    expected = unfolded(stock, samples)
    places = range(1, fold(samples).physical_tokens)
    for _ in range(4):
        cuts = rng.sample(places, rng.randint(2, min(9, len(places))))
        of_pass = {"multiple": rng.randint(1, 4), "pass_tokens": rng.randint(1, 9)}
        assert_equal(train(tree, carried(samples, cuts, **of_pass)), expected, FP64)
    assert_equal(train(tree, carried(samples, places)), expected, FP64)


def test_trees_of_pairs_are_folded_as_planned() -> None:
    """Trees that pairs join are in the order of the whole step, not in that of their samples by themselves."""
    rng = random.Random(0)
    joined = 0
    for _ in range(40):
        rows = [[rng.randrange(2) for _ in range(rng.randint(1, 12))] for _ in range(8)]
        samples = [Sample(tokens=row, merge_key=rng.choice([None, "a", "b"])) for row in rows]
        folding = Folding(
            max_tokens=6, dp_size=1, cost_model=None, device=torch.device("cpu"), over_budget="carry", scores_first=True
        )
        plan = folding.plan(samples, together=[0, 0, 1, 1, 2, 2, None, None])
        assert plan.carrying is not None
        (carrying,), (cut,) = plan.carrying, plan.micro_batches
        batches = fold_carrying(samples, cut, carrying, folding)
        for batch, run in zip(batches, carrying.runs, strict=True):
            if run.is_chunk:
                position = batch.layout.whole.position_ids.astype(np.int64)
                borders = sorted({0, run.start, run.end, len(position)})
                chunk = next(one for one in make_chunks(position, borders) if one.start == run.start)
                assert run[:4] == chunk[:4]  # it follows the same tokens, but fewer chunks do
                joined += int((position == 0).sum()) > 1
        places = [place for place, run in enumerate(carrying.runs) if run.is_chunk]
        assert carrying.scored == tuple(places[::-1])
    assert joined > 40


@pytest.mark.parametrize("settings", [{}, LATENT], ids=["keys and values", "latents"])
def test_one_path_is_held_at_once(settings: dict[str, Any]) -> None:
    samples = [Sample(tokens=[*range(6), *[10 + at] * 24]) for at in range(6)]
    _, tree = twins(tiny_config(**settings))
    size = fold(samples).physical_tokens
    batches = carried(samples, range(5, size, 5))
    store, most = batches[0].packed_seq_params.carry.store, 0
    for batch in batches:
        sft_step(tree, batch)
        most = max(most, store.num_bytes)
    config = tree.config
    sizes = 2 * config.num_query_groups * config.kv_channels
    if settings:
        sizes = config.kv_lora_rank + config.qk_pos_emb_head_dim
    of_token = 2 * config.num_layers * sizes * 8  # with gradients
    # A path of 30 tokens, and 5 that ran ahead; all carried tokens are about 120.
    assert 20 * of_token < most <= 35 * of_token
    # Keys and values only: of the chunks from the first to the last, and of a step without its backward.
    step = [batch.without_backward() for batch in carried(samples, range(5, size, 5))]
    for scored in (carried(samples, range(5, size, 5), trains=False), step):
        store, most = scored[0].packed_seq_params.carry.store, 0
        for batch in scored:
            with torch.no_grad():
                tree_forward(tree, batch)
            most = max(most, store.num_bytes)
        assert 20 * of_token // 2 < most <= 35 * of_token // 2
        assert store.num_bytes == 0


def test_a_window_of_latents() -> None:
    """Scored from the first chunk to the last, and trained."""
    samples = small_tree(4)
    stock, tree = twins(tiny_config(**LATENT, window_size=(2, 0)))
    size, options = fold(samples).physical_tokens, {"backend": "reference", "config": tree.config}
    cuts = [size // 4, size // 2, size - 3]
    assert_equal(train(tree, carried(samples, cuts, **options)), unfolded(stock, samples), FP32_INSIDE)
    expected = torch.cat([score_alone(stock, sample)[0] for sample in samples]).detach()
    step = [batch.without_backward() for batch in carried(samples, cuts, **options)]
    for batches in (carried(samples, cuts, trains=False, **options), step):
        joined = score_in_parts(tree, batches)
        layout = batches[-1].layout.whole
        rows = [joined[layout.sample_map[slice(*ends)][1:]] for ends in pairwise(layout.cu_sample_lens)]
        assert worst(torch.from_numpy(np.concatenate(rows)), expected) < FP32_INSIDE
        assert batches[0].packed_seq_params.carry.store.num_bytes == 0


@pytest.mark.parametrize("trains", [True, False])
def test_a_window_is_kept(trains: bool) -> None:
    """Layers with a window of 4 keep the 3 tokens before each part, of a path of 60 tokens that has a branch."""
    samples = [Sample(tokens=[*range(60)]), Sample(tokens=[*range(30), 60])]
    config = tiny_config(window_size=(3, 0), window_attn_skip_freq=3)  # in two of three layers
    batches = carried(samples, [40, 50], trains=trains, config=config, backend="reference")
    carries = [batch.packed_seq_params.carry for batch in batches if not batch.forward_only]
    # The chunk from 50 begins on the path, and has the branch at 30.
    assert sorted((carry.size, carry.within(4).size) for carry in carries) == [(0, 0), (40, 3), (50, 6)]
    kept = sum(len(places) for batch in batches for _, places in batch.packed_seq_params.carry.within(4).tokens.left)
    passes = trains * 9  # before the second part of the first pass
    assert 9 <= kept <= 2 * (9 + passes)


def test_a_chunk_is_a_micro_batch_of_the_loss_that_compares_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is upstream's of the chunks' tokens, each as often as it has samples; the first pass does not count."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(1, dtype=torch.float64))
    compares = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.5}
    config = tiny_config(**MOE | compares, moe_router_score_function="sigmoid")
    stock, tree = (model.train().decoder.layers[0].mlp.router for model in twins(config))
    samples = small_tree(3)
    size, expert_weight = fold(samples).physical_tokens, torch.arange(4.0, dtype=torch.float64)
    with kept_double(), counting_exactly():
        for batch in carried(samples, [size // 3, size // 2], multiple=4):
            params = batch.packed_seq_params
            values = torch.randn(batch.layout.padded_size, 1, config.hidden_size, dtype=torch.float64)
            times, gradients = Multiplicity.of(params.tree_metadata).of_token, []
            for router in (stock, tree):
                given = values.clone().requires_grad_()
                with torch.set_grad_enabled(not batch.forward_only):
                    if router is tree:
                        router.tree, router.carry = params.tree_metadata, params.carry
                        loss = (times[:, None] * router(given)[0]) @ expert_weight
                    elif not batch.forward_only:
                        loss = router(given.repeat_interleave(times.long(), dim=0))[0] @ expert_weight
                if not batch.forward_only:
                    loss.sum().backward()
                    gradients.append(given.grad)
            assert not gradients or worst(gradients[1], gradients[0]) < FP64
    assert worst(tree.weight.grad, stock.weight.grad) < FP64
    assert tree.ga_steps == stock.ga_steps == 3
    assert torch.equal(tree.global_tokens_per_expert, stock.global_tokens_per_expert)


class Whole(Objective):
    """An objective of one's own, which reads hidden states."""


def test_what_needs_whole_samples_is_named() -> None:
    why = "the objective reads more of whole samples than scores of tokens"
    assert choose_cutting("auto", Whole()) == Cutting(why_repeat=why)
    with pytest.raises(RecipeError, match=f"batch.over_budget=carry is not possible: {why}; set batch.over_budget=re"):
        choose_cutting("carry", Whole())


def test_loops_without_a_pass_before_a_step_are_named() -> None:
    assert why_not_carried(make_objective("sft"), runs_ahead=False) is None
    reason = why_not_carried(make_objective("dpo"), runs_ahead=False)
    assert reason is not None
    assert "needs a pass before the step" in reason
    assert "Megatron-LM core_v0.19.0 or later" in reason


def test_frozen_keys_leave_no_gradient() -> None:
    """A first layer with frozen weights gets no gradient, and later chunks still read its keys."""
    samples = small_tree(6)
    stock, tree = twins(tiny_config())
    for model in (stock, tree):
        model.embedding.requires_grad_(False)
        model.decoder.layers[0].self_attention.requires_grad_(False)
    found = train(tree, carried(samples, [fold(samples).physical_tokens // 2]))
    assert_equal(found, unfolded(stock, samples), FP64)
    assert {grad is None for grad in found["grads"].values()} == {True, False}
