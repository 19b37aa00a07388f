"""Models of all kinds: a forest and a tree in chunks train as the stock model does on each sample by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from harness.carried_trees import carried, small_tree, train
from harness.in_double import kept_double
from harness.seam_models import (
    DELTA_NET,
    MAMBA,
    RECOMPUTE,
    deep_samples,
    hybrid_twins,
    tiny_config,
    twins,
    with_long_memory,
)
from harness.seam_runs import (
    FP32_INSIDE,
    LATENT,
    LATENT_YARN,
    MOE,
    SAMPLES,
    SPARSE,
    VARIANTS,
    WINDOWS_AND_SINKS,
    YARN,
    assert_equal,
    assert_folded_is_unfolded,
    assert_same_gradients,
    batch_of,
    supervised,
    take_gradients,
    unfolded,
)
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.attention.api import supporting
from mcore_prefix_tree.mcore.engine.backend import attention_case
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.outputs import WeightedSum
from mcore_prefix_tree.mcore.release import HAS_DELTA_NET, HAS_HYBRID_MODEL, HAS_SPARSE_ATTENTION
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.tree_layers import follow_trees

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A model: fields of its config, the pattern of a HybridModel, arguments of the model; and how it is compared.

    ``samples`` may be the seed of a deep forest. ``chunk`` is that of a scan of Mamba. Layers with states and with an
    indexer compute in fp64 what upstream takes to fp32.
    """

    settings: Settings = field(default_factory=dict)
    pattern: str | None = None
    model: Settings = field(default_factory=dict)
    samples: Sequence[Sample] | int = tuple(SAMPLES)
    backend: str = "path"
    limit: float = 1e-12
    dtype: torch.dtype = torch.float64
    chunk: int = 128
    slow: bool = False

    @property
    def is_double(self) -> bool:
        return bool(set(self.pattern or "") & set("MGD")) or "experimental_attention_variant" in self.settings

    def computing(self) -> Any:
        """A context in which both models run."""
        return kept_double() if self.is_double else nullcontext()

    def twins(self) -> tuple[Any, Any]:
        """The stock model and one that follows trees; states last for many tokens."""
        if self.pattern is None:
            if self.is_double and not HAS_SPARSE_ATTENTION:
                pytest.skip("these layers follow a tree since megatron-core 0.19")
            return with_long_memory(twins(tiny_config(self.dtype, **self.settings), **self.model))
        if not HAS_HYBRID_MODEL or ("G" in self.pattern and not HAS_DELTA_NET):
            pytest.skip("this megatron-core has no such layers that follow a tree")
        from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

        if not set(self.pattern) <= Symbols.VALID_LAYERS:
            pytest.skip(f"layers {self.pattern} came with megatron-core 0.19")
        config = tiny_config(self.dtype, **MAMBA | DELTA_NET | {"num_layers": len(self.pattern)} | self.settings)
        models = with_long_memory(hybrid_twins(config, self.pattern, **self.model))
        for module in (one for model in models for one in model.modules() if hasattr(one, "chunk_size")):
            module.chunk_size = self.chunk
        return models

    def forest(self) -> list[Sample]:
        return deep_samples(self.samples) if isinstance(self.samples, int) else list(self.samples)


def of(kinds: dict[str, Kind]) -> Any:
    """Give a test each kind."""
    marks = {name: [pytest.mark.slow] if kind.slow else [] for name, kind in kinds.items()}
    return pytest.mark.parametrize("kind", [pytest.param(kinds[name], id=name, marks=marks[name]) for name in kinds])


