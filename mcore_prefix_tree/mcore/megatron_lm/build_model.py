"""The model of a ``--prefix-tree`` job: the checkout's own builder makes it, from layers that follow the tree."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.training import get_args, print_rank_0

from mcore_prefix_tree.arguments.flags import readable_arguments
from mcore_prefix_tree.arguments.refusals import has_scalar_head
from mcore_prefix_tree.cpu.specs import cpu_spec, interleaving
from mcore_prefix_tree.mcore.megatron_lm.argument_checks import config_in_provider
from mcore_prefix_tree.mcore.megatron_lm.hf_arguments import load_weights
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import vocab_size_without_padding
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import build_model, hybrid_pattern
from mcore_prefix_tree.mcore.megatron_lm.resume import head_starts_new
from mcore_prefix_tree.mcore.seam.layer_specs import is_hybrid_stack, with_prefix_tree
from mcore_prefix_tree.mcore.seam.multi_token import with_multi_token
from mcore_prefix_tree.mcore.seam.output_layer import with_edge_head
from mcore_prefix_tree.mcore.seam.scalar_output_layer import start_new_head, with_scalar_head
from mcore_prefix_tree.mcore.seam.validation import check_model
from mcore_prefix_tree.mcore.seam.vocab_size import with_vocab_size


@readable_arguments()
def tree_model_provider(*ends: bool, config: Any = None, **stage: Any) -> Any:
    """Return the model of the arguments, with stock state-dict keys; exit with status 2 if folding rejects it.

    ``ends`` and ``stage`` are as in :func:`tree_model`.
    """
    args = get_args()
    checked = config_in_provider(args)
    model = tree_model(args, config or checked, *ends, **stage)
    if args.prefix_tree_hf is not None:
        load_weights(args, model)
    return model


def tree_model(
    args: argparse.Namespace,
    config: Any,
    pre_process: bool = True,
    post_process: bool = True,
    *,
    vp_stage: int | None = None,
    pg_collection: Any = None,
) -> Any:
    """Return a model of these arguments and of this ``TransformerConfig``, which is set for this machine in place.

    The other arguments are those that Megatron gives a model provider.
    """

    def exchange(spec: Any) -> Any:
        on_cpu = args.transformer_impl != "transformer_engine" and not torch.cuda.is_available()
        if on_cpu and not is_hybrid_stack(spec):
            # The emulation is for experiments, also with layers that upstream lacks on a CPU.
            spec = cpu_spec(spec, config, vp_stage)
        return with_prefix_tree(spec)

    print_rank_0(f"building {'GPT' if hybrid_pattern(args) is None else 'hybrid'} model, tree-capable ...")
    on_gpu = torch.cuda.is_available()
    vars(config).update(interleaving(config.virtual_pipeline_model_parallel_size, on_gpu=on_gpu))
    if has_scalar_head(args):  # its embedding is read from a tied checkpoint all the same
        args = argparse.Namespace(**vars(args) | {"untie_embeddings_and_output_weights": True})
    stage = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    model = build_model(args, config, exchange, **stage, pg_collection=pg_collection)
    check_model(model)
    if not has_scalar_head(args):
        with_multi_token(model)
    return with_head(args, model)


def with_head(args: argparse.Namespace, model: Any) -> Any:
    """Return a stage, changed in place, with the output layer of the job's objective; all ranks call it together."""
    if not has_scalar_head(args):
        with_vocab_size(model, vocab_size_without_padding(args))
        return with_edge_head(model) if args.prefix_tree_fused_head else model
    with_scalar_head(model)
    source = head_starts_new(args)
    if source is not None:
        print_rank_0(f"> the weights start from {source}, with a new scalar head")
        start_new_head(model)
        # A HybridModel would take the optimizer of a GPT even with --finetune, and that has nothing for this head.
        get_args().no_load_optim = True
    return model
