"""Rejection of models that folding cannot do exactly, by the name of the setting, before the first forward."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from megatron.core.fp8_utils import TE_LINEAR_TYPES
from megatron.core.utils import get_model_config

from mcore_prefix_tree.mcore.release import HAS_DEPTHS, HAS_SPARSE_ATTENTION, NEEDS_DEPTHS
from mcore_prefix_tree.mcore.seam.hybrid_layers import check_pattern
from mcore_prefix_tree.plan.model_shape import DELTA_NETS, depth_letters
from mcore_prefix_tree.utils.randomness import random_part
from mcore_prefix_tree.utils.ranks import is_first_rank

logger = logging.getLogger(__name__)

_FLAGS = {
    "cache_mla_latents": "it is only for inference",  # a field of MLATransformerConfig
    "fused_single_qkv_rope": "that kernel takes no packed_seq_params",
    "tp_comm_overlap": "its buffers have one sequence length, micro-batches do not",
    "overlap_moe_expert_parallel_comm": "its schedule plan does not go through the layer's forward",
    "enable_mhc_connections": "not proven exact under folding yet",  # since 0.20
}
_OWN_FOLDERS: list[TemporaryDirectory[str]] = []  # of compilations, until this process exits
_FP8_RECIPES = ("tensorwise", "blockwise", "mxfp8")
_FP8_FLAGS = {
    "fp8_param": "weights are read, compared and saved in the model's dtype",
    **dict.fromkeys(
        ("fp8_dot_product_attention", "fp8_multi_head_attention"),
        "attention along a tree computes in the model's dtype",
    ),
    "fp8_output_proj": "the output layer computes in the model's dtype",
    "moe_router_padding_for_quantization": "experts would get tokens that no router chose; without it they pad",
}


def _refusals(config: Any) -> list[tuple[bool, str]]:
    """Return (whether it applies, sentence) for every setting of a TransformerConfig that folding does not support."""
    return [
        (
            config.context_parallel_size > 1,
            f"context_parallel_size={config.context_parallel_size}: a tree is not split over context-parallel ranks; "
            "set context_parallel_size=1 and use tensor, sequence or pipeline parallelism",
        ),
        *(
            (value > 0, f"{name}={value}: samples that share a token would share its dropout; set {name}=0")
            for name in ("attention_dropout", "hidden_dropout")
            for value in (getattr(config, name),)
        ),
        (
            config.multi_latent_attention and config.apply_rope_fusion,
            "apply_rope_fusion=True with multi_latent_attention: that kernel counts positions along the flat layout; "
            "set apply_rope_fusion=False",
        ),
        (
            config.multi_latent_attention and config.tensor_model_parallel_size > 1 and not config.sequence_parallel,
            f"multi_latent_attention with tensor_model_parallel_size={config.tensor_model_parallel_size} and without "
            "sequence_parallel: Megatron-Core's own gradient of the rotary keys lacks the other ranks' heads "
            "(NVIDIA/Megatron-LM issue 1699); set sequence_parallel=True",
        ),
        (
            config.experimental_attention_variant not in (None, *DELTA_NETS, "dsa" if HAS_SPARSE_ATTENTION else None),
            f"experimental_attention_variant={config.experimental_attention_variant!r}: its tokens mix in other ways "
            "than attention or a state along a path; set experimental_attention_variant='gated_delta_net', 'dsa' with "
            "megatron-core 0.19 or later, or None",
        ),
        (
            bool(getattr(config, "dsa_indexer_loss_coeff", None)) and not config.calculate_per_token_loss,
            f"dsa_indexer_loss_coeff={getattr(config, 'dsa_indexer_loss_coeff', None)} with "
            "calculate_per_token_loss=False: the mean over a sample's tokens is not a sum over those of a tree; set "
            "calculate_per_token_loss=True",
        ),
        *_fp8_refusals(config),
        *_graph_refusals(config),
        *(_multi_token_refusals(config) if config.mtp_num_layers else ()),
        (
            isinstance(config.window_size, tuple | list) and (config.window_size[0] < 0 or config.window_size[1] != 0),
            f"window_size={config.window_size}: a token of a tree sees a number of tokens before it and none after; "
            "set window_size=(that number, 0) or None",
        ),
        (
            config.qk_clip or config.log_max_attention_logit,
            "qk_clip or log_max_attention_logit: tree attention does not report its largest logit; turn both off",
        ),
        (
            config.use_kitchen or config.quant_recipe is not None,
            "use_kitchen or quant_recipe: their layers multiply in less than bf16, which is not proven exact under "
            "folding yet; turn both off",
        ),
        *((getattr(config, name, False), f"{name}=True: {why}; set {name}=False") for name, why in _FLAGS.items()),
        *(() if config.num_moe_experts is None else _expert_refusals(config)),
    ]


def _fp8_refusals(config: Any) -> list[tuple[bool, str]]:
    """Return the refusals of :func:`_refusals` for the settings of FP8 and FP4."""
    recipe, has_fp8 = getattr(config.fp8_recipe, "value", config.fp8_recipe), bool(config.fp8)
    return [
        (
            has_fp8 and recipe not in _FP8_RECIPES,
            f"fp8_recipe={recipe!r}: only a scale that the quantised numbers themselves decide is the same in a first "
            f"pass, a check and a step; set fp8_recipe to one of {', '.join(map(repr, _FP8_RECIPES))}",
        ),
        *(
            (has_fp8 and bool(getattr(config, name, False)), f"{name}=True: {reason}; set {name}=False")
            for name, reason in _FP8_FLAGS.items()
        ),
        *(
            (has_fp8 and bool(value), f"fp8 with {name}={value!r}: not proven yet; set fp8=None")
            # Older releases are refused depths anyway.
            for name in ("experimental_attention_variant", *["mtp_num_layers"] * HAS_DEPTHS)
            for value in (getattr(config, name),)
        ),
        (
            bool(config.fp4),
            f"fp4={config.fp4!r}: it rounds at random, and samples that share a token would share a draw; set fp4=None",
        ),
    ]


def _graph_refusals(config: Any) -> list[tuple[bool, str]]:
    """Return the refusals of :func:`_refusals` for CUDA graphs: nothing that a graph replays may read the tree."""
    modules, name = graph_modules(config), f"cuda_graph_impl={config.cuda_graph_impl!r}"
    fits = config.cuda_graph_impl == "transformer_engine" and bool(modules) and modules <= {"mlp", "moe_router"}
    return [
        (
            config.cuda_graph_impl != "none" and not fits,
            f"{name} with cuda_graph_modules={sorted(modules)}: a graph replays the tree of its capture in whatever "
            "reads it; set cuda_graph_impl='transformer_engine' and cuda_graph_modules to mlp, moe_router or both, "
            "since megatron-core 0.18, or cuda_graph_impl='none'",
        ),
        *(
            (
                fits and "moe_router" in modules and bool(value),
                f"{name} of moe_router with {setting}={value!r}: it counts the samples of a token; turn it off, or "
                "leave moe_router out of cuda_graph_modules",
            )
            for setting in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias")
            for value in (getattr(config, setting),)
        ),
        (
            fits and config.pipeline_model_parallel_size > 1,
            f"{name} with pipeline_model_parallel_size={config.pipeline_model_parallel_size}: each micro-batch in "
            "flight would need graphs; set cuda_graph_impl='none'",
        ),
        *(
            (fits and bool(value), f"{name} with {setting}={value!r}: not proven yet; set cuda_graph_impl='none'")
            for setting in ("fp8", *["mtp_num_layers"] * HAS_DEPTHS)
            for value in (getattr(config, setting),)
        ),
        (fits and not config.bf16, f"{name} with bf16=False: Megatron-Core captures only bf16; set bf16=True"),
    ]


def graph_modules(config: Any) -> set[str]:
    """Return the names of a layer's modules that CUDA graphs replay, none without graphs."""
    modules = getattr(config, "cuda_graph_modules", ()) if config.cuda_graph_impl != "none" else ()
    return {module.name for module in modules}


