"""Lines and tables for a terminal of 80 columns or more, and the display of a training run.

A run has one line per step, and on a terminal a progress bar below it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import progress
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mcore_prefix_tree.cli import numbers

if TYPE_CHECKING:
    from mcore_prefix_tree.mcore.engine.comparison import Comparison
    from mcore_prefix_tree.mcore.engine.evaluation import Evaluation
    from mcore_prefix_tree.mcore.engine.verification import VerifyReport
    from mcore_prefix_tree.mcore.loop.trainer import StepReport

_QUIET_S = 30.0
# A width that fits everywhere: also into a log, whose reader's terminal is unknown.
WIDTH = 80
_SEPARATOR, _INDENT = " | ", "  "


def wrapped(parts: Iterable[str], *, begins: str = "") -> list[str]:
    """Join parts into lines of at most :data:`WIDTH` columns; a part is never cut, and ``begins`` each line."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(_SEPARATOR) + len(part) <= WIDTH:
            lines[-1] += _SEPARATOR + part
        else:
            lines.append((begins if not lines else begins or _INDENT) + part)
    return lines


def grid(headings: Sequence[str], *, left: Sequence[int] = (0,)) -> Table:
    """Return a table without lines, whose long cells end in an ellipsis; columns ``left`` are left-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right", no_wrap=True, overflow="ellipsis")
    return table


def rows(lines: Iterable[tuple[str, str, str]]) -> Table:
    """Return names, values and remarks as a table; a long remark continues below itself."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    return table


def show(console: Console, drawn: RenderableType, *, width: int | None = None) -> None:
    """Print a table or a tree; in a file or a pipe, lines have no spaces at their ends."""
    if console.is_terminal:
        console.print(drawn, width=width)
        return
    with console.capture() as captured:
        console.print(drawn, width=width)
    say_line(console, "\n".join(line.rstrip() for line in captured.get().splitlines()))


