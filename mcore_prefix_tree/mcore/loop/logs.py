"""Logs of every step's numbers, for programs: a file of JSON Lines, TensorBoard's, and Weights & Biases."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mcore_prefix_tree.data.write import check_output, whole_file
from mcore_prefix_tree.mcore.checkpoints.checkpoint import hold
from mcore_prefix_tree.mcore.ranks import on_main_rank
from mcore_prefix_tree.settings import LogConfig

if TYPE_CHECKING:
    from mcore_prefix_tree.mcore.engine.evaluation import Evaluation
    from mcore_prefix_tree.mcore.loop.trainer import StepReport

# Beginning of every line; it identifies half a line that a killed run has left.
_BEGINNING = b'{"iteration": '
# File next to the checkpoints, with the id of the W&B run that a resumed run continues.
_WANDB_ID = "wandb_run_id"


# Its methods ``step`` and ``evaluation`` raise LogError if it cannot be written to.
_Log: TypeAlias = "_MetricsFile | _Charts"


class LogError(OSError):
    """A log cannot be written. The message names the setting, the place and the reason."""


class Logs:
    """Places that a run's numbers are written to; only the main rank has any.

    A place that fails, for example on a full disk, is reported once and skipped from then on: the run is worth more.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.places: list[_Log] = []

    def step(self, report: StepReport) -> None:
        self._write(lambda log: log.step(report))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write(lambda log: log.evaluation(evaluation))

    def _write(self, to: Callable[[_Log], None]) -> None:
        self.places = [log for log in self.places if self._is_written(log, to)]

    def _is_written(self, log: _Log, to: Callable[[_Log], None]) -> bool:
        try:
            to(log)
        except LogError as error:
            self._say(f"{error}; the run continues without it")
            return False
        return True


@contextmanager
def open_logs(
    config: LogConfig,
    *,
    done: int,
    say: Callable[[str], None],
    folder: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Logs]:
    """Open the logs of steps, on the main rank; all ranks together.

    A run continues after the ``done`` steps of its last checkpoint. ``say`` receives which entries of later steps were
    dropped from the logs. ``folder``, of its checkpoints, keeps the id of its W&B run; None if none is resumed.

    Raises:
        LogError: a log cannot be written.
        ValueError: the file of metrics holds something else.
    """
    logs = Logs(say)
    with ExitStack() as stack:

        def open_all() -> None:
            if config.metrics is not None:
                file = _MetricsFile(config.metrics, done, say)
                stack.callback(file.close)
                logs.places.append(file)
            if config.tensorboard is not None:
                board = _Board(config.tensorboard, done)
                stack.callback(board.close)
                logs.places.append(board)
            if config.wandb is not None:
                run = _Wandb(config.wandb, done, say, folder=folder, settings=settings or {})
                stack.push(lambda kind, *_: run.close(failed=kind is not None))
                logs.places.append(run)

        if config.tensorboard is not None:
            stack.callback(setattr, threading, "excepthook", threading.excepthook)
            threading.excepthook = partial(_report_thread, threading.excepthook)
        on_main_rank(open_all)
        yield logs


def _report_thread(report: Callable[[threading.ExceptHookArgs], Any], failure: threading.ExceptHookArgs) -> None:
    """Report an error, but not of TensorBoard's writing thread: that one is raised in the next step too."""
    if not type(failure.thread).__module__.startswith("tensorboard."):
        report(failure)


