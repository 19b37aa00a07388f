"""The entry of every ``--prefix-tree`` job: arguments that are checked as soon as Megatron-LM has parsed them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mcore_prefix_tree.arguments.flags import readable_arguments
from mcore_prefix_tree.arguments.group import add_argument_group
from mcore_prefix_tree.arguments.refusals import ArgumentError, check_checkpoint_args, check_checkpoints, check_unused
from mcore_prefix_tree.mcore import compat
from mcore_prefix_tree.utils.os_signals import end_without_stacks


def add_prefix_tree_args(
    parser: argparse.ArgumentParser, args_defaults: Mapping[str, Any] | None = None, *, scores: bool = False
) -> argparse.ArgumentParser:
    """Add the arguments of ``--prefix-tree``; an ``extra_args_provider`` for Megatron-LM.

    Args:
        args_defaults: defaults that the script gives Megatron-LM under this name. With them, arguments that Megatron-LM
            itself refuses end the job with a sentence too; without them, Megatron-LM refuses those.
        scores: whether the script writes the scores of ``--prefix-tree-score``; else the argument is refused.

    Returns:
        The parser to parse with in place of ``parser``. It has the same arguments, and checks the job.
    """
    return _CheckedJob(add_argument_group(parser), args_defaults, scores=scores)


class CheckedParser(argparse.ArgumentParser):
    """Megatron-LM's parser; ends the process with one sentence if the job cannot run."""

    script = "pretrain_gpt.py"

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(
            prog=parser.prog, description=parser.description, parents=[parser], add_help=False, allow_abbrev=False
        )

    def check(self, parsed: argparse.Namespace, words: Sequence[str]) -> None:
        """Check a ``--prefix-tree`` job: its parsed arguments, not validated yet, and the words of the command line."""
        raise NotImplementedError

    def add_own(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the arguments of ``--prefix-tree`` and return the parser."""
        raise NotImplementedError

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse and check the arguments; exit with status 2 for a bad job, 0 after a dry run or ``--help``."""
        words = sys.argv[1:] if args is None else args
        with readable_arguments():
            parsed = super().parse_args(args, namespace)
            if parsed.prefix_tree:
                end_without_stacks()  # a site's own script has no other place
                check_checkpoints(parsed)
                self.check(parsed, words)
            else:
                check_unused(words)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Refuse the command line; under ``--prefix-tree`` without the usage, which has hundreds of lines."""
        if "--prefix-tree" in sys.argv[1:]:
            raise ArgumentError(message)
        super().error(message)

    def format_help(self) -> str:
        """Return Megatron-LM's help, or this package's part of it where argparse cannot format the rest."""
        try:
            return super().format_help()
        except ValueError as error:  # core_v0.19.0 has a help text that holds "10%)"
            usage = f"%(prog)s <arguments of {self.script}> --prefix-tree ..."
            ours = self.add_own(argparse.ArgumentParser(usage=usage, add_help=False)).format_help()
            return f"{ours}\nMegatron-LM {compat.installed_version()} cannot show its own arguments: {error}\n"


class _CheckedJob(CheckedParser):
    """The parser of jobs that read files; a dry run ends here."""

    def __init__(
        self, parser: argparse.ArgumentParser, args_defaults: Mapping[str, Any] | None, *, scores: bool
    ) -> None:
        super().__init__(parser)
        self._args_defaults = args_defaults
        self._scores = scores

    def add_own(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_argument_group(parser)

    def check(self, parsed: argparse.Namespace, words: Sequence[str]) -> None:
        if parsed.prefix_tree_score is not None and not self._scores:
            raise ArgumentError(
                "--prefix-tree-score: this script trains; start it with python -m mcore_prefix_tree.pretrain_gpt"
            )
        check_checkpoint_args(parsed)
        # These imports need Megatron-LM, which this module works without.
        if parsed.prefix_tree_hf is not None:
            from mcore_prefix_tree.mcore.megatron_lm.hf_arguments import set_arguments

            set_arguments(parsed, self._given(words))
        from mcore_prefix_tree.mcore.megatron_lm.argument_checks import check_command_line

        if parsed.prefix_tree_dry_run:
            self._dry_run(parsed)
        check_command_line(parsed, self._args_defaults)

    def _dry_run(self, parsed: argparse.Namespace) -> NoReturn:
        from mcore_prefix_tree.mcore.megatron_lm.argument_checks import check_command_line
        from mcore_prefix_tree.mcore.megatron_lm.dry_run import dry_run, fill_omitted

        omitted = fill_omitted(parsed, self._args_defaults)
        validated = check_command_line(parsed, self._args_defaults)
        assert validated is not None, "a dry run that cannot be validated is refused"
        if validated.rank == 0:
            print(dry_run(validated, omitted))
        raise SystemExit(0)

    def _given(self, words: Sequence[str]) -> set[str]:
        """Return the names of the arguments on a command line."""
        options = {word.partition("=")[0] for word in words}
        return {action.dest for action in self._actions if options & set(action.option_strings)}
