"""Commands that measure: ``bench``, which compares folded with unfolded, and ``calibrate``, which fits a cost model."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mcore_prefix_tree.cli import numbers
from mcore_prefix_tree.cli.options import (
    RecipeFile,
    Repeats,
    accept_count,
    accept_path,
    check_output_option,
    load_job,
    local_file,
    overrides_like,
    takes,
)
from mcore_prefix_tree.cli.pictures import Plot, check_picture, draw_comparison
from mcore_prefix_tree.cli.samples import SampleOptions

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

    from mcore_prefix_tree.bench.step import step_result
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


@app.command()
@takes(SampleOptions)
def attention(
    options: SampleOptions,
    predict: Annotated[str, typer.Option(metavar="GPU", help="The GPU: h100 or h200.")],
    max_tokens: Annotated[int, accept_count("N", "Most physical tokens of a micro-batch.")],
    heads: Annotated[
        str, typer.Option(metavar="Q,K,D", help="Heads of queries and of keys on a rank, and their width.")
    ] = "64,8,128",
) -> None:
    """Predict the times of a layer's attention on a GPU that is not here, folded and unfolded, from machine code.

    The micro-batches are those of all samples as one step. A measurement of the same forest is shown instead.
    """
    from mcore_prefix_tree.utils.versions import install_command

    if find_spec("triton") is None:
        raise ValueError(f"--predict compiles the kernels, but Triton is missing; {install_command('gpu')}")
    from rich.console import Console

    from mcore_prefix_tree.bench.predicted_attention import WAITING, attention_case, find_chip, predict_step
    from mcore_prefix_tree.cli.console import grid, say

    chip, sizes = find_chip(predict), heads.split(",")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes) or int(sizes[0]) % int(sizes[1]):
        raise ValueError(
            f"--heads {heads}: give three numbers, the first a multiple of the second; for example 64,8,128"
        )
    case = attention_case(*map(int, sizes))
    table = grid(("layout", "pass", "source", "ms", "TFLOP/s", "of peak"), left=(0, 1, 2))
    for layout, name, source, seconds, rate in predict_step(options.read().all, max_tokens, case, chip):
        share = numbers.share(rate / chip.peak)
        table.add_row(layout, name, source, numbers.figure(1e3 * seconds), numbers.figure(rate), share)
    console = Console()
    console.print(table)
    say(
        console,
        f"One layer on one {chip.name}: {case.heads} heads on {case.kv_heads} of {case.head_dim}, bf16, triton. "
        "TFLOP/s count visible pairs. A predicted figure sums the clocks of compiled tiles along the block lists, at "
        f"the clock of a product of {chip.peak:g} TFLOP/s, times {WAITING} for waits. This factor is fitted to a "
        "forest on an H100, where another was 1 % off. Memory, host and row sums are not counted.",
        style="dim",
    )


def calibrate(
    recipe: RecipeFile,
    overrides: Annotated[list[str] | None, overrides_like("batch.max_tokens=32768")] = None,
    output: Annotated[
        str | None, accept_path("FILE", "Write the measurements, for batch.calibration and plan.")
    ] = None,
    repeats: Repeats = 5,
) -> None:
    """Time micro-batches of a recipe and fit the cost model that plans balance ranks by.

    Under torchrun for the layout of the job; nothing is trained.
    """
    from mcore_prefix_tree.data.write import whole_file

    loaded = load_job(recipe, overrides, "measure", outputs=[partial(check_output_option, "--output", output)])
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

    from mcore_prefix_tree.cli.console import grid, rows, say

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
