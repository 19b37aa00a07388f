"""One step of tiny models in the seam, folded and unfolded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from harness.kept_sets import within_sets
from harness.oracles import worst
from harness.seam_models import branching_samples, heterogeneous_json
from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.logprob import restore
from mcore_prefix_tree.mcore.engine.forward_step import forward_step, tree_forward
from mcore_prefix_tree.mcore.outputs import Logprobs, Readout, WeightedSum
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import LossOutput, sft_loss
from mcore_prefix_tree.sample import Tempered

SAMPLES = branching_samples()


def folded_batch(backend: str = "path") -> MicroBatch:
    return batch_of(SAMPLES, backend=backend)


def batch_of(samples: list[Sample] = SAMPLES, *, only_supervised: bool = False, backend: str = "path") -> MicroBatch:
    layout = fold(samples, padded_size=fold(samples).physical_tokens + 3)
    needed = layout.edge_weight != 0 if only_supervised else None
    return MicroBatch.from_layout(layout, needed=needed, attention_backend=backend)


def score_alone(model: torch.nn.Module, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities ``[n - 1]`` and entropies ``[n]`` of one sample, through a stock model."""
    ids = torch.tensor(sample.tokens.tolist()).unsqueeze(0)
    logits = model(ids, torch.arange(len(sample)).unsqueeze(0), None)[0]
    rows = torch.log_softmax(within_sets(logits, sample) / sample.temperature, dim=-1)
    entropy = -(rows.exp() * rows.masked_fill(rows == -torch.inf, 0)).sum(dim=1)
    return rows[:-1].gather(1, ids[0, 1:, None])[:, 0], entropy


def unfolded(
    model: torch.nn.Module,
    samples: Sequence[Sample] = SAMPLES,
    *,
    entropy_weight: float = 0.0,
    around: Callable[[Sample], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """Each sample by itself through a stock model: rows, loss, scored tokens, and gradients by name."""
    logprobs, entropies, total, count = [], [], torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        mask = torch.tensor(sample.loss_mask[1:].tolist())
        with around(sample):
            logprob, entropy = score_alone(model, sample)
            loss = entropy_weight * entropy[:-1].sum() - (logprob * mask).sum()
            loss.backward()
        total += loss.detach()
        logprobs.append(logprob.detach())
        entropies.append(entropy.detach())
        count += int(mask.count_nonzero())
    grads = take_gradients(model)
    return {"logprob": logprobs, "entropy": entropies, "loss": total, "count": count, "grads": grads}


def folded(
    model: torch.nn.Module, batch: MicroBatch, *, fused: bool = False, entropy_weight: float = 0.1
) -> dict[str, Any]:
    """The same from a folded micro-batch, through logits or the fused head."""
    readout = Logprobs(entropy=True, fused=fused)
    logprob, entropy = readout.read(tree_forward(model, batch, readout), batch)
    assert entropy is not None
    rows = restore(entropy, batch.layout)
    loss = sft_loss(logprob, batch.loss_weight) + entropy_weight * sum(row[:-1].sum() for row in rows)
    loss.backward()
    return {
        "logprob": [row[1:].detach() for row in restore(logprob, batch.layout)],
        "entropy": [row[: -1 if fused else None].detach() for row in rows],  # a head gives none that is not read
        "loss": loss.detach(),
        "grads": take_gradients(model),
    }


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], limit: float = 1e-12) -> None:
    """Compare all that both have."""
    for name in ("logprob", "entropy"):
        for index, row in enumerate(actual.get(name, ())):
            assert worst(row, expected[name][index][: len(row)]) < limit, (name, index, len(row))
    assert worst(actual["loss"], expected["loss"]) < limit
    assert actual.get("count", expected["count"]) == expected["count"]
    assert_same_gradients(actual["grads"], expected["grads"], limit)


def assert_folded_is_unfolded(
    stock: Any, tree: Any, samples: list[Sample] = SAMPLES, *, backend: str = "path", limit: float = 1e-12
) -> None:
    """Compare log-probabilities, entropies, a loss of both, and every gradient."""
    expected = unfolded(stock, samples, entropy_weight=0.1)
    assert_equal(folded(tree, batch_of(samples, backend=backend)), expected, limit)


def supervised(model: torch.nn.Module, batch: MicroBatch, readout: Readout[Any]) -> torch.Tensor:
    """The loss that a readout gives."""
    found = readout.read(tree_forward(model, batch, readout), batch)
    return found.loss if isinstance(found, LossOutput) else sft_loss(found[0], batch.loss_weight)


def take_gradients(model: torch.nn.Module) -> dict[str, Any]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return grads


