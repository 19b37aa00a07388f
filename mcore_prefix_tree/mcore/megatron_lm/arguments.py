"""The arguments that Megatron-LM's ``pretrain_*.py`` scripts gain, and what they refuse.

Scripts take them with ``extra_args_provider=add_prefix_tree_args``, which also checks the job; see
:mod:`mcore_prefix_tree.mcore.megatron_lm`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from mcore_prefix_tree.attention.api import check_setting
from mcore_prefix_tree.data.fields import check_names
from mcore_prefix_tree.inputs import MOST
from mcore_prefix_tree.objectives import OBJECTIVES
from mcore_prefix_tree.recipe import ObjectiveConfig
from mcore_prefix_tree.recipe.objective import check_teachers_named, settings_of
from mcore_prefix_tree.recipe.teacher import SettingNames

# Objectives of a language model. Others need a scalar head.
TRAINED = [name for name, (made, _) in OBJECTIVES.items() if not made.has_scalar_head]
NAMES = SettingNames(
    objective="--prefix-tree-objective {}",
    options="--prefix-tree-objective-options",
    teacher="--prefix-tree-teacher",
    teacher_tensor_parallel="--prefix-tree-teacher-tensor-model-parallel-size",
    tensor_parallel="--tensor-model-parallel-size",
    tokenizer="--prefix-tree-tokenizer",
    max_tokens="--prefix-tree-max-tokens",
    no_fused_head="--prefix-tree-no-fused-head",
)


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


def _field_names(text: str) -> dict[str, Any]:
    found = _json_object(text)
    try:
        check_names(found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or abs(int(text)) > MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of at most {MOST}")
    return int(text)


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
        help="Checkout of Megatron-LM, core_v0.16.1, core_v0.19.0 or main; its own megatron.core is used. Default: the "
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
        "--prefix-tree-fields",
        type=_field_names,
        default={},
        metavar="JSON",
        help="The files' names of our fields, such as "
        """'{"group": "task_id", "tokens": "input_ids"}'; null for one of ours that the files mean otherwise.""",
    )
    group.add_argument(
        "--prefix-tree-hf",
        metavar="DIR",
        help="Folder of a Hugging Face model, whose architecture sets the model's arguments. Training starts from its "
        "weights unless it loads a checkpoint. Needs Megatron-Bridge, Python 3.12 and core_v0.19.0.",
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
        "--prefix-tree-objective",
        default="sft",
        choices=sorted(TRAINED),
        metavar="NAME",
        help=f"What the samples are trained with: {', '.join(TRAINED)}. Groups and pairs stay in one step. Default: "
        "%(default)s.",
    )
    group.add_argument(
        "--prefix-tree-objective-options",
        type=_json_object,
        metavar="JSON",
        help="""Options of the objective, such as '{"kl_coef": 0.01}'; docs/objectives.md lists them.""",
    )
    group.add_argument(
        "--prefix-tree-teacher",
        nargs="+",
        metavar="RECIPE",
        help="Recipes of the models that distill with teacher=full, and xtoken, learn from: model, checkpoint.save or "
        "model.hf, data.tokenizer and attention_backend are read of them. The folder of a Hugging Face model can take "
        "a recipe's place.",
    )
    group.add_argument(
        "--prefix-tree-teacher-tensor-model-parallel-size",
        type=_whole_number,
        metavar="N",
        help="Ranks that a teacher is cut over: 1, which leaves it whole on each, or a multiple of "
        "--tensor-model-parallel-size. Default: that. On a pipeline the last stage has all layers of a teacher.",
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
        "its micro-batches is reported while the one before computes; --prefix-tree-dry-run looks at all of an epoch.",
    )
    group.add_argument(
        "--prefix-tree-max-tokens",
        type=_whole_number,
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
        type=_whole_number,
        default=0,
        metavar="N",
        help="Common prefixes of fewer tokens are not shared. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-length-buckets",
        type=_whole_number,
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


# Arguments that cannot be used at all, and why.
_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (
        "data_path train_data_path data_args_path per_split_data_args_path mock_data",
        "the data is --prefix-tree-data-path; leave it out",
    ),
    ("valid_data_path", "validation data is --prefix-tree-valid-data-path; leave it out"),
    ("test_data_path", "there is no test phase; leave it out"),
    ("sft eod_mask_loss", "losses are masked by the data here; leave it out"),
    ("fim_data reset_position_ids reset_attention_mask", "it belongs to Megatron's own data; leave it out"),
    ("full_validation", "use --eval-iters"),
    ("multiple_validation_sets", "give one --prefix-tree-valid-data-path"),
    ("iterations_to_skip", "Megatron skips by reading its own kind of batch"),
    ("result_rejected_tracker_filename", "it skips iterations"),
    ("phase_transition_iterations", "samples are counted from the start of the run"),
    ("use_legacy_models", "only megatron-core's layers know the tree"),
    ("yaml_cfg", "give the arguments on the command line"),
    ("perform_rl_step", "it brings its own data and objective"),
    ("use_torch_fsdp2 use_megatron_fsdp", "not proven equal yet; use --use-distributed-optimizer"),
    ("experimental_attention_variant", "only self-attention knows the tree"),
    ("check_for_spiky_loss", "it compares sums, and micro-batches differ in tokens"),
    (
        "log_throughput log_progress",
        "it counts --seq-length tokens a sample; the log line has logical and physical tokens/s",
    ),
    ("record_memory_history", "pretrain_gpt.py's own model provider starts it"),
    ("inprocess_restart", "not proven yet; restart with --load"),
    ("moe_use_upcycling", "convert the checkpoint with pretrain_gpt.py first"),
    ("fp16", "not proven equal yet; use --bf16"),
    ("ddp_average_in_collective", "a step's divisor is known only after it; leave it out"),
    # Since core_v0.18 or core_v0.19.
    ("dataloader_inter_document_masking", "it belongs to Megatron's own data; leave it out"),
    ("logits_load_dir", "it brings its own loss"),
    ("logits_save_dir", "it would save the logits of unique tokens as those of samples"),
    ("hybrid_layer_pattern", "only self-attention knows the tree"),
    ("use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp", "not proven equal yet; leave it out"),
)
# Values of arguments that cannot be used, and why.
_UNSUPPORTED_VALUES: tuple[tuple[str, str, str], ...] = (
    ("transformer_impl", "inference_optimized", "use local or transformer_engine"),
    ("non_persistent_ckpt_type", "local", "which samples it was trained on cannot be read of it; use global"),
    ("position_embedding_type", "mrope", "its positions are three-dimensional; use rope"),
)


def _splits_latents(args: argparse.Namespace) -> bool:
    """Return whether tensor parallelism meets multi-latent attention in layers that Megatron chooses."""
    return getattr(args, "multi_latent_attention", False) and args.tensor_model_parallel_size > 1 and args.spec is None


_WRONG_GRADIENT = (
    " with --multi-latent-attention and --tensor-model-parallel-size above 1: of layers that split the down "
    "projection, Megatron-Core's own gradient is wrong (NVIDIA/Megatron-LM issue 1699); leave it out"
)
_SHARDS = "tensor-parallel-num-weight-shards above the tensor-parallel size: not proven equal yet; leave it out"

# What cannot be used together.
_AT_ODDS: tuple[tuple[Callable[[argparse.Namespace], bool], str], ...] = (
    (
        lambda args: args.dataloader_type != "external",
        "--dataloader-type {dataloader_type}: folded micro-batches come from outside; leave it out",
    ),
    (
        lambda args: _splits_latents(args) and args.transformer_impl == "local",
        f"--transformer-impl local{_WRONG_GRADIENT}",
    ),
    (
        lambda args: _splits_latents(args) and getattr(args, "mla_down_proj_fusion", False),
        f"--mla-down-proj-fusion{_WRONG_GRADIENT}",
    ),
    (
        lambda args: args.num_experts is not None and args.moe_token_dispatcher_type == "allgather",
        "--moe-token-dispatcher-type allgather: it wants equal lengths on all ranks; "
        "use --moe-token-dispatcher-type alltoall",
    ),
    # Since core_v0.19; Megatron's validation turns the arguments into these ratios.
    (lambda args: (getattr(args, "gtp_weight_remat_size", None) or 1) > 1, f"--{_SHARDS}"),
    (lambda args: (getattr(args, "expert_gtp_weight_remat_size", None) or 1) > 1, f"--expert-{_SHARDS}"),
    (
        lambda args: args.prefix_tree_fused_head and getattr(args, "defer_embedding_wgrad_compute", False),
        "--defer-embedding-wgrad-compute with the fused head, whose gradient is never there as a whole: leave it "
        "out, or give --prefix-tree-no-fused-head",
    ),
    (
        lambda args: args.deterministic_mode and not args.prefix_tree_deterministic_attention,
        "--prefix-tree-no-deterministic-attention with --deterministic-mode: leave one of them out",
    ),
    (
        lambda args: not args.calculate_per_token_loss,
        "a step without --calculate-per-token-loss: micro-batches hold different numbers of scored tokens",
    ),
)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot be used with ``--prefix-tree``, from the arguments alone.

    Args:
        args: parsed by Megatron-LM's parser with :func:`add_argument_group`, validated by it or not yet.

    Raises:
        ArgumentError: one sentence for every argument at fault.
        ValueError: there is no such attention back-end.
    """
    given = vars(args)
    found = [f"{_option(name)}: {why}" for names, why in _UNSUPPORTED for name in names.split() if given.get(name)]
    found += [f"{_option(name)} {value}: {why}" for name, value, why in _UNSUPPORTED_VALUES if given.get(name) == value]
    found += [sentence.format_map(given) for holds, sentence in _AT_ODDS if holds(args)]
    if found:
        raise ArgumentError("prefix-tree training does not support " + "; nor ".join(found))
    for name in ("prefix_tree_data_path", "prefix_tree_max_tokens"):
        if given[name] is None:
            raise ArgumentError(f"--prefix-tree needs {_option(name)}")
    for name, least in (
        ("prefix_tree_max_tokens", 1),
        ("prefix_tree_min_shared_tokens", 0),
        ("prefix_tree_teacher_tensor_model_parallel_size", 1),
    ):
        if given[name] is not None and given[name] < least:
            raise ArgumentError(f"{_option(name)}={given[name]} must be at least {least}")
    if "-" in [*args.prefix_tree_data_path, *(args.prefix_tree_valid_data_path or ())]:
        raise ArgumentError("--prefix-tree-data-path -: every rank reads the data itself; write it to a file")
    if args.prefix_tree_order == "folded" and args.prefix_tree_streaming:
        raise ArgumentError(
            "--prefix-tree-order folded sorts all samples in memory; leave --prefix-tree-streaming out, or use "
            "--prefix-tree-order shuffled"
        )
    check_setting(args.prefix_tree_attention_backend)
    _check_objective(args)