class _MetricsFile:
    """A file with a line per step and per evaluation; flushed lines outlive the process."""

    def __init__(self, name: str, done: int, say: Callable[[str], None]) -> None:
        self._setting, path = f"log.metrics={name}", Path(name)
        with _naming(self._setting, "file"):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            check_output(path)
        except ValueError as error:
            raise ValueError(f"log.metrics={error}") from None
        with _naming(self._setting, "file"):
            dropped = 0
            # Dropping lines makes another file of that name, which is locked in its turn.
            for last in (False, True):
                self._stream = path.open("a", encoding="utf-8")
                if not hold(self._stream.fileno()):
                    self._stream.close()
                    raise ValueError(f"{self._setting}: another run writes to this file; name another")
                if not last:
                    with self._stream:
                        dropped = _drop_after(path, done, self._setting)
        if dropped:
            of = f"steps after step {done}" if done else "another run"
            say(f"{self._setting}: dropped {dropped} line{'s' if dropped > 1 else ''} of {of}")

    def step(self, report: StepReport) -> None:
        line = {name: _finite(value) for name, value in asdict(report).items() if name != "metrics"}
        line |= {
            "fold_ratio": report.fold_ratio,
            "logical_tokens_per_second": report.logical_tokens / report.seconds,
            "physical_tokens_per_second": report.physical_tokens / report.seconds,
            "metrics": {name: _finite(value) for name, value in report.metrics.items()},
        }
        self._write(line)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write a separate line under other names, so that no reader takes its loss for a step's."""
        self._write(
            {
                "iteration": evaluation.iteration,
                "validation_loss": _finite(evaluation.loss),
                "validation_metrics": {name: _finite(value) for name, value in evaluation.metrics.items()},
                "validation_seconds": evaluation.seconds,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        with _naming(self._setting, "file"):
            self._stream.write(json.dumps(line, allow_nan=False) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the file; every step was flushed, and errors have been reported."""
        with suppress(OSError):
            self._stream.close()


def _drop_after(path: Path, done: int, setting: str) -> int:
    """Keep the lines of the first steps in a file; return how many others it had, or raise ValueError."""
    # A second pass writes, so that most files are left as they are and a wrong one is not touched.
    with path.open("rb") as lines:
        wanted = [_is_wanted(line, done, f"{setting}: line {number}") for number, line in enumerate(lines, start=1)]
    if not all(wanted):
        with path.open("rb") as lines, whole_file(path) as unfinished, unfinished.open("wb") as stream:
            stream.writelines(compress(lines, wanted))
    return len(wanted) - sum(wanted)


def _is_wanted(line: bytes, done: int, where: str) -> bool:
    if not line.endswith(b"\n") and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
        return False  # the run was killed while it wrote this
    try:
        found = json.loads(line)
        iteration = found["iteration"] if isinstance(found, dict) else None
    except (ValueError, KeyError, RecursionError):
        iteration = None
    if type(iteration) is not int or iteration < 0:
        raise ValueError(f"{where} is not a step of a run, and the run would append to the file; name another")
    # Entries that a starting run finds are another run's, also those of before the first step.
    return done > 0 and iteration <= done


class _Charts:
    """A place that shows numbers by name."""

    def step(self, report: StepReport) -> None:
        norm = {} if report.grad_norm is None else {"grad_norm": report.grad_norm}
        numbers = {
            "loss": report.loss,
            **norm,
            "lr": report.lr,
            "fold_ratio": report.fold_ratio,
            "tokens_per_second/logical": report.logical_tokens / report.seconds,
            "tokens_per_second/physical": report.physical_tokens / report.seconds,
            "seconds/step": report.seconds,
            "seconds/plan": report.plan_seconds,
            **{f"objective/{name}": value for name, value in report.metrics.items()},
        }
        self._write(numbers, report.iteration)

    def evaluation(self, evaluation: Evaluation) -> None:
        metrics = {f"validation/{name}": value for name, value in evaluation.metrics.items()}
        self._write({"validation/loss": evaluation.loss, **metrics}, evaluation.iteration)

    def _write(self, numbers: Mapping[str, float], iteration: int) -> None:
        raise NotImplementedError


class _Board(_Charts):
    """TensorBoard's file; it hides the later steps of an earlier run in its folder."""

    def __init__(self, folder: str, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._setting = f"log.tensorboard={folder}"
        with _naming(self._setting, "folder"):
            self._writer: Any = SummaryWriter(folder, purge_step=done + 1 if done else 0)  # type: ignore[no-untyped-call]
            self._writer.flush()

    def _write(self, numbers: Mapping[str, float], iteration: int) -> None:
        with _naming(self._setting, "folder"):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, iteration)
            self._writer.flush()

    def close(self) -> None:
        """Close as :meth:`_MetricsFile.close` does."""
        with suppress(OSError):
            self._writer.close()


class _Wandb(_Charts):
    """A run of Weights & Biases; a resumed run continues the one whose id is saved with its checkpoints."""

    def __init__(
        self, project: str, done: int, say: Callable[[str], None], *, folder: str | None, settings: Mapping[str, Any]
    ) -> None:
        import wandb

        # Steps count as iteration. W&B keeps the steps after the checkpoint, and they are sent again.
        self._setting = f"log.wandb={project}"
        kept = None if folder is None else Path(folder) / _WANDB_ID
        known = kept.read_text().strip() if kept is not None and done and kept.exists() else None
        try:
            self._run: Any = wandb.init(
                project=project,
                id=known,
                resume="allow" if known else None,
                config=dict(settings),
                # It would print over the lines of steps, and keep a copy of them.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except Exception as error:  # of several kinds, which differ between its releases
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise LogError(f"{self._setting}: {reason}; log in with wandb login, or set WANDB_MODE=offline") from error
        if kept is not None:
            kept.write_text(f"{self._run.id}\n")
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        say(f"{self._setting}: run {self._run.id} in {self._run.dir if self._run.offline else self._run.url}")

    def _write(self, numbers: Mapping[str, float], iteration: int) -> None:
        try:
            self._run.log({"iteration": iteration, **numbers})
        except Exception as error:
            raise LogError(f"{self._setting}: {error}") from error

    def close(self, *, failed: bool) -> None:
        """Send the remaining data; a run that ends with an error is marked so."""
        with suppress(Exception):  # the numbers are not worth the run
            self._run.finish(exit_code=int(failed))


@contextmanager
def _naming(setting: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LogError(f"{setting}: {error.strerror or error}; name a {what} that can be written to") from error


def _finite(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity: null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
