"""Stock megatron-core trains on the CPU, and every layout trains the same model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness.layouts import LAYOUTS
from harness.models import LENGTHS, VOCAB, forward_step, microbatches
from harness.worlds import Layout, world

STEPS = 3  # the losses of the third see two optimizer steps


def train(layout: Layout, kind: str, dtype: torch.dtype, distributed_optimizer: bool) -> dict[str, Any]:
    from harness.models import Trainer, build_chunks, tiny_gpt_config
    from harness.weights import local_parts
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    changes, layer = {}, {}
    if kind == "moe":
        changes = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_load_balancing_type": "none"}
        layer = {"num_experts": 4}
    if kind == "qk-layernorm":
        changes = layer = {"qk_layernorm": True, "normalization": "LayerNorm"}
    config = tiny_gpt_config(layout=layout, dtype=dtype, **changes)
    spec = get_gpt_layer_local_spec(**{"normalization": config.normalization, **layer})
    chunks = build_chunks(config, spec, vocab_size=VOCAB, share_embeddings=kind == "tied")
    trainer = Trainer.of(chunks, distributed_optimizer=distributed_optimizer)
    weights = local_parts(trainer.chunks, lambda p: p.data)

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = microbatches()[rank::size]
    trainer.backward(forward_step, mine, seq_length=max(LENGTHS))
    # The distributed optimizer leaves each data-parallel rank with the sum of its shard only.
    gradients = [] if distributed_optimizer else local_parts(trainer.chunks, lambda p: p.main_grad)
    reports = [trainer.step(forward_step, mine, seq_length=max(LENGTHS)) for _ in range(STEPS)]
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        reports = []
    return {"reports": reports, "weights": weights, "gradients": gradients}


def losses(results: list[dict[str, Any]]) -> torch.Tensor:
    curve = []
    for step in range(STEPS):
        items = [item for result in results if result["reports"] for item in result["reports"][step]]
        assert len(items) == len(LENGTHS)
        curve.append(sum(item["loss"] for item in items) / sum(item["tokens"] for item in items))
    return torch.tensor(curve, dtype=torch.float64)


@functools.cache
def single(kind: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    return world(1).run(train, Layout(), kind, dtype, False, layout=Layout())


def assembled(results: list[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    from harness.weights import assemble

    return assemble(part for result in results for part in result[key])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tp2", "dense"),
        ("pp2-vpp2", "dense"),
        *(pytest.param(name, "dense", marks=pytest.mark.ci) for name in ("pp2", "dp2", "tp2-sp-pp2-vpp2")),
        *(pytest.param(name, "dense", marks=pytest.mark.slow) for name in ("tp2-sp", "tp2-pp2", "tp2-dp2")),
        pytest.param("tp2-pp2", "tied", marks=pytest.mark.ci),
        pytest.param("tp2-sp", "qk-layernorm", marks=pytest.mark.slow),
        pytest.param("tp2-sp", "moe", marks=pytest.mark.ci),
        ("ep2", "moe"),
    ],
)
def test_float64_layouts_train_the_same_model(name: str, kind: str) -> None:
    size, layout = LAYOUTS[name]
    results = world(size).run(train, layout, kind, torch.float64, False, layout=layout)
    expected = single(kind, torch.float64)

    weights, expected_weights = assembled(results, "weights"), assembled(expected, "weights")
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[key], expected_weights[key]) for key in weights)

    gradients, expected_gradients = assembled(results, "gradients"), assembled(expected, "gradients")
    assert gradients.keys() == expected_gradients.keys() == weights.keys()
    for key, gradient in gradients.items():
        assert gradient.dtype is torch.float64
        assert expected_gradients[key].norm() > 0, key
        error = (gradient - expected_gradients[key]).norm() / expected_gradients[key].norm()
        assert error < 1e-12, (key, error)

    torch.testing.assert_close(losses(results), losses(expected), rtol=1e-10, atol=0)
    assert losses(results)[-1] < losses(results)[0]


@pytest.mark.parametrize("size", [2, 4])
def test_distributed_optimizer_trains_the_same_model(size: int) -> None:
    results = world(size).run(train, Layout(), "dense", torch.float32, True, layout=Layout())
    expected = losses(single("dense", torch.float32))
    torch.testing.assert_close(losses(results), expected, rtol=1e-5, atol=0)
    # float32 is close to float64 as well, so the bound above is meaningful.
    torch.testing.assert_close(expected, losses(single("dense", torch.float64)), rtol=1e-5, atol=0)


def test_bfloat16_trains() -> None:
    layout = Layout(tp=2, sequence_parallel=True)
    results = world(2).run(train, layout, "dense", torch.bfloat16, False, layout=layout)
    torch.testing.assert_close(losses(results), losses(single("dense", torch.float64)), rtol=3e-3, atol=0)
