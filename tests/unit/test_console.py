from __future__ import annotations

import io
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mcore_prefix_tree.cli.console import ConsoleReporter, comparison_table, verify_table
from mcore_prefix_tree.cli.main import app

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def step_report():
    from mcore_prefix_tree.mcore.trainer.trainer import StepReport

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
    from mcore_prefix_tree.mcore.engine.verify import VerifyReport

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
    from mcore_prefix_tree.mcore.engine.compare import Comparison, Measurement
    from mcore_prefix_tree.plan import Bound
    from mcore_prefix_tree.plan.work import Flops, Work

    def work(body, attention, head):
        return Work(*(Flops(forward=flops, backward=2 * flops) for flops in (body, attention, head)))

    return Comparison(
        folded=Measurement(name="folded", seconds=[1.0, 1.2, 1.1], peak_bytes=100 * 2**20, tokens=3_000),
        packed=Measurement(name="unfolded, packed", seconds=[4.0, 4.8, 4.4], peak_bytes=400 * 2**20, tokens=12_000),
        stock=Measurement(name="unfolded, stock", seconds=[8.0, 8.0, 8.8], peak_bytes=None, tokens=12_000),
        stock_missing=None,
        logical_tokens=12_000,
        bound=Bound(folded=work(10, 2, 8), unfolded=work(40, 12, 48)),
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


def test_a_log_has_one_plain_line_a_step(log, step_report):
    console, reporter = log
    reporter.started(3, 6)
    assert printed(console) == ""
    reporter.step(step_report)
    assert printed(console) == (
        "step 3 | loss 1.234568 | grad norm 0.500 | lr 1.000e-04 | tokens 12,000 -> 3,000 (fold ratio 4.00) | "
        "2.00 s, plan 4 ms | 6,000 logical tokens/s | 1,500 physical tokens/s\n"
    )
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
    assert "step 2/6" in shown, "a resumed run starts where it stopped"
    assert "step 6/6" in shown
    assert [line for line in shown.splitlines() if line.startswith("step 3 | loss 1.234568 | ")], "above the bar"
    assert printed(console).rindex("\x1b[?25h") > printed(console).rindex("\x1b[?25l"), "the cursor is back"


def test_closing_twice_or_without_a_bar_is_nothing(terminal, log):
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


def test_nothing_to_train_is_said(log, terminal):
    for console, reporter in (log, terminal):
        reporter.started(7, 6)
        assert printed(console) == "nothing to train: train_iters=6 are done\n"


def test_messages_are_taken_literally_and_never_wrapped(log):
    console, reporter = log
    text = "resumed from [bold]/runs[/bold]/" + "x" * 200
    reporter.message(text)
    assert printed(console) == text + "\n"


def table_lines(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return printed(console)


def unwrapped(text):
    """Titles and captions are as narrow as their table."""
    return " ".join(text.split())


def cells(text, first):
    (line,) = [line for line in text.splitlines() if first in line and "│" in line]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_table_of_errors(verify_report, log):
    console, reporter = log
    reporter.verified(verify_report)
    assert "TOO LARGE" not in printed(console)
    text = table_lines(verify_table(verify_report))
    assert "verify: folded against unfolded (float32, 8 samples, 12,000 -> 3,000 tokens, 15 parameter tensors)" in (
        unwrapped(text)
    )
    assert "largest gradient error: decoder.layers.[0].weight (rank 1)" in unwrapped(text)
    assert cells(text, "loss") == ["loss", "3.00e-07", "1.00e-05", "ok"]
    assert cells(text, "gradient of") == ["gradient of a parameter", "4.00e-07", "1.00e-05", "ok"]


@pytest.mark.parametrize("error", [1.1e-5, float("inf"), float("nan")])
def test_an_error_above_its_limit_stands_out(verify_report, error):
    report = replace(verify_report, entropy_error=error)
    text = table_lines(verify_table(report))
    assert cells(text, "entropies")[-1] == "TOO LARGE"
    assert text.count("TOO LARGE") == 1
    assert not report.passed


def test_half_precision_has_a_limit_a_row(verify_report):
    limits = {"logprob_error": 1e-3, "entropy_error": 2e-3, "loss_error": 3e-3, "gradient_error": 4e-9}
    report = replace(verify_report, tolerance=0.0, unfolded_errors=limits, dtype="bfloat16")
    text = table_lines(verify_table(report))
    assert cells(text, "log-prob") == ["log-probabilities of a sample", "1.00e-07", "3.00e-03", "ok"]
    assert cells(text, "gradient of") == ["gradient of a parameter", "4.00e-07", "1.20e-08", "TOO LARGE"]


def test_the_table_of_costs(comparison):
    text = table_lines(comparison_table(comparison))
    assert cells(text, "unfolded, packed") == ["unfolded, packed", "12,000", "4.400", "4.00", "400 MiB"]
    assert cells(text, "unfolded, stock") == ["unfolded, stock", "12,000", "8.000", "7.27", "not known here"]
    assert unwrapped(text).endswith(
        "folded is 4.00x the faster unfolded way (4.00 to 4.00), 80% of its bound by FLOPs, 5.00x "
        "(body 4.00x of 50% of the folded FLOPs, attention 6.00x of 10%, head 6.00x of 40%)"
    )


def test_one_round_has_no_spread(comparison):
    ways = {name: replace(getattr(comparison, name), seconds=[2.0]) for name in ("folded", "packed", "stock")}
    assert "folded is 1.00x the faster unfolded way, 20% of its bound" in unwrapped(
        table_lines(comparison_table(replace(comparison, **ways)))
    )


def test_a_way_that_could_not_be_run_is_explained(comparison):
    partial = replace(comparison, stock=None, stock_missing="no room for data[a].jsonl:3")
    text = table_lines(comparison_table(partial))
    assert cells(text, "unfolded, packed")[3] == "4.00"
    assert "unfolded, stock" not in text
    assert unwrapped(text).endswith("stock not run: no room for data[a].jsonl:3")


@pytest.fixture
def recipe(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"tokens": [1, 2, token]}) + "\n" for token in range(3, 9)))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"data: {{path: {data}}}\n"
        "model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 16}\n"
        "batch: {global_batch_size: 2, max_tokens: 64}\n"
        "train_iters: 4\nattention_backend: path\ncompare: false\nverify: {enabled: false}\n"
    )
    return path