def _multi_token_refusals(config: Any) -> list[tuple[bool, str]]:
    """Return the refusals of :func:`_refusals` for the settings of multi-token prediction."""
    depths = f"mtp_num_layers={config.mtp_num_layers}"
    if not HAS_DEPTHS:
        needed = f"{depths}: multi-token prediction on a tree needs {NEEDS_DEPTHS}; set mtp_num_layers=None"
        return [(True, needed)]
    last_rows = "stock layers route the last tokens of a sample, which predict nothing, and balance them too"
    balances = config.moe_router_load_balancing_type != "none"
    return [
        (not 0 <= config.mtp_num_layers <= 100, f"{depths}: set it to a number of depths up to 100, or to None"),
        (
            getattr(config, "mtp_use_repeated_layer", False),
            f"{depths} with mtp_use_repeated_layer=True: not proven exact under folding yet; set it to False",
        ),
        (
            getattr(config, "mtp_standalone", False),
            f"{depths} with a pipeline_model_parallel_layout that parts these layers from the loss: put both in one "
            "stage",
        ),
        (
            bool(getattr(config, "dsa_indexer_loss_coeff", None)),
            f"{depths} with dsa_indexer_loss_coeff={getattr(config, 'dsa_indexer_loss_coeff', None)}: stock layers "
            "count the last tokens of a sample, which predict nothing, in the indexer's loss; set it to 0",
        ),
        (
            getattr(config, "dsa_indexer_topk_freq", 1) > 1,
            f"{depths} with dsa_indexer_topk_freq={getattr(config, 'dsa_indexer_topk_freq', None)}: not proven exact "
            "under folding yet; set it to 1",
        ),
        *(
            (
                config.num_moe_experts is not None and applies,
                f"{depths} with {name}={getattr(config, name)}: {last_rows}; set {name}=0",
            )
            for name, applies in (
                ("moe_aux_loss_coeff", balances and bool(np.any(config.moe_aux_loss_coeff))),
                ("moe_z_loss_coeff", bool(config.moe_z_loss_coeff)),
                (
                    "moe_router_bias_update_rate",
                    config.moe_router_enable_expert_bias and bool(config.moe_router_bias_update_rate),
                ),
            )
        ),
    ]


