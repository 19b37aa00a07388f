"""Checks of a ``--prefix-tree`` job: of its command line, and of the validated arguments that a provider finds.

Whichever script starts the job, its command line passes :func:`check_command_line` when Megatron-LM parses it.
Providers call :func:`checked_config` again: the arguments may come from a checkpoint, or bypass our parser.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args, validate_args

from mcore_prefix_tree.arguments.refusals import (
    APEX_MISSING,
    SPEC_EXAMPLE,
    ArgumentError,
    check_arguments,
    check_data,
    check_launched,
    check_score,
    check_spec_named,
    check_vocabulary_known,
)
from mcore_prefix_tree.data import load_tokenizer
from mcore_prefix_tree.mcore.megatron_lm.hf_arguments import check_same_model
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import (
    make_folding_from_args,
    make_objective_from_args,
    resolve_backend_from_args,
)
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import check_layers, check_megatron_lm, hybrid_pattern
from mcore_prefix_tree.mcore.megatron_lm.step_batches import check_sizes, megatrons_calculator
from mcore_prefix_tree.mcore.seam.validation import check_config
from mcore_prefix_tree.utils.ranks import check_gpus

_RANKS = (("RANK", "0"), ("WORLD_SIZE", "1"))


def check_command_line(args: argparse.Namespace, args_defaults: Mapping[str, Any] | None) -> argparse.Namespace | None:
    """Check a job before Megatron-LM starts anything; raise ArgumentError, or the error of a part that it checks.

    Return a copy of the arguments as Megatron's validation leaves them; None if this has to wait for Megatron itself.
    ``args`` gain the tokenizer and the vocabulary that ``--prefix-tree-tokenizer`` sets.
    """
    check_megatron_lm()
    check_arguments(args)
    check_layers(args)
    check_score(args)
    if args.prefix_tree_score is not None and args.micro_batch_size is None:
        args.micro_batch_size = 1  # Megatron wants one, and nothing takes it
    check_data(args)
    if not args.prefix_tree_dry_run:
        check_machine(args)
    _set_vocabulary(args, args_defaults)
    if args.use_checkpoint_args:
        # Megatron reads the model's arguments from the checkpoint later; the model provider checks them then.
        return None
    # First, because a model that folding rejects may need a missing package already for Megatron's validation.
    check_config(as_config(args))
    validated = copy.deepcopy(args)
    # As Megatron sets them when it has parsed the command line.
    validated.rank, validated.world_size = (int(os.environ.get(name, default)) for name, default in _RANKS)
    try:
        _validate(validated, args_defaults or {})
    except ArgumentError:
        if args_defaults is not None or args.prefix_tree_dry_run:
            raise
        # With the script's own defaults the rest may be right; if not, Megatron refuses it itself.
        names = ("global_batch_size", "micro_batch_size", "data_parallel_size")
        if None not in [getattr(validated, name, None) for name in names]:
            with _megatrons_refusals(), megatrons_calculator(validated):
                pass
        return None
    config = checked_config(validated)
    if args.prefix_tree_score is None:
        with _megatrons_refusals(), megatrons_calculator(validated):
            check_sizes(validated)
    make_folding_from_args(validated, device=torch.device("cpu"))
    make_objective_from_args(validated)
    if not args.prefix_tree_dry_run:
        resolve_backend_from_args(validated, config)
    return validated


def checked_config(args: argparse.Namespace) -> Any:
    """Return the ``TransformerConfig`` of a job that folding can train and Megatron-LM can save."""
    check_arguments(args)
    check_layers(args)
    config = config_for_folding(args)
    if args.fp8 and not args.prefix_tree_dry_run and (args.transformer_impl == "local" or not HAVE_TE):
        raise ArgumentError(
            f"--fp8-format {args.fp8} needs --transformer-impl transformer_engine, and TransformerEngine installed; "
            "set both, or remove it"
        )
    if args.prefix_tree_hf is not None:
        check_same_model(args, config)
    if not args.prefix_tree_dry_run:
        check_installed(args)
    return config


def config_for_folding(args: argparse.Namespace) -> Any:
    """Return the ``TransformerConfig`` of a model that folding can train; ``args`` gain its values."""
    check_spec(args)
    # Micro-batches differ in length. Megatron's validation switches this off and leaves it to whoever brings the data.
    args.variable_seq_lengths = True
    if args.num_experts is None:
        # Upstream refuses allgather, its default, with variable lengths even if no expert is dispatched to.
        args.moe_token_dispatcher_type = "alltoall"
    config = core_transformer_config_from_args(args)
    check_config(config)
    return config


def check_spec(args: argparse.Namespace) -> None:
    """Check that ``--spec`` names layers; a module that needs a started job is for Megatron-LM to import."""
    if args.spec is None:
        return
    check_spec_named(args.spec)
    place, name = args.spec
    try:
        found = vars(import_module(place)).get(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            return
        raise ArgumentError(f"--spec {place} {name}: there is no module {error.name}; {SPEC_EXAMPLE}") from None
    except Exception:  # it may need a started job
        return
    if not isinstance(found, ModuleSpec | TransformerBlockSubmodules | MultiTokenPredictionBlockSubmodules):
        what = "is missing" if found is None else f"is a {type(found).__name__}"
        raise ArgumentError(f"--spec {place} {name}: {place}.{name} {what} and no spec of layers; {SPEC_EXAMPLE}")


def config_in_provider(args: argparse.Namespace) -> Any:
    """Return :func:`checked_config` for a provider, which Megatron calls in a started job; reject a dry run there."""
    if args.prefix_tree_dry_run:
        raise ArgumentError(
            "--prefix-tree-dry-run came to a job that has started: the script's extra_args_provider has to return the "
            "parser that add_prefix_tree_args returns"
        )
    return checked_config(args)


def check_installed(args: argparse.Namespace) -> None:
    """Raise ArgumentError if Apex, TransformerEngine's layers or both optimizers are needed and missing."""
    # Upstream's vocabulary layer asks the same, but only on the last pipeline stage and when all models are built.
    if args.gradient_accumulation_fusion and not getattr(tensor_parallel_layers, "_grad_accum_fusion_available", True):
        raise ArgumentError(APEX_MISSING)
    if hybrid_pattern(args) is not None and args.spec is None and not HAVE_TE:
        raise ArgumentError(
            "--hybrid-layer-pattern without --spec: Megatron-Core's own hybrid layers are TransformerEngine's, which "
            "is not installed; install it, or name layers, for example --spec mcore_prefix_tree.cpu.hybrid hybrid_stack"
        )
    saves_optimizer = args.save is not None and not args.no_save_optim
    if args.use_distributed_optimizer and saves_optimizer and not HAVE_APEX_OR_TE:
        raise ArgumentError(
            "--use-distributed-optimizer with --save: without the FusedAdam of TransformerEngine or Apex, Megatron "
            "cannot read back what its distributed optimizer saves; remove one of them, or add --no-save-optim"
        )
    is_local = (args.transformer_impl, args.spec) == ("local", None)
    if torch.cuda.is_available() and args.multi_latent_attention and is_local:
        raise ArgumentError(
            "--multi-latent-attention needs --transformer-impl transformer_engine: megatron-core's own attention "
            "has one size for queries and values"
        )