def test_control_c_in_training_exits_130_and_closes_the_bar(recipe, monkeypatch):
    steps, closed = [], []
    honest_step, honest_close = ConsoleReporter.step, ConsoleReporter.close

    def step(self, report):
        honest_step(self, report)
        steps.append(report.iteration)
        if report.iteration == 2:
            raise KeyboardInterrupt

    def close(self):
        honest_close(self)
        closed.append(True)

    monkeypatch.setattr(ConsoleReporter, "step", step)
    monkeypatch.setattr(ConsoleReporter, "close", close)
    result = CliRunner().invoke(app, ["train", str(recipe)])
    assert (result.exit_code, result.stderr) == (130, "")
    assert [line.split(" | ")[0] for line in result.stdout.splitlines()][1:] == ["step 1", "step 2"]
    assert (steps, closed) == ([1, 2], [True])


@pytest.fixture
def waits(monkeypatch):
    """``train`` with a recipe that fails; a rank that waits says how long."""
    monkeypatch.setattr("mcore_prefix_tree.errors.time.sleep", lambda seconds: sys.stderr.write(f"{seconds} s\n"))
    monkeypatch.setattr("mcore_prefix_tree.recipe.load_recipe", fail)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def said(recipe):
    result = CliRunner().invoke(app, ["train", str(recipe)])
    assert result.exit_code == 2
    return result.stderr


def test_every_rank_but_the_first_leaves_the_word_to_it(recipe, waits, monkeypatch):
    """torchrun ends all ranks when one exits: a quiet one that exits first would silence the one that explains."""
    for rank, expected in (("0", "error: x\n"), ("1", "10.0 s\nerror: x\n")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert said(recipe) == expected
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # torchrun's, told to keep no logs
        assert said(recipe) == expected
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert not Path("told").exists()


def test_under_torchrun_the_first_to_speak_speaks_for_all(recipe, waits, monkeypatch, tmp_path):
    for attempt in range(2):  # a restart has a word of its own
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


def test_reading_says_a_line_now_and_then_elsewhere(monkeypatch):
    now = iter([0.0, 1.0, 31.0, 31.0, 40.0])
    monkeypatch.setattr("mcore_prefix_tree.cli.console.time.monotonic", lambda: next(now))
    console = Console(file=io.StringIO())
    reporter = ConsoleReporter(console)
    for gibibytes in (1, 2, 3):
        reporter.reading(gibibytes * 2**30, 4 * 2**30)
    assert console.file.getvalue() == "reading data: 2.0 of 4.0 GiB\n"