def _expert_refusals(config: Any) -> list[tuple[bool, str]]:
    """Return the refusals of :func:`_refusals` for the settings of experts."""
    return [
        *(
            (
                name in config.moe_router_load_balancing_type,
                f"moe_router_load_balancing_type={name!r}: it routes a token by the other tokens in the batch; "
                "set moe_router_load_balancing_type='none'",
            )
            for name in ("sinkhorn", "quantile_balancing")
        ),
        *(
            (
                getattr(config, name, "bf16") != "bf16",
                f"{name}={getattr(config, name, None)!r}: not proven exact under folding yet; set {name}='bf16'",
            )
            for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")  # since 0.20
        ),
        (
            config.moe_router_topk > config.num_moe_experts,
            f"moe_router_topk={config.moe_router_topk} with num_moe_experts={config.num_moe_experts}: a token goes to "
            "more experts than there are; lower moe_router_topk",
        ),
        (
            # An expert has room for all tokens from factor * top-k = experts on.
            config.moe_expert_capacity_factor is not None
            and config.moe_expert_capacity_factor * config.moe_router_topk < (config.num_moe_experts or 0),
            f"moe_expert_capacity_factor={config.moe_expert_capacity_factor}: which tokens are dropped depends on the "
            "batch; set it to None, or to at least num_moe_experts / moe_router_topk, which drops none",
        ),
        (
            config.moe_pad_expert_input_to_capacity,
            "moe_pad_expert_input_to_capacity=True: not proven exact under folding yet; set it to False",
        ),
        (
            getattr(config, "moe_expert_rank_capacity_factor", None) is not None,  # since 0.18
            f"moe_expert_rank_capacity_factor={getattr(config, 'moe_expert_rank_capacity_factor', None)}: which tokens "
            "are dropped depends on the batch; set moe_expert_rank_capacity_factor=None",
        ),
        (
            # The second is a field since megatron-core 0.17.
            bool(config.moe_router_force_load_balancing or getattr(config, "moe_router_force_biased", None)),
            "moe_router_force_load_balancing or moe_router_force_biased: they route at random, for benchmarks, and "
            "samples that share a token would share its draw; turn both off",
        ),
        (
            config.moe_input_jitter_eps is not None,
            f"moe_input_jitter_eps={config.moe_input_jitter_eps}: samples that share a token would share its noise; "
            "set moe_input_jitter_eps=None",
        ),
    ]


def check_config(config: Any) -> None:
    """Reject a ``TransformerConfig`` that folding cannot do exactly. A later compilation of torch's waits for no other.

    Raises:
        NotImplementedError: one sentence for every setting at fault, with the way out.
    """
    found = [sentence for applies, sentence in _refusals(config) if applies]
    if found:
        raise NotImplementedError("prefix-tree training does not support " + "; nor ".join(found))
    _avoid_locks()


