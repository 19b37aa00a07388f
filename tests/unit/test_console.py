from __future__ import annotations

import io
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness.commands import run_command, write_rows
from rich.console import Console

from mcore_prefix_tree.cli import numbers
from mcore_prefix_tree.cli.console import ConsoleReporter, print_comparison, print_verified

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def step_report():
    from mcore_prefix_tree.mcore.loop.trainer import StepReport

    return StepReport(
        iteration=3,
        loss=1.23456789,
        grad_norm=0.5,
        lr=1e-4,
        samples=8,
        logical_tokens=12_000,
        physical_tokens=3_000,
        plan_seconds=0.004,
        seconds=2.0,
    )


@pytest.fixture(scope="module")
def verify_report():
    from mcore_prefix_tree.mcore.engine.verification import VerifyReport

    return VerifyReport(
        logprob_error=1e-7,
        entropy_error=2e-7,
        loss_error=3e-7,
        gradient_error=4e-7,
        worst_parameter="decoder.layers.[0].weight (rank 1)",
        tolerance=1e-5,
        reference="unfolded",
        unfolded_errors=None,
        samples=8,
        logical_tokens=12_000,
        physical_tokens=3_000,
        parameters=15,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def comparison():
    from mcore_prefix_tree.mcore.engine.comparison import Comparison, Measurement
    from mcore_prefix_tree.plan import ExpectedSpeedup, Parts
    from mcore_prefix_tree.plan.flops import Flops, Work

    def work(body, attention, head):
        return Work(*(Flops(forward=flops, backward=2 * flops) for flops in (body, attention, head)))

    def rounds(*seconds):
        return [Parts(body=0.5 * one, attention=0.25 * one, head=0.25 * one, rest=0.0) for one in seconds]

    names = ("name", "rounds", "cpu_rounds", "peak_bytes", "tokens")
    return Comparison(
        **{
            way: Measurement(**dict(zip(names, values, strict=True)))
            for way, values in {
                "folded": ("folded", rounds(1.0, 1.2, 1.1), rounds(2.0, 2.0, 2.0), 100 * 2**20, 3_000),
                "packed": ("unfolded, packed", rounds(4.0, 4.8, 5.5), rounds(8.0, 9.0, 10.0), 400 * 2**20, 12_000),
                "small": ("unfolded, small", rounds(6.0, 6.0, 6.0), rounds(8.0, 8.0, 8.0), 99 * 2**20, 12_000),
                "stock": ("unfolded, stock", rounds(12.0), rounds(24.0), None, 12_000),
            }.items()
        },
        stock_missing=None,
        logical_tokens=12_000,
        expected=ExpectedSpeedup(folded=work(10, 2, 8), unfolded=work(40, 12, 48)),
        ratios=Parts(body=4.0, attention=5.0, head=6.0, rest=1.0),
    )


@pytest.fixture
def log():
    """A console that is no terminal, and its reporter."""
    console = Console(file=io.StringIO(), width=100)
    return console, ConsoleReporter(console)


@pytest.fixture
def terminal():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    return console, ConsoleReporter(console)


def printed(console):
    return console.file.getvalue()


def test_log_has_one_plain_line_per_step(log, step_report):
    console, reporter = log
    reporter.started(3, 6)
    assert printed(console) == ""
    reporter.step(step_report)
    assert printed(console) == "step 3 | loss 1.234568 | grad 0.5 | lr 1.0e-04 | fold 4.00x | 6k tok/s\n"
    reporter.step(replace(step_report, iteration=4, grad_norm=None))
    reporter.close()
    lines = printed(console).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("step 4 | loss 1.234568 | lr ")


def test_a_terminal_has_a_bar(terminal, step_report):
    console, reporter = terminal
    reporter.started(3, 6)
    assert "\x1b[?25l" in printed(console), "the cursor is hidden"
    reporter.step(step_report)
    reporter.step(replace(step_report, iteration=6))
    reporter.close()
    shown = ANSI.sub("", printed(console))
    assert "step 2/6" in shown, "a resumed run starts at its last step"
    assert "step 6/6" in shown
    assert [line for line in shown.splitlines() if line.startswith("step 3 | loss 1.234568 | ")], "above the bar"
    assert printed(console).rindex("\x1b[?25h") > printed(console).rindex("\x1b[?25l"), "the cursor is back"


def test_closing_twice_or_without_a_bar_does_nothing(terminal, log):
    for console, reporter in (terminal, log):
        reporter.close()
        reporter.close()
        assert printed(console) == ""


def test_the_closing_table_ends_the_bar(terminal, comparison):
    console, reporter = terminal
    reporter.started(1, 2)
    reporter.compared(comparison)
    assert "\x1b[?25h" in printed(console)
    before = printed(console)
    reporter.close()
    assert printed(console) == before


def test_missing_training_samples_are_reported(log, terminal):
    for console, reporter in (log, terminal):
        reporter.started(7, 6)
        assert printed(console) == "nothing to train: train_iters=6 are done\n"


def test_messages_are_taken_literally_and_never_wrapped(log):
    console, reporter = log
    text = "resumed from [bold]/runs[/bold]/" + "x" * 200
    reporter.message(text)
    assert printed(console) == text + "\n"


def test_lines_of_a_step_have_80_columns_and_cut_no_part(log, step_report):
    console, reporter = log
    metrics = {f"metric_number_{number}": 1234.5 / 10**number for number in range(9)}
    large = {"iteration": 2_000, "loss": -10.379326, "grad_norm": 123.456, "logical_tokens": 160_000}
    reporter.step(replace(step_report, **large, metrics=metrics))
    first, *more = printed(console).splitlines()
    assert first == "step 2000 | loss -10.379326 | grad 123.5 | lr 1.0e-04 | fold 53.33x | 80k tok/s"
    assert [len(line) <= 80 for line in (first, *more)] == [True] * 5
    parts = [part for line in more for part in line.removeprefix("  ").split(" | ")]
    assert parts[:3] == ["metric number 0 1.23k", "metric number 1 123.5", "metric number 2 12.35"]
    assert len(parts) == 9


def test_an_evaluation_has_lines_like_a_step(log):
    from mcore_prefix_tree.mcore.engine.evaluation import Evaluation

    console, reporter = log
    names = dict.fromkeys(("iteration", "loss", "samples", "logical_tokens", "physical_tokens", "seconds"), 0)
    known = {"iteration": 4, "loss": 2.5, "samples": 1200, "seconds": 61.0, "metrics": {"nll": 2.5}}
    reporter.evaluated(Evaluation(**(names | known)))
    assert printed(console) == "validation after step 4 | loss 2.500000 | 1,200 samples in 61 s\n  nll 2.5\n"


def test_last_line_names_the_checkpoint(log, terminal):
    for console, reporter in (log, terminal):
        reporter.finished("runs/mine/iter_0000004")
        reporter.finished(None)
        assert printed(console) == ("saved: runs/mine/iter_0000004\nnothing is saved: checkpoint.save is not set\n")


def shown(print_it, of, width=80, **console):
    """The lines that a table is printed as."""
    console = Console(file=io.StringIO(), width=width, **console)
    print_it(console, of)
    return [line.rstrip() for line in printed(console).splitlines()]


def cells(lines, first):
    (line,) = [line for line in lines if first in line]
    return re.split(r"\s{2,}", line.strip())


def test_the_errors_fit_80_columns(verify_report, log):
    console, reporter = log
    reporter.verified(verify_report)
    assert "TOO LARGE" not in printed(console)
    report = replace(verify_report, reference="the same weights in float64, unfolded", logical_tokens=9_000_000)
    assert shown(print_verified, report) == [
        "verify: folded against the same weights in float64, unfolded",
        "float32, 8 samples, 9,000,000 -> 3,000 tokens, 15 parameter tensors",
        "largest relative error of       folded    limit",
        "log-probabilities of a sample  1.0e-07  1.0e-05  ok",
        "entropies of a sample          2.0e-07  1.0e-05  ok",
        "the loss                       3.0e-07  1.0e-05  ok",
        "a parameter's gradient         4.0e-07  1.0e-05  ok",
        "largest gradient error: decoder.layers.[0].weight (rank 1)",
    ]
    assert shown(print_verified, report, width=200) == shown(print_verified, report)


@pytest.mark.parametrize("error", [1.1e-5, float("inf"), float("nan")])
def test_error_above_its_limit_is_highlighted(verify_report, error):
    report = replace(verify_report, entropy_error=error)
    lines = shown(print_verified, report)
    assert cells(lines, "entropies")[-1] == "TOO LARGE"
    assert sum("TOO LARGE" in line for line in lines) == 1
    assert not report.passed


def test_half_precision_has_a_limit_a_row(verify_report):
    limits = {"logprob_error": 1e-3, "entropy_error": 2e-3, "loss_error": 3e-3, "gradient_error": 4e-9}
    lines = shown(print_verified, replace(verify_report, tolerance=0.0, unfolded_errors=limits, dtype="bfloat16"))
    assert cells(lines, "log-prob") == ["log-probabilities of a sample", "1.0e-07", "3.0e-03", "ok"]
    assert cells(lines, "a parameter's") == ["a parameter's gradient", "4.0e-07", "1.2e-08", "TOO LARGE"]


def test_the_costs_fit_80_columns(comparison):
    assert shown(print_comparison, comparison) == [
        "forward and backward of one batch, in one process",
        "                  tokens  seconds   CPU s      folded is  by CPU  peak memory",
        "folded             3,000    1.100   2.000                             100 MiB",
        "unfolded, packed  12,000    4.800   9.000   4.36x faster   4.50x      400 MiB",
        "unfolded, small   12,000    6.000   8.000   5.45x faster   4.00x       99 MiB",
        "unfolded, stock   12,000   12.000  24.000  10.91x faster  12.00x    not known",
        "sharing can give at most 5.19x; 87% of it, by CPU time",
    ]


def test_a_gpu_has_no_cpu_time(comparison):
    ways = {name: replace(getattr(comparison, name), cpu_rounds=None) for name in ("folded", "packed", "small")}
    lines = shown(print_comparison, replace(comparison, **ways))
    assert cells(lines, "unfolded, packed")[3] == "-"
    assert re.fullmatch(r"sharing can give at most \S+x; \d+% of it, by time", lines[-1])


def test_a_way_that_could_not_be_run_is_explained(comparison):
    why = "no room for data[a].jsonl:3" + "x" * 80
    lines = shown(print_comparison, replace(comparison, stock=None, stock_missing=why))
    assert cells(lines, "unfolded, packed")[4] == "4.36x faster"
    assert not [line for line in lines if "unfolded, stock" in line]
    assert lines[-1] == f"stock not run: {why}"


def test_runs_that_are_compared_have_a_bar(terminal):
    console, reporter = terminal
    reporter.comparing("verify", 3, 48)
    reporter.close()
    assert "verify  3/48" in ANSI.sub("", printed(console))
    assert "\x1b[?25h" in printed(console)


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        ("count", 13_218, "13,218"),
        ("ratio", 6.404, "6.40x"),
        ("share", 0.1239, "12.4%"),
        ("error", 3.04e-7, "3.0e-07"),
        ("figure", 0.053841, "0.05384"),
        ("figure", -1234.5, "-1.23k"),
        ("figure", float("nan"), "nan"),
        ("short", 999.4, "999"),
        ("short", 999.6, "1k"),
        ("short", 6.99e10, "69.9G"),
        ("short", 1e25, "1e+07E"),
        ("seconds", 0.0241, "24.1 ms"),
        ("seconds", 3.314, "3.31 s"),
        ("seconds", 725.0, "12 min 5 s"),
        ("size", 951 * 2**20, "951 MiB"),
        ("size", None, "not known"),
    ],
)
def test_numbers_have_one_format(name, number, text):
    assert getattr(numbers, name)(number) == text


