"""Folded steps on a world's ranks, and the stock model's on one process, in one call each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from harness.folded_jobs import Job, branching_samples, folded_gradients, unfolded_gradients
from harness.weights import assemble
from harness.worlds import Layout, world
from mcore_prefix_tree import Sample

SAMPLES = branching_samples()
LONGEST = max(len(sample) for sample in SAMPLES)
FP64, FP32 = 1e-12, 1e-5
# Upstream routes in fp32 for any dtype of the model: a shared token's gradient is rounded there once instead of
# once per sample. One wrong key costs 1e-2.
FP32_INSIDE = 1e-6
MOE = (
    ("num_moe_experts", 4),
    ("moe_ffn_hidden_size", 32),
    ("moe_router_topk", 2),
    ("moe_router_load_balancing_type", "none"),
)
BALANCED = (
    *MOE[:-1],
    ("moe_router_load_balancing_type", "seq_aux_loss"),
    ("moe_aux_loss_coeff", 0.05),
    ("moe_z_loss_coeff", 0.01),
    ("moe_router_enable_expert_bias", True),
    ("moe_router_score_function", "sigmoid"),
    ("moe_router_bias_update_rate", 0.1),
)
LATENT = (
    ("multi_latent_attention", True),
    ("num_query_groups", 4),
    ("q_lora_rank", 24),
    ("kv_lora_rank", 20),
    ("qk_head_dim", 16),
    ("qk_pos_emb_head_dim", 8),
    ("v_head_dim", 12),
    ("rope_type", "yarn"),
    ("rotary_scaling_factor", 4.0),
    ("original_max_position_embeddings", 8),
)
DELTA_NET = (
    ("linear_conv_kernel_dim", 4),
    ("linear_key_head_dim", 8),
    ("linear_value_head_dim", 12),
    ("linear_num_key_heads", 2),
    ("linear_num_value_heads", 4),
)
SPARSE = (
    ("experimental_attention_variant", "dsa"),
    ("dsa_indexer_n_heads", 2),
    ("dsa_indexer_head_dim", 16),
    ("dsa_indexer_topk", 6),
    ("dsa_indexer_loss_coeff", 0.5),
    ("dsa_indexer_use_sparse_loss", True),
    ("dsa_indexer_rotate_activation", False),
    ("dsa_indexer_scoring_relu", False),
)
MAMBA = (("mamba_state_dim", 6), ("mamba_head_dim", 8), ("mamba_num_groups", 2), ("mamba_num_heads", 4))
Result = tuple[float, dict[str, torch.Tensor]]


@functools.cache
def _oracle(job: Job) -> Result:
    ((loss, parts),) = world(1).run(unfolded_gradients, Layout(), job, SAMPLES, layout=Layout())
    return loss, assemble(parts)


def oracle(job: Job) -> Result:
    """Each sample by itself, one process, stock layers; run once for all the ways of cutting the batch."""
    return _oracle(replace(job, max_tokens=0, backend="none"))


def folded(size: int, layout: Layout, job: Job, samples: Sequence[Sample] = SAMPLES) -> Result:
    results = world(size).run(folded_gradients, layout, job, samples, layout=layout)
    losses = {loss for loss, _, _ in results}
    assert max(losses) - min(losses) <= 1e-12 * abs(max(losses)), "all ranks report one loss"
    return results[0][0], assemble(itertools.chain.from_iterable(parts for _, parts, _ in results))


def check(actual: Result, expected: Result, limit: float) -> None:
    assert abs(actual[0] - expected[0]) <= limit * abs(expected[0])
    assert actual[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        error = torch.linalg.vector_norm((actual[1][name] - tensor).double()) / torch.linalg.vector_norm(
            tensor.double()
        )
        assert error <= limit, f"{name}: {error:.2e}"
