"""Check a ``pretrain_gpt`` job before anything is started, then hand it to Megatron-LM."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib.metadata
import io
import os
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import validate_args

from mcore_prefix_tree.data import load_tokenizer, resolve_paths
from mcore_prefix_tree.launchers import check_gpus
from mcore_prefix_tree.mcore import compat
from mcore_prefix_tree.mcore.arguments import ArgumentError, check_arguments, check_unused
from mcore_prefix_tree.mcore.pretrain.adapter import check_megatron_lm, parse_command_line, run_pretrain
from mcore_prefix_tree.mcore.pretrain.backend import check_backend, device_of_this_rank
from mcore_prefix_tree.mcore.pretrain.dry_run import dry_run
from mcore_prefix_tree.mcore.pretrain.memory import warm_up_bytes
from mcore_prefix_tree.mcore.pretrain.providers import (
    TreeDatasetsProvider,
    folding_of,
    tree_model_provider,
    tree_transformer_config,
)
from mcore_prefix_tree.mcore.pretrain.step import tree_forward_step
from mcore_prefix_tree.mcore.validation import check_config
from mcore_prefix_tree.testing.emulation import enable_training

__all__ = ["check_unused", "emulate_without_gpu", "prepare"]


def say(text: str) -> None:
    """One line, from one rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"mcore_prefix_tree: {text}", flush=True)


def emulate_without_gpu(*, dry_run: bool = False) -> None:
    """Let Megatron run on this machine's CPU, if it has no GPU; a dry run only asks it to check arguments."""
    if not torch.cuda.is_available():
        enable_training()
        if not dry_run:
            say(
                "no GPU here, Megatron runs on the CPU under emulation; it needs --distributed-backend gloo "
                "--transformer-impl local --use-cpu-initialization and its --no-...-fusion flags"
            )


