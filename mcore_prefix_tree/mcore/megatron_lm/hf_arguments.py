"""``--prefix-tree-hf``: arguments and weights from a Hugging Face folder; Megatron-LM's own builder makes the model."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from megatron.core import ModelParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import print_rank_0

from mcore_prefix_tree.arguments.refusals import ArgumentError, has_scalar_head
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import hybrid_pattern
from mcore_prefix_tree.mcore.models.bridge import OFF, load_folder, make_provider
from mcore_prefix_tree.mcore.models.config_fields import SAME_NAMES, defaults_of_run, settings_of_run
from mcore_prefix_tree.settings import ModelConfig, ParallelConfig, RecipeError
from mcore_prefix_tree.settings.hf_folder import SAME_FUNCTION, HuggingFaceFolder
from mcore_prefix_tree.utils.inputs import TRACKER

# Arguments that a folder decides, by the names of a provider's fields.
_DECIDED = {
    name: name
    for name in (
        *(*SAME_NAMES, "layernorm_epsilon", "add_qkv_bias", "vocab_size"),
        *("position_embedding_type", "rotary_base", "rotary_percent"),
        *("moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_router_topk"),
        *("moe_router_pre_softmax", "moe_router_score_function", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
    )
} | {
    "max_position_embeddings": "seq_length",
    "num_experts": "num_moe_experts",
    "padded_vocab_size": "vocab_size",
    "swiglu": "gated_linear_unit",
    "use_rope_scaling": "rope_scaling",
}
# Fields that other arguments set, and that change only the rounding of a model.
_OF_RUN = ("attention_softmax_in_fp32", "cp_comm_type", "cuda_graph_modules", "transformer_impl")
_ROPE_SCALING_FACTOR = 8.0  # Megatron-LM has no argument for it that reaches its model


def set_arguments(args: argparse.Namespace, given: Collection[str]) -> None:
    """Set the arguments that the folder decides, and the tokenizer if none is set and the folder has a chat template.

    ``args``, not validated yet, are changed in place; ``given`` names the arguments on the command line. Raises
    ArgumentError if one contradicts the folder, or if no builder has its model.
    """
    path = args.prefix_tree_hf
    if hybrid_pattern(args) is not None:
        raise ArgumentError(
            "--prefix-tree-hf with --hybrid-layer-pattern: its weights are read into a GPT; remove one of them"
        )
    provider = _provider(args)
    decided = {name: getattr(provider, field) for name, field in _DECIDED.items()} | {
        "group_query_attention": provider.num_query_groups != provider.num_attention_heads,
        "untie_embeddings_and_output_weights": not provider.share_embeddings_and_output_weights,
    }
    for name, value in decided.items():
        present = getattr(args, name)
        if name in given and present != value:
            raise ArgumentError(
                f"--{name.replace('_', '-')}={present}, but --prefix-tree-hf {path} decides it, and has {value}; leave "
                "one of them out"
            )
        setattr(args, name, value)
    if args.prefix_tree_tokenizer is None and HuggingFaceFolder.read(path).has_chat_template:
        args.prefix_tree_tokenizer = path


def check_same_model(args: argparse.Namespace, config: Any) -> None:
    """Raise ArgumentError, with the field's name, if validated arguments make another model than the folder."""
    if args.virtual_pipeline_model_parallel_size is not None:
        raise ArgumentError(
            "--prefix-tree-hf with virtual pipeline stages: Megatron-LM builds them one at a time, and Megatron-Bridge "
            "fills all of a rank together; remove the virtual stages"
        )
    provider, (model, parallel) = _provider(args), _sections(args)
    # The arguments decide how a model is cut and sent, not Megatron-Bridge.
    of_layout = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    aside = of_layout.union(settings_of_run(model, parallel, on_gpu=False), defaults_of_run(parallel), OFF, _OF_RUN)
    for field in dataclasses.fields(TransformerConfig):
        name = field.name
        if name in aside or name.startswith("inference_") or SAME_FUNCTION.fullmatch(f"transformer.{name}"):
            continue
        decided, made = getattr(provider, name), getattr(config, name)
        if decided != made:
            raise ArgumentError(
                f"--prefix-tree-hf {args.prefix_tree_hf}: its model has {name}={decided}, and Megatron-LM's arguments "
                f"make it {made}; train it with `mcore-prefix-tree train --hf`"
            )


def load_weights(args: argparse.Namespace, chunk: torch.nn.Module) -> None:
    """Fill a ``GPTModel`` with the weights of the folder, unless the job loads a checkpoint; all ranks together."""
    checkpoints = (args.load, args.pretrained_checkpoint)
    if any(folder is not None and Path(folder, TRACKER).is_file() for folder in checkpoints):
        return
    load_folder(args.prefix_tree_hf, [chunk])
    is_new = has_scalar_head(args) and not HuggingFaceFolder.read(args.prefix_tree_hf).has_scalar_head
    print_rank_0(f"the weights start from {args.prefix_tree_hf}{', with a new scalar head' if is_new else ''}")


def _sections(args: argparse.Namespace) -> tuple[ModelConfig, ParallelConfig]:
    """Return the sections of a recipe that trains the folder in the same way."""
    sizes: dict[str, Any] = HuggingFaceFolder.read(args.prefix_tree_hf).sizes
    model = ModelConfig(
        hf=args.prefix_tree_hf,
        dtype="bfloat16" if args.bf16 else "float32",
        transformer_impl=args.transformer_impl,
        transformer={"mtp_num_layers": args.mtp_num_layers} if args.mtp_num_layers else {},
        **sizes,
    )
    parallel = ParallelConfig(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        # Without tensor parallelism Megatron-LM's validation turns it off.
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    return model, parallel


def _provider(args: argparse.Namespace) -> Any:
    try:
        provider = make_provider(*_sections(args), on_gpu=torch.cuda.is_available(), only_stock=True)
    except RecipeError:
        raise
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--prefix-tree-hf: {error}") from error
    if HuggingFaceFolder.read(args.prefix_tree_hf).has_scalar_head and not has_scalar_head(args):
        raise ArgumentError(
            f"--prefix-tree-hf {args.prefix_tree_hf} ends in a scalar head, and --prefix-tree-objective "
            f"{args.prefix_tree_objective} needs a vocabulary; give a language model"
        )
    if isinstance(provider, MLATransformerConfig):
        why = "multi-latent attention has further arguments, which are not read from folders"
    elif provider.rope_scaling and provider.rope_scaling_factor != _ROPE_SCALING_FACTOR:
        factor = provider.rope_scaling_factor
        why = f"Megatron-LM scales rotary frequencies by {_ROPE_SCALING_FACTOR:g}, and its config.json by {factor:g}"
    else:
        return provider
    raise ArgumentError(f"--prefix-tree-hf {args.prefix_tree_hf}: {why}; train it with `mcore-prefix-tree train --hf`")
