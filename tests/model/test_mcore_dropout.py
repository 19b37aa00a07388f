"""A Megatron-Core model that draws random numbers is refused at every door; the checks leave no trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.packed_calls import ROWS, packed
from harness.seam_models import branching_samples, build, local_spec, tiny_config

from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.mcore import fold_inside, with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.packed import FoldCheckError
from mcore_prefix_tree.mcore.seam import tree_layers
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.tree_layers import follow_trees
from mcore_prefix_tree.utils import randomness

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]

NAMED = (
    r"decoder\.layers\.1\.self_attention\.linear_proj\.adapter\.dropout has p=0\.1 and is in training mode.*set it to"
)


class Adapter(torch.nn.Module):
    """A low-rank adapter on a linear layer, for example one of Megatron-Bridge."""

    def __init__(self, linear: Any, kind: type[torch.nn.Module], rate: float) -> None:
        super().__init__()
        self.to_wrap = linear
        inside, outside = linear.weight.shape[1], linear.weight.shape[0]
        generator = torch.Generator().manual_seed(3)
        self.adapter = torch.nn.ModuleDict({"dropout": kind(rate), "linear_in": torch.nn.Linear(inside, 2)})
        self.adapter["linear_out"] = torch.nn.Linear(2, outside)
        for weight in self.adapter.parameters():
            weight.data = torch.randn(weight.shape, generator=generator).to(linear.weight.dtype)

    def forward(self, hidden: torch.Tensor) -> Any:
        output, bias = self.to_wrap(hidden)
        low = self.adapter["linear_in"](self.adapter["dropout"](hidden))
        return output + self.adapter["linear_out"](low), bias


def tree_model(**settings: Any) -> Any:
    config = tiny_config(**settings)
    return build(config, with_prefix_tree(local_spec(config)))


def attach(model: Any, kind: type[torch.nn.Module] = torch.nn.Dropout, rate: float = 0.1) -> torch.nn.Module:
    attention = model.decoder.layers[1].self_attention
    attention.linear_proj = Adapter(attention.linear_proj, kind, rate)
    return attention.linear_proj.adapter["dropout"]


def inside(model: Any) -> Any:
    folding = fold_inside(model)
    return lambda: folding(**packed(ROWS))


def step(model: Any) -> Any:
    return lambda: tree_forward(model, MicroBatch.from_layout(fold(branching_samples())))


@pytest.mark.parametrize("kind", [torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.AlphaDropout])
@pytest.mark.parametrize("door", [inside, step])
def test_dropout_of_adapters_is_refused_while_it_is_in_effect(door: Any, kind: type[torch.nn.Module]) -> None:
    model = tree_model()
    call = door(model)  # a trainer attaches the adapter to a model that folds already
    dropout: Any = attach(model, kind)
    with pytest.raises(NotImplementedError, match=NAMED):
        call()
    dropout.eval()
    call()
    dropout.train()
    dropout.p = 0.0
    call()
    dropout.p = 0.1
    with pytest.raises(NotImplementedError, match=NAMED):
        call()
    model.eval()
    call()


@pytest.mark.parametrize("door", [inside, step])
def test_rates_that_a_layer_reads_are_refused(door: Any) -> None:
    model = tree_model()
    call = door(model)
    model.decoder.layers[2].hidden_dropout = 0.2
    with pytest.raises(NotImplementedError, match=r"decoder\.layers\.2 has hidden_dropout=0\.2"):
        call()


@pytest.mark.parametrize("door", [inside, step])
@pytest.mark.parametrize("place", ["decoder.layers.1", "decoder.layers.2.self_attention.core_attention", "mlp.router"])
def test_modules_that_are_exchanged_later_are_refused(door: Any, place: str) -> None:
    """After a first call, which found nothing, modules are searched again only if one was put into another."""
    experts = {"num_moe_experts": 2, "moe_ffn_hidden_size": 32, "moe_router_load_balancing_type": "none"}
    model, stock = (build(config, local_spec(config)) for config in [tiny_config(**experts)] * 2)
    path = f"decoder.layers.1.{place}" if place == "mlp.router" else place
    follow_trees(model)
    call = door(model)
    call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_layers, "_stock_in", None)
        patch.setattr(randomness, "_walk", None)
        call()
    model.set_submodule(path, stock.get_submodule(path))
    with pytest.raises(NotImplementedError, match="does not follow a tree"):
        call()
    follow_trees(model)
    call()


@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "full", "recompute_method": "uniform"}])
def test_check_first_finds_draws_that_no_attribute_shows(recompute: dict[str, Any]) -> None:
    if recompute:
        recompute = recompute | {"recompute_num_layers": 1}
    model = fold_inside(tree_model(**recompute), check_first=True)
    hook = model.decoder.layers[1].register_forward_hook(
        lambda module, _, output: (F.dropout(output[0], 0.1, module.training), output[1])
    )
    with torch.no_grad():
        model.eval()(**packed(ROWS))
    with pytest.raises(FoldCheckError, match=r"a second run on the same tokens .* draws random numbers"):
        model.train()(**packed(ROWS))
    hook.remove()
    model(**packed(ROWS)).sum().backward()
    assert model.config.recompute_granularity == recompute.get("recompute_granularity")


class Statistics(torch.nn.Module):
    """A buffer that changes in training, for example one of a batch norm or a router; it changes no output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += hidden.shape[0]
        return hidden


def test_check_first_leaves_buffers_and_generators() -> None:
    """Python's generator too, for example for the stochastic depth of some models."""
    experts = {"num_moe_experts": 2, "moe_router_load_balancing_type": "none", "moe_router_score_function": "sigmoid"}
    left: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
    for check_first in (False, True):
        model = tree_model(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.0, **experts)
        model.embedding.add_module("statistics", Statistics())
        model.embedding.register_forward_hook(lambda module, _, output: module.statistics(output))
        fold_inside(model, check_first=check_first)
        torch.manual_seed(1)
        random.seed(1)
        model(**packed(ROWS))
        left.append(([buffer.clone() for buffer in model.buffers()], torch.get_rng_state(), random.getstate()))
        assert int(model.embedding.statistics.seen) == model.folding.last.unique_tokens
        assert all(parameter.grad is None for parameter in model.parameters())
    (buffers, torch_state, python_state), (others, other_torch_state, other_python_state) = left
    assert any("local_tokens_per_expert" in name for name, _ in model.named_buffers())
    assert all(map(torch.equal, buffers, others))
    assert torch.equal(torch_state, other_torch_state)
    assert python_state == other_python_state
