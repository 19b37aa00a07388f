"""``mcore-prefix-tree plan``: how a step's samples would be dealt to micro-batches and ranks, and at what cost."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import typer

from mcore_prefix_tree.cli.boundary import quiet_upstream
from mcore_prefix_tree.cli.samples import (
    ChatTemplateKwargs,
    ExpandTurns,
    Files,
    MinSharedTokens,
    OnErrorOption,
    ShareOption,
    TokenizerName,
    object_of,
    read_files,
    work_of,
)

if TYPE_CHECKING:
    from mcore_prefix_tree.plan import PlanReport
    from mcore_prefix_tree.recipe import Recipe
    from mcore_prefix_tree.sample import Sample

_RANKS_SHOWN = 16


class _Sharing(TypedDict):
    share: Literal["all", "prompt"]
    min_shared_tokens: int


def plan(
    files: Files,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Physical tokens that a micro-batch may hold.")],
    dp: Annotated[int, typer.Option(min=1, metavar="D", help="Data-parallel ranks.")] = 1,
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Per rank; as few as the budget allows if none are given."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="Read and plan as this recipe does, at the cost of its model; else a token costs 1.",
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Predict seconds, from measurements that the calibrate command wrote."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the ranks' micro-batches into a PNG or SVG file.")
    ] = None,
    length_buckets: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="The only sizes that micro-batches are padded to.")
    ] = None,
    tokenizer: TokenizerName = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    expand_turns: ExpandTurns = False,
    on_error: OnErrorOption = None,
    share: ShareOption = None,
    min_shared_tokens: MinSharedTokens = None,
) -> None:
    """Plan all samples as one step and show the ranks: tokens, predicted cost, balance and repeated context."""
    from mcore_prefix_tree.layout import Padding
    from mcore_prefix_tree.plan import CostModel, plan_step, read_measured, report_plan
    from mcore_prefix_tree.recipe import load_recipe

    if plot is not None:
        _check_plot(plot)  # before the work, not after it
    recipe = None if model is None else load_recipe(model)
    samples, on_demand, skipped = read_files(
        files,
        tokenizer=tokenizer,
        chat_template_kwargs=object_of(chat_template_kwargs),
        expand_turns=expand_turns,
        on_error=on_error,
        limits={"--max-tokens": max_tokens},
        recipe=recipe,
    )

    cost_model, padding, multiple, bubble = CostModel(), Padding(), 1, 0.0
    sharing: _Sharing = {"share": "all", "min_shared_tokens": 0}
    if recipe is not None:
        vocab_size = None if recipe.model.vocab_size else on_demand.vocab_size
        cost_model = CostModel.from_work(work_of(recipe, vocab_size))
        padding, multiple, bubble = recipe.padding, recipe.parallel.micro_batch_multiple, recipe.parallel.bubble
        sharing = {"share": recipe.batch.share, "min_shared_tokens": recipe.batch.min_shared_tokens}
        calibration = calibration or recipe.batch.calibration
    if calibration is not None:
        cost_model = cost_model.calibrated(read_measured(calibration))
    if length_buckets is not None:
        padding = Padding(multiple=padding.multiple, buckets=_numbers(length_buckets))
    padding.check_holds(max_tokens)
    if share is not None:
        sharing["share"] = share.value
    if min_shared_tokens is not None:
        sharing["min_shared_tokens"] = min_shared_tokens
    kept = None if recipe is None else _kept_together(recipe, samples)
    planned = plan_step(
        samples,
        max_tokens=max_tokens,
        dp_size=dp,
        micro_batch_multiple=multiple,
        micro_batches=micro_batches,
        cost_model=cost_model,
        bubble=bubble,
        together=kept,
        **sharing,
    )
    report = report_plan(samples, planned, cost_model, max_tokens=max_tokens, padding=padding, bubble=bubble, **sharing)
    unit = "seconds" if calibration is not None else "FLOPs" if recipe is not None else "tokens"
    if plot is not None:
        _draw(report, unit, plot)
    if as_json:
        left_out = {"skipped": skipped.count, "skipped_by_kind": skipped.kinds}
        more = {"imbalance": report.imbalance, "over_lower_bound": report.over_lower_bound, "cost_unit": unit}
        typer.echo(json.dumps({"samples": len(samples), **left_out, **asdict(report), **more}))
    else:
        _print(report, unit, len(samples), max_tokens)


def _kept_together(recipe: Recipe, samples: list[Sample]) -> list[Hashable] | None:
    """What ``plan_step`` keeps in one micro-batch because the recipe's loss is of both; None if of each sample alone.

    Raises:
        RecipeError: the recipe's objective is none.
        SampleError: as in training, of pairs that are not two neighbouring samples.
    """
    quiet_upstream()
    from mcore_prefix_tree.data.grouping import whole_groups
    from mcore_prefix_tree.mcore.train.objective import objective_of
    from mcore_prefix_tree.objectives import together

    if objective_of(recipe).grouped_by != "pair":
        return None
    whole_groups([samples], "pair", step=None, setting=f"objective.name={recipe.objective.name}")
    return together(samples)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"--length-buckets {text}: give sizes with commas between, for example 8192,16384") from None


def _print(report: PlanReport, unit: str, samples: int, max_tokens: int) -> None:
    from rich.console import Console
    from rich.table import Table

    summary = Table(show_header=False, box=None)
    per_rank = len(report.ranks[0])
    computed = report.unique_tokens + report.repeated_tokens
    for name, value in [
        ("samples", f"{samples:,}"),
        ("logical tokens", f"{report.logical_tokens:,}"),
        ("unique tokens", f"{report.unique_tokens:,}"),
        ("repeated context", f"{report.repeated_tokens:,} ({report.repeated_tokens / report.unique_tokens:.1%})"),
        ("fold ratio, as planned", f"{report.logical_tokens / computed:.2f}"),
        ("padding", f"{report.padding:,} ({report.padding / computed:.1%})"),
        ("micro-batches", f"{per_rank} on each of {len(report.ranks)} ranks, up to {max_tokens:,} tokens"),
        ("slowest rank", f"{report.slowest:.4g} {unit}"),
        ("  over the mean", f"{report.imbalance:.3f}"),
        ("  over the lower bound", f"{report.over_lower_bound:.3f}"),
    ]:
        summary.add_row(name, value)
    ranks = Table(box=None, title_justify="left")
    for column in ("rank", "samples", "tokens", f"cost, {unit}", "of slowest", "tokens of its micro-batches"):
        ranks.add_column(column, justify="left" if column.startswith("tokens of") else "right")
    costs = report.rank_costs
    slowest_first = sorted(range(len(costs)), key=lambda rank: -costs[rank])
    for rank in slowest_first[:_RANKS_SHOWN]:
        batches = report.ranks[rank]
        ranks.add_row(
            str(rank),
            f"{sum(batch.samples for batch in batches):,}",
            f"{sum(batch.tokens for batch in batches):,}",
            f"{costs[rank]:.4g}",
            f"{costs[rank] / report.slowest:.1%}",
            " ".join(f"{batch.tokens:,}" for batch in batches),
        )
    console = Console()
    console.print(summary)
    console.print()
    console.print(ranks)
    if len(costs) > _RANKS_SHOWN:
        console.print(f"… {len(costs) - _RANKS_SHOWN:,} faster ranks", style="dim", highlight=False)


def _check_plot(path: str) -> None:
    """See that a plot can be drawn into a file of this name.

    Raises:
        ValueError: it is of another format, or its folder does not exist.
        ImportError: there is no matplotlib.
    """
    if not path.lower().endswith((".png", ".svg")):
        raise ValueError(f"--plot {path}: give a file name that ends with .png or .svg")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: its folder does not exist; create it")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot needs matplotlib; install it with: pip install 'mcore-prefix-tree[plot]'") from None


def _draw(report: PlanReport, unit: str, path: str) -> None:
    """One bar a rank, stacked from its micro-batches, under the mean and the lower bound."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    ranks = range(len(report.ranks))
    figure, axes = pyplot.subplots(figsize=(min(16.0, 4.0 + 0.25 * len(report.ranks)), 4.0), layout="constrained")
    below = [0.0] * len(report.ranks)
    for number in range(len(report.ranks[0])):
        cost = [rank[number].cost for rank in report.ranks]
        axes.bar(ranks, cost, bottom=below, width=0.9, color=f"C{number % 2}", edgecolor="white", linewidth=0.5)
        below = [low + more for low, more in zip(below, cost, strict=True)]
    axes.axhline(report.mean, color="black", linewidth=1, linestyle="--", label="mean")
    axes.axhline(report.lower_bound, color="red", linewidth=1, label="lower bound of the slowest")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("data-parallel rank")
    axes.set_ylabel(f"predicted cost, {unit}")
    axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    finally:
        pyplot.close(figure)
