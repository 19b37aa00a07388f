"""The entry of every ``--prefix-tree`` job: arguments that are checked as soon as Megatron-LM has parsed them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from mcore_prefix_tree.arguments.flags import add_argument_group, readable_arguments
from mcore_prefix_tree.arguments.refusals import ArgumentError, check_checkpoint_args, check_unused
from mcore_prefix_tree.mcore import release
from mcore_prefix_tree.utils.errors import end_without_stacks


def add_prefix_tree_args(
    parser: argparse.ArgumentParser,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    scores: bool = False,
    runs_ahead: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser with the arguments of ``--prefix-tree`` too, which checks the job; an ``extra_args_provider``.

    With ``args_defaults`` of the script, arguments that Megatron-LM itself refuses end the job with a sentence too;
    without them, Megatron-LM refuses those. ``scores`` is whether the script writes ``--prefix-tree-score``, and
    ``runs_ahead`` whether several pipeline stages can run a pass before a step.
    """
    return CheckedParser(parser, add_argument_group, partial(_check_job, args_defaults, scores, runs_ahead))


class CheckedParser(argparse.ArgumentParser):
    """Parser of Megatron-LM's ``script``; ends the process with one sentence if the job cannot run.

    ``add_group`` adds our arguments to a parser. ``check`` checks the parsed arguments, not validated yet, of a
    ``--prefix-tree`` job; it also receives the names of those given.
    """

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        add_group: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
        check: Callable[[argparse.Namespace, set[str]], None],
        *,
        script: str = "pretrain_gpt.py",
    ) -> None:
        self._add_group, self._check, self._script = add_group, check, script
        parent = add_group(parser)
        super().__init__(
            prog=parent.prog, description=parent.description, parents=[parent], add_help=False, allow_abbrev=False
        )

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse and check the arguments; exit with status 2 for a bad job, 0 after a dry run or ``--help``."""
        words = sys.argv[1:] if args is None else args
        with readable_arguments():
            parsed = super().parse_args(args, namespace)
            if parsed.prefix_tree:
                end_without_stacks()  # a site's own script has no other place
                options = {word.partition("=")[0] for word in words}
                self._check(parsed, {one.dest for one in self._actions if options & set(one.option_strings)})
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
            usage = f"%(prog)s <arguments of {self._script}> --prefix-tree ..."
            ours = self._add_group(argparse.ArgumentParser(usage=usage, add_help=False)).format_help()
            return f"{ours}\nMegatron-LM {release.installed_version()} cannot show its own arguments: {error}\n"


def _check_job(
    args_defaults: Mapping[str, Any] | None, scores: bool, runs_ahead: bool, parsed: argparse.Namespace, given: set[str]
) -> None:
    """Check a job that reads files; a dry run ends here."""
    if parsed.prefix_tree_score is not None and not scores:
        raise ArgumentError(
            "--prefix-tree-score: this script trains; start it with python -m mcore_prefix_tree.pretrain_gpt"
        )
    parsed.prefix_tree_runs_ahead = scores or runs_ahead
    check_checkpoint_args(parsed)
    # These imports need Megatron-LM, which this module works without.
    if parsed.prefix_tree_hf is not None:
        from mcore_prefix_tree.mcore.megatron_lm.hf_arguments import set_arguments

        set_arguments(parsed, given)
    from mcore_prefix_tree.mcore.megatron_lm.argument_checks import check_command_line

    if not parsed.prefix_tree_dry_run:
        check_command_line(parsed, args_defaults)
        return
    from mcore_prefix_tree.mcore.megatron_lm.dry_run import dry_run, fill_omitted

    omitted = fill_omitted(parsed, args_defaults)
    validated = check_command_line(parsed, args_defaults)
    assert validated is not None, "a dry run that cannot be validated is refused"
    if validated.rank == 0:
        print(dry_run(validated, omitted))
    raise SystemExit(0)