def say_which_megatron_core(root: Path) -> None:
    """One line where the checkout's ``megatron.core`` is not the one that pip installed."""
    version = compat.installed_version().partition("+")[0]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version("megatron-core")
        if installed != version:
            say(f"megatron.core {version} of {root} is used, not the installed {installed}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job whose arguments are sound.

    Attributes:
        defaults: for arguments that the command line leaves out.
        validated: a copy of the arguments as Megatron will see them; None where it reads them from a checkpoint.
        dry_run: only say what would happen.
    """

    defaults: dict[str, Any]
    validated: argparse.Namespace | None
    dry_run: bool

    def run(self) -> None:
        """Train, by Megatron-LM's ``pretrain``, or print the dry run.

        Raises:
            SampleError: bad data.
            ArgumentError: the data does not fit the arguments.
        """
        if self.dry_run:
            assert self.validated is not None
            if self.validated.rank == 0:
                print(dry_run(self.validated))
            return
        run_pretrain(TreeDatasetsProvider(), tree_model_provider, tree_forward_step, args_defaults=self.defaults)


def prepare(root: Path) -> Job:
    """Parse and check the command line, by Megatron's validation and this package's.

    Raises:
        ArgumentError: arguments that cannot be used together, by this package or by Megatron-LM's own validation; or an
            unsupported Megatron-LM.
        SampleError: there is no such data.
        MegatronCoreError: something that the package relies on has moved.
        NotImplementedError: a model that folding cannot do exactly.
        ValueError: an attention back-end that the model or this machine cannot have, or fewer GPUs than ranks.
        SystemExit: for ``--help``.
    """
    args = parse_command_line()
    check_megatron_lm(root)
    say_which_megatron_core(root)
    check_arguments(args)
    resolve_paths([*args.prefix_tree_data_path, *(args.prefix_tree_valid_data_path or ())])
    if not args.prefix_tree_dry_run:
        _check_machine(args)
    if args.use_checkpoint_args:
        # Megatron reads the model's arguments from the checkpoint later; the model provider checks them then.
        if args.prefix_tree_dry_run:
            raise ArgumentError("--prefix-tree-dry-run does not read --use-checkpoint-args; give the model's arguments")
        return Job(defaults=_defaults(args), validated=None, dry_run=False)
    # First, because what folding cannot do may also need, for Megatron's validation, what is not installed.
    check_config(_as_config(args))
    defaults = _defaults(args)
    validated = copy.deepcopy(args)
    # pretrain() validates again and prints all arguments then; once is enough.
    with _megatrons_refusals(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        validate_args(validated, defaults)
        if args.prefix_tree_dry_run and not HAVE_TE:
            # Where the job runs there is TransformerEngine; without it upstream's config refuses its fused rope.
            validated.apply_rope_fusion = False
        config = tree_transformer_config(validated)
    folding_of(validated, device=torch.device("cpu"))
    if not args.prefix_tree_dry_run:
        check_backend(validated, config)
        _check_warm_up(validated)
    return Job(defaults=defaults, validated=validated, dry_run=args.prefix_tree_dry_run)


def _check_machine(args: argparse.Namespace) -> None:
    """What a job needs of where it is started, and a dry run does not.

    Raises:
        ArgumentError: nobody says where ranks meet; or Apex is missing, or TransformerEngine's attention, or both
            optimizers.
        ValueError: see :func:`check_gpus`.
    """
    if "MASTER_ADDR" not in os.environ:
        raise ArgumentError(
            "MASTER_ADDR is not set: start the job with torchrun, or with a launcher that says where its ranks meet"
        )
    # Upstream's vocabulary layer asks the same, on the last pipeline stage alone and when all models are built.
    if args.gradient_accumulation_fusion and not getattr(tensor_parallel_layers, "_grad_accum_fusion_available", True):
        raise ArgumentError(
            "--no-gradient-accumulation-fusion is missing: Megatron-LM's default needs NVIDIA Apex, whose extension "
            "fused_weight_gradient_mlp_cuda is not here; give the flag, or build https://github.com/NVIDIA/apex with "
            "its CUDA extensions"
        )
    saves_optimizer = args.save is not None and not args.no_save_optim
    if args.use_distributed_optimizer and saves_optimizer and not HAVE_APEX_OR_TE:
        raise ArgumentError(
            "--use-distributed-optimizer with --save: without the FusedAdam of TransformerEngine or Apex, Megatron "
            "cannot read back what its distributed optimizer saves; leave one of them out, or give --no-save-optim"
        )
    if torch.cuda.is_available():
        if args.multi_latent_attention and args.transformer_impl == "local" and args.spec is None:
            raise ArgumentError(
                "--multi-latent-attention needs --transformer-impl transformer_engine: megatron-core's own attention "
                "has one size for queries and values"
            )
        check_gpus(os.environ, torch.cuda.device_count())


def _check_warm_up(args: argparse.Namespace) -> None:
    """Megatron-LM's first allocation fits this rank's GPU.

    Raises:
        ArgumentError: it does not.
    """
    device = device_of_this_rank()
    if device.type != "cuda":
        return
    needed, there = warm_up_bytes(args), torch.cuda.get_device_properties(device).total_memory
    if needed > there:
        raise ArgumentError(
            f"--micro-batch-size={args.micro_batch_size} samples of --seq-length={args.seq_length} tokens: on as many "
            f"tokens Megatron-LM warms up its fused functions before there is a model, in {needed / 2**30:.1f} GiB, "
            f"and this GPU has {there / 2**30:.1f}; lower --micro-batch-size, or --seq-length to the longest sample"
        )


def _as_config(args: argparse.Namespace) -> argparse.Namespace:
    """What the arguments say of a ``TransformerConfig``, before Megatron's validation."""
    unset = {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(TransformerConfig)
    }
    return argparse.Namespace(**unset | vars(args) | {"num_moe_experts": args.num_experts})


@contextlib.contextmanager
def _megatrons_refusals() -> Iterator[None]:
    """Make a sentence of what Megatron's validation asserts: its own words, or else the line that asks.

    Raises:
        ArgumentError: Megatron refuses the arguments.
    """
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


def _defaults(args: argparse.Namespace) -> dict[str, Any]:
    """What pretrain_gpt.py's arguments default to under ``--prefix-tree``.

    Raises:
        ArgumentError: the vocabulary is not known, or too small for the tokenizer.
    """
    name = args.prefix_tree_tokenizer
    size = None if name is None else load_tokenizer(name, args.prefix_tree_chat_template_kwargs).vocab_size
    if args.tokenizer_type is not None:
        return {}
    if args.use_checkpoint_args:
        # The checkpoint has the rest. Of a tokenizer Megatron takes its type from there and not its size.
        known = args.vocab_size or size
        return {} if known is None else {"vocab_size": known}
    given = args.padded_vocab_size or args.vocab_size
    if given is None and size is None:
        raise ArgumentError(
            "the vocabulary is not known: give --prefix-tree-tokenizer, --vocab-size, or Megatron's --tokenizer-type"
        )
    if given is not None and size is not None and given < size:
        raise ArgumentError(f"the vocabulary of {given} tokens is smaller than the {size} of tokenizer {name}")
    # Megatron wants a tokenizer of its own, which has nothing to do here; left alone it would add a token to the
    # vocabulary.
    vocab_size = args.vocab_size or size or given
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return {
        "tokenizer_type": "NullTokenizer",
        "vocab_size": vocab_size,
        "padded_vocab_size": -(-vocab_size // multiple) * multiple,
    }
