"""Check of a command line before Megatron-LM is imported, which takes seconds on an idle machine.

It checks the arguments of ``--prefix-tree`` and the few of Megatron-LM's that the rules read. Everything that passes,
and every other argument, is checked again when Megatron-LM has parsed the command line.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mcore_prefix_tree.arguments.flags import PREFIX, spell_option
from mcore_prefix_tree.arguments.group import add_argument_group, add_rl_argument_group
from mcore_prefix_tree.arguments.read_recipe import read_section
from mcore_prefix_tree.arguments.refusals import (
    AT_ODDS_OF_FILES,
    TOKENIZER_FILES,
    UNSUPPORTED,
    ArgumentError,
    check_arguments,
    check_checkpoint_args,
    check_checkpoints,
    check_data,
    check_extensions,
    check_launched,
    check_rl_arguments,
    check_score,
    check_spec_named,
    check_vocabulary_known,
    refuse,
)
from mcore_prefix_tree.data import check_tokenizer_named
from mcore_prefix_tree.settings import BatchConfig
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder
from mcore_prefix_tree.utils.errors import Mistakes

# Megatron-LM's arguments that the rules read, by type, with its defaults; tests compare them with its own parser.
_SIZES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_experts": None,
    "gtp_weight_remat_size": None,
    "expert_gtp_weight_remat_size": None,
    "global_batch_size": None,
    "micro_batch_size": None,
    "vocab_size": None,
    "padded_vocab_size": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "mtp_num_layers": None,
}
_RATES = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "mtp_loss_scaling_factor": 0.1}
_NAMES = {
    "dataloader_type": None,
    "transformer_impl": "transformer_engine",
    "moe_token_dispatcher_type": "allgather",
    "experimental_attention_variant": None,
    "position_embedding_type": "learned_absolute",
    "non_persistent_ckpt_type": None,
    "ckpt_format": "torch_dist",
    "cuda_graph_impl": "none",
    "tokenizer_type": None,
    "load": None,
    "save": None,
    "pretrained_checkpoint": None,
    "step_batch_size_schedule": None,
    **dict.fromkeys(TOKENIZER_FILES),
}
_LISTS = ("spec", "rampup_batch_size")
_SWITCHES = (
    "calculate_per_token_loss",
    "multi_latent_attention",
    "mla_down_proj_fusion",
    "defer_embedding_wgrad_compute",
    "use_checkpoint_args",
    "skip_train",
    "rl_training_cuda_graphs",
    "batch_invariant_mode",
)
# Values that turn an argument off, in any type that Megatron-LM reads it in.
_OFF = {"", "0", "0.0", "none", "null", "false"}


class _Given(argparse.Action):
    """An argument that is rejected if it is set; Megatron-LM reads a value that may turn it off."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        words = [str(value).lower() for value in values or ()]
        setattr(namespace, self.dest, not words or not _OFF.issuperset(words))


class _NotingReader:
    """Type of an argument that notes a value that cannot be read, and takes the default in its place."""

    def __init__(self, action: argparse.Action, mistakes: Mistakes) -> None:
        self._type, self._choices = action.type, action.choices
        self._action, self._mistakes = action, mistakes

    def __call__(self, word: str) -> Any:
        name = self._action.option_strings[0]
        try:
            value = self._type(word) if callable(self._type) else word
        except argparse.ArgumentTypeError as error:
            self._mistakes.note(ArgumentError(f"argument {name}: {error}"))
        except ValueError:
            kind = getattr(self._type, "__name__", "")
            self._mistakes.note(ArgumentError(f"argument {name}: invalid {kind} value: {word!r}"))
        else:
            if self._choices is None or value in self._choices:
                return value
            choices = ", ".join(map(str, self._choices))
            self._mistakes.note(ArgumentError(f"argument {name}: invalid choice: {word!r} (choose from {choices})"))
        return self._action.default


