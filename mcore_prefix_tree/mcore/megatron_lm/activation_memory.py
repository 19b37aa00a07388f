"""Memory that a rank keeps of a micro-batch from its forward to its backward pass: the dry run's estimate.

Megatron's own ``compute_activation_memory`` (megatron/training/theoretical_memory_usage.py) counts no experts and no
gate in an MLP, takes queries to be as wide as the hidden size, and ignores recomputation.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from mcore_prefix_tree.mcore.engine.backend import head_dims
from mcore_prefix_tree.plan.model_shape import layers_with_experts

# In the formulas: h hidden size, q and kv widths of all queries and of all keys, f of an MLP, k experts per token.


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Bytes of a micro-batch in one layer: kept until its backward, and recomputed (``again``) while that runs."""

    kept: float
    again: float = 0.0


def warm_up_bytes(args: argparse.Namespace) -> float:
    """Return the least bytes that Megatron-LM takes when it compiles its fused functions, before there is a model.

    ``_warmup_jit_function`` (megatron/training/initialize.py) runs on ``--seq-length`` times ``--micro-batch-size``
    tokens: first the activation of an MLP, on one input with the output and the one before; then the sum of a residual
    and a bias, on two inputs with as many outputs, of hidden states that only sequence parallelism divides. Under
    ``--prefix-tree`` these are the longest sample and the logical samples of a micro-batch, most of whose tokens do
    not exist.
    """
    tokens = args.seq_length * args.micro_batch_size / args.context_parallel_size
    tensor = args.tensor_model_parallel_size
    activation = args.ffn_hidden_size / tensor * (1 + 2 * (0.5 if args.swiglu else 1))
    residual = args.hidden_size / (tensor if args.sequence_parallel else 1) * 4
    return float(tokens * max(activation, residual) * (2 if args.bf16 else 4))


def activation_bytes(config: Any, tokens: int, *, micro_batches: int, logits_width: int = 0) -> float:
    """Return the peak bytes of activations on a rank of the first pipeline stage, with balanced routing.

    Elements that a layer keeps for each token, by Korthikanti et al., Reducing Activation Recomputation in Large
    Transformer Models (https://arxiv.org/abs/2205.05198), section 4.1, as in Megatron's ``compute_activation_memory``,
    but without dropout masks, since folding refuses dropout:

    - ``4h``: the inputs of both norms, of attention and of the MLP or router.
    - ``3q + 3kv``: rotated queries and keys, the output of attention, and all of the projection, ``q + 2kv``, because
      values are a view of it; with QK layernorm also the inputs of that, ``q + kv``, which are copies. Attention along
      a tree keeps nothing of pairs of tokens: recomputing ``core_attn`` spares nothing.
    - multi-latent attention instead: queries, keys, values and the output of attention, each a copy, and both latents,
      with QK layernorm twice. Recomputing ``mla_up_proj`` drops the first three.
    - an MLP: ``f`` for the input of its second matrix and ``2f`` for the output of its first with a gate, ``f``
      without.
    - experts: ``k * (h + f + 2f)``, which ``TEGroupedMLP.forward`` (megatron/core/transformer/moe/experts.py) keeps of
      each token for each of its experts: the input of the first matrix, gathered over expert tensor parallelism, its
      output, and the input of the second. ``MoELayer`` (moe_layer.py) and its dispatchers also keep indices and
      probabilities, which are not counted. A rank has as many tokens to compute as it sends to others only if
      all experts are chosen equally often; a rank whose experts are chosen more often keeps more.
    - a shared expert: an MLP.

    Tensor parallelism divides all of it, but ``4h`` only with sequence parallelism. Between both passes there are as
    many micro-batches as there are stages, so that the first stage keeps as much as all layers would of one; see
    ``compute_activation_memory`` for the interleaved schedule and for fewer micro-batches.

    Each of a rank's ``micro_batches`` of a step has as many physical ``tokens``. ``logits_width`` is the size of the
    vocabulary if all tokens' logits are kept; it counts without pipeline stages only.
    """
    have_experts = [False] * config.num_layers
    if config.num_moe_experts is not None:
        have_experts = layers_with_experts(config.num_layers, config.moe_layer_freq)
    layers = [_layer(config, tokens, has_experts) for has_experts in have_experts]
    stages, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    in_flight: float = min(1.0, micro_batches / stages) if virtual is None else 1 + (stages - 1) / (stages * virtual)
    kept, again = _kept(config, tokens, layers)
    head = 0.0
    if stages == 1:
        # The last norm's input and its output, which the vocabulary's matrix takes.
        head = 2 * _hidden(config, tokens) + 4 * tokens * logits_width / config.tensor_model_parallel_size
    return in_flight * kept + again + head


def _kept(config: Any, tokens: int, layers: list[_Layer]) -> tuple[float, float]:
    """Return the bytes of all layers, and of the largest of those that are recomputed together."""
    if config.recompute_granularity != "full":
        return sum(layer.kept for layer in layers), max(layer.again for layer in layers)
    inputs = _hidden(config, tokens)
    if config.distribute_saved_activations:
        inputs /= config.tensor_model_parallel_size
    whole, largest = sum(layer.kept for layer in layers), max(layer.kept for layer in layers)
    chunks = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    at_once = min(config.recompute_num_layers, len(layers) // chunks)
    if config.recompute_method == "uniform":
        return inputs * len(layers) / at_once, largest * at_once
    # By block: the first layers of each chunk of the model are recomputed, one at a time.
    share = at_once * chunks / len(layers)
    return share * inputs * len(layers) + (1 - share) * whole, largest


def _hidden(config: Any, tokens: int) -> float:
    """Return the bytes of hidden states of all tokens, or of this rank's under sequence parallelism."""
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return float(tokens * config.hidden_size * config.params_dtype.itemsize / parts)


def _layer(config: Any, tokens: int, has_experts: bool) -> _Layer:
    recomputed = set(config.recompute_modules) if config.recompute_granularity == "selective" else set()
    sharded = tokens * config.params_dtype.itemsize / config.tensor_model_parallel_size

    attention = 4 * _hidden(config, tokens)
    parts = {}
    if config.multi_latent_attention:
        query, value = (config.num_attention_heads * dim for dim in head_dims(config))
        latent = (2 if config.qk_layernorm else 1) * ((config.q_lora_rank or 0) + config.kv_lora_rank)
        attention += _hidden(config, tokens) / config.hidden_size * (latent + config.qk_pos_emb_head_dim)
        attention += sharded * value
        parts["mla_up_proj"] = sharded * (2 * query + value)
    else:
        query = config.num_attention_heads * config.kv_channels
        key = config.num_query_groups * config.kv_channels
        attention += sharded * (4 if config.qk_layernorm else 3) * (query + key)

    outputs = 2 if config.gated_linear_unit else 1  # widths of an MLP that its first matrix puts out
    if not has_experts:
        parts["mlp"] = sharded * (1 + outputs) * config.ffn_hidden_size
    else:
        per_expert = sharded * config.moe_router_topk
        shared = config.moe_shared_expert_intermediate_size or 0
        gathered = config.expert_tensor_parallel_size * (config.moe_latent_size or config.hidden_size)
        experts = {
            "moe_experts": per_expert * (gathered + outputs * config.moe_ffn_hidden_size),
            "moe_act": per_expert * config.moe_ffn_hidden_size,
            "shared_experts": sharded * (1 + outputs) * shared,
        }
        if "moe" in recomputed:
            recomputed |= experts.keys()
        parts |= experts
    again = sum(size for name, size in parts.items() if name in recomputed)
    return _Layer(kept=attention + sum(parts.values()) - again, again=again)
