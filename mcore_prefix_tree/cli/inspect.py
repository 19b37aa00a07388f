"""``mcore-prefix-tree inspect``: the gain of folding on given data, and its largest trees."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcore_prefix_tree.cli import numbers
from mcore_prefix_tree.cli.alternatives import alternatives, print_alternatives, print_hints, steps_json, steps_rows
from mcore_prefix_tree.cli.options import accept_count, takes
from mcore_prefix_tree.cli.pictures import Plot, check_picture, draw_forest
from mcore_prefix_tree.cli.samples import SampleOptions

if TYPE_CHECKING:
    from mcore_prefix_tree.cli.samples import Samples
    from mcore_prefix_tree.data.causes import Cause, Causes
    from mcore_prefix_tree.plan import StepsReport


@takes(SampleOptions)
def inspect(
    options: SampleOptions,
    trees: Annotated[int, accept_count("N", "Trees to draw, largest first.", least=0)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a drawing.")] = False,
    plot: Plot = None,
) -> None:
    """Fold samples and show the savings: tokens, ratios and the largest trees."""
    import numpy as np

    from mcore_prefix_tree.data.causes import find_causes
    from mcore_prefix_tree.layout.forest import SampleForest, largest_trees
    from mcore_prefix_tree.plan.plan_report import tokens_without_routes
    from mcore_prefix_tree.trie import build_trie

    check_picture(plot, options.inputs)
    samples = options.read()
    forest = SampleForest.of(samples.all, build_trie(samples.all, options.sharing))
    counts, tokens = forest.counts(), tokens_without_routes([samples.all], options.sharing)
    unrouted = None if tokens is None else forest.logical_tokens / tokens
    expected = None if samples.work is None else samples.work.expected_speedup([forest])
    longest = samples.all[int(np.argmax(np.diff(forest.cu_sample_lens)))].source
    largest = largest_trees(forest, trees)
    order, steps = samples.order, _report_steps(samples)
    better = alternatives(samples, steps)
    # Texts are compared if their tokenizer is known.
    decode = samples.tokenizer.try_decode if samples.tokenizer.loaded else None
    causes = find_causes(samples.all, decode=decode)
    if plot is not None:
        draw_forest(forest, plot)
    if as_json:
        report: dict[str, Any] = {
            **counts,
            **({} if unrouted is None else {"fold_ratio_without_routes": unrouted}),
            "expected_speedup": None if expected is None else expected.to_json(),
            "steps": steps_json(steps, order),
            "folds_more_with": list(map(asdict, better)),
            "causes": {"complete": causes.is_complete, "found": [_json(cause) for cause in causes.causes]},
            "skipped": samples.skipped.count,
            "skipped_by_kind": samples.skipped.kinds,
            "excluded": samples.skipped.excluded,
            "not_read": samples.skipped.unread,
            "longest_sample": longest,
            "tokenizer": samples.tokenizer.name if samples.tokenizer.loaded else None,
            "largest_trees": [
                {name: value for name, value in tree._asdict().items() if name != "root"} for tree in largest
            ],
        }
        typer.echo(json.dumps(report))
        return

    from rich.console import Console

    from mcore_prefix_tree.cli.console import say, say_line, show
    from mcore_prefix_tree.cli.drawing import draw_tree, summary

    # Only the caller knows which vocabulary plain tokens belong to: their text is shown if a tokenizer is named.
    console = Console()
    width = console.width - (2 if console.options.ascii_only else 0)  # an ellipsis becomes three dots
    for tree in largest:
        show(console, draw_tree(forest, tree, samples.tokenizer.try_decode), width=width)
        console.print()
    if forest.num_trees > len(largest) > 0:
        say(console, f"… {numbers.plural(forest.num_trees - len(largest), 'more tree', 'more trees')}\n", style="dim")
    more = steps_rows(steps, order)
    if unrouted is not None:
        more.insert(0, ("  without routes", numbers.ratio(unrouted), "if tokens alone had to agree"))
    show(console, summary(counts, expected, more))
    say_line(console, f"longest sample: {longest}", style="dim")
    print_alternatives(console, better)
    lines = causes_lines(causes, has_text=samples.tokenizer.loaded is not None)
    for line in ["", *lines] if lines else []:
        say_line(console, line, style="dim")
    print_hints(console, samples, forest.physical_tokens)


def _report_steps(samples: Samples) -> StepsReport | None:
    """Fold the steps of the first epoch, cut as the recipe cuts them; None if the size of a step is not known."""
    from mcore_prefix_tree.plan import plan_step, report_steps

    options, order, plan = samples.options, samples.order, None
    if order is None:
        return None
    if options.recipe is not None:
        (way, scores_first), most = options.cutting, options.recipe.batch.max_tokens
        plan = partial(plan_step, max_tokens=most, sharing=options.sharing, over_budget=way, scores_first=scores_first)
    return report_steps(order.first_epoch(), plan=plan, sharing=options.sharing)


_SHOWN = 48
_PAGE = "see docs/howto/token-ids.md"
# By cause: title, title if the chat format is the cause, and the way out.
_TITLES: dict[str, tuple[str, str, str]] = {
    "retokenised": (
        "the same text in other tokens",
        "the chat format writes the same text in other tokens",
        f"train on the token ids that the engine returned; {_PAGE}",
    ),
    "rewritten": (
        "history rewritten",
        "the chat format rewrites the history",
        f"train on the history that the engine saw; {_PAGE}",
    ),
    "prompt": (
        "a few other words ahead of equal ones",
        "",
        "give all samples the same words, or write them after the shared part",
    ),
    "unknown": ("other tokens, cause unknown", "", "give --tokenizer to see the text"),
}


def causes_lines(causes: Causes, *, has_text: bool) -> list[str]:
    """Return lines about the causes, none if samples do not diverge; ``has_text`` if texts were compared."""
    if not causes.causes:
        if not causes.branches:
            return []
        if not has_text:
            return ["No cause found in token ids; give --tokenizer to compare their text."]
        return ["No cause found why samples share no more: their continuations differ."]
    lines = ["Samples would share more without:"]
    for cause in causes.causes:
        title, of_format, way_out = _TITLES[cause.name]
        at_least = "" if causes.is_complete else "at least "
        lines += [
            f"- {of_format if cause.is_format else title}, {at_least}{numbers.plural(cause.samples, 'sample')}, "
            f"{numbers.plural(cause.unshared_tokens, 'token')} not shared",
            f"  {cause.source} parts from {cause.other} after {numbers.plural(cause.common_tokens, 'token')}"
            f"{_words(cause)}",
            f"  {way_out}",
        ]
    return lines


def _words(cause: Cause) -> str:
    if cause.words is None or cause.other_words is None:
        return ""
    if cause.name == "retokenised":
        return f": both have {_shown(cause.other_words)}"
    return f": {_shown(cause.words)} instead of {_shown(cause.other_words)}"


def _shown(text: str) -> str:
    """Return text on one line, without characters that could move the cursor, cut to a few words."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f'"{plain[:_SHOWN].rstrip()}…"' if len(plain) > _SHOWN else f'"{plain}"'


def _json(cause: Cause) -> dict[str, Any]:
    return {"cause" if name == "name" else name: value for name, value in asdict(cause).items()}