def _avoid_locks() -> None:
    """Compile extensions in a folder of this process if a killed process left the common one locked."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    lock = next(chain(root.glob("*/lock"), root.glob("*/*/lock")), None)
    if lock is not None:
        _OWN_FOLDERS.append(TemporaryDirectory(prefix="torch_extensions-", ignore_cleanup_errors=True))
        os.environ["TORCH_EXTENSIONS_DIR"] = _OWN_FOLDERS[-1].name
        if is_first_rank():
            says = "%s is of a compilation that runs or was killed: this process compiles in %s; remove a stale lock"
            logger.warning(says, lock, os.environ["TORCH_EXTENSIONS_DIR"])


def check_model(model: Any, *, takes_spatial: bool = False) -> None:
    """Reject models whose positions or layers folding does not support; ``model`` comes without wrappers.

    ``takes_spatial`` accepts positions in three dimensions, which a caller has to pass.

    Raises:
        NotImplementedError: see :func:`check_config` and :func:`check_pattern`, on every pipeline stage; also for
            ``position_embedding_type='mrope'``.
    """
    check_config(model.config)
    pattern = getattr(model, "hybrid_layer_pattern", None)
    in_fp8 = (any(isinstance(one, TE_LINEAR_TYPES) for one in layer.modules()) for layer in model.decoder.layers)
    if model.config.fp8 and (pattern or not all(in_fp8)):
        raise NotImplementedError(
            f"prefix-tree training does not support fp8={model.config.fp8!r} "
            + ("with hybrid_layer_pattern: not proven yet" if pattern else "in layers that compute without it")
            + "; use TransformerEngine's layers in a GPT, or set fp8=None"
        )
    if pattern is not None:
        check_pattern(pattern)
        if graph_modules(model.config):
            raise NotImplementedError(
                f"prefix-tree training does not support cuda_graph_impl={model.config.cuda_graph_impl!r} with "
                "hybrid_layer_pattern: not proven yet; set cuda_graph_impl='none'"
            )
        depths, trained = len(depth_letters(pattern)), model.config.mtp_num_layers
        if depths != (trained or 0):
            raise NotImplementedError(
                f"mtp_num_layers={trained}, but hybrid_layer_pattern={pattern!r} has {depths} depths: make them equal"
            )
    if model.position_embedding_type == "mrope" and not takes_spatial:
        raise NotImplementedError(
            "prefix-tree training does not support position_embedding_type='mrope': its positions are "
            "three-dimensional; use 'rope', 'yarn', 'learned_absolute' or 'none'"
        )


def check_interleaving(config: Any, lengths: Sequence[int] | None = None) -> None:
    """Reject an interleaved schedule whose messages between two stages are mistaken for each other.

    Without overlap, an output for the next chunk and a gradient for the one before go to the same rank at once. That is
    right for three and more micro-batches of one length; with two, one stage waits for ever. ``lengths`` are the padded
    lengths of a step's micro-batches; None if they are not known.

    Raises:
        NotImplementedError: names the settings and the way out.
    """
    chunks = config.virtual_pipeline_model_parallel_size
    if config.pipeline_model_parallel_size != 2 or chunks is None or config.overlap_p2p_comm:
        return
    if lengths is None or len(set(lengths)) > 1 or len(lengths) < 3 or config.batch_p2p_comm:
        raise NotImplementedError(
            "prefix-tree training does not support overlap_p2p_comm=False with pipeline_model_parallel_size=2 and "
            f"virtual_pipeline_model_parallel_size={chunks}: micro-batches differ in length, and Megatron-Core "
            "mistakes two messages that go to one stage at once for each other; set overlap_p2p_comm=True and "
            "batch_p2p_comm=False"
        )


def check_draws(model: torch.nn.Module) -> None:
    """Reject modules that draw random numbers as the model is now: adapters and modes change after it was built.

    Raises:
        NotImplementedError: one sentence, with the path of the module, its rate and the way out.
    """
    part = random_part(model)
    if part is not None:
        raise NotImplementedError(f"prefix-tree training does not support dropout: {part}")


def check_step(model: Any) -> None:
    """Raise ValueError without ``calculate_per_token_loss``, for forward steps that return a sum and its count."""
    if not get_model_config(model).calculate_per_token_loss:
        raise ValueError(
            "calculate_per_token_loss=False in the model's TransformerConfig: Megatron would average the means of the "
            "micro-batches, which hold different numbers of scored tokens; set calculate_per_token_loss=True"
        )


def check_positions(model: Any, max_path_len: int) -> None:
    """Reject a micro-batch whose longest path does not fit the learned positions, without device synchronisation.

    Raises:
        ValueError: the path does not fit; names ``max_position_embeddings`` and the length of the path.
    """
    if model.position_embedding_type == "learned_absolute" and max_path_len > model.max_sequence_length:
        raise ValueError(
            f"a path of {max_path_len} tokens does not fit the learned absolute positions of this model "
            f"(max_position_embeddings={model.max_sequence_length}); shorten the samples or use "
            "position_embedding_type='rope'"
        )