def check_machine(args: argparse.Namespace) -> None:
    """Check the launcher, the GPUs and the packages of this machine."""
    check_launched()
    if torch.cuda.is_available():
        check_gpus(os.environ, torch.cuda.device_count())
    check_installed(args)


def as_config(args: argparse.Namespace) -> argparse.Namespace:
    """Return the fields of a ``TransformerConfig`` that the arguments set, before Megatron's validation."""
    unset = {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(TransformerConfig)
    }
    return argparse.Namespace(**unset | vars(args) | {"num_moe_experts": args.num_experts})


def _validate(args: argparse.Namespace, args_defaults: Mapping[str, Any]) -> None:
    """Let Megatron validate arguments, without its output; raise ArgumentError if it refuses them."""
    with _megatrons_refusals(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        validate_args(args, dict(args_defaults))
    if args.prefix_tree_dry_run and not HAVE_TE:
        # The machine of the job has TransformerEngine; without it upstream's config refuses its fused rope.
        args.apply_rope_fusion = False


@contextlib.contextmanager
def _megatrons_refusals() -> Iterator[None]:
    """Raise one ArgumentError for an assertion of Megatron's validation: its message, or else its line."""
    try:
        yield
    except ArgumentError:
        raise
    except (AssertionError, ValueError) as error:
        asked = traceback.extract_tb(error.__traceback__)[-1]
        raise ArgumentError(
            f"Megatron-LM does not take these arguments: {str(error) or asked.line} (in {asked.filename}, line "
            f"{asked.lineno})"
        ) from error


def _set_vocabulary(args: argparse.Namespace, args_defaults: Mapping[str, Any] | None) -> None:
    """Set tokenizer and vocabulary if Megatron's arguments leave them open; raise ArgumentError if they do not fit."""
    name = args.prefix_tree_tokenizer
    size = None if name is None else load_tokenizer(name, args.prefix_tree_chat_template_kwargs).vocab_size
    if args.tokenizer_type is not None:
        if args.prefix_tree_dry_run:
            if args.padded_vocab_size is None and args.vocab_size is None:
                raise ArgumentError(
                    "--prefix-tree-dry-run builds no tokenizer; give --vocab-size or --padded-vocab-size"
                )
            _pad_vocabulary(args)
        return
    given = args.padded_vocab_size or args.vocab_size
    if args.use_checkpoint_args:
        # The checkpoint has the rest. Of a tokenizer Megatron takes its type from there and not its size.
        args.vocab_size = args.vocab_size or size
        args.prefix_tree_vocab_size = args.vocab_size
        return
    if given is None and size is None and args_defaults is None and (args.vocab_file or args.tokenizer_model):
        return  # of the tokenizer that the script sets by default
    check_vocabulary_known(args)
    if given is not None and size is not None and given < size:
        raise ArgumentError(f"the vocabulary of {given} tokens is smaller than the {size} of tokenizer {name}")
    # Megatron requires a tokenizer, which is not used here; its default would add a token to the vocabulary.
    args.tokenizer_type = "NullTokenizer"
    args.vocab_size = max(args.vocab_size or 0, size or 0) or given
    args.prefix_tree_vocab_size = args.vocab_size
    _pad_vocabulary(args)


def _pad_vocabulary(args: argparse.Namespace) -> None:
    """Set the rows of the embedding as Megatron-LM does, if they are not given."""
    if args.padded_vocab_size is not None:
        return
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
