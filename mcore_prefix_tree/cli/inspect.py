"""``mcore-prefix-tree inspect``: what folding is worth on given data, and what its trees look like."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from mcore_prefix_tree.cli.samples import (
    ChatTemplateKwargs,
    ExpandTurns,
    Files,
    MinSharedTokens,
    OnErrorOption,
    Share,
    ShareOption,
    TokenizerName,
    object_of,
    read_files,
    work_of,
)


def inspect(
    files: Files,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a drawing.")] = False,
    tokenizer: TokenizerName = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    expand_turns: ExpandTurns = False,
    on_error: OnErrorOption = None,
    share: ShareOption = None,
    min_shared_tokens: MinSharedTokens = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Read as this recipe does, and compute the bound of a step of its model."),
    ] = None,
    trees: Annotated[int, typer.Option(min=0, metavar="N", help="How many trees to draw, largest first.")] = 3,
) -> None:
    """Fold samples and show what folding is worth: tokens, ratios and the largest trees."""
    import numpy as np

    from mcore_prefix_tree.layout import fold
    from mcore_prefix_tree.recipe import load_recipe
    from mcore_prefix_tree.stats import forest_stats, largest_trees
    from mcore_prefix_tree.trie import build_trie

    recipe = None if model is None else load_recipe(model)
    samples, on_demand, skipped = read_files(
        files,
        tokenizer=tokenizer,
        chat_template_kwargs=object_of(chat_template_kwargs),
        expand_turns=expand_turns,
        on_error=on_error,
        recipe=recipe,
    )
    trie = build_trie(samples, share=(share or Share.all).value, min_shared_tokens=min_shared_tokens or 0)
    layout = fold(samples, trie=trie)
    stats = forest_stats(layout)
    bound = None
    if recipe is not None:
        vocab_size = None if recipe.model.vocab_size else on_demand.vocab_size
        bound = work_of(recipe, vocab_size).bound([layout])
    longest = samples[int(np.argmax(np.diff(layout.cu_sample_lens)))].source
    largest = largest_trees(layout, trees)

    if as_json:
        report: dict[str, Any] = {
            **vars(stats),
            "bound": None if bound is None else bound.to_json(),
            "skipped": skipped.count,
            "skipped_by_kind": skipped.kinds,
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
    console = Console()
    console.print(summary(stats, bound))
    console.print(f"longest sample: {longest}", style="dim", markup=False, highlight=False, soft_wrap=True)
    for tree in largest:
        console.print()
        console.print(draw_tree(layout, tree, on_demand.loaded))
    if stats.trees > len(largest) > 0:
        console.print(f"\n… {stats.trees - len(largest):,} more trees", style="dim", highlight=False)
