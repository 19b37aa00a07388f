"""Check of a command line before Megatron-LM is imported, which takes seconds on an idle machine.

It checks the arguments of ``--prefix-tree`` and the few of Megatron-LM's that the rules read. Everything that passes,
and every other argument, is checked again when Megatron-LM has parsed the command line.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mcore_prefix_tree.arguments import refusals
from mcore_prefix_tree.arguments.flags import (
    PREFIX,
    add_argument_group,
    add_rl_argument_group,
    read_section,
    spell_option,
)
from mcore_prefix_tree.arguments.refusals import TOKENIZER_FILES, UNSUPPORTED, ArgumentError
from mcore_prefix_tree.data import check_tokenizer_named
from mcore_prefix_tree.settings import BatchConfig
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder
from mcore_prefix_tree.utils.errors import Mistakes

# Megatron-LM's arguments that the rules read, with its defaults; tests compare them with its own parser.
_DEFAULTS: dict[str, int | float | str] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "mtp_loss_scaling_factor": 0.1,
    "transformer_impl": "transformer_engine",
    "moe_token_dispatcher_type": "allgather",
    "position_embedding_type": "learned_absolute",
    "ckpt_format": "torch_dist",
    "cuda_graph_impl": "none",
}
# Those without a default, by type.
_UNSET = {
    int: "num_experts gtp_weight_remat_size expert_gtp_weight_remat_size global_batch_size micro_batch_size vocab_size "
    "padded_vocab_size num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage mtp_num_layers",
    str: "dataloader_type experimental_attention_variant non_persistent_ckpt_type tokenizer_type load save "
    f"pretrained_checkpoint step_batch_size_schedule {' '.join(TOKENIZER_FILES)}",
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


def _note_unreadable(action: argparse.Action, mistakes: Mistakes) -> None:
    """Let an argument note a value that cannot be read, and take the default in its place."""
    kind, known = action.type, action.choices

    def read(word: str) -> Any:
        try:
            value = kind(word) if callable(kind) else word
        except argparse.ArgumentTypeError as error:
            why = str(error)
        except ValueError:
            why = f"invalid {getattr(kind, '__name__', '')} value: {word!r}"
        else:
            if known is None or value in known:
                return value
            why = f"invalid choice: {word!r} (choose from {', '.join(map(str, known))})"
        mistakes.note(ArgumentError(f"argument {action.option_strings[0]}: {why}"))
        return action.default

    action.type, action.choices = read, None


class EarlyParser(argparse.ArgumentParser):
    """Parser of the arguments that the rules read; ``mistakes`` collects unreadable values and misspelt names."""

    def __init__(
        self, add_group: Callable[[argparse.ArgumentParser], argparse.ArgumentParser], mistakes: Mistakes
    ) -> None:
        super().__init__(allow_abbrev=False, add_help=False, argument_default=None)
        self._mistakes = mistakes
        add_group(self)
        for name, default in _DEFAULTS.items():
            self.add_argument(spell_option(name), type=type(default), default=default)
        for kind, names in _UNSET.items():
            for name in names.split():
                self.add_argument(spell_option(name), type=kind)
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
                _note_unreadable(action, mistakes)

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

    Raises ArgumentError, SampleError, OSError or ValueError, with all mistakes in one sentence.
    """
    mistakes = Mistakes()
    args = EarlyParser(add_argument_group, mistakes).parse(words)
    if mistakes:  # of values that later checks would read
        mistakes.check(refusals.refuse, args, at_odds=refusals.AT_ODDS_OF_FILES)
        mistakes.report()
    mistakes.check(refusals.check_checkpoints, args)
    mistakes.check(refusals.check_checkpoint_args, args)
    mistakes.check(refusals.check_arguments, args)
    if args.prefix_tree_hf is not None:
        mistakes.check(_check_folder, args.prefix_tree_hf)
    mistakes.check(refusals.check_score, args)
    mistakes.check(refusals.check_data, args)
    if not args.prefix_tree_dry_run:
        mistakes.check(refusals.check_launched)
        mistakes.check(refusals.check_extensions, args)
    mistakes.check(refusals.check_vocabulary_known, args)
    if args.prefix_tree_tokenizer is not None:
        mistakes.check(check_tokenizer_named, args.prefix_tree_tokenizer, args.prefix_tree_chat_template_kwargs)
    mistakes.check(_check_padding, args)
    if args.spec is not None:
        mistakes.check(refusals.check_spec_named, args.spec)
    mistakes.report()


def check_rl_early(words: Sequence[str]) -> None:
    """Check a command line of ``train_rl`` without Megatron-LM; see :func:`check_early`."""
    mistakes = Mistakes()
    args = EarlyParser(add_rl_argument_group, mistakes).parse(words)
    mistakes.report()
    mistakes.check(refusals.check_checkpoints, args)
    mistakes.check(refusals.check_rl_arguments, args)
    mistakes.check(refusals.check_launched)
    mistakes.check(refusals.check_extensions, args)
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
