"""Small stock GPT models, their tree-capable twins, and the forest that both have to agree on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mcore_prefix_tree import Sample
from mcore_prefix_tree.cpu.specs import cpu_spec
from mcore_prefix_tree.mcore import with_prefix_tree

VOCAB = 61
LAYERS = 3
# Changes of a configuration.
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp64",
}
DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA = {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": 4}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def tiny_config(dtype: torch.dtype = torch.float64, **changes: Any) -> TransformerConfig:
    """Grouped queries, SwiGLU, RMSNorm, no biases; ``yarn_*`` are attributes, as Megatron-LM's arguments set them."""
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "calculate_per_token_loss": True,
        "attention_softmax_in_fp32": False,
    } | changes
    attributes = {name: settings.pop(name) for name in list(settings) if name.startswith("yarn_")}
    kind = TransformerConfig
    if "heterogeneous_layers_config_encoded_json" in settings:
        kind = HeterogeneousTransformerConfig
    elif settings.get("multi_latent_attention"):
        kind = MLATransformerConfig
    config = kind(**settings)
    for name, value in attributes.items():
        setattr(config, name, value)
    return config


def local_spec(config: TransformerConfig, **options: Any) -> Any:
    """Megatron's own spec for the configuration, with the parts that it lacks on a CPU."""
    if isinstance(config, HeterogeneousTransformerConfig):
        return get_gpt_heterogeneous_layer_spec(config)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
        **options,
    )
    return cpu_spec(spec, config)


def build(config: TransformerConfig, spec: Any, **model: Any) -> GPTModel:
    """With noise, so that no norm is one, no bias is zero and no gradient is right by accident."""
    torch.manual_seed(0)  # which experts get tokens is up to the draw
    settings = {"vocab_size": VOCAB, "max_sequence_length": 64, "position_embedding_type": "rope"} | model
    return noisy(GPTModel(config, spec, **settings))


def noisy(model: Any) -> Any:
    """A model of the dtype of its configuration, with some noise in every parameter."""
    built = model.to(model.config.params_dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter.dtype))
    return built


def twins(
    config: TransformerConfig, spec: Any = None, *, follows: bool = True, **model: Any
) -> tuple[GPTModel, GPTModel]:
    """A stock model and one whose layers follow trees, or do so later, with the same weights."""
    spec = local_spec(config) if spec is None else spec
    stock, tree = build(config, spec, **model), build(config, with_prefix_tree(spec) if follows else spec, **model)
    tree.load_state_dict(stock.state_dict(), strict=True)
    return stock, tree


