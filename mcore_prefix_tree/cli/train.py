"""``mcore-prefix-tree train``."""

from __future__ import annotations

from rich.console import Console

from mcore_prefix_tree.cli.console import ConsoleReporter
from mcore_prefix_tree.recipe import load_recipe


def train(recipe: str, overrides: list[str], *, resume: bool) -> None:
    """Run a recipe to its end.

    Raises:
        VerificationError: folded and unfolded differ; nothing was trained.
        ValueError, NotImplementedError, OSError: a user's mistake, in one sentence.
    """
    loaded = load_recipe(recipe, overrides)
    # Megatron takes seconds to import: a wrong recipe is told before.
    from mcore_prefix_tree.mcore.train.trainer import run_train

    reporter = ConsoleReporter(Console())
    try:
        run_train(loaded, reporter, resume=resume)
    finally:
        reporter.close()