FULL, SELECTIVE = RECOMPUTE["layers"], {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
EXPERTS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ABSOLUTE, TIED = {"position_embedding_type": "learned_absolute"}, {"share_embeddings_and_output_weights": True}
BIASES = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
}
BALANCED = BIASES | {
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
}
VARIANT = {"experimental_attention_variant": "gated_delta_net"}
DELTA_GPT = DELTA_NET | VARIANT | {"linear_attention_freq": 4, "num_layers": 4}
LOSS = {"dsa_indexer_loss_coeff": 0.7}
SPARSE_LOSS = LOSS | {"dsa_indexer_use_sparse_loss": True}
# Those that can be held to the tolerance of fp64.
EXACT = supporting(attention_case(tiny_config(), device=torch.device("cpu")))
APART = [Sample(tokens=[first, 3, 4, 5], loss_mask=[1.0] * 4) for first in range(5)]  # they share nothing


def long_paths() -> list[Sample]:
    """Paths of thousands of tokens, with whose length rounding grows."""
    rng = torch.Generator().manual_seed(3)
    stem, *leaves = (torch.randint(0, 61, (n,), generator=rng).tolist() for n in (4100, 70, 1, 200))
    return [Sample(tokens=stem + leaf, loss_mask=[1.0] * len(stem + leaf)) for leaf in leaves]


def sparse(changes: Settings, samples: int, pattern: str | None = None, **more: Any) -> Kind:
    return Kind(SPARSE | {"num_layers": len(pattern or "DD")} | changes, pattern, samples=samples, **more)


