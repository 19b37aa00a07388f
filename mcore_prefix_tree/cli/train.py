"""``mcore-prefix-tree train``: run a recipe to its end."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from mcore_prefix_tree.cli.options import HuggingFace, RecipeFile, load_job, overrides_like
from mcore_prefix_tree.cli.pictures import Plot, check_picture, draw_steps
from mcore_prefix_tree.utils.errors import ENDED_BY_SIGNAL, FAILED, exit_with
from mcore_prefix_tree.utils.stdout import outlive_output


def train(
    recipe: RecipeFile,
    overrides: Annotated[list[str] | None, overrides_like("data.path=rollouts.jsonl")] = None,
    hf: HuggingFace = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last complete checkpoint in checkpoint.save, or start.")
    ] = False,
    new_data: Annotated[
        bool,
        typer.Option(
            "--new-data",
            help="With --resume: accept data other than the checkpoint's and begin with its first sample; weights, "
            "optimizer and steps continue.",
        ),
    ] = False,
    plot: Plot = None,
) -> None:
    """Train a GPT on folded rollouts; under torchrun for several ranks.

    Ctrl-C, a lost terminal, or SIGTERM, SIGUSR1 or SIGUSR2 from a scheduler ends the run after its step, with a
    checkpoint.
    """
    from rich.console import Console

    from mcore_prefix_tree.cli.console import ConsoleReporter

    loaded = load_job(recipe, overrides, "train", hf=hf, outputs=[partial(check_picture, plot)])
    outlive_output()
    from mcore_prefix_tree.mcore.loop.jobs import VerificationError, run_train
    from mcore_prefix_tree.mcore.loop.session import EndedError

    reporter = ConsoleReporter(Console(), keeps=plot is not None)
    try:
        run_train(loaded, reporter, resume=resume, new_data=new_data)
    except VerificationError as error:
        exit_with(FAILED, str(error))
    except EndedError as error:
        raise SystemExit(ENDED_BY_SIGNAL + error.signal) from None
    finally:
        reporter.close()
        if plot is not None and reporter.steps:  # of the main rank, also of a run that ends early
            draw_steps(reporter.steps, reporter.evaluations, plot)
