"""``mcore-prefix-tree inspect``: what folding is worth on given data, and what its trees look like."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from mcore_prefix_tree.cli.tokenizer import TokenizerOnDemand


def inspect(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="JSON Lines files or globs, .gz too; '-' is standard input."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a drawing.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of chat messages: mistral-v7 (if none is given), mistral-v3, mistral-v3-tekken, or a folder with a "
            "Hugging Face tokenizer.",
        ),
    ] = None,
    expand_turns: Annotated[
        bool, typer.Option("--expand-turns", help="One sample per assistant turn, its whole history as prefix.")
    ] = False,
    trees: Annotated[int, typer.Option(min=0, metavar="N", help="How many trees to draw, largest first.")] = 3,
) -> None:
    """Fold samples and show what folding is worth: tokens, ratios and the largest trees."""
    import numpy as np

    from mcore_prefix_tree.data import DEFAULT_TOKENIZER, read_samples
    from mcore_prefix_tree.layout import fold
    from mcore_prefix_tree.stats import forest_stats, largest_trees

    on_demand = TokenizerOnDemand(tokenizer or DEFAULT_TOKENIZER)
    if tokenizer is not None:
        on_demand.load()  # a wrong name is an error whatever the files hold
    samples = read_samples(files, tokenizer=on_demand, expand_turns=expand_turns)
    layout = fold(samples)
    stats = forest_stats(layout)
    longest = samples[int(np.argmax(np.diff(layout.cu_sample_lens)))].source
    largest = largest_trees(layout, trees)

    if as_json:
        report: dict[str, Any] = {
            **vars(stats),
            "longest_sample": longest,
            "tokenizer": on_demand.name if on_demand.loaded else None,
            "largest_trees": [
                {name: value for name, value in tree._asdict().items() if name != "root"} for tree in largest
            ],
        }
        typer.echo(json.dumps(report))
        return

    from rich.console import Console

    from mcore_prefix_tree.cli.drawing import draw_tree, summary

    # Which vocabulary plain tokens are of, only the caller knows: their text is shown if a tokenizer is named.
    decode = None if on_demand.loaded is None else on_demand.loaded.decode
    console = Console()
    console.print(summary(stats))
    console.print(f"longest sample: {longest}", style="dim", markup=False, highlight=False, soft_wrap=True)
    for tree in largest:
        console.print()
        console.print(draw_tree(layout, tree, decode))
    if stats.trees > len(largest) > 0:
        console.print(f"\n… {stats.trees - len(largest):,} more trees", style="dim", highlight=False)
