"""``mcore-prefix-tree xtoken export-teacher``: a teacher's rows for the samples that a student learns from."""

from __future__ import annotations

from typing import Annotated

import typer

from mcore_prefix_tree.cli.boundary import quiet_upstream
from mcore_prefix_tree.cli.options import check_output_option, local
from mcore_prefix_tree.utils.inputs import MOST


def export_teacher(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The student's, with objective.name=xtoken.")],
    output: Annotated[
        str,
        typer.Option(
            parser=local,
            metavar="FILE",
            help="One sample per line in the data's order: JSON Lines (.jsonl, .json, or packed with .gz), or a "
            ".parquet, .arrow or .feather file. An existing file is replaced once all samples are exported.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example data.path=held_out.jsonl.")
    ] = None,
    top_k: Annotated[
        int, typer.Option(min=1, max=MOST, metavar="K", help="Tokens of each row, the teacher's likeliest.")
    ] = 64,
) -> None:
    """Write every sample of a student's data with the likeliest tokens of its teacher, which has another tokenizer.

    The teacher is the last checkpoint of objective.teacher_recipe, in the parallel layout of that recipe. A student
    trains on the lines with objective.options.teacher=top_k. Under torchrun for several ranks.
    """
    from mcore_prefix_tree.settings import load_recipe
    from mcore_prefix_tree.settings.teachers import list_inputs

    loaded = load_recipe(recipe, overrides or [])
    check_output_option("--output", output, [recipe, *list_inputs(loaded)])
    quiet_upstream()
    from mcore_prefix_tree.mcore.loop.export_teacher import run_export

    report, is_main = run_export(loaded, output, top_k=top_k)
    if is_main:
        print(*report.lines(output), sep="\n")
