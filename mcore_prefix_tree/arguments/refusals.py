"""Checks of the arguments of ``--prefix-tree``, and of the files, checkpoints, vocabulary and layers that they name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from mcore_prefix_tree.arguments.flags import SCORING, read_data, read_objective, read_score, spell_option
from mcore_prefix_tree.attention.api import check_setting
from mcore_prefix_tree.data import resolve_paths
from mcore_prefix_tree.data.write import check_rows_output
from mcore_prefix_tree.plan.model_shape import trained_depths
from mcore_prefix_tree.settings.bind_objective import check_teachers_named, make_settings
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder
from mcore_prefix_tree.utils.errors import Mistakes, naming
from mcore_prefix_tree.utils.inputs import TRACKER

# Whether arguments contradict each other, and the sentence that says so.
Rule = tuple[Callable[[argparse.Namespace], bool], str]


class ArgumentError(ValueError):
    """Arguments that cannot be used with ``--prefix-tree``. The message names them."""


# Arguments that cannot be used at all, and the reason.
_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (
        "data_path train_data_path data_args_path per_split_data_args_path mock_data",
        "the data is --prefix-tree-data-path; remove it",
    ),
    ("valid_data_path", "validation data is --prefix-tree-valid-data-path; remove it"),
    ("test_data_path", "there is no test phase; remove it"),
    ("sft eod_mask_loss", "losses are masked by the data here; remove it"),
    ("fim_data reset_position_ids reset_attention_mask", "it belongs to Megatron's own data; remove it"),
    ("full_validation", "use --eval-iters"),
    ("multiple_validation_sets", "give one --prefix-tree-valid-data-path"),
    ("iterations_to_skip", "Megatron skips by reading its own kind of batch"),
    ("result_rejected_tracker_filename", "it skips iterations"),
    ("phase_transition_iterations", "samples are counted from the start of the run"),
    ("use_legacy_models", "only megatron-core's layers know the tree"),
    ("yaml_cfg", "give the arguments on the command line"),
    ("perform_rl_step", "it brings its own data and objective; use -m mcore_prefix_tree.train_rl"),
    ("use_torch_fsdp2 use_megatron_fsdp", "not proven equal yet; use --use-distributed-optimizer"),
    ("check_for_spiky_loss", "it compares sums, and micro-batches differ in tokens"),
    (
        "log_throughput log_progress",
        "it counts --seq-length tokens per sample; the log line has logical and physical tokens/s",
    ),
    ("record_memory_history", "pretrain_gpt.py's own model provider starts it"),
    ("inprocess_restart", "not proven yet; restart with --load"),
    ("moe_use_upcycling", "convert the checkpoint with pretrain_gpt.py first"),
    (
        "is_hybrid_model hybrid_attention_ratio hybrid_mlp_ratio",
        "name the layers with --hybrid-layer-pattern of core_v0.19's pretrain_hybrid.py",
    ),
    ("fp16", "not proven equal yet; use --bf16"),
    ("ddp_average_in_collective", "a step's divisor is known only after it; remove it"),
    # Since core_v0.18 or core_v0.19.
    ("dataloader_inter_document_masking", "it belongs to Megatron's own data; remove it"),
    ("logits_load_dir", "it brings its own loss"),
    ("logits_save_dir", "it would save the logits of unique tokens as those of samples"),
    ("use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp", "not proven equal yet; remove it"),
)
# Arguments that name the files of Megatron-LM's own tokenizers.
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
# Values of arguments that cannot be used, and the reason.
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
    "projection, Megatron-Core's own gradient is wrong (NVIDIA/Megatron-LM issue 1699); remove it"
)
_SHARDS = "tensor-parallel-num-weight-shards above the tensor-parallel size: not proven equal yet; remove it"

# Arguments that cannot be used together.
_AT_ODDS: tuple[Rule, ...] = (
    (
        lambda args: args.context_parallel_size > 1,
        "--context-parallel-size {context_parallel_size}: a tree is not split over context-parallel ranks; use "
        "tensor, sequence or pipeline parallelism",
    ),
    # The arguments of a checkpoint, or a file, would replace these.
    *(
        (
            lambda args, name=name: getattr(args, name) > 0 and not (args.use_checkpoint_args or args.yaml_cfg),
            f"{option} {{{name}}}: samples that share a token would share its dropout; give {option} 0",
        )
        for name, option in (("attention_dropout", "--attention-dropout"), ("hidden_dropout", "--hidden-dropout"))
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
        lambda args: (
            getattr(args, "experimental_attention_variant", None) is not None
            and (args.transformer_impl, args.spec) == ("local", None)
        ),
        "--experimental-attention-variant {experimental_attention_variant} with --transformer-impl local: Megatron-"
        "Core has no local layers of it; use --transformer-impl transformer_engine, or to try a job on a CPU add "
        "--spec mcore_prefix_tree.mcore.seam.layer_specs gpt_layer_local",
    ),
    (
        lambda args: args.num_experts is not None and args.moe_token_dispatcher_type == "allgather",
        "--moe-token-dispatcher-type allgather: it wants equal lengths on all ranks; "
        "use --moe-token-dispatcher-type alltoall",
    ),
    (
        lambda args: getattr(args, "cuda_graph_impl", "none") != "none",
        "--cuda-graph-impl {cuda_graph_impl}: Megatron-LM captures graphs for --seq-length tokens, and micro-batches "
        "have other lengths; remove it, or train by a recipe with batch.length_buckets",
    ),
    # Since core_v0.19; Megatron's validation turns the arguments into these ratios.
    (lambda args: (getattr(args, "gtp_weight_remat_size", None) or 1) > 1, f"--{_SHARDS}"),
    (lambda args: (getattr(args, "expert_gtp_weight_remat_size", None) or 1) > 1, f"--expert-{_SHARDS}"),
    (
        lambda args: (
            args.prefix_tree_fused_head
            and not has_scalar_head(args)
            and getattr(args, "defer_embedding_wgrad_compute", False)
        ),
        "--defer-embedding-wgrad-compute with the fused head, whose complete gradient never exists: remove it, "
        "or give --prefix-tree-no-fused-head",
    ),
    (
        lambda args: has_scalar_head(args) and getattr(args, "defer_embedding_wgrad_compute", False),
        "--defer-embedding-wgrad-compute with --prefix-tree-objective {prefix_tree_objective}, which has no output "
        "layer to defer: remove it",
    ),
    (
        lambda args: has_scalar_head(args) and getattr(args, "ckpt_format", "torch_dist") != "torch_dist",
        "--ckpt-format {ckpt_format} with --prefix-tree-objective {prefix_tree_objective}: only torch_dist tells "
        "a scalar head from a vocabulary's; use --ckpt-format torch_dist",
    ),
)
# The same, of steps that are made of files.
AT_ODDS_OF_FILES: tuple[Rule, ...] = (
    (
        lambda args: args.dataloader_type != "external",
        "--dataloader-type {dataloader_type}: folded micro-batches come from outside; remove it",
    ),
    (
        lambda args: not args.calculate_per_token_loss,
        "a step without --calculate-per-token-loss: micro-batches hold different numbers of scored tokens",
    ),
)
# Rejected if the data are files; train_rl.py reads them itself, or nothing does.
_ALLOWED_OF_RL = {
    "perform_rl_step",
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
    "valid_data_path",
    "test_data_path",
    "eod_mask_loss",
    "full_validation",
    "log_throughput",
    "log_progress",
}
_VIRTUAL = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)
# The same, of train_rl.py, whose data are rollouts.
_AT_ODDS_OF_RL: tuple[Rule, ...] = (
    (
        lambda args: any(getattr(args, name, None) is not None for name in _VIRTUAL),
        "virtual pipeline stages: Megatron-LM's log-probabilities take only the first model chunk of a rank; remove "
        "them",
    ),
    (
        lambda args: args.rl_training_cuda_graphs,
        "--rl-training-cuda-graphs: the shape of a tree changes with every micro-batch; remove it",
    ),
    (
        lambda args: trained_depths(vars(args)) > 0,
        "--mtp-num-layers: Megatron-LM's RL loop trains them on prompts and padding too, in micro-batches that folding "
        "cuts differently; set --mtp-loss-scaling-factor 0, which keeps them as they are, or remove it",
    ),
    (
        lambda args: getattr(args, "batch_invariant_mode", False),
        "--batch-invariant-mode: attention along a tree is computed in other blocks than that of a row; remove it",
    ),
)


def refuse(args: argparse.Namespace, *, at_odds: Sequence[Rule] = (), allowed: Collection[str] = ()) -> None:
    """Raise ArgumentError, one sentence per mistake, for arguments that folding supports in no entry point.

    ``at_odds`` adds rules for this entry point; ``allowed`` names arguments that it takes.
    """
    given = vars(args)
    found = _describe_given(_UNSUPPORTED, {name: value for name, value in given.items() if name not in allowed})
    found += [
        f"{spell_option(name)} {value}: {why}" for name, value, why in _UNSUPPORTED_VALUES if given.get(name) == value
    ]
    found += [sentence.format_map(given) for holds, sentence in (*_AT_ODDS, *at_odds) if holds(args)]
    if found:
        raise ArgumentError("prefix-tree training does not support " + "; nor ".join(found))


def _describe_given(reasons: Iterable[tuple[str, str]], given: Mapping[str, object]) -> list[str]:
    """Return each argument of a table that is given, and why it is rejected."""
    return [f"{spell_option(name)}: {why}" for names, why in reasons for name in names.split() if given.get(name)]


def check_arguments(args: argparse.Namespace) -> None:
    """Reject arguments that cannot be used with ``--prefix-tree``; raises ArgumentError or ValueError."""
    mistakes = Mistakes()
    mistakes.check(refuse, args, at_odds=AT_ODDS_OF_FILES)
    mistakes.check(_check_data, args)
    mistakes.check(check_setting, args.prefix_tree_attention_backend)
    mistakes.check(_check_objective, args)
    mistakes.report()


def check_rl_arguments(args: argparse.Namespace) -> None:
    """Reject arguments of ``train_rl.py`` that ``--prefix-tree`` cannot have, as :func:`check_arguments` does."""
    if not args.perform_rl_step:
        raise ArgumentError(
            "--prefix-tree needs --perform-rl-step here; -m mcore_prefix_tree.pretrain_gpt trains on files"
        )
    refuse(args, at_odds=_AT_ODDS_OF_RL, allowed=_ALLOWED_OF_RL)
    check_setting(args.prefix_tree_attention_backend)


def _check_data(args: argparse.Namespace) -> None:
    given = vars(args)
    missing = [name for name in ("prefix_tree_data_path", "prefix_tree_max_tokens") if given[name] is None]
    if missing:
        raise ArgumentError(f"--prefix-tree needs {' and '.join(map(spell_option, missing))}")
    if "-" in args.prefix_tree_data_path:
        raise ArgumentError("--prefix-tree-data-path -: every rank reads the data itself; write it to a file")
    read_data(args)


def _check_objective(args: argparse.Namespace) -> None:
    section = read_objective(args)
    objective = make_settings(section)
    check_teachers_named(objective, section, fused_head=args.prefix_tree_fused_head)
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if objective.grouped_by is not None and getattr(args, name, None) is not None:
            raise ArgumentError(
                f"{spell_option(name)} with objective.name={section.name}, whose steps take complete "
                f"{objective.grouped_by}s and would cut some; remove it"
            )
    if section.teacher_recipes and getattr(args, "expert_model_parallel_size", 1) > 1:
        raise ArgumentError(
            "objective.teacher_recipe with --expert-model-parallel-size: not proven equal yet; export the teacher's "
            "rows with mcore-prefix-tree xtoken export-teacher, or score --teacher-top-k"
        )


def has_scalar_head(args: argparse.Namespace) -> bool:
    """Return whether the model gives a value per token, not a distribution; the RL loop reads log-probabilities."""
    return "prefix_tree_objective" in args and read_objective(args).has_scalar_head


# Arguments without effect in a job that does not train, and the reason.
_ONLY_TRAINING: tuple[tuple[str, str], ...] = (
    ("save", "nothing is saved; remove it"),
    ("pretrained_checkpoint", "name the checkpoint with --load"),
    ("prefix_tree_valid_data_path", "nothing is evaluated; name all files with --prefix-tree-data-path"),
    ("prefix_tree_new_data prefix_tree_dry_run skip_train", "nothing is trained; remove it"),
    ("rampup_batch_size step_batch_size_schedule", "--global-batch-size samples are planned together; remove it"),
)


def check_score(args: argparse.Namespace) -> None:
    """Check a job of ``--prefix-tree-score`` after :func:`check_arguments`; reject its options in other jobs.

    Raises ArgumentError if the scores are not available, the file cannot be written, or a checkpoint is missing.
    """
    score = read_score(args)
    given = vars(args)
    if score is None:
        options = [one.option for one in SCORING[1:] if given.get(one.dest) not in (None, one.setting.default)]
        if options:
            raise ArgumentError(f"{', '.join(options)} needs --prefix-tree-score FILE")
        return
    if found := _describe_given(_ONLY_TRAINING, given):
        raise ArgumentError("--prefix-tree-score does not take " + "; nor ".join(found))
    objective = read_objective(args)
    score.check(objective.kind, setting=f"objective.name={objective.name}", vocab_size=args.vocab_size)
    names = ("load", "prefix_tree_score_reference", "prefix_tree_hf", "prefix_tree_tokenizer", *TOKENIZER_FILES)
    folders = [folder for name in names if (folder := getattr(args, name, None)) is not None]
    with naming("--prefix-tree-score ", ArgumentError):
        check_rows_output(score.output, [*args.prefix_tree_data_path, *folders])
    if Path(score.output).exists():
        raise ArgumentError(f"--prefix-tree-score {score.output}: exists; name another file, or move it away")
    if args.global_batch_size is None:
        raise ArgumentError("--prefix-tree-score needs --global-batch-size, the samples that are planned together")
    if args.load is None and args.prefix_tree_hf is None:
        raise ArgumentError("--prefix-tree-score needs --load, the folder of the checkpoints to score with")
    for option, folder in (("--load", args.load), ("score.reference", score.reference)):
        if folder is not None and not Path(folder, TRACKER).is_file():
            raise ArgumentError(f"{option} {folder} holds no checkpoint; name the folder of a run that saved one")
    if args.load is None and has_scalar_head(args) and not HuggingFaceFolder.read(args.prefix_tree_hf).has_scalar_head:
        raise ArgumentError(f"--prefix-tree-hf {args.prefix_tree_hf} has no scalar head to score with; give --load")


def check_unused(arguments: Sequence[str]) -> None:
    """Raise ArgumentError that names an argument of the group on a command line without ``--prefix-tree``."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--prefix-tree-"):
            raise ArgumentError(f"{name} needs --prefix-tree, which is missing")
        if name.replace("_", "-").startswith("--prefix-tree"):
            raise ArgumentError(f"{argument}: there is no such argument, did you mean --prefix-tree?")


