"""Commands that run a recipe: ``train``, ``verify``, ``score``, ``export``; and ``recipes``, which copies some."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer

from mcore_prefix_tree.cli.options import (
    HuggingFace,
    RecipeFile,
    accept_count,
    accept_path,
    check_output_option,
    load_job,
    local,
    local_file,
    overrides_like,
)
from mcore_prefix_tree.cli.pictures import Plot, check_picture, draw_steps
from mcore_prefix_tree.utils.errors import ENDED_BY_SIGNAL, FAILED, exit_with, spelled


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
    # A job saves and goes on without its output: a terminal that sends SIGHUP takes no more lines.
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            setattr(sys, name, cast("TextIO", _Outlived(stream)))
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


def verify(
    recipe: RecipeFile,
    overrides: Annotated[list[str] | None, overrides_like("model.dtype=float64")] = None,
    hf: HuggingFace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show that folding changes nothing but the cost: log-probabilities, loss and every gradient, on your model.

    Exit code 1 if an error is above its limit.
    """
    loaded = load_job(recipe, overrides, "verify", hf=hf)
    from rich.console import Console

    from mcore_prefix_tree.cli.console import ConsoleReporter, print_verified
    from mcore_prefix_tree.mcore.loop.jobs import run_once, verify_first

    # Standard output is for the result.
    with closing(ConsoleReporter(Console(stderr=True))) as reporter:
        work = partial(verify_first, progress=partial(reporter.comparing, "verify"))
        report, is_main = run_once(loaded, work)
    if is_main and as_json:
        print(json.dumps(report.to_json()))
    elif is_main:
        print_verified(Console(), report)
    if not report.passed:
        exit_with(FAILED)


_SCORE_SPELLINGS = {
    f"score.{name}": f"--{name.replace('_', '-')}" for name in ("output", "reference", "teacher_top_k", "record_routes")
}


def score(
    recipe: RecipeFile,
    output: Annotated[
        str,
        accept_path(
            "FILE",
            "File to write, one sample per line in the data's order: JSON Lines (.jsonl, .json, also .gz), "
            ".parquet, .arrow or .feather. An existing file is replaced once all samples are scored.",
        ),
    ],
    overrides: Annotated[list[str] | None, overrides_like("checkpoint.save=runs/mine")] = None,
    hf: HuggingFace = None,
    reference: Annotated[
        str | None, accept_path("FOLDER", "Checkpoints of a reference model; adds ref_logprobs.")
    ] = None,
    all_tokens: Annotated[
        bool, typer.Option("--all-tokens", help="Score every token, not only those of the loss mask.")
    ] = False,
    entropy: Annotated[bool, typer.Option("--entropy/--no-entropy", help="Write the entropies too.")] = True,
    teacher_top_k: Annotated[
        int | None, accept_count("K", "Write the K likeliest tokens instead, to distil from.")
    ] = None,
    record_routes: Annotated[
        bool, typer.Option("--record-routes", help="Write routed_experts too, the experts of each token.")
    ] = False,
) -> None:
    """Write every sample with its log-probabilities under the last checkpoint in checkpoint.save.

    checkpoint.save is the folder of a run, in the recipe or given here; it is only read. With checkpoint.save=null the
    weights of model.hf score.

    The lines can be trained on: old_logprobs, ref_logprobs and entropy have a number for each token, null if none was
    asked for. The recipe of a critic writes values, of a reward model reward. Under torchrun for several ranks.
    """

    def check_written(inputs: list[str]) -> None:
        inputs = inputs if reference is None else [*inputs, str(reference)]
        check_output_option("--output", output, inputs, is_of_rows=True)

    loaded = load_job(recipe, overrides, "score", hf=hf, outputs=[check_written])
    from mcore_prefix_tree.mcore.loop.score_recipe import run_score
    from mcore_prefix_tree.settings.score_section import ScoreConfig

    with spelled(_SCORE_SPELLINGS):
        options = ScoreConfig(
            output=output,
            reference=reference,
            all_tokens=all_tokens,
            entropy=entropy,
            teacher_top_k=teacher_top_k,
            record_routes=record_routes,
        )
        report, is_main = run_score(loaded, options)
    if is_main:
        print(*report.lines(output), sep="\n")


def export(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file that sets model.hf.")],
    path: Annotated[str, typer.Argument(parser=local, metavar="PATH", help="The folder to make; it must not exist.")],
    overrides: Annotated[list[str] | None, overrides_like("checkpoint.save=runs/mine")] = None,
    hf: HuggingFace = None,
) -> None:
    """Write the last checkpoint in checkpoint.save with the names, types, configuration and tokenizer of model.hf.

    With model.lora, write only the adapter, in PEFT's format.

    Any parallel layout reads the checkpoint; under torchrun for several ranks.
    """
    from mcore_prefix_tree.settings.command_checks import check_new

    loaded = load_job(recipe, overrides, "export", hf=hf, outputs=[lambda inputs: check_new(path, f"PATH={path}")])
    from mcore_prefix_tree.mcore.loop.export_folder import run_export

    iteration, is_main = run_export(loaded, path)
    if is_main:
        by = iteration if isinstance(iteration, str) else f"iteration {iteration}"
        if loaded.model.lora is not None:
            print(f"{path}: the adapter of {by} in PEFT's format, for {loaded.model.hf}")
        else:
            print(f"{path}: the weights of {by} in the format of {loaded.model.hf}")


# In a clone a link to its recipes/, in a wheel the files themselves.
SHIPPED = Path(__file__).parents[1] / "shipped_recipes"


def recipes(
    folder: Annotated[
        Path, typer.Argument(parser=local_file, metavar="[FOLDER]", help="Where to make the folder recipes.")
    ] = Path("."),
) -> None:
    """Copy the shipped recipes and the quickstart's data into FOLDER/recipes, to edit and to train."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name one, which may be new")
    target = folder / "recipes"
    if target.exists():
        raise ValueError(f"{target} exists already; name another folder")
    # copytree would go on after an error, and put all of them into one.
    for path in sorted(SHIPPED.rglob("*")):
        copy = target / path.relative_to(SHIPPED)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            shutil.copy2(path, copy)
    typer.echo(f"{target}: {sum(path.is_file() for path in target.rglob('*'))} files")
    there = "" if folder == Path(".") else f"cd {folder} && "
    typer.echo(f"{there}mcore-prefix-tree train recipes/quickstart.yaml")


class _Outlived:
    """A stream whose lines are dropped once its terminal, its reader or its disk is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()
