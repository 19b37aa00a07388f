"""Display of a training run: a line a step, on a terminal a progress bar below it; tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from mcore_prefix_tree.mcore.engine.compare import Comparison, Measurement
    from mcore_prefix_tree.mcore.engine.held_out import Evaluation
    from mcore_prefix_tree.mcore.engine.verify import VerifyReport
    from mcore_prefix_tree.mcore.trainer.trainer import StepReport

_QUIET_S = 30.0


class ConsoleReporter:
    """Reports a run to a console; see ``mcore_prefix_tree.mcore.trainer.trainer.Reporter``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._told = time.monotonic()

    def message(self, text: str) -> None:
        """One line, as it is."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def reading(self, done: int, total: int) -> None:
        """A bar of bytes on a terminal, a line now and then elsewhere."""
        if self._console.is_terminal:
            if self._progress is None:
                self._progress = Progress(
                    TextColumn("reading data"),
                    DownloadColumn(),
                    BarColumn(),
                    TimeRemainingColumn(),
                    console=self._console,
                )
                self._task = self._progress.add_task("", total=total)
                self._progress.start()
            self._progress.update(self._task, completed=done)
        elif time.monotonic() - self._told >= _QUIET_S:
            self._told = time.monotonic()
            self.message(f"reading data: {done / 2**30:.1f} of {total / 2**30:.1f} GiB")

    def verified(self, report: VerifyReport) -> None:
        """The table of errors."""
        self._end_bar()
        self._console.print(verify_table(report))

    def started(self, first: int, last: int) -> None:
        """Open the progress bar on a terminal."""
        self._end_bar()
        if first > last:
            self.message(f"nothing to train: train_iters={last} are done")
        elif self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=last, completed=first - 1)
            self._progress.start()

    def step(self, report: StepReport) -> None:
        """A line, above the bar where there is one."""
        rate = f"{report.logical_tokens / report.seconds:,.0f} logical tokens/s"
        tokens = f"tokens {report.logical_tokens:,} -> {report.physical_tokens:,} (fold ratio {report.fold_ratio:.2f})"
        norm = "" if report.grad_norm is None else f" | grad norm {report.grad_norm:.3f}"
        self.message(
            f"step {report.iteration} | loss {report.loss:.6f}{_told(report.metrics)}{norm} | lr {report.lr:.3e} | "
            f"{tokens} | {report.seconds:.2f} s, plan {report.plan_seconds * 1000:.0f} ms | {rate} | "
            f"{report.physical_tokens / report.seconds:,.0f} physical tokens/s"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=report.iteration)

    def evaluated(self, evaluation: Evaluation) -> None:
        """A line, like a step's."""
        self.message(
            f"validation after step {evaluation.iteration} | loss {evaluation.loss:.6f}{_told(evaluation.metrics)} | "
            f"{evaluation.samples:,} samples, tokens {evaluation.logical_tokens:,} -> {evaluation.physical_tokens:,} | "
            f"{evaluation.seconds:.2f} s"
        )

    def compared(self, comparison: Comparison) -> None:
        """The closing table."""
        self.close()
        self._console.print(comparison_table(comparison))

    def close(self) -> None:
        """Leave the terminal as it was; for the end of a run and for Ctrl-C."""
        self._end_bar()

    def _end_bar(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _told(metrics: Mapping[str, float]) -> str:
    return "".join(f" | {name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())


def verify_table(report: VerifyReport) -> Table:
    """Errors, limits, and what was compared."""
    table = Table(
        title=f"verify: folded against {report.reference} ({report.dtype}, {report.samples} samples, "
        f"{report.logical_tokens:,} -> {report.physical_tokens:,} tokens, {report.parameters} parameter tensors)",
        caption=f"largest gradient error: {report.worst_parameter}",
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("largest relative error", "folded", "limit", ""):
        table.add_column(heading)
    names = {
        "logprob_error": "log-probabilities of a sample",
        "entropy_error": "entropies of a sample",
        "value_error": "values of a sample",
        "loss_error": "loss",
        "gradient_error": "gradient of a parameter",
    }
    for name, (error, limit) in report.checks.items():
        table.add_row(names[name], f"{error:.2e}", f"{limit:.2e}", "ok" if error <= limit else "TOO LARGE")
    return table


def comparison_table(comparison: Comparison) -> Table:
    """Return step time and peak memory of each way, next to the bound."""
    low, high = comparison.speedups[0], comparison.speedups[-1]
    spread = f" ({low:.2f} to {high:.2f})" if len(comparison.speedups) > 1 else ""
    table = Table(
        title="forward and backward of the last batch, same process",
        caption=f"folded is {comparison.speedup:.2f}x the faster unfolded way{spread}, {comparison.share_of_bound:.0%} "
        f"of its bound by FLOPs, {comparison.bound}",
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("", "tokens", "seconds", "x slower than folded", "peak memory"):
        table.add_column(heading, justify="left" if not heading else "right")

    def add(row: Measurement) -> None:
        memory = "not known here" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f} MiB"
        slower = row.median_seconds / comparison.folded.median_seconds
        table.add_row(row.name, f"{row.tokens:,}", f"{row.median_seconds:.3f}", f"{slower:.2f}", memory)

    for row in (comparison.folded, comparison.packed, comparison.stock):
        if row is not None:
            add(row)
    if comparison.stock_missing is not None:
        # It names a file, whose brackets are not markup.
        table.caption = f"{table.caption}; stock not run: {escape(comparison.stock_missing)}"
    return table
