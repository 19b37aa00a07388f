"""``mcore-prefix-tree verify``."""

from __future__ import annotations

import json

from rich.console import Console

from mcore_prefix_tree.cli.console import verify_table
from mcore_prefix_tree.recipe import load_recipe


def verify(recipe: str, overrides: list[str], *, as_json: bool) -> bool:
    """Compare a recipe's first batch folded and unfolded, print the result on the main rank, say whether it passed.

    Raises:
        ValueError, NotImplementedError, OSError: a user's mistake, in one sentence.
    """
    loaded = load_recipe(recipe, overrides)
    from mcore_prefix_tree.mcore.train.trainer import run_verify

    report, is_main = run_verify(loaded)
    if is_main and as_json:
        print(json.dumps(report.to_json()))
    elif is_main:
        Console().print(verify_table(report))
    return report.passed