@pytest.fixture
def recipe(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", ({"tokens": [1, 2, token]} for token in range(3, 9)))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"data: {{path: {data}}}\n"
        "model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 16}\n"
        "batch: {global_batch_size: 2, max_tokens: 64}\n"
        "train_iters: 4\nattention_backend: path\ncompare: false\nverify: {enabled: false}\n"
    )
    return path


def test_control_c_in_training_exits_130_and_closes_the_bar(recipe, monkeypatch):
    seen = []
    honest_step, honest_close = ConsoleReporter.step, ConsoleReporter.close

    def step(self, report):
        honest_step(self, report)
        seen.append(report.iteration)
        if report.iteration == 2:
            raise KeyboardInterrupt

    def close(self):
        honest_close(self)
        seen.append("closed")

    monkeypatch.setattr(ConsoleReporter, "step", step)
    monkeypatch.setattr(ConsoleReporter, "close", close)
    result = run_command("train", recipe)
    assert (result.exit_code, result.stderr) == (130, "")
    assert [line.split(" | ")[0] for line in result.stdout.splitlines()][1:] == ["step 1", "step 2"]
    assert seen[-3:] == [1, 2, "closed"]


@pytest.fixture
def waits(monkeypatch):
    """``train`` with a recipe that fails; a waiting rank prints its time."""
    monkeypatch.setattr("mcore_prefix_tree.utils.errors.time.sleep", lambda seconds: sys.stderr.write(f"{seconds} s\n"))
    monkeypatch.setattr("mcore_prefix_tree.settings.load_recipe", fail)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def said(recipe):
    result = run_command("train", recipe, code=2)
    return result.stderr


