"""``mcore-prefix-tree plan``: the micro-batches and ranks of a step's samples, and their cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_prefix_tree.cli import numbers
from mcore_prefix_tree.cli.alternatives import alternatives, print_alternatives, print_hints, steps_json, steps_rows
from mcore_prefix_tree.cli.options import RANKS, accept_count, takes
from mcore_prefix_tree.cli.pictures import Plot, check_picture, draw_ranks
from mcore_prefix_tree.cli.samples import SampleOptions, Samples
from mcore_prefix_tree.utils.errors import naming

if TYPE_CHECKING:
    from mcore_prefix_tree.plan import ForestPlan, ModelWork, PlanReport, StepsReport
    from mcore_prefix_tree.sample import Sample

_RANKS_SHOWN = 16
# Of 80 columns, next to those of numbers.
_SIZES_WIDTH = 27
_MICRO_BATCHES = 2**16


@takes(SampleOptions)
def plan(
    options: SampleOptions,
    max_tokens: Annotated[
        int | None, accept_count("N", "Most physical tokens of a micro-batch. Default: the recipe's.")
    ] = None,
    dp: Annotated[int, accept_count("D", "Data-parallel ranks.", most=RANKS)] = 1,
    micro_batches: Annotated[
        int | None, accept_count("K", "Micro-batches per rank. Default: as few as possible.", most=RANKS)
    ] = None,
    length_buckets: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="The only sizes that micro-batches are padded to.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    plot: Plot = None,
) -> None:
    """Plan all samples as one step and show the ranks: tokens, predicted cost, balance and repeated context.

    If the size of a step is known, show the fold ratio of training steps as well. A recipe gives the cost of its model;
    without one a token costs 1.
    """
    from mcore_prefix_tree.layout import Padding
    from mcore_prefix_tree.plan import CostModel, plan_step, report_plan, report_steps

    check_picture(plot, options.inputs)
    if dp * (micro_batches or 1) > _MICRO_BATCHES:
        raise ValueError(f"--dp {dp} with --micro-batches {micro_batches}: at most {_MICRO_BATCHES:,} are planned")
    recipe = options.recipe
    if max_tokens is None:
        if recipe is None:
            raise ValueError("--max-tokens is missing: give the most tokens of a micro-batch, or --model RECIPE")
        max_tokens = recipe.batch.max_tokens
    over_budget, scores_first = options.cutting
    samples = options.read({"batch.max_tokens": max_tokens} if over_budget == "repeat" else {})
    work = samples.work
    cost_model, unit = (CostModel(), "tokens") if work is None else (CostModel.from_work(work), "FLOPs")
    padding = Padding() if recipe is None else recipe.padding
    with naming("batch.length_buckets: " if length_buckets is None else "--length-buckets: "):
        if length_buckets is not None:
            padding = Padding(multiple=padding.multiple, buckets=_numbers(length_buckets))
        padding.check_holds(max_tokens)
    bubble = 0.0 if recipe is None else recipe.parallel.bubble
    objective = options.objective

    def planned(step: Sequence[Sample], micro_batches: int | None = None) -> ForestPlan:
        return plan_step(
            step,
            max_tokens=max_tokens,
            dp_size=dp,
            micro_batches=micro_batches,
            micro_batch_multiple=1 if recipe is None else recipe.parallel.micro_batch_multiple,
            cost_model=cost_model,
            together=None if objective is None else objective.together(step),
            bubble=bubble,
            sharing=options.sharing,
            over_budget=over_budget,
            scores_first=scores_first,
        )

    order = samples.order  # which refuses pairs that are none
    report = report_plan(
        samples.all,
        planned(samples.all, micro_batches),
        cost_model,
        max_tokens=max_tokens,
        padding=padding,
        bubble=bubble,
        sharing=options.sharing,
    )
    steps = None if order is None else report_steps(order.first_epoch(), plan=planned, sharing=options.sharing)
    if plot is not None:
        draw_ranks(report, unit, plot)
    if as_json:
        skipped = samples.skipped
        left_out = {"skipped": skipped.count, "skipped_by_kind": skipped.kinds, "excluded": skipped.excluded}
        more = {
            "imbalance": report.imbalance,
            "over_lower_bound": report.over_lower_bound,
            "idle_ranks": report.idle_ranks,
            "empty_micro_batches": report.empty_micro_batches,
            "cost_unit": unit,
            "steps": steps_json(steps, order),
            "folds_more_with": list(map(asdict, alternatives(samples, steps))),
        }
        typer.echo(json.dumps({"samples": len(samples.all), **left_out, **asdict(report), **more}))
    else:
        _print(report, steps, samples, unit, max_tokens, [] if work is None else _states_rows(report, work))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(
            f"{text!r} is not a list of sizes; give sizes with commas between, for example 8192,16384"
        ) from None


def _print(
    report: PlanReport,
    steps: StepsReport | None,
    samples: Samples,
    unit: str,
    max_tokens: int,
    states: Sequence[tuple[str, str, str]],
) -> None:
    from rich.console import Console

    from mcore_prefix_tree.cli.console import grid, rows, say, show

    per_rank = len(report.ranks[0])
    computed = report.unique_tokens + report.repeated_tokens
    working = len(report.ranks) - report.idle_ranks
    idle = "idle ranks included" if report.idle_ranks else ""
    carried, scored_first = report.carried_tokens, report.scored_first_tokens
    empty = report.empty_micro_batches - report.idle_ranks * per_rank
    repeated = f"{numbers.share(report.repeated_tokens / report.unique_tokens)} of the unique ones"
    lines = [
        ("samples", numbers.count(len(samples.all)), ""),
        ("logical tokens", numbers.count(report.logical_tokens), ""),
        ("unique tokens", numbers.count(report.unique_tokens), ""),
        ("repeated context", numbers.count(report.repeated_tokens), repeated),
        ("carried tokens", numbers.count(carried), "run forward once more") if carried else None,
        ("scored first", numbers.count(scored_first), "run forward before the step") if scored_first else None,
        *states,
        ("fold ratio, as planned", numbers.ratio(report.logical_tokens / computed), "all samples in one step"),
        *steps_rows(steps, samples.order),
        ("padding", numbers.count(report.padding), f"{numbers.share(report.padding / computed)} of the computed ones"),
        ("micro-batches", str(per_rank), f"on each of {working} ranks, up to {max_tokens:,} tokens"),
        ("  without samples", f"{empty:,} of {working * per_rank:,}", "use fewer --micro-batches") if empty else None,
        # A smaller budget would give idle ranks no work.
        ("ranks with work", f"{working} of {len(report.ranks)}", f"use {working} ranks, or more samples per step")
        if report.idle_ranks
        else None,
        ("slowest rank", numbers.short(report.slowest), unit),
        ("  over the mean", f"{report.imbalance:.3f}x", idle),
        ("  over the lower bound", f"{report.over_lower_bound:.3f}x", "idle ranks there too" if idle else ""),
    ]
    costs = report.rank_costs
    table = grid(("rank", "samples", "tokens", f"cost, {unit}", "of slowest", "tokens of its micro-batches"), left=(5,))
    slowest_first = sorted(range(len(costs)), key=lambda rank: -costs[rank])[:working]
    for rank in slowest_first[:_RANKS_SHOWN]:
        batches = report.ranks[rank]
        table.add_row(
            str(rank),
            numbers.count(sum(batch.samples for batch in batches)),
            numbers.count(sum(batch.tokens for batch in batches)),
            numbers.short(costs[rank]),
            numbers.share(costs[rank] / report.slowest),
            _some(numbers.count(batch.tokens) for batch in batches),
        )
    console = Console()
    show(console, table)
    if working > _RANKS_SHOWN:
        say(console, f"… {working - _RANKS_SHOWN:,} faster ranks", style="dim")
    if report.idle_ranks:
        say(console, f"… {report.idle_ranks:,} idle ranks", style="dim")
    console.print()
    show(console, rows(filter(None, lines)))
    print_alternatives(console, alternatives(samples, steps))
    print_hints(console, samples, report.unique_tokens)


def _some(sizes: Iterable[str]) -> str:
    """Return sizes, or the first of them if they would not fit on a line."""
    listed = list(sizes)
    shown = " ".join(listed)
    if len(shown) <= _SIZES_WIDTH:
        return shown
    fit = shown[: _SIZES_WIDTH - len(" … 99,999 more")].rsplit(" ", 1)[0]
    return f"{fit} … {len(listed) - fit.count(' ') - 1:,} more"


def _states_rows(report: PlanReport, work: ModelWork) -> list[tuple[str, str, str]]:
    """Return rows about the largest micro-batch's levels and states below branch points, if layers keep any."""
    if not work.state_layers:
        return []
    batches = [batch for rank in report.ranks for batch in rank]
    states, levels = (max(getattr(one, name) for one in batches) for name in ("segment_states", "segment_levels"))
    kept = f"{states * work.state_bytes / 2**30:.3g} GiB in {work.state_layers} layers, before tensor parallelism"
    return [
        ("levels of segments", numbers.count(levels), "at most in a micro-batch"),
        ("states below branches", numbers.count(states), kept),
        ("  in the budget", f"{work.state_tokens:,} tokens", "for each path that joins a tree"),
    ]
