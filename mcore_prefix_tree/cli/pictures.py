"""Pictures of a command's numbers, as PNG or SVG; matplotlib draws them, which is an extra."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from mcore_prefix_tree.cli.options import accept_path, check_output_option
from mcore_prefix_tree.utils.versions import install_command

if TYPE_CHECKING:
    from mcore_prefix_tree.layout.forest import Forest
    from mcore_prefix_tree.mcore.engine.comparison import Comparison
    from mcore_prefix_tree.mcore.engine.evaluation import Evaluation
    from mcore_prefix_tree.mcore.loop.trainer import StepReport
    from mcore_prefix_tree.plan import PlanReport

Plot = Annotated[str | None, accept_path("FILE", "Draw the result into a PNG or SVG file.")]


def check_picture(path: str | None, inputs: Iterable[str]) -> None:
    """Raise ValueError unless a picture can be written as PNG or SVG, ImportError without matplotlib."""
    if path is None:
        return
    if not path.lower().endswith((".png", ".svg")):
        raise ValueError(f"--plot {path}: give a file name that ends with .png or .svg")
    check_output_option("--plot", path, inputs)
    if find_spec("matplotlib") is None:
        raise ImportError(f"--plot needs matplotlib; install it with: {install_command('plot')}")


_COLUMNS = 3
# Panels of a run next to loss, speed and fold ratio: the axis, and the objective's metrics with their legends.
_METRICS: tuple[tuple[str, dict[str, str]], ...] = (
    ("reward", {"reward": "mean of the rollouts", "reward_chosen": "chosen", "reward_rejected": "rejected"}),
    ("KL divergence", {"kl": "from the reference", "kl_old": "from the old policy"}),
    ("clip fraction", {"clip_fraction": "clipped tokens"}),
)


@contextmanager
def _picture(path: str, panels: int, width: float = 6.0) -> Iterator[Any]:
    """Yield the axes of panels, three per row, and write them to a file if no error occurs."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    from mcore_prefix_tree.data.write import whole_file

    columns, rows = min(panels, _COLUMNS), -(-panels // _COLUMNS)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(width * columns, 4.0 * rows), layout="constrained", squeeze=False
    )
    for axes in grid.flat[panels:]:
        axes.remove()
    try:
        yield grid.flat[:panels]
        with whole_file(path) as unfinished:
            figure.savefig(unfinished, format=path[-3:].lower())
    finally:
        pyplot.close(figure)


def draw_forest(forest: Forest, path: str) -> None:
    """Draw the fold ratio by depth, and how many tokens there are at each depth."""
    import numpy as np

    from mcore_prefix_tree.layout.forest import tokens_by_depth

    logical, physical = tokens_by_depth(forest)
    depths = np.arange(len(logical))
    with _picture(path, 2) as (ratios, tokens):
        ratios.step(depths, logical / physical, where="mid")
        ratios.axhline(forest.fold_ratio, color="black", linewidth=1, linestyle="--", label="of all tokens")
        ratios.set(xlabel="position in a sample", ylabel="fold ratio", yscale="log")
        ratios.legend()
        tokens.fill_between(depths, logical, step="mid", alpha=0.3, label="logical: of all samples")
        tokens.fill_between(depths, physical, step="mid", label="physical: computed once")
        tokens.set(xlabel="position in a sample", ylabel="tokens", ylim=(0, None))
        tokens.legend()


def draw_ranks(report: PlanReport, unit: str, path: str) -> None:
    """Draw a bar per rank, stacked from its micro-batches, with the mean and the lower bound."""
    ranks = range(len(report.ranks))
    with _picture(path, 1, width=min(16.0, 4.0 + 0.25 * len(report.ranks))) as (axes,):
        below = [0.0] * len(report.ranks)
        for number in range(len(report.ranks[0])):
            cost = [rank[number].cost for rank in report.ranks]
            axes.bar(ranks, cost, bottom=below, width=0.9, color=f"C{number % 2}", edgecolor="white", linewidth=0.5)
            below = [low + more for low, more in zip(below, cost, strict=True)]
        axes.axhline(report.mean, color="black", linewidth=1, linestyle="--", label="mean")
        axes.axhline(report.lower_bound, color="red", linewidth=1, label="lower bound of the slowest")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel="data-parallel rank", ylabel=f"predicted cost, {unit}")
        axes.legend(loc="lower right")


def draw_steps(steps: Sequence[StepReport], evaluations: Sequence[Evaluation], path: str) -> None:
    """Draw loss, speed and fold ratio over the steps of a run, and the metrics of an objective of rewards."""
    at = [one.iteration for one in steps]
    reported = [panel for panel in _METRICS if any(name in one.metrics for one in steps for name in panel[1])]
    with _picture(path, 3 + len(reported), width=5.0) as (losses, speed, ratios, *others):
        losses.plot(at, [one.loss for one in steps], marker="." if len(at) < 50 else None, label="training")
        if evaluations:
            held_out = [(one.iteration, one.loss) for one in evaluations]
            losses.plot(*zip(*held_out, strict=True), marker="o", label="validation")
        losses.set(xlabel="step", ylabel="loss")
        losses.legend()
        for name in ("logical", "physical"):
            speed.plot(at, [getattr(one, f"{name}_tokens") / one.seconds for one in steps], label=name)
        speed.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
        speed.legend()
        ratios.plot(at, [one.fold_ratio for one in steps])
        ratios.set(xlabel="step", ylabel="fold ratio", ylim=(0, None))
        for axes, (label, names) in zip(others, reported, strict=True):
            for name, meaning in names.items():
                known = [(one.iteration, one.metrics[name]) for one in steps if name in one.metrics]
                if known:
                    axes.plot(*zip(*known, strict=True), marker="." if len(known) < 50 else None, label=meaning)
            axes.set(xlabel="step", ylabel=label)
            axes.legend()
        for axes in (losses, speed, ratios, *others):
            axes.xaxis.get_major_locator().set_params(integer=True)


def draw_comparison(comparison: Comparison, path: str) -> None:
    """Draw time and peak memory of a batch, folded and unfolded."""
    ways = [comparison.folded, *comparison.unfolded]
    names = [way.name.replace(", ", ",\n") for way in ways]
    with _picture(path, 2, width=5.0) as (time, memory):
        bars = time.bar(names, [way.median_seconds for way in ways], color=["C0", *["C1"] * (len(ways) - 1)])
        time.bar_label(bars, fmt="%.3g s")
        time.set(ylabel="seconds, forward and backward")
        known = [(name, way.peak_bytes / 2**20) for name, way in zip(names, ways, strict=True) if way.peak_bytes]
        bars = memory.bar([name for name, _ in known], [peak for _, peak in known], color="C2")
        memory.bar_label(bars, fmt="%.0f MiB")
        memory.set(ylabel="peak memory, MiB")