SPEC_EXAMPLE = "for example --spec mcore_prefix_tree.mcore.seam.layer_specs gpt_layer_local"
APEX_MISSING = (
    "--no-gradient-accumulation-fusion is missing: Megatron-LM's default needs NVIDIA Apex, whose extension "
    "fused_weight_gradient_mlp_cuda is not installed; give the flag, or build https://github.com/NVIDIA/apex with its "
    "CUDA extensions"
)


def check_checkpoint_args(args: argparse.Namespace) -> None:
    """Reject arguments that need the model before ``--use-checkpoint-args`` has read it; raises ArgumentError."""
    if args.use_checkpoint_args and args.prefix_tree_hf is not None:
        raise ArgumentError("--use-checkpoint-args and --prefix-tree-hf both decide the model; give only one of them")
    if args.use_checkpoint_args and args.prefix_tree_dry_run:
        raise ArgumentError("--prefix-tree-dry-run does not read --use-checkpoint-args; give the model's arguments")


def check_launched() -> None:
    """Check that a launcher started this rank; raises ArgumentError if ``MASTER_ADDR`` is not set."""
    if "MASTER_ADDR" not in os.environ:
        raise ArgumentError("MASTER_ADDR is not set: start the job with torchrun, or with a launcher that sets it")


def check_data(args: argparse.Namespace) -> None:
    """Raise SampleError if a file of samples is missing, or a glob matches none."""
    resolve_paths([*(args.prefix_tree_data_path or ()), *(args.prefix_tree_valid_data_path or ())])


def check_vocabulary_known(args: argparse.Namespace) -> None:
    """Raise ArgumentError if no argument sets the vocabulary."""
    if args.use_checkpoint_args:
        return
    names = ("prefix_tree_tokenizer", "prefix_tree_hf", "tokenizer_type", "vocab_size", "padded_vocab_size")
    if all(getattr(args, name) is None for name in names):
        raise ArgumentError(
            "the vocabulary is not known: give --prefix-tree-tokenizer, --vocab-size, or Megatron's --tokenizer-type"
        )


def check_spec_named(spec: Sequence[str]) -> None:
    """Raise ArgumentError unless ``--spec`` is an installed module and a name in it; import neither."""
    words = " ".join(spec)
    if len(spec) != 2:
        raise ArgumentError(f"--spec {words}: give a module and the name of a spec in it; {SPEC_EXAMPLE}")
    package = spec[0].partition(".")[0]
    if package not in sys.modules and (not package or find_spec(package) is None):
        raise ArgumentError(f"--spec {words}: there is no module {package}; {SPEC_EXAMPLE}")
