"""Checks of calls and models before they fold inside: each refusal names the argument or the setting."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mcore_prefix_tree.mcore.packed.answers import RowLogprobs
from mcore_prefix_tree.mcore.packed.bridge_pictures import takes_deepstack
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam.all_tokens import count_splits
from mcore_prefix_tree.mcore.seam.validation import check_interleaving, check_model

_MODELS: tuple[type[Any], ...] = (GPTModel,)
if HAS_HYBRID_MODEL:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    _MODELS += (HybridModel,)

# Arguments that must be None.
_REFUSED = {
    "attention_mask": "the tree is the mask, and it is causal; pass None",
    "inference_context": "generation does not read packed rows; generate with a model that does not fold inside",
    "inference_params": "generation does not read packed rows; generate with a model that does not fold inside",
}


@cache
def call_arguments(kind: Any) -> list[str]:
    """Return the names of the arguments of a class's forward, in their order."""
    return list(inspect.signature(kind.forward).parameters)[1:]


def check_call(model: Any, call: dict[str, Any]) -> None:
    """Reject arguments that folding does not support, by name."""
    if not isinstance(call.get("output_processor"), RowLogprobs | None):
        kind: Any = next(kind for kind in _MODELS if isinstance(model, kind))
        if "output_processor" not in call_arguments(kind):
            raise NotImplementedError(
                "folding inside the model does not support another output_processor than RowLogprobs here: this "
                f"Megatron-Core's {kind.__name__} takes none; pass RowLogprobs, or labels"
            )
    for name, reason in _REFUSED.items():
        if call.get(name) is not None:
            raise NotImplementedError(f"folding inside the model does not support {name}: {reason}")
    params: Any = call.get("packed_seq_params")
    if getattr(params, "qkv_format", None) != "thd":
        found = "None" if params is None else f"qkv_format={params.qkv_format!r}"
        raise ValueError(
            "folding inside the model takes packed rows: pass packed_seq_params with qkv_format='thd' and "
            f"cu_seqlens_q, not {found}"
        )
    _check_embeddings(model, call.get("decoder_input"), getattr(params, "picture_tokens", None), call.get("input_ids"))
    if (params.local_cp_size or 1) > 1:
        raise NotImplementedError(
            f"folding inside the model does not support packed_seq_params.local_cp_size={params.local_cp_size}: a tree "
            "is not split over context-parallel ranks"
        )
    ids = call.get("input_ids")
    if ids is None or ids.is_nested or ids.ndim != 2 or len(ids) != 1:
        found = "None" if ids is None else "a nested tensor" if ids.is_nested else f"a tensor of {list(ids.shape)}"
        raise ValueError(
            f"folding inside the model takes input_ids [1, T], not {found}; every pipeline stage folds for itself, so "
            "pass them to all"
        )


def _check_embeddings(model: Any, embeddings: Any, pictures: Any, ids: Any) -> None:
    """Reject embeddings that come without what compares them, in another shape, or for another model."""
    if embeddings is None and pictures is None:
        return
    if model.position_embedding_type != "mrope" or pictures is None:
        raise NotImplementedError(
            "folding inside the model does not support decoder_input except with position_embedding_type='mrope' and "
            "PicturePackedSeqParams(picture_tokens=...): rows are folded by their token ids; pass input_ids"
        )
    parts = count_splits(model)
    if model.pre_process and (embeddings is None or (len(embeddings) * parts, embeddings.shape[1]) != ids.shape[::-1]):
        found = "None" if embeddings is None else list(embeddings.shape)
        shape = "[T, 1, h]" if parts == 1 else f"[T / {parts}, 1, h] with sequence_parallel=True"
        raise ValueError(f"pictures need decoder_input {shape} for input_ids {list(ids.shape)}, not {found}")


def check_foldable(model: Any) -> None:
    """Refuse models that cannot fold, by the name of the setting or the layer."""
    if not isinstance(model, _MODELS):
        kinds = " or ".join(kind.__name__ for kind in _MODELS)
        raise TypeError(f"fold_inside takes a {kinds} or a provider of a GPTModel, not a {type(model).__name__}")
    check_model(model, takes_spatial=True)
    kind: Any = type(model)
    is_stock = kind.forward is cast("Any", GPTModel).forward
    if model.position_embedding_type == "mrope" and not (is_stock or takes_deepstack(model)):
        raise NotImplementedError(
            f"position_embedding_type='mrope' of {kind.__name__}, whose own forward may give pictures to its layers: "
            "folding inside the model supports M-RoPE only of GPTModel and of Megatron-Bridge's Qwen3-VL"
        )
    if model.config.mtp_num_layers and model.position_embedding_type == "mrope":
        raise NotImplementedError(
            f"mtp_num_layers={model.config.mtp_num_layers} with position_embedding_type='mrope': folding inside the "
            "model predicts several tokens only of text; set mtp_num_layers=None"
        )
    if model.config.pipeline_model_parallel_size > 1 and not model.config.variable_seq_lengths:
        raise NotImplementedError(
            "variable_seq_lengths=False: pipeline stages send each other folded micro-batches of many sizes; set "
            "variable_seq_lengths=True"
        )
    check_interleaving(model.config)
    if model.config.cuda_graph_impl != "none":
        raise NotImplementedError(
            f"cuda_graph_impl={model.config.cuda_graph_impl!r}: graphs have one length, and folding inside the model "
            "gives its layers other lengths than the rows'; set cuda_graph_impl='none'"
        )
    if getattr(model.config, "moe_enable_routing_replay", False):
        raise NotImplementedError(
            "moe_enable_routing_replay=True: rows that share a token may have recorded different routes for it; set "
            "moe_enable_routing_replay=False, and give routes in RoutedPackedSeqParams(routed_experts=...)"
        )


def packs_exactly(model: Any, *, has_states: bool) -> bool:
    """Return whether upstream computes packed rows as each row by itself, on all pipeline stages, which all ask.

    Megatron's local attention takes none. Upstream's recurrent layers run a state from a row into the next one unless
    a trainer numbers the rows, and multi-token prediction takes targets from padding. Losses of routers and indexers,
    and counts of experts, are those of all rows together, with padding. Pictures need the numbers of their tokens.
    """
    config = model.config
    if has_states or config.mtp_num_layers or model.position_embedding_type == "mrope":
        return False
    if model.vp_stage is not None and (config.heterogeneous_block_specs or not isinstance(model, GPTModel)):
        return False  # a chunk without attention cannot ask the others
    of_experts = (
        config.moe_router_load_balancing_type != "none" and np.any(config.moe_aux_loss_coeff),
        config.moe_z_loss_coeff,
        config.moe_router_enable_expert_bias,
    )
    if getattr(config, "dsa_indexer_loss_coeff", None) or (config.num_moe_experts is not None and any(of_experts)):
        return False
    is_local = any(isinstance(module, DotProductAttention) for module in model.modules())
    if model.pp_group.size() > 1:  # a stage may have no attention
        found = torch.tensor(int(is_local), device=torch.cuda.current_device())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=model.pp_group)
        is_local = bool(found)
    return not is_local