def say(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a sentence, broken between words at the terminal's width."""
    show(console, Text(text, style=style or ""))


def say_line(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a line unchanged, however long: it may hold a path, to be copied or searched for."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class ConsoleReporter:
    """Reports a run to a console, as a ``Reporter``; ``keeps`` is whether to keep the reports of steps."""

    def __init__(self, console: Console, *, keeps: bool = False) -> None:
        self._console, self._keeps = console, keeps
        self.steps: list[StepReport] = []
        self.evaluations: list[Evaluation] = []
        self._progress: progress.Progress | None = None
        self._task = progress.TaskID(0)
        self._told = time.monotonic()

    def message(self, text: str) -> None:
        say_line(self._console, text)

    def reading(self, done: int, total: int) -> None:
        """Show a bar of bytes on a terminal, a line now and then elsewhere."""
        of = f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB"
        self._advance("reading data", done, total, of, progress.DownloadColumn())

    def comparing(self, what: str, done: int, total: int) -> None:
        """Show a bar of runs on a terminal, a line now and then elsewhere."""
        self._advance(what, done, total, f"{done:,} of {total:,}", progress.MofNCompleteColumn())

    def _advance(self, what: str, done: int, total: int, of: str, counter: progress.ProgressColumn) -> None:
        if self._console.is_terminal:
            if self._progress is None:
                self._begin_bar(what, counter, total=total)
            assert self._progress is not None
            self._progress.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._told >= _QUIET_S:
            self._told = time.monotonic()
            self.message(f"{what}: {of}")

    def _begin_bar(self, what: str, *columns: progress.ProgressColumn, total: int, done: int = 0) -> None:
        counter, *times = columns
        columns = progress.TextColumn(what), counter, progress.BarColumn(), *times, progress.TimeRemainingColumn()
        self._progress = progress.Progress(*columns, console=self._console)
        self._task = self._progress.add_task("", total=total, completed=done)
        self._progress.start()

    def verified(self, report: VerifyReport) -> None:
        self.close()
        print_verified(self._console, report)

    def started(self, first: int, last: int) -> None:
        self.close()
        if first > last:
            self.message(f"nothing to train: train_iters={last} are done")
        elif self._console.is_terminal:
            counter, elapsed = progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
            self._begin_bar("step", counter, elapsed, total=last, done=first - 1)

    def step(self, report: StepReport) -> None:
        if self._keeps:
            self.steps.append(report)
        parts = [f"step {report.iteration}", f"loss {report.loss:.6f}"]
        if report.grad_norm is not None:
            parts.append(f"grad {numbers.figure(report.grad_norm)}")
        rate = numbers.short(report.logical_tokens / report.seconds)
        parts += [f"lr {report.lr:.1e}", f"fold {numbers.ratio(report.fold_ratio)}", f"{rate} tok/s"]
        if report.carried_tokens:
            parts.append(f"carried {report.carried_tokens:,} tokens, {numbers.size(report.carried_bytes)} per rank")
        self._lines(parts, report.metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=report.iteration)

    def evaluated(self, evaluation: Evaluation) -> None:
        if self._keeps:
            self.evaluations.append(evaluation)
        samples = f"{evaluation.samples:,} samples in {numbers.seconds(evaluation.seconds)}"
        parts = [f"validation after step {evaluation.iteration}", f"loss {evaluation.loss:.6f}", samples]
        self._lines(parts, evaluation.metrics)

    def _lines(self, parts: Sequence[str], metrics: Mapping[str, float]) -> None:
        """Print the fixed parts of a step on lines of 80 columns, and the objective's metrics below."""
        for line in (*wrapped(parts), *wrapped(_named(metrics), begins="  ")):
            self.message(line)

    def compared(self, comparison: Comparison) -> None:
        self.close()
        print_comparison(self._console, comparison)

    def finished(self, checkpoint: str | None) -> None:
        self.close()
        self.message("nothing is saved: checkpoint.save is not set" if checkpoint is None else f"saved: {checkpoint}")

    def close(self) -> None:
        """Restore the terminal, before other output, at the end of a run and after Ctrl-C."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _named(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name.replace('_', ' ')} {numbers.figure(value)}" for name, value in metrics.items()]


def print_verified(console: Console, report: VerifyReport) -> None:
    """Print errors, their limits, and the parts that were compared."""
    say(console, f"verify: folded against {report.reference}")
    compared = numbers.plural(report.samples, "sample"), numbers.plural(report.parameters, "parameter tensor")
    tokens = f"{report.logical_tokens:,} -> {report.physical_tokens:,} tokens"
    say(console, f"{report.dtype}, {compared[0]}, {tokens}, {compared[1]}")
    table = grid(("largest relative error of", "folded", "limit", ""), left=(0, 3))
    names = {
        "logprob_error": "log-probabilities of a sample",
        "entropy_error": "entropies of a sample",
        "value_error": "values of a sample",
        "loss_error": "the loss",
        "gradient_error": "a parameter's gradient",
    }
    for name, (error, limit) in report.checks.items():
        verdict = "ok" if error <= limit else "TOO LARGE"
        table.add_row(names[name], numbers.error(error), numbers.error(limit), verdict)
    show(console, table)
    say_line(console, f"largest gradient error: {report.worst_parameter}")
    if report.left_out is not None:
        say_line(console, f"not compared: {report.left_out}, which a sample by itself does not have")


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print time, peak memory and what folding saves against each unfolded way, and the bound in one line."""
    folded = comparison.folded
    say(console, "forward and backward of one batch, in one process")
    table = grid(("", "tokens", "seconds", "CPU s", "folded is", "by CPU", "peak memory"))
    for row in (folded, *comparison.unfolded):
        cpu, least_cpu = row.median_cpu_seconds, folded.median_cpu_seconds
        table.add_row(
            row.name,
            numbers.count(row.tokens),
            f"{row.median_seconds:.3f}",
            "-" if cpu is None else f"{cpu:.3f}",
            "" if row is folded else f"{numbers.ratio(row.median_seconds / folded.median_seconds)} faster",
            "" if row is folded or cpu is None or not least_cpu else numbers.ratio(cpu / least_cpu),
            numbers.size(row.peak_bytes),
        )
    show(console, table)
    # Other jobs on the machine take its time, and not a process's CPU time.
    gain, clock = (comparison.gain, "time") if comparison.cpu_gain is None else (comparison.cpu_gain, "CPU time")
    say(
        console,
        f"sharing can give at most {numbers.ratio(gain.bound.ratio)}; {gain.share_of_bound:.0%} of it, by {clock}",
    )
    if comparison.stock_missing is not None:
        say_line(console, f"stock not run: {comparison.stock_missing}")
