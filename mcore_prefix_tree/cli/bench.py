"""The command ``bench step``, which measures a step folded and unfolded."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mcore_prefix_tree.cli.options import (
    RecipeFile,
    Repeats,
    accept_path,
    check_output_option,
    load_job,
    local_file,
    overrides_like,
)
from mcore_prefix_tree.cli.pictures import Plot, check_picture, draw_comparison

app = typer.Typer(no_args_is_help=True, help="Measure training steps, and write the numbers.")


@app.command()
def step(
    recipe: RecipeFile,
    overrides: Annotated[list[str] | None, overrides_like("attention_backend=cascade")] = None,
    repeats: Repeats = 5,
    output: Annotated[
        Path | None, accept_path("FILE", "Write the numbers, the machine and its versions as JSON.", local_file)
    ] = None,
    plot: Plot = None,
) -> None:
    """Time forward and backward of a recipe's first batch, folded and unfolded. Under torchrun for several ranks."""
    is_new = output is not None and not output.parent.exists()
    outputs = [partial(check_output_option, "--output", None if is_new else output), partial(check_picture, plot)]
    loaded = load_job(recipe, [*(overrides or []), "checkpoint.save=null"], "measure", outputs=outputs)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    from rich.console import Console

    from mcore_prefix_tree.bench import step_result
    from mcore_prefix_tree.cli.console import ConsoleReporter, print_comparison
    from mcore_prefix_tree.mcore.loop.jobs import compare_first, run_once

    # Standard output is for the result.
    with closing(ConsoleReporter(Console(stderr=True))) as reporter:
        work = partial(compare_first, repeats=repeats, progress=partial(reporter.comparing, "bench"))
        comparison, is_main = run_once(loaded, work, is_trained=True, reporter=reporter)
    if not is_main:
        return
    print_comparison(Console(), comparison)
    if plot is not None:
        draw_comparison(comparison, plot)
    if output is not None:
        from mcore_prefix_tree.data.write import whole_file

        with whole_file(output) as unfinished:
            unfinished.write_text(json.dumps(step_result(asdict(loaded), comparison), indent=2, allow_nan=False) + "\n")
