"""``mcore-prefix-tree calibrate``: the cost of a token, its score and a visible pair on this machine."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from mcore_prefix_tree.cli.options import RecipeFile, Repeats, check_output_option, load_job, local, overrides_like


def calibrate(
    recipe: RecipeFile,
    overrides: Annotated[list[str] | None, overrides_like("batch.max_tokens=32768")] = None,
    output: Annotated[
        str | None,
        typer.Option(parser=local, metavar="FILE", help="Write the measurements, for batch.calibration and plan."),
    ] = None,
    repeats: Repeats = 5,
) -> None:
    """Time micro-batches of a recipe and fit the cost model that plans balance ranks by.

    Under torchrun for the layout of the job; nothing is trained.
    """
    from mcore_prefix_tree.data.write import whole_file
    from mcore_prefix_tree.settings.command_checks import Task

    loaded = load_job(recipe, overrides, Task.MEASURE, outputs=[partial(check_output_option, "--output", output)])
    from mcore_prefix_tree.bench.machine import describe_machine
    from mcore_prefix_tree.mcore.loop.jobs import measure_costs, run_once

    found, is_main = run_once(loaded, partial(measure_costs, repeats=repeats), is_trained=True)
    if not is_main:
        return
    if output is not None:
        # Complete or not at all: jobs that start now read it.
        with whole_file(output) as unfinished:
            unfinished.write_text(json.dumps({"machine": describe_machine(), **found.to_json()}, indent=2) + "\n")

    from rich.console import Console

    from mcore_prefix_tree.cli import numbers
    from mcore_prefix_tree.cli.terminal import grid, rows, say

    table = grid(("tokens", "scored", "visible pairs", "measured", "fitted"), left=())
    for one in found.measured:
        fitted = found.cost.of_measured(one)
        counts = [numbers.count(count) for count in (one.tokens, one.scored or one.tokens, one.pairs)]
        table.add_row(*counts, numbers.seconds(one.seconds), numbers.seconds(fitted))
    console, cost = Console(), found.cost
    console.print(table)
    console.print()
    parts = {"a token": cost.token, "its score": cost.scored, "a visible pair": cost.pair}
    if any(one.levels for one in found.measured):
        parts |= {"a segment": cost.segment, "a level": cost.level}
    parts["a micro-batch"] = cost.micro_batch
    costs = [(f"{name} costs", f"{value:.2e} s", "") for name, value in parts.items()]
    console.print(rows(costs))
    say(console, f"largest error of the fit: {numbers.share(found.worst)}")