def assert_same_gradients(actual: dict[str, Any], expected: dict[str, Any], limit: float) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        if wanted is None:  # of an indexer without a loss, or of a frozen weight
            assert actual[name] is None, name
            continue
        error = worst(actual[name], wanted)
        assert error < limit, f"{name}: {error:.2e}"


YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
GPT2 = {
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "gated_linear_unit": False,
    "activation_func": F.gelu,
}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_ffn_hidden_size": 24,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp64",
}
LATENT_SIZES = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
LATENT = LATENT_SIZES | {"rope_type": "rope"}
SPARSE = LATENT | {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 12,
    "dsa_indexer_loss_coeff": 0.0,
    "dsa_indexer_rotate_activation": False,
    # Scores of exactly 0 are common with it, and which key of equal ones is chosen is up to torch.topk.
    "dsa_indexer_scoring_relu": False,
}
LATENT_YARN = LATENT | {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
# name: (fields of the config, arguments of GPTModel)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rope": ({}, {}),
    "yarn": (YARN, {"position_embedding_type": "yarn"}),
    "learned_absolute": ({}, {"position_embedding_type": "learned_absolute"}),
    "no positions": ({}, {"position_embedding_type": "none"}),
    "rope scaling": ({}, {"rope_scaling": True}),
    "rope interpolation": ({}, {"seq_len_interpolation_factor": 2.0}),
    "rotary_percent": ({}, {"rotary_percent": 0.5}),
    "rotary_interleaved": ({"rotary_interleaved": True}, {}),
    "layers without rope": ({"no_rope_freq": [0, 1, 0]}, {}),
    "multi-head": ({"num_query_groups": 4}, {}),
    "multi-query": ({"num_query_groups": 1}, {}),
    "wide heads": ({"kv_channels": 24}, {}),
    "qk_layernorm": ({"qk_layernorm": True}, {}),
    "tied embeddings": ({}, {"share_embeddings_and_output_weights": True}),
    "GPT-2": (GPT2, {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True}),
    "LayerNorm, biases, rope": (GPT2, {}),
    "softmax_scale": ({"softmax_scale": 0.11}, {}),
    "query-key layer scaling": ({"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}, {}),
    "full recompute": ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, {}),
    "full recompute by block": (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {},
    ),
    "selective recompute": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, {}),
    "selective recompute, yarn": (
        YARN | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        {"position_embedding_type": "yarn"},
    ),
    "latent attention": (LATENT, {}),
    "latent attention, yarn": (LATENT_YARN, {}),
    "latent attention, queries without a latent": (LATENT | {"q_lora_rank": None}, {}),
    "latent attention, qk_layernorm": (LATENT | {"qk_layernorm": True}, {}),
    "latent attention, one head": (LATENT | {"num_attention_heads": 1, "num_query_groups": 1}, {}),
    "latent attention, full recompute": (
        LATENT | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {},
    ),
    "latent attention, yarn, selective recompute": (
        LATENT_YARN | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
        {},
    ),
    "heterogeneous": ({"heterogeneous_layers_config_encoded_json": heterogeneous_json()}, {}),
}
sft_forward_step = partial(forward_step, readout=WeightedSum(fused=False))


def sft_step(model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """As Megatron's schedules run it, with the gradient of the logits written over the logits."""
    output, loss_func = sft_forward_step(iter([batch]), model)
    loss, num_tokens, reported = loss_func(output)
    loss.backward()
    return loss.detach(), num_tokens, reported


WINDOWS_AND_SINKS = {
    "window": {"window_size": (3, 0)},
    "window of one token": {"window_size": (0, 0)},
    "window wider than any sample": {"window_size": (1000, 0)},
    "windows but in every second layer": {"window_size": (2, 0), "window_attn_skip_freq": 2},
    "windows in two layers": {"window_size": (4, 0), "window_attn_skip_freq": [1, 0, 1]},
    "learnable sinks": {"softmax_type": "learnable"},
    "off-by-one": {"softmax_type": "off-by-one"},
    "windows, learnable sinks, query-key layer scaling": {
        "window_size": (5, 0),
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
        "apply_query_key_layer_scaling": True,
        "attention_softmax_in_fp32": True,
    },
    "windows, learnable sinks, selective recompute": {
        "window_size": (5, 0),
        "softmax_type": "learnable",
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
}
# Upstream computes some things in fp32 for any dtype of the model: a sum over the samples of a token is
# rounded once there, or once per sample. A query that sees one wrong key costs 1e-2.
FP32_INSIDE = 1e-6


WARM = [
    Sample(tokens=s.tokens, loss_mask=s.loss_mask, merge_key=Tempered(temperature=0.6 + 0.2 * (i % 3), key=s.merge_key))
    for i, s in enumerate(SAMPLES)
]