ATTENTION = {name: Kind(settings, model=model) for name, (settings, model) in VARIANTS.items()}
ATTENTION |= {
    f"{name}: {one}": Kind(VARIANTS[name][0], backend=one) for name in ("rope", "selective recompute") for one in EXACT
}
ATTENTION |= {name: Kind(settings, backend="reference") for name, settings in WINDOWS_AND_SINKS.items()}
ATTENTION |= {
    f"float32: {name}": Kind(VARIANTS[name][0], model=VARIANTS[name][1], dtype=torch.float32, limit=1e-5)
    for name in ("rope", "GPT-2", "yarn")
}
ATTENTION |= {
    "output gate": Kind({"attention_output_gate": True}, limit=FP32_INSIDE),
    "experts": Kind(MOE, limit=FP32_INSIDE),
    "experts, recomputed": Kind(MOE | EXPERTS_AGAIN, limit=FP32_INSIDE),
}
PATTERNS = {
    "attention, MLP": Kind({}, "*-*-"),
    "experts": Kind(MOE, "*E*E"),
    "experts and MLPs, biases of experts": Kind(MOE | BIASES, "*-*E", slow=True),
    "balanced experts": Kind(MOE | BALANCED, "*E*E"),
    "full recompute, balanced experts": Kind(FULL | MOE | BALANCED, "E*E-", slow=True),
    "latent attention": Kind(LATENT, "+-+-", slow=True),
    "latent attention, yarn, experts": Kind(LATENT_YARN | MOE, "+-+E"),
    "attention twice, ends in attention": Kind({}, "-**", slow=True),
    "no positions": Kind({}, "*-*-", {"position_embedding_type": "none"}, slow=True),
    "learned positions, tied": Kind({}, "*-", ABSOLUTE | TIED, slow=True),
    "yarn": Kind(YARN, "*-", {"position_embedding_type": "yarn"}, slow=True),
    "full recompute": Kind(FULL, "*-*-"),
    "full recompute, experts": Kind(FULL | MOE, "*E*E", slow=True),
    "selective recompute": Kind(SELECTIVE, "*-*-", slow=True),
    # Layers are numbered over the full pattern, also those without attention.
    "windows": Kind({"window_size": (3, 0), "window_attn_skip_freq": [1, 0, 0, 1]}, "*-*-", backend="reference"),
}
STATES = {
    "Mamba, attention and MLPs": Kind({}, "M-M*M", samples=0),
    "only Mamba": Kind({}, "M", samples=1, chunk=64, slow=True),
    "small chunks": Kind({}, "MM", samples=2, chunk=4),
    "Mamba, experts": Kind(MOE, "ME*E", samples=3, slow=True),
    "Mamba, full recompute": Kind(FULL, "M*M-", samples=4),
    "one group": Kind({"mamba_num_groups": 1}, "M*", samples=5, slow=True),
    "as many groups as heads": Kind({"mamba_num_groups": 4}, "M*", samples=6, slow=True),
    "as many heads as fit": Kind({"mamba_num_heads": None}, "M*", samples=7, slow=True),
    "Mamba, Gated DeltaNet": Kind({}, "MGM*-", samples=8, slow=True),
    "Mamba, deterministic": Kind({"deterministic_mode": True}, "MM", samples=9, slow=True),
    "Mamba, nothing shared": Kind({}, "M", samples=APART),
    "Mamba, long paths": Kind({}, "M", samples=long_paths(), limit=1e-10),
    "one in four is attention": Kind({}, "GGG*", samples=0),
    "only Gated DeltaNet": Kind({}, "G", samples=1, slow=True),
    "Gated DeltaNet, MLPs": Kind({}, "G-*-", samples=2, slow=True),
    "Gated DeltaNet, experts": Kind(MOE, "GE*E", samples=3, slow=True),
    "Gated DeltaNet, deterministic": Kind({"deterministic_mode": True}, "G*G-", samples=4, slow=True),
    "Gated DeltaNet, full recompute": Kind(FULL, "G*G-", samples=5),
    "wide convolution": Kind({"linear_conv_kernel_dim": 7}, "G*", samples=7, slow=True),
    "convolution of one token": Kind({"linear_conv_kernel_dim": 1}, "G*", samples=8, slow=True),
    "as many keys as values": Kind({"linear_num_key_heads": 4}, "G*", samples=9, slow=True),
    "gated attention": Kind({"attention_output_gate": True}, "GG*-", samples=10, slow=True),
    "Gated DeltaNet, long paths": Kind({}, "G", samples=long_paths(), limit=1e-10),
    "GPT with Gated DeltaNet": Kind(DELTA_GPT, samples=11),
    "GPT with Gated DeltaNet, full recompute": Kind(DELTA_GPT | FULL, samples=11),
    "GPT with Gated DeltaNet, experts": Kind(DELTA_GPT | MOE, samples=11),
}
INDEXED = {
    f"{topk} keys, {loss}": sparse({"dsa_indexer_topk": topk} | changes, topk)
    for loss, changes in {"no loss": {}, "loss": LOSS, "loss of chosen keys": SPARSE_LOSS}.items()
    for topk in (1, 12, 130, 1000)  # the last are more than any path has
    if (topk, loss) not in ((1, "no loss"), (130, "no loss"), (12, "loss"), (1000, "loss"))
}
INDEXED |= {
    name: replace(INDEXED[name], slow=True)
    for name in ("1 keys, loss of chosen keys", "1000 keys, loss of chosen keys")
}
INDEXED |= {
    "YaRN": sparse(LOSS | LATENT_YARN, 1),
    "norms of latents": sparse(LOSS | {"qk_layernorm": True}, 2, slow=True),
    "queries without a latent": sparse(LOSS | {"q_lora_rank": None}, 3, slow=True),
    "interleaved positions, fp32 norm": sparse(
        LOSS | {"dsa_indexer_rope_interleaved": True, "dsa_indexer_k_norm_fp32": True}, 4, slow=True
    ),
    # So many heads that no score is 0 in all of them.
    "scores of ReLU": sparse(LOSS | {"dsa_indexer_scoring_relu": True, "dsa_indexer_n_heads": 32}, 3),
    "sparse, full recompute": sparse(FULL | SPARSE_LOSS, 5),
    "sparse, selective recompute": sparse(
        LOSS | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]}, 6, slow=True
    ),
    "sparse, experts, recompute": sparse(LOSS | MOE | EXPERTS_AGAIN, 7, slow=True),
    "pattern": sparse(LOSS, 8, "D-D"),
    "pattern with experts and latent attention": sparse(LOSS | MOE, 9, "DE+", slow=True),
}
KINDS = ATTENTION | {f"pattern, {name}": kind for name, kind in PATTERNS.items()} | STATES | INDEXED


