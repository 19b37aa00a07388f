"""What a job's arguments set of folding: its plan, its padding, its cost model."""

from __future__ import annotations

import argparse

import torch

from mcore_prefix_tree.layout import Padding
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.megatron_lm.arguments import ArgumentError
from mcore_prefix_tree.plan import CostModel, ModelWork
from mcore_prefix_tree.trie import Sharing


def folding_of(args: argparse.Namespace, *, device: torch.device) -> Folding:
    """How the job folds under these arguments, validated ones.

    Raises:
        ArgumentError: the length buckets fit neither the budget nor the parallel layout.
    """
    stages, interleaved = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size is not None
    # Groups of another size may leave a rest of micro-batches, which Megatron checks.
    in_stages = interleaved and (args.microbatch_group_size_per_vp_stage or stages) == stages
    return Folding(
        max_tokens=args.prefix_tree_max_tokens,
        dp_size=args.data_parallel_size,
        cost_model=CostModel.from_work(work_of(args)),
        device=device,
        micro_batch_multiple=stages if in_stages else 1,
        bubble=(stages - 1) / (args.virtual_pipeline_model_parallel_size or 1),
        sharing=Sharing(share=args.prefix_tree_share, min_shared_tokens=args.prefix_tree_min_shared_tokens),
        padding=_padding_of(args),
        attention_backend=args.prefix_tree_attention_backend,
        deterministic_attention=args.prefix_tree_deterministic_attention,
        only_supervised=args.prefix_tree_fused_head,
    )


def _padding_of(args: argparse.Namespace) -> Padding:
    multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
    try:
        padding = Padding(multiple=multiple, buckets=tuple(args.prefix_tree_length_buckets or ()))
        padding.check_holds(args.prefix_tree_max_tokens)
    except ValueError as error:
        raise ArgumentError(f"--prefix-tree-length-buckets: {error}") from None
    return padding


def work_of(args: argparse.Namespace) -> ModelWork:
    """Return the FLOPs of the model that the arguments describe."""
    return ModelWork.from_dimensions(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        vocab_size=args.padded_vocab_size,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        swiglu=args.swiglu,
        fused_head=args.prefix_tree_fused_head,
        settings=vars(args),
    )