def _check_objective(args: argparse.Namespace) -> None:
    section = objective_section(args)
    objective = settings_of(section, NAMES)
    check_teachers_named(objective, section, fused_head=args.prefix_tree_fused_head, names=NAMES)
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if objective.grouped_by is not None and getattr(args, name, None) is not None:
            raise ArgumentError(
                f"{_option(name)} with {NAMES.objective.format(section.name)}, whose steps take whole "
                f"{objective.grouped_by}s and would cut some; leave it out"
            )
    if getattr(args, "pipeline_model_parallel_size", 1) > 1 and section.options.get("scaling") == "dynamic":
        raise ArgumentError(
            f"{NAMES.options}.scaling=dynamic runs the student once more before each step, for which Megatron-LM's "
            "loop has no place on a pipeline; set scaling=fixed, or use --pipeline-model-parallel-size 1"
        )
    if section.teacher_recipes and getattr(args, "expert_model_parallel_size", 1) > 1:
        raise ArgumentError(
            f"{NAMES.teacher} with --expert-model-parallel-size: not proven equal yet; export the teacher's rows with "
            "mcore-prefix-tree xtoken export-teacher, or score --teacher-top-k"
        )


def objective_section(args: argparse.Namespace) -> ObjectiveConfig:
    """Return what arguments say of their objective, as a recipe's section."""
    return ObjectiveConfig(
        name=args.prefix_tree_objective,
        options=args.prefix_tree_objective_options or {},
        teacher_recipe=args.prefix_tree_teacher,
        teacher_tensor_model_parallel_size=args.prefix_tree_teacher_tensor_model_parallel_size,
    )


def check_unused(arguments: Sequence[str]) -> None:
    """Refuse the group's arguments on a command line without ``--prefix-tree``.

    Raises:
        ArgumentError: names the first of them.
    """
    for argument in arguments:
        if argument.startswith("--prefix-tree-"):
            raise ArgumentError(f"{argument.partition('=')[0]} needs --prefix-tree, which is missing")
