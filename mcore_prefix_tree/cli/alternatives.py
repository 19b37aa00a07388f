"""Settings that make training steps fold more, each with the ratio that it gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mcore_prefix_tree.cli import numbers
from mcore_prefix_tree.cli.samples import Samples, make_order

if TYPE_CHECKING:
    from rich.console import Console

    from mcore_prefix_tree.data.batches import SampleOrder
    from mcore_prefix_tree.data.source import Source
    from mcore_prefix_tree.plan import Spread, StepsReport
    from mcore_prefix_tree.sample import Sample

# A setting is named if steps fold this much more with it.
_GAIN = 1.05
# A larger step is this many times as large, or the smaller number if there are not enough samples.
_LARGER = (4, 2)
# Above this number of logical tokens, expanded turns are not folded step by step.
_MOST_TOKENS = 2**24


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A setting that folds training steps more, as an ``option`` of the command and as a ``setting`` of a recipe."""

    option: str
    setting: str
    fold_ratio: float
    remark: str = ""


def alternatives(samples: Samples, steps: StepsReport | None) -> list[Alternative]:
    """Return settings that fold training steps more, by a twentieth or more; none if ``steps`` is None."""
    source, found = samples.source, list[Alternative]()
    if steps is None or source is None:
        return found
    best, remark = steps.fold_ratio.mean, ""
    if source.order != "folded":
        folded = replace(source, order="folded")
        ratio = _ratio(samples, folded, samples.lines)
        if ratio >= _GAIN * best:
            found.append(Alternative(option="--order folded", setting="data.order=folded", fold_ratio=ratio))
            source, best, remark = folded, ratio, ", with --order folded"
    others = [*_larger_steps(samples, source, remark), *_expanded(samples, source, remark)]
    return found + [one for one in others if one.fold_ratio >= _GAIN * best]


def _larger_steps(samples: Samples, source: Source, remark: str) -> Iterator[Alternative]:
    assert samples.order is not None
    all_of_them = samples.order.per_epoch if source.grouped_by is not None else len(samples.all)
    for step in (factor * source.step for factor in _LARGER):
        if step <= all_of_them:
            setting = f"batch.groups_per_step={step}" if source.counts_units else f"batch.global_batch_size={step}"
            yield Alternative(
                option=setting if source.counts_units else f"--global-batch-size {step}",
                setting=setting,
                fold_ratio=_ratio(samples, replace(source, step=step), samples.lines),
                remark=f"fewer, larger steps{remark}",
            )
            return


def _expanded(samples: Samples, source: Source, remark: str) -> Iterator[Alternative]:
    turns = samples.turns
    if source.grouped_by is not None or len(turns) <= len(samples.all) or sum(turns) > _MOST_TOKENS:
        return
    lines = [[turn for sample in line for turn in expand_sample(sample)] for line in samples.lines]
    yield Alternative(
        option="--expand-turns",
        setting="data.expand_turns=true",
        fold_ratio=_ratio(samples, source, lines),
        remark=f"a sample per turn{remark}",
    )


def expand_sample(sample: Sample) -> list[Sample]:
    """Return a sample for every unbroken run of scored tokens, with all tokens up to its end."""
    import numpy as np

    from mcore_prefix_tree.sample import Sample

    scored = np.append(sample.loss_mask != 0, False)
    ends = (np.flatnonzero(scored[:-1] & ~scored[1:]) + 1).tolist()
    turns = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        mask = sample.loss_mask[:end].copy()
        mask[:begin] = 0
        routes = None if sample.signals.routes is None else sample.signals.routes.ids[:end]
        turns.append(
            Sample(
                tokens=sample.tokens[:end],
                loss_mask=mask,
                merge_key=sample.merge_key,
                source=sample.source,
                routed_experts=routes,
            )
        )
    return turns


def _ratio(samples: Samples, source: Source, lines: Sequence[Sequence[Sample]]) -> float:
    from mcore_prefix_tree.plan import report_steps

    return report_steps(make_order(source, lines).first_epoch(), sharing=samples.options.sharing).fold_ratio.mean


def print_alternatives(console: Console, found: Sequence[Alternative]) -> None:
    """Print a row for each setting that folds more; nothing if there is no such setting."""
    from mcore_prefix_tree.cli.console import rows, say, show

    if found:
        say(console, "\nTraining steps fold more with:")
        show(console, rows((f"  {one.option}", numbers.ratio(one.fold_ratio), one.remark) for one in found))


def steps_rows(steps: StepsReport | None, order: SampleOrder | None) -> list[tuple[str, str, str]]:
    """Return rows of name, value and remark; none if the size of a step is not known."""
    if steps is None or order is None:
        return []
    of = f"{order.step:,} {'groups' if order.by_line else 'samples'}"
    rows = [
        _row("  in training steps", steps.fold_ratio, f", {numbers.plural(steps.steps, 'step')} of {of}, {order.order}")
    ]
    if steps.planned_fold_ratio is not None:
        rows.append(_row("  and micro-batches", steps.planned_fold_ratio, ""))
    if steps.idle_ranks:
        rows.append(("  and idle ranks", f"{steps.idle_ranks:.1f}", "in an average step"))
    return rows


def _row(name: str, ratio: Spread, where: str) -> tuple[str, str, str]:
    return name, numbers.ratio(ratio.mean), f"{numbers.ratio(ratio.lowest)}-{numbers.ratio(ratio.highest)}{where}"


def steps_json(steps: StepsReport | None, order: SampleOrder | None) -> dict[str, Any] | None:
    """Return the fold ratios of steps for programs."""
    if steps is None or order is None:
        return None
    size = {"groups_per_step" if order.by_line else "global_batch_size": order.step}
    return {**asdict(steps), "order": order.order, **size}


def print_hints(console: Console, samples: Samples, physical_tokens: int) -> None:
    """Print sentences about options that show, or fold, more; all samples fold to ``physical_tokens``."""
    from mcore_prefix_tree.cli.console import say
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
    for line in lines:
        console.print()
        say(console, line, style="dim")