def test_other_ranks_wait_for_the_first_ranks_error(recipe, waits, monkeypatch):
    """torchrun ends all ranks when one exits: a quiet one that exits first would silence the one that explains."""
    for rank, expected in (("0", "error: x\n"), ("1", "10.0 s\nerror: x\n")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert said(recipe) == expected
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # torchrun's, told to keep no logs
        assert said(recipe) == expected
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert not Path("told").exists()


def test_under_torchrun_the_first_to_speak_speaks_for_all(recipe, waits, monkeypatch, tmp_path):
    for attempt in range(2):  # a restart has a separate word
        for place, rank in enumerate(("1", "0", "2")):
            folder = tmp_path / f"attempt_{attempt}" / rank
            folder.mkdir(parents=True)
            monkeypatch.setenv("LOCAL_RANK", rank)
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
            assert said(recipe) == ("30.0 s\nerror: x\n" if place else "error: x\n")


def fail(*_):
    raise ValueError("x")


def test_reading_shows_bytes_on_a_terminal_until_training_starts():
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    reporter = ConsoleReporter(console)
    reporter.reading(2**30, 2**31)
    assert reporter._progress is not None
    assert "reading data" in console.file.getvalue()
    bar = reporter._progress
    reporter.started(1, 2)
    assert "1.1/2.1 GB" in console.file.getvalue()
    assert reporter._progress is not bar
    assert bar.live.is_started is False
    reporter.close()


@pytest.mark.parametrize(
    ("tell", "line"),
    [
        (lambda reporter, done: reporter.reading(done * 2**30, 4 * 2**30), "reading data: 2.0 of 4.0 GiB\n"),
        (lambda reporter, done: reporter.comparing("verify", done, 48), "verify: 2 of 48\n"),
    ],
)
def test_progress_without_a_terminal_is_printed_in_lines(tell, line, monkeypatch):
    now = iter([0.0, 1.0, 31.0, 31.0, 40.0])
    monkeypatch.setattr("mcore_prefix_tree.cli.console.time.monotonic", lambda: next(now))
    console = Console(file=io.StringIO())
    reporter = ConsoleReporter(console)
    for done in (1, 2, 3):
        tell(reporter, done)
    assert printed(console) == line


@pytest.mark.parametrize("command", [("inspect", "--trees", "3"), ("plan", "--max-tokens", "64")])
def test_piped_lines_have_no_spaces_at_their_ends(tmp_path: Path, command: tuple[str, ...]) -> None:
    rows = [{"tokens": [1, 2, *range(3, 5 + number)], "loss_mask": [0] * 2 + [1] * (2 + number)} for number in range(4)]
    name, *options = command
    done = run_command(name, write_rows(tmp_path / "data.jsonl", rows), *options, code=0)
    assert done.stdout.count("\n") > 5
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []
