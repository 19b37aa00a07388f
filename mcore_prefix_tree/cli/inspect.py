"""``mcore-prefix-tree inspect``: the gain of folding on given data, and its largest trees."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import typer

from mcore_prefix_tree.cli.alternatives import (
    alternatives,
    alternatives_json,
    print_alternatives,
    routes_rows,
    steps_json,
    steps_rows,
    ways_to_more,
)
from mcore_prefix_tree.cli.causes import causes_json, causes_lines, find_causes_in_samples
from mcore_prefix_tree.cli.options import takes
from mcore_prefix_tree.cli.pictures import Plot, check_picture, draw_forest
from mcore_prefix_tree.cli.samples import SampleOptions
from mcore_prefix_tree.utils.inputs import MOST


@takes(SampleOptions)
def inspect(
    options: SampleOptions,
    trees: Annotated[int, typer.Option(min=0, max=MOST, metavar="N", help="Trees to draw, largest first.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a drawing.")] = False,
    plot: Plot = None,
) -> None:
    """Fold samples and show the savings: tokens, ratios and the largest trees."""
    import numpy as np

    from mcore_prefix_tree.layout import fold
    from mcore_prefix_tree.layout.stats import forest_counts, largest_trees
    from mcore_prefix_tree.plan import plan_step, report_steps
    from mcore_prefix_tree.plan.step_ratios import tokens_without_routes
    from mcore_prefix_tree.trie import build_trie

    check_picture(plot, options.inputs)
    samples, recipe = options.read(), options.recipe
    layout = fold(samples.all, trie=build_trie(samples.all, options.sharing))
    counts, tokens = forest_counts(layout), tokens_without_routes([samples.all], options.sharing)
    unrouted = None if tokens is None else layout.logical_tokens / tokens
    expected = None if samples.work is None else samples.work.expected_speedup([layout])
    longest = samples.all[int(np.argmax(np.diff(layout.cu_sample_lens)))].source
    largest = largest_trees(layout, trees)
    order, steps = samples.order, None
    if order is not None:
        cut = None
        if recipe is not None:
            cut = partial(
                plan_step,
                max_tokens=recipe.batch.max_tokens,
                sharing=options.sharing,
                over_budget=options.over_budget,
                scores_first=samples.scores_first,
            )
        steps = report_steps(order.first_epoch(), plan=cut, sharing=options.sharing)

    better, causes = alternatives(samples, steps), find_causes_in_samples(samples)
    if plot is not None:
        draw_forest(layout, plot)
    if as_json:
        report: dict[str, Any] = {
            **counts,
            **({} if unrouted is None else {"fold_ratio_without_routes": unrouted}),
            "expected_speedup": None if expected is None else expected.to_json(),
            "steps": steps_json(steps, order),
            "folds_more_with": alternatives_json(better),
            "causes": causes_json(causes),
            "skipped": samples.skipped.count,
            "skipped_by_kind": samples.skipped.kinds,
            "excluded": samples.skipped.excluded,
            "longest_sample": longest,
            "tokenizer": samples.tokenizer.name if samples.tokenizer.loaded else None,
            "largest_trees": [
                {name: value for name, value in tree._asdict().items() if name != "root"} for tree in largest
            ],
        }
        typer.echo(json.dumps(report))
        return

    from rich.console import Console

    from mcore_prefix_tree.cli import numbers
    from mcore_prefix_tree.cli.drawing import draw_tree, summary
    from mcore_prefix_tree.cli.terminal import say, say_line

    # Only the caller knows which vocabulary plain tokens belong to: their text is shown if a tokenizer is named.
    console = Console()
    width = console.width - (2 if console.options.ascii_only else 0)  # an ellipsis becomes three dots
    for tree in largest:
        console.print(draw_tree(layout, tree, samples.tokenizer.loaded), width=width)
        console.print()
    if layout.num_trees > len(largest) > 0:
        say(console, f"… {numbers.plural(layout.num_trees - len(largest), 'more tree', 'more trees')}\n", style="dim")
    console.print(summary(counts, expected, [*routes_rows(unrouted), *steps_rows(steps, order)]))
    say_line(console, f"longest sample: {longest}", style="dim")
    print_alternatives(console, better)
    lines = causes_lines(causes, counts["fold_ratio"], has_text=samples.tokenizer.loaded is not None)
    for line in ["", *lines] if lines else []:
        say_line(console, line, style="dim")
    for line in ways_to_more(samples, layout.physical_tokens):
        console.print()
        say(console, line, style="dim")