@pytest.fixture(autouse=True)
def fresh_losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scale balancing losses exactly, and forget the log and the scale of an indexer's losses."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(1, dtype=torch.float64))
    if not HAS_SPARSE_ATTENTION:
        yield
        return
    from megatron.core.transformer.experimental_attention_variant import dsa

    dsa.DSAIndexerLossLoggingHelper.tracker.clear()  # as long as the first model has layers
    yield
    dsa.DSAIndexerLossLoggingHelper.tracker.clear()
    dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None  # a schedule's has another shape


def limit_of(kind: Kind) -> float:
    """Upstream's scores of experts are in fp32 for any dtype of the model."""
    return FP32_INSIDE if "num_moe_experts" in kind.settings else kind.limit


@of(KINDS)
def test_folded_is_unfolded(kind: Kind) -> None:
    stock, tree = kind.twins()
    with kind.computing():
        assert_folded_is_unfolded(stock, tree, kind.forest(), backend=kind.backend, limit=limit_of(kind))
    assert list(tree.state_dict()) == list(stock.state_dict())


PLAIN = {name: ATTENTION[name] for name in ("rope", "yarn", "GPT-2", "full recompute", "heterogeneous")}
PLAIN |= {"pattern": PATTERNS["attention, MLP"], "Mamba": Kind({}, "M-M"), "Gated DeltaNet": Kind({}, "GG")}
PLAIN |= {"deterministic": Kind({"deterministic_mode": True}, "GG"), "sparse": sparse(LOSS, 0)}


@of(PLAIN)
def test_without_a_tree_the_model_is_stock_to_the_bit(kind: Kind) -> None:
    stock, tree = kind.twins()
    samples = SAMPLES if kind.pattern is None else deep_samples()[:1]
    with kind.computing():
        one, other = (unfolded(model, samples, entropy_weight=0.1) for model in (tree, stock))
    assert torch.equal(one["loss"], other["loss"])
    assert all(map(torch.equal, one["logprob"] + one["entropy"], other["logprob"] + other["entropy"]))
    assert one["grads"].keys() == other["grads"].keys()
    assert all(
        grad is other["grads"][name] or torch.equal(grad, other["grads"][name]) for name, grad in one["grads"].items()
    )
    assert list(tree.state_dict()) == list(stock.state_dict())
    if set(kind.pattern or "") & set("MG"):  # a checkpoint may name classes
        assert [type(one).__name__ for one in tree.modules()] == [type(one).__name__ for one in stock.modules()]


@pytest.mark.parametrize("padding", [0, 1, 70])
@of({"Mamba": Kind({}, "MM"), "Gated DeltaNet": Kind({}, "GG"), "sparse": sparse(LOSS | {"num_layers": 1}, 0)})
def test_padding_changes_nothing(kind: Kind, padding: int) -> None:
    """One token that no sample has would change the loss of an indexer, or be chosen as a key."""
    _, tree = kind.twins()
    samples, found = deep_samples(12), []
    for extra in (3, padding):
        layout = fold(samples, padded_size=fold(samples).physical_tokens + extra)
        with kind.computing():
            supervised(tree, MicroBatch.from_layout(layout), WeightedSum(fused=False)).backward()
        found.append(take_gradients(tree))
    assert_same_gradients(*found, 1e-13 if kind.pattern else 1e-11)


@of({"Mamba": Kind({}, "M"), "Gated DeltaNet": Kind({}, "G"), "sparse": sparse({}, 0)})
def test_a_built_layer_follows(kind: Kind) -> None:
    stock, tree = kind.twins()
    follow_trees(stock)
    batch = batch_of(deep_samples())
    assert torch.equal(tree_forward(stock, batch), tree_forward(tree, batch))


