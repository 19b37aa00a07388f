"""A forest on a terminal: its counts as a table and its largest trees as drawings."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Drawing

from mcore_prefix_tree.cli import numbers
from mcore_prefix_tree.cli.console import rows
from mcore_prefix_tree.layout.forest import Chains, SampleForest, Tree, chains
from mcore_prefix_tree.plan import ExpectedSpeedup

# A drawing is for a glance: about a screen of lines, narrow enough for the deepest one.
MAX_LINES = 24
MAX_BRANCHES = 6
MAX_LEVELS = 8
_WORDS_TOKENS = 24
_WORDS_WIDTH = 48


def summary(
    counts: Mapping[str, int | float], expected: ExpectedSpeedup | None, more: Sequence[tuple[str, str, str]]
) -> Table:
    """Return the counts, one per row, and the gain of folding; ``more`` rows go below the fold ratio."""
    of_parts = [counts["fold_ratio"], counts["pair_ratio"], counts["predictor_ratio"]]
    if expected is None:
        between = f"{numbers.ratio(min(of_parts))}-{numbers.ratio(max(of_parts))}"
        gain = [("expected speed-up", between, "by the model: --model RECIPE computes it")]
    else:
        gain = [("expected speed-up", numbers.ratio(expected.ratio), "estimated from the FLOPs of the model's parts:")]
        gain += [
            (f"  {name}", numbers.ratio(ratio), f"{numbers.share(share)} of the folded FLOPs")
            for name, (ratio, share) in expected.parts.items()
        ]
    return rows(
        [
            ("samples", numbers.count(counts["samples"]), f"longest {counts['longest_path']:,} tokens"),
            ("logical tokens", numbers.count(counts["logical_tokens"]), f"{counts['supervised_tokens']:,} supervised"),
            ("physical tokens", numbers.count(counts["physical_tokens"]), "each computed once"),
            ("trees", numbers.count(counts["trees"]), ""),
            ("nodes", numbers.count(counts["nodes"]), f"at most {counts['deepest_node']:,} deep"),
            ("fold ratio", numbers.ratio(counts["fold_ratio"]), "less work in a model's body"),
            *more,
            ("visible-pair ratio", numbers.ratio(counts["pair_ratio"]), "less work in attention"),
            ("predictor ratio", numbers.ratio(counts["predictor_ratio"]), "less work in the fused head"),
            *gain,
        ]
    )


def draw_tree(forest: SampleForest, tree: Tree, decode: Callable[[Sequence[int]], str | None]) -> Drawing:
    """Draw one tree, cut down to its largest branches; every cut shows how much it omits.

    A line begins with its first words, or with token ids if ``decode`` does not know all of them.
    """
    grouped = chains(forest)
    root = int(grouped.segment_of_node[tree.root])
    drawn = _choose(grouped, root)

    def label(segment: int) -> Text:
        first = int(grouped.first_node[segment])
        last = int(grouped.first_node[segment + 1]) if segment + 1 < len(grouped.first_node) else forest.num_nodes
        tokens = forest.tokens(first, last)
        text = Text(numbers.plural(len(tokens), "token"), style="bold")
        if last - first > 1:
            text.append(f" in a chain of {last - first:,} nodes", style="not bold")
        text.append(f", {numbers.plural(int(grouped.samples[segment]), 'sample')}  ", style="not bold")
        text.append(_first_words(tokens, decode), style="not bold dim")
        text.no_wrap, text.overflow = True, "ellipsis"
        return text

    def add_children(drawing: Drawing, segment: int) -> None:  # as deep as MAX_LEVELS
        kept = [child for child in grouped.children[segment] if child in drawn]
        for child in kept:
            add_children(drawing.add(label(child)), child)
        left_out = [child for child in grouped.children[segment] if child not in drawn]
        if left_out:
            tokens = int(grouped.physical_tokens[left_out].sum())
            more = "more " if kept else ""
            branches = numbers.plural(len(left_out), f"{more}branch", f"{more}branches")
            drawing.add(Text(f"… {branches}, {numbers.plural(tokens, 'token')}", style="dim"))

    drawing = Drawing(label(root), guide_style="dim")
    add_children(drawing, root)
    return drawing


def _choose(grouped: Chains, root: int) -> set[int]:
    """Return the segments to draw: from the root, always the largest next, within the limits above."""
    drawn: set[int] = set()
    candidates = [(0, root, 1)]
    while candidates and len(drawn) < MAX_LINES:
        _, segment, level = heapq.heappop(candidates)
        drawn.add(segment)
        if level < MAX_LEVELS:
            # Several branches of one token, for example the ends of samples, are not informative one by one.
            children = grouped.children[segment]
            longer = [child for child in children if grouped.physical_tokens[child] > 1]
            if len(children) - len(longer) > 1:
                children = longer
            below = ((-int(grouped.physical_tokens[child]), child, level + 1) for child in children)
            for candidate in heapq.nsmallest(MAX_BRANCHES, below):
                heapq.heappush(candidates, candidate)
    return drawn


def _first_words(token_ids: npt.NDArray[np.int32], decode: Callable[[Sequence[int]], str | None]) -> str:
    """Return the first words of int32 ``[n]``, or its ids."""
    ids = token_ids[:_WORDS_TOKENS].tolist()
    text = decode(ids)
    if text is None:
        text = " ".join(map(str, ids))
    else:
        # Control characters could move the cursor; a cut may fall into the middle of a character.
        text = " ".join("".join(c if c.isprintable() else " " for c in text.replace("\ufffd", " ")).split())
    cut = len(text) > _WORDS_WIDTH or len(token_ids) > _WORDS_TOKENS
    return text[:_WORDS_WIDTH].rstrip() + ("…" if cut else "")
