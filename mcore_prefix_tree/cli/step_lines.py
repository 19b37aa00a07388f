"""Fold ratios of training steps as rows and JSON, and hints about options that fold better."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mcore_prefix_tree.cli import numbers

if TYPE_CHECKING:
    from mcore_prefix_tree.cli.samples import Samples
    from mcore_prefix_tree.data.batches import SampleOrder
    from mcore_prefix_tree.plan import Spread, StepsReport


def steps_rows(steps: StepsReport | None, order: SampleOrder | None) -> list[tuple[str, str, str]]:
    """Return rows of name, value and remark; none if the size of a step is not known."""
    if steps is None or order is None:
        return []
    of = f"{order.step:,} {'groups' if order.by_line else 'samples'}"
    rows = [_row("  in training steps", steps.fold_ratio, f", {steps.steps:,} of {of}, {order.order}")]
    if steps.planned_fold_ratio is not None:
        rows.append(_row("  and micro-batches", steps.planned_fold_ratio, ""))
    if steps.idle_ranks:
        rows.append(("  and idle ranks", f"{steps.idle_ranks:.1f}", "in an average step"))
    return rows


def _row(name: str, ratio: Spread, where: str) -> tuple[str, str, str]:
    return name, numbers.ratio(ratio.mean), f"{numbers.ratio(ratio.lowest)} to {numbers.ratio(ratio.highest)}{where}"


def steps_json(steps: StepsReport | None, order: SampleOrder | None) -> dict[str, Any] | None:
    """Return the fold ratios of steps for programs."""
    if steps is None or order is None:
        return None
    size = {"groups_per_step" if order.by_line else "global_batch_size": order.step}
    return {**asdict(steps), "order": order.order, **size}


def ways_to_more(samples: Samples, physical_tokens: int) -> list[str]:
    """Return sentences about options that show, or fold, more; all samples fold to ``physical_tokens``."""
    from mcore_prefix_tree.trie import SHARE_ALL

    lines = []
    if samples.order is None:
        lines.append(
            "These figures take all samples as one step. Training steps hold fewer and fold less: give "
            "--global-batch-size N or --model RECIPE to see by how much."
        )
    elif samples.source is not None and samples.source.step > samples.order.per_epoch and not samples.order.by_line:
        lines.append(
            f"A step of {samples.source.step:,} is larger than the {samples.order.per_epoch:,} samples there are, so "
            "these figures are for one step that takes each of them once."
        )
    turns = samples.turns
    # Every prefix is shared: a turn that ends inside a conversation adds no unique token.
    if len(turns) > len(samples.all) and samples.options.sharing == SHARE_ALL:
        now = sum(map(len, samples.all)) / physical_tokens
        lines.append(
            f"If you train one sample per assistant turn, give --expand-turns: {len(turns):,} samples of "
            f"{sum(turns):,} logical tokens in the same {physical_tokens:,} physical ones, a fold ratio of "
            f"{numbers.ratio(sum(turns) / physical_tokens)} instead of {numbers.ratio(now)}."
        )
    return lines