VARIED = {name: ATTENTION[name] for name in ("yarn", "learned_absolute", "no positions", "GPT-2", "full recompute")}
VARIED |= {name: ATTENTION[name] for name in ("selective recompute", "heterogeneous", "experts", *WINDOWS_AND_SINKS)}
VARIED |= {f"{name}: chunks": Kind(backend=name) for name in ("reference", "cascade")}
# Latents are projected by each chunk that reads them.
VARIED |= {
    name: Kind(LATENT | changes, limit=FP32_INSIDE)
    for name, changes in {
        "latent attention": {},
        "latent attention, recomputed projection": SELECTIVE | {"recompute_modules": ["mla_up_proj", "core_attn"]},
        "latent attention, full recompute": FULL,
    }.items()
}
VARIED |= {
    "query-key layer scaling": replace(
        ATTENTION["windows, learnable sinks, query-key layer scaling"], limit=FP32_INSIDE
    )
}
del VARIED["windows, learnable sinks, query-key layer scaling"]
IN_CI = {
    "Gated DeltaNet": Kind({}, "G*G-"),
    "only Gated DeltaNet": Kind({}, "G"),
    "Mamba": Kind({}, "M*M-"),
    "only Mamba": Kind({}, "M"),
    "experts with states": Kind(MOE, "MGE*E"),
    "wide convolution": Kind({"linear_conv_kernel_dim": 7}, "G"),
    "convolution of one token": Kind({"linear_conv_kernel_dim": 1}, "G*"),
    "one group": Kind({"mamba_num_groups": 1}, "M*"),
    "few keys": sparse({"dsa_indexer_topk": 3}, 0),
    "few keys, loss": sparse({"dsa_indexer_topk": 3} | SPARSE_LOSS, 0),
    "few keys, full recompute": sparse({"dsa_indexer_topk": 5} | FULL, 0),
    "keys of another layer": sparse({"num_layers": 4, "dsa_indexer_topk_freq": 2, "dsa_indexer_topk": 4}, 0),
}
CUT = VARIED | {
    "Mamba and Gated DeltaNet": Kind({}, "MG*M"),
    "states, full recompute": Kind(FULL, "MG*-"),
    "GPT with Gated DeltaNet": Kind(DELTA_GPT | {"linear_attention_freq": 2}),
    "GPT with Gated DeltaNet, full recompute": Kind(DELTA_GPT | FULL | {"linear_attention_freq": 2}),
    "few keys, full recompute, loss": sparse({"dsa_indexer_topk": 5} | LOSS | FULL, 0),
    "sparse pattern": sparse({"dsa_indexer_topk": 4} | LOSS, 0, "D-D"),
    "pattern": Kind({"is_hybrid_model": True}, "*-*-"),
}


@pytest.mark.parametrize("name", [*CUT, *(pytest.param(name, marks=pytest.mark.ci) for name in IN_CI)])
def test_trees_in_chunks(name: str) -> None:
    """Cut in chunks of one or two tokens, and anywhere; other chunks' keys, latents and states are read."""
    kind = (CUT | IN_CI)[name]
    stock, tree = (model.train() for model in kind.twins())
    samples, rng = small_tree(2 + len(name)), random.Random(name)
    places = range(1, fold(samples).physical_tokens)
    with kind.computing():
        expected = unfolded(stock, samples)
        every = places[:: min(2, len(tree.decoder.layers))]
        for cuts in (every, *(rng.sample(places, rng.randint(2, min(9, len(places)))) for _ in range(2))):
            options = {"multiple": rng.randint(1, 4), "pass_tokens": rng.randint(1, 9), "backend": kind.backend}
            assert_equal(train(tree, carried(samples, cuts, config=tree.config, **options)), expected, limit_of(kind))


@pytest.mark.slow
def test_recomputation_with_megatrons_compiled_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the copy in conftest.py; its compilation takes 50 CPU-seconds."""
    monkeypatch.setattr(megatron_random, "_share_storage_ext", None, raising=False)
    test_trees_in_chunks("latent attention, recomputed projection")
