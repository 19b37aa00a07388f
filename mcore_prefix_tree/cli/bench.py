"""``mcore-prefix-tree bench``: training steps compared with unfolded ones, and predicted times of attention."""

from __future__ import annotations

import json
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
    check_output_option,
    load_job,
    local_file,
    overrides_like,
    takes,
)
from mcore_prefix_tree.cli.pictures import Plot, check_picture, draw_comparison
from mcore_prefix_tree.cli.samples import SampleOptions
from mcore_prefix_tree.utils.inputs import MOST

app = typer.Typer(no_args_is_help=True, help="Measure training steps, and write the numbers.")


@app.command()
def step(
    recipe: RecipeFile,
    overrides: Annotated[list[str] | None, overrides_like("attention_backend=cascade")] = None,
    repeats: Repeats = 5,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=local_file, metavar="FILE", help="Write the numbers, the machine and its versions as JSON."
        ),
    ] = None,
    plot: Plot = None,
) -> None:
    """Time forward and backward of a recipe's first batch, folded and unfolded. Under torchrun for several ranks."""
    from mcore_prefix_tree.settings.command_checks import Task

    is_new = output is not None and not output.parent.exists()
    outputs = [partial(check_output_option, "--output", None if is_new else output), partial(check_picture, plot)]
    loaded = load_job(recipe, [*(overrides or []), "checkpoint.save=null"], Task.MEASURE, outputs=outputs)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    from rich.console import Console

    from mcore_prefix_tree.bench.step import step_result
    from mcore_prefix_tree.cli.console import ConsoleReporter, print_comparison
    from mcore_prefix_tree.mcore.loop.jobs import compare_first, run_once

    # Standard output is for the result.
    reporter = ConsoleReporter(Console(stderr=True))
    work = partial(compare_first, repeats=repeats, progress=partial(reporter.comparing, "bench"))
    try:
        comparison, is_main = run_once(loaded, work, is_trained=True)
    finally:
        reporter.close()
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
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MOST, metavar="N", help="Most physical tokens of a micro-batch.")
    ],
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
    from mcore_prefix_tree.cli.terminal import grid, say

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