class EarlyParser(argparse.ArgumentParser):
    """Parser of the arguments that the rules read; ``mistakes`` collects unreadable values and misspelt names."""

    def __init__(
        self, add_group: Callable[[argparse.ArgumentParser], argparse.ArgumentParser], mistakes: Mistakes
    ) -> None:
        super().__init__(allow_abbrev=False, add_help=False, argument_default=None)
        self._mistakes = mistakes
        add_group(self)
        for of_type, defaults in ((int, _SIZES), (float, _RATES), (str, _NAMES)):
            for name, default in defaults.items():
                self.add_argument(spell_option(name), type=of_type, default=default)
        for name in _LISTS:
            self.add_argument(spell_option(name), nargs="*")
        for name in _SWITCHES:
            self.add_argument(spell_option(name), action="store_true")
        self.add_argument(
            "--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion"
        )
        for name in UNSUPPORTED:
            self.add_argument(spell_option(name), nargs="*", action=_Given)
        for action in self._actions:
            if action.type is not None or action.choices is not None:
                action.type, action.choices = _NotingReader(action, mistakes), None

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments that are known here; raises ArgumentError for one without its value."""
        parsed, rest = self.parse_known_args(words)
        for word in rest:
            name = word.partition("=")[0]
            if name.replace("_", "-").startswith(PREFIX):
                near = difflib.get_close_matches(
                    name.replace("_", "-"), [one for one in self._option_string_actions if one.startswith(PREFIX)], 1
                )
                hint = f", did you mean {near[0]}?" if near else ""
                self._mistakes.note(ArgumentError(f"{name}: there is no such argument{hint}"))
        return parsed


def check_early(words: Sequence[str]) -> None:
    """Check a command line of ``pretrain_gpt`` or ``pretrain_hybrid`` with ``--prefix-tree``, without Megatron-LM.

    Raises:
        ArgumentError: an argument is unknown, cannot be read, is missing, or cannot be used with another.
        SampleError: a file of samples is missing.
        OSError, ValueError: a folder that an argument names cannot be used.
    """
    mistakes = Mistakes()
    args = EarlyParser(add_argument_group, mistakes).parse(words)
    if mistakes:  # of values that later checks would read
        mistakes.check(refuse, args, at_odds=AT_ODDS_OF_FILES)
        mistakes.report()
    mistakes.check(check_checkpoints, args)
    mistakes.check(check_checkpoint_args, args)
    mistakes.check(check_arguments, args)
    if args.prefix_tree_hf is not None:
        mistakes.check(_check_folder, args.prefix_tree_hf)
    mistakes.check(check_score, args)
    mistakes.check(check_data, args)
    if not args.prefix_tree_dry_run:
        mistakes.check(check_launched, os.environ)
        mistakes.check(check_extensions, args)
    mistakes.check(check_vocabulary_known, args)
    if args.prefix_tree_tokenizer is not None:
        mistakes.check(check_tokenizer_named, args.prefix_tree_tokenizer, args.prefix_tree_chat_template_kwargs)
    mistakes.check(_check_padding, args)
    if args.spec is not None:
        mistakes.check(check_spec_named, args.spec)
    mistakes.report()


def check_rl_early(words: Sequence[str]) -> None:
    """Check a command line of ``train_rl`` without Megatron-LM; see :func:`check_early`."""
    mistakes = Mistakes()
    args = EarlyParser(add_rl_argument_group, mistakes).parse(words)
    mistakes.report()
    mistakes.check(check_checkpoints, args)
    mistakes.check(check_rl_arguments, args)
    mistakes.check(check_launched, os.environ)
    mistakes.check(check_extensions, args)
    mistakes.report()


def _check_padding(args: argparse.Namespace) -> None:
    if args.prefix_tree_max_tokens is not None:
        BatchConfig(**{"global_batch_size": 1} | read_section(args, "batch")).padding(multiple=1)


def _check_folder(folder: str) -> None:
    try:
        HuggingFaceFolder.read(folder)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--prefix-tree-hf: {error}") from error


def render_help(script: str, *, rl: bool) -> str:
    """Return the help of ``--prefix-tree``'s arguments; Megatron-LM's ``script`` itself shows the others."""
    usage = f"%(prog)s <arguments of {script}> {PREFIX} ..."
    parser = argparse.ArgumentParser(usage=usage, add_help=False)
    (add_rl_argument_group if rl else add_argument_group)(parser)
    others = f"The other arguments are Megatron-LM's: python {script} --help in its checkout shows them"
    return f"{parser.format_help()}\n{others}\n"
