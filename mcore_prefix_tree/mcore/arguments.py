"""The arguments that Megatron-LM's ``pretrain_*.py`` scripts gain, and what they refuse.

Scripts take them with ``extra_args_provider=add_prefix_tree_args``, which also checks the job; see
:mod:`mcore_prefix_tree.mcore.pretrain`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from mcore_prefix_tree.attention.auto import check_setting


class ArgumentError(ValueError):
    """Arguments that cannot be used with ``--prefix-tree``. The message names them."""


class _Enable(argparse.Action):
    """``--prefix-tree``: also switches on what folding always needs, for Megatron to validate the arguments with."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.prefix_tree = True
        # Micro-batches hold different numbers of scored tokens: the step has one denominator.
        namespace.calculate_per_token_loss = True
        if namespace.dataloader_type is None:  # another one, before or after the flag, is refused
            namespace.dataloader_type = "external"


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def add_argument_group(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "prefix-tree" and return the parser."""
    group = parser.add_argument_group(
        title="prefix-tree",
        description="Fold samples that begin with the same tokens and compute every unique token once. "
        "--global-batch-size, --train-samples and the schedules count samples as they are before folding. "
        "--micro-batch-size says how many of them are folded into one micro-batch on average: a step always has "
        "global-batch-size / (micro-batch-size * data-parallel-size) micro-batches a rank, and samples that share "
        "their beginning are dealt to the same one.",
    )
    group.add_argument(
        "--prefix-tree",
        action=_Enable,
        nargs=0,
        default=False,
        help="Train folded. Implies --calculate-per-token-loss and --dataloader-type external.",
    )
    group.add_argument(
        "--megatron-lm-path",
        metavar="DIR",
        help="Checkout of Megatron-LM, core_v0.16.1 or core_v0.19.0; its own megatron.core is used. Default: the "
        "environment's MEGATRON_LM_PATH, else the megatron.training that Python finds.",
    )
    group.add_argument(
        "--prefix-tree-data-path",
        nargs="+",
        metavar="FILE",
        help="JSONL, Parquet or Arrow files or globs: lines or rows with tokens (and loss_mask, merge_key) or with "
        "chat messages.",
    )
    group.add_argument(
        "--prefix-tree-valid-data-path",
        nargs="+",
        metavar="FILE",
        help="The same, for validation. Without it nothing is evaluated.",
    )
    group.add_argument(
        "--prefix-tree-tokenizer",
        metavar="NAME",
        help="For chat messages: mistral-v7, mistral-v3, mistral-v3-tekken, or the folder of a Hugging Face "
        "tokenizer. Sets the vocabulary where --tokenizer-type and --vocab-size do not.",
    )
    group.add_argument(
        "--prefix-tree-chat-template-kwargs",
        type=_json_object,
        metavar="JSON",
        help="What the chat template of a Hugging Face tokenizer is given besides, such as "
        """'{"enable_thinking": false}'; with strftime_now, a date as 2026-11-20, its clock shows that date.""",
    )
    group.add_argument(
        "--prefix-tree-expand-turns",
        action="store_true",
        help="One sample per assistant turn, with its whole history as prefix.",
    )
    group.add_argument(
        "--prefix-tree-order",
        choices=["shuffled", "folded", "file"],
        default="shuffled",
        help="shuffled: draw lines in a new order each epoch, by --seed. folded: deal samples that begin with the same "
        "tokens to the same step of --global-batch-size, anew each epoch, by --seed; needs the samples in memory. "
        "file: keep the order of the files. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-new-data",
        action="store_true",
        help="A job that resumes with other samples than its checkpoint was trained on, which it knows again, begins "
        "with the first of them. Otherwise they are refused. With the same samples it goes on where it stopped.",
    )
    group.add_argument(
        "--prefix-tree-on-error",
        choices=["raise", "skip"],
        default="raise",
        help="raise: end before training at the first bad line. skip: leave out and count the lines that cannot be "
        "used and the samples that are too long. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-streaming",
        action="store_true",
        help="Hold no samples: --num-workers processes of each rank read and encode lines when a step needs them, for "
        "files larger than memory. All ranks together go through the files once at the start. A step that does not fit "
        "its micro-batches is told while the one before computes; --prefix-tree-dry-run looks at all of an epoch.",
    )
    group.add_argument(
        "--prefix-tree-max-tokens",
        type=int,
        metavar="N",
        help="Most physical tokens (after folding, before padding) of a micro-batch. Bounds its memory.",
    )
    group.add_argument(
        "--prefix-tree-share",
        choices=["all", "prompt"],
        default="all",
        help="all: every common prefix. prompt: what samples have in common before their first scored token. Either is "
        "exact. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-min-shared-tokens",
        type=int,
        default=0,
        metavar="N",
        help="Common prefixes of fewer tokens are not shared. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-length-buckets",
        type=int,
        nargs="+",
        metavar="N",
        help="The only sizes that micro-batches are padded to, the largest at least --prefix-tree-max-tokens. Default: "
        "as little padding as the parallel layout allows.",
    )
    group.add_argument(
        "--prefix-tree-attention-backend",
        default="auto",
        metavar="NAME",
        help="Attention along the tree: one of the back-ends, or auto, the fastest measured on a tree like that of the "
        "first step. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-no-deterministic-attention",
        action="store_false",
        dest="prefix_tree_deterministic_attention",
        help="Let back-ends take a faster backward that adds up in any order, and admit those that have no other. "
        "Otherwise attention gives the same bits twice, with --deterministic-mode or without.",
    )
    group.add_argument(
        "--prefix-tree-no-fused-head",
        action="store_false",
        dest="prefix_tree_fused_head",
        help="Keep the logits of all tokens. Otherwise the tokens that are scored are projected a chunk at a time.",
    )
    group.add_argument(
        "--prefix-tree-dry-run",
        action="store_true",
        help="Print the plan of the first step, its bound and an estimate of each rank's memory, and stop. Needs "
        "no GPU and starts no job; set WORLD_SIZE to the ranks of the job to plan for.",
    )
    return parser


_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    ("data_path", "--data-path: the data is --prefix-tree-data-path; leave it out"),
    ("train_data_path", "--train-data-path: the data is --prefix-tree-data-path; leave it out"),
    ("valid_data_path", "--valid-data-path: validation data is --prefix-tree-valid-data-path; leave it out"),
    ("test_data_path", "--test-data-path: there is no test phase; leave it out"),
    ("data_args_path", "--data-args-path: the data is --prefix-tree-data-path; leave it out"),
    ("per_split_data_args_path", "--per-split-data-args-path: the data is --prefix-tree-data-path; leave it out"),
    ("mock_data", "--mock-data: the data is --prefix-tree-data-path; leave it out"),
    ("sft", "--sft: it belongs to Megatron's own data; losses are masked by the data here, leave it out"),
    ("fim_data", "--fim-data: it belongs to Megatron's own data; leave it out"),
    ("full_validation", "--full-validation: use --eval-iters"),
    ("multiple_validation_sets", "--multiple-validation-sets: give one --prefix-tree-valid-data-path"),
    ("iterations_to_skip", "--iterations-to-skip: Megatron skips by reading its own kind of batch"),
    ("result_rejected_tracker_filename", "--result-rejected-tracker-filename: it skips iterations"),
    ("phase_transition_iterations", "--phase-transition-iterations: samples are counted from the start of the run"),
    ("use_legacy_models", "--use-legacy-models: only megatron-core's layers know the tree"),
    ("yaml_cfg", "--yaml-cfg: give the arguments on the command line"),
    ("perform_rl_step", "--perform-rl-step: it brings its own data and objective"),
    ("use_torch_fsdp2", "--use-torch-fsdp2: not proven equal yet; use --use-distributed-optimizer"),
    ("use_megatron_fsdp", "--use-megatron-fsdp: not proven equal yet; use --use-distributed-optimizer"),
    ("experimental_attention_variant", "--experimental-attention-variant: only self-attention knows the tree"),
    ("check_for_spiky_loss", "--check-for-spiky-loss: it compares sums, and micro-batches differ in tokens"),
    (
        "log_throughput",
        "--log-throughput: it counts --seq-length tokens a sample; the log line has logical and physical tokens/s",
    ),
    (
        "log_progress",
        "--log-progress: it counts --seq-length tokens a sample; the log line has logical and physical tokens/s",
    ),
    ("record_memory_history", "--record-memory-history: pretrain_gpt.py's own model provider starts it"),
    ("inprocess_restart", "--inprocess-restart: not proven yet; restart with --load"),
    ("moe_use_upcycling", "--moe-use-upcycling: convert the checkpoint with pretrain_gpt.py first"),
    ("fp16", "--fp16: not proven equal yet; use --bf16"),
    ("reset_position_ids", "--reset-position-ids: it belongs to Megatron's own data; leave it out"),
    ("reset_attention_mask", "--reset-attention-mask: it belongs to Megatron's own data; leave it out"),
    ("eod_mask_loss", "--eod-mask-loss: losses are masked by the data here; leave it out"),
    ("ddp_average_in_collective", "--ddp-average-in-collective: a step's divisor is known only after it; leave it out"),
    # Since core_v0.18 or core_v0.19.
    ("dataloader_inter_document_masking", "--dataloader-inter-document-masking: it belongs to Megatron's own data"),
    ("logits_load_dir", "--logits-load-dir: it brings its own loss"),
    ("logits_save_dir", "--logits-save-dir: it would save the logits of unique tokens as those of samples"),
    ("hybrid_layer_pattern", "--hybrid-layer-pattern: only self-attention knows the tree"),
    ("use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser: not proven equal yet; leave it out"),
    ("use_grouped_gemm_for_dense_mlp", "--use-grouped-gemm-for-dense-mlp: not proven equal yet; leave it out"),
)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot be used with ``--prefix-tree``, from the arguments alone.

    Args:
        args: parsed by Megatron-LM's parser with :func:`add_argument_group`, validated by it or not yet.

    Raises:
        ArgumentError: one sentence for every argument at fault.
        ValueError: there is no such attention back-end.
    """
    found = [sentence for name, sentence in _UNSUPPORTED if getattr(args, name, None)]
    if args.dataloader_type != "external":
        found.append(f"--dataloader-type {args.dataloader_type}: folded micro-batches come from outside; leave it out")
    if getattr(args, "transformer_impl", None) == "inference_optimized":
        found.append("--transformer-impl inference_optimized: use local or transformer_engine")
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        found.append(
            "--non-persistent-ckpt-type local: which samples it was trained on cannot be read of it; use global"
        )
    if getattr(args, "position_embedding_type", None) == "mrope":
        found.append("--position-embedding-type mrope: its positions are three-dimensional; use rope")
    if getattr(args, "multi_latent_attention", False) and args.tensor_model_parallel_size > 1 and args.spec is None:
        split = [
            option
            for option, is_given in (
                ("--transformer-impl local", args.transformer_impl == "local"),
                ("--mla-down-proj-fusion", getattr(args, "mla_down_proj_fusion", False)),
            )
            if is_given
        ]
        found += [
            f"{option} with --multi-latent-attention and --tensor-model-parallel-size above 1: of layers that split "
            "the down projection, Megatron-Core's own gradient is wrong (NVIDIA/Megatron-LM issue 1699); leave it out"
            for option in split
        ]
    if args.num_experts is not None and args.moe_token_dispatcher_type == "allgather":
        found.append(
            "--moe-token-dispatcher-type allgather: it wants equal lengths on all ranks; "
            "use --moe-token-dispatcher-type alltoall"
        )
    for name in ("", "expert_"):
        # Since core_v0.19; Megatron's validation turns the argument into this ratio.
        if (getattr(args, f"{name}gtp_weight_remat_size", None) or 1) > 1:
            option = f"--{name}tensor_parallel_num_weight_shards".replace("_", "-")
            found.append(f"{option} above the tensor-parallel size: not proven equal yet; leave it out")
    if args.prefix_tree_fused_head and getattr(args, "defer_embedding_wgrad_compute", False):
        found.append(
            "--defer-embedding-wgrad-compute with the fused head, whose gradient is never there as a whole: leave it "
            "out, or give --prefix-tree-no-fused-head"
        )
    if args.deterministic_mode and not args.prefix_tree_deterministic_attention:
        found.append("--prefix-tree-no-deterministic-attention with --deterministic-mode: leave one of them out")
    if not args.calculate_per_token_loss:
        found.append("a step without --calculate-per-token-loss: micro-batches hold different numbers of scored tokens")
    if found:
        raise ArgumentError("prefix-tree training does not support " + "; nor ".join(found))
    for name in ("prefix_tree_data_path", "prefix_tree_max_tokens"):
        if getattr(args, name) is None:
            raise ArgumentError(f"--prefix-tree needs --{name.replace('_', '-')}")
    if args.prefix_tree_max_tokens < 1:
        raise ArgumentError(f"--prefix-tree-max-tokens={args.prefix_tree_max_tokens} must be at least 1")
    if args.prefix_tree_min_shared_tokens < 0:
        raise ArgumentError(f"--prefix-tree-min-shared-tokens={args.prefix_tree_min_shared_tokens} must be at least 0")
    if "-" in [*args.prefix_tree_data_path, *(args.prefix_tree_valid_data_path or ())]:
        raise ArgumentError("--prefix-tree-data-path -: every rank reads the data itself; write it to a file")
    if args.prefix_tree_order == "folded" and args.prefix_tree_streaming:
        raise ArgumentError(
            "--prefix-tree-order folded sorts all samples in memory; leave --prefix-tree-streaming out, or use "
            "--prefix-tree-order shuffled"
        )
    check_setting(args.prefix_tree_attention_backend)


def check_unused(arguments: Sequence[str]) -> None:
    """Refuse the group's arguments on a command line without ``--prefix-tree``.

    Raises:
        ArgumentError: names the first of them.
    """
    for argument in arguments:
        if argument.startswith("--prefix-tree-"):
            raise ArgumentError(f"{argument.partition('=')[0]} needs --prefix-tree, which is missing")