def hybrid(config: Any, pattern: str, spec: Any = None, **model: Any) -> Any:
    """A HybridModel with noise; ``spec`` is that of its layers, by default those for a CPU."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from mcore_prefix_tree.cpu.hybrid import hybrid_stack

    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB, "max_sequence_length": 64, "position_embedding_type": "rope"} | model
    return noisy(HybridModel(config, hybrid_stack if spec is None else spec, hybrid_layer_pattern=pattern, **settings))


def hybrid_twins(config: Any, pattern: str, *, follows: bool = True, **model: Any) -> tuple[Any, Any]:
    """A stock model and one whose layers follow trees, or do so later, with the same weights."""
    from mcore_prefix_tree.cpu.hybrid import hybrid_stack

    stock = hybrid(config, pattern, **model)
    tree = hybrid(config, pattern, with_prefix_tree(hybrid_stack) if follows else hybrid_stack, **model)
    tree.load_state_dict(stock.state_dict(), strict=True)
    return stock, tree


def branching_samples() -> list[Sample]:
    """A tree that branches at every one of four levels, two more roots, and every edge case of DESIGN.md section 5."""
    rng = random.Random(0)

    def run(length: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(length)]

    paths = [run(3)]
    leaves: list[list[int]] = []
    for level, fan_out in enumerate((2, 3, 2, 2)):
        paths = [path + run(rng.randint(1, 3)) for path in paths for _ in range(fan_out)]
        kept = paths[: 2 if level else 1]
        leaves += kept  # samples that others continue: strict prefixes
        paths = paths if level < 2 else paths[::2]
    leaves += paths
    leaves += [leaves[-1], run(9), [5], [leaves[0][0], 60]]  # a duplicate, a lone path, a single token, an early fork

    def mask(tokens: list[int]) -> list[float]:
        return [rng.choice([0.0, 1.0, 1.0, 0.5]) for _ in tokens]

    samples = [Sample(tokens=tokens, loss_mask=mask(tokens)) for tokens in leaves]
    samples.append(Sample(tokens=leaves[-5], merge_key="other policy"))
    samples.append(Sample(tokens=leaves[3], loss_mask=[0.0] * len(leaves[3])))
    return samples


def with_long_memory(models: tuple[Any, Any]) -> tuple[Any, Any]:
    """Decays near one: states last for many tokens, and no gradient is the small rest of large ones."""
    for model in models:
        for parameter in (value for name, value in model.named_parameters() if name.endswith("A_log")):
            parameter.data -= 4
    return models


def deep_samples(seed: int = 0) -> list[Sample]:
    """Two trees that branch at every one of five levels, with segments of one token and ends around chunks of 64.

    There are also strict prefixes, a duplicate, a lone token and an early fork.
    """
    rng = random.Random(seed)

    def run(*lengths: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.choice(lengths))]

    paths: list[list[int]] = []
    for first in ((63, 64, 65), (1, 3)):
        path = run(*first)
        for _ in range(5):
            path += run(1, 2, 7, 20, 64)
            paths += [path + run(1, 2, 5, 40) for _ in range(rng.choice((1, 2)))]
        paths += [path, path[: len(path) // 2]]
    paths += [[5, 7, 9], [5, 8, 9], [5], [5, 7, 9]]
    return [Sample(tokens=tokens, loss_mask=[rng.choice([0.0, 1.0, 1.0, 0.5]) for _ in tokens]) for tokens in paths]


def heterogeneous_json() -> str:
    """A normal layer, one without attention, one with a linear in its place."""

    def block(**attention: Any) -> dict[str, Any]:
        attention = {"n_heads_in_group": None, "no_op": False, "replace_with_linear": False} | attention
        return {"attention": attention, "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False}}

    blocks = [block(n_heads_in_group=2), block(no_op=True), block(replace_with_linear=True)]
    return json.dumps({"block_configs": blocks})


def config_with(**changes: Any) -> TransformerConfig:
    """Set past ``__post_init__``, which itself rejects some of these."""
    config = tiny_config()
    for name, value in changes.items():
        assert hasattr(config, name) or name in NEWER | LATENT_ONLY, name
        setattr(config, name, value)
    return config


GRAPHS: dict[str, Any] = {
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_modules": [SimpleNamespace(name="moe_router")],
    "bf16": True,
}
# Settings that a model which follows trees rejects, by name.
REFUSED_SETTINGS: list[dict[str, Any]] = [
    {"context_parallel_size": 2},
    {"attention_dropout": 0.1},
    {"hidden_dropout": 0.1},
    {"multi_latent_attention": True, "apply_rope_fusion": True},
    {"multi_latent_attention": True, "tensor_model_parallel_size": 2},
    {"multi_latent_attention": True, "cache_mla_latents": True},
    {"experimental_attention_variant": "unknown"},
    {"dsa_indexer_loss_coeff": 0.1, "calculate_per_token_loss": False},
    {"window_size": (128, 1)},
    {"window_size": (-1, 0)},
    {"fused_single_qkv_rope": True},
    {"qk_clip": True},
    {"log_max_attention_logit": True},
    {"fp8": "hybrid", "fp8_recipe": "delayed"},
    {"fp8": "hybrid", "fp8_recipe": "custom"},
    *(
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", **setting}
        for setting in (
            {"fp8_param": True},
            {"fp8_dot_product_attention": True},
            {"fp8_multi_head_attention": True},
            {"fp8_output_proj": True},
            {"moe_router_padding_for_quantization": True},
            {"experimental_attention_variant": "gated_delta_net"},
            {"mtp_num_layers": 1},
        )
    ),
    {"fp4": "e2m1"},
    {"use_kitchen": True},
    {"quant_recipe": "of its own"},
    {"cuda_graph_impl": "local"},
    {"cuda_graph_impl": "transformer_engine"},
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [SimpleNamespace(name="attn")]},
    *(
        GRAPHS | setting
        for setting in (
            {"moe_aux_loss_coeff": 0.1},
            {"moe_z_loss_coeff": 0.1},
            {"moe_router_enable_expert_bias": True},
            {"pipeline_model_parallel_size": 2},
            {"fp8_recipe": "tensorwise", "fp8": "hybrid"},
            {"mtp_num_layers": 1},
            {"bf16": False},
        )
    ),
    {"tp_comm_overlap": True},
    {"overlap_moe_expert_parallel_comm": True},
    {"enable_mhc_connections": True},
    {"mtp_num_layers": -1},
    {"mtp_num_layers": 1_000_000},
]
REFUSED_EXPERT_SETTINGS: list[dict[str, Any]] = [
    {"moe_router_load_balancing_type": "sinkhorn"},
    {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
    {"moe_expert_capacity_factor": 1.25},
    {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
    {"moe_router_topk": 65},
    {"moe_input_jitter_eps": 0.01},
    {"moe_router_load_balancing_type": "quantile_balancing"},
    {"moe_router_force_load_balancing": True},
    {"moe_router_force_biased": 0.1},
    {"moe_expert_rank_capacity_factor": 1.5},
    {"moe_dispatch_fwd_dtype": "mxfp8"},
    {"moe_combine_bwd_dtype": "mxfp8"},
]
# Fields that older releases of megatron-core lack.
NEWER = {
    *("moe_router_force_biased", "moe_expert_rank_capacity_factor"),
    *(
        "moe_dispatch_fwd_dtype",
        "moe_combine_bwd_dtype",
        "enable_mhc_connections",
        "fp8_output_proj",
        "cuda_graph_modules",
    ),
}
# A setting of MLATransformerConfig only.
LATENT_ONLY = {"cache_mla_latents"}


def ids_of(settings: Sequence[dict[str, Any]]) -> list[str]:
    return [", ".join(f"{name}={value}" for name, value in setting.items()) for setting in settings]
