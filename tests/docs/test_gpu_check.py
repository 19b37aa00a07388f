"""``scripts/gpu_check``: files are complete at every moment, a failure affects nothing else, a later run continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import bare_machine
import gpu_parts
import numpy as np
import pytest
from attention_bench.settings import Settings, bytes_per_token, misfit, parts_that_fit
from gpu_check_parts import arguments, check, head, results
from gpu_check_parts.context import Context, Options, hash_of
from gpu_check_parts.registry import PARTS
from gpu_check_parts.results import Key, ResultFile
from gpu_check_parts.sections import sections_of
from gpu_check_parts.table import short_table
from harness.commands import run_process

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RESULT = "gpu_h100.json"
LARGE = Settings(heads=64, kv_heads=8, head_dim=128, value_dim=128, dtype="bfloat16", device="cpu", repeats=5)
GIB = 1 << 30


def environment(folder: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "scripts", HERE)))
    kept = {name: value for name, value in os.environ.items() if name != "OUT"}
    return kept | {"PYTHONPATH": path, "FAKE_SEEN": str(folder / "seen"), **more}


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "gpu_parts.py"), "--output", str(folder), *words]
    return subprocess.Popen(command, env=environment(folder, **more), stdout=subprocess.PIPE, text=True)


def run(folder: Path, *words: str, **more: str) -> tuple[int, str, dict[str, dict]]:
    """Exit code, output, and its rows by method."""
    process = start(folder, *words, **more)
    said, _ = process.communicate(timeout=120)
    return process.returncode, said, rows_in(folder)


def rows_in(folder: Path) -> dict[str, dict]:
    return {row["method"]: row for row in results.rows_of(folder / RESULT)}


def seen(folder: Path) -> list[str]:
    return (folder / "seen").read_text().split()


def test_rows_and_table_of_a_good_run(tmp_path):
    code, said, rows = run(tmp_path)
    assert code == 0
    assert list(rows) == ["first", "second", "third"]
    assert said.index("plan: 1.0 minutes expected, no limit") < said.index("-- parity")
    assert said.rstrip().endswith("parity, forest, third: 0.5 s")
    assert (tmp_path / "gpu_h100.log").read_text().rstrip() == said.rstrip()
    assert sorted(path.name for path in tmp_path.iterdir()) == [RESULT, "gpu_h100.log", "seen"]


@pytest.mark.parametrize(
    ("end", "entry", "reason"),
    [
        ("crash", "failed", "the last words"),
        ("hang", "failed", "stopped after 2 s without a result"),
        ("memory", "failed", "out of memory"),
        ("error", "failed", "ValueError: it does not compile"),
        ("refused", "not_run", "it would need about 90 GiB, and 80 GiB are free"),
    ],
)
def test_failing_measurement_leaves_others(tmp_path, end, entry, reason):
    code, said, rows = run(tmp_path, FAKE_PART=end, FAKE_SECONDS="2" if end == "hang" else "60")
    assert code == (1 if entry == "failed" else 0)
    assert reason in rows["second"][entry]
    # On a busy machine the last line of the row before may come after that row.
    assert end != "crash" or "signal SIGSEGV: " in rows["second"][entry]
    assert [rows[name].get("seconds") for name in ("first", "third")] == [[0.5], [0.5]]
    assert seen(tmp_path) == list(gpu_parts.METHODS)
    if entry == "failed":
        assert said.index("2 measured, 1 failed, 0 not run") < said.rindex(reason)


def test_later_run_measures_missing_rows(tmp_path):
    run(tmp_path, FAKE_PART="crash")
    _, _, rows = run(tmp_path)
    assert rows["second"]["seconds"] == [0.5]
    assert seen(tmp_path) == ["first", "second", "third", "second"]
    # A row is measured again if a package that it used has another version.
    run(tmp_path, FAKE_VERSION="2")
    assert seen(tmp_path)[4:] == ["first", "second", "third"]


def test_figures_outlive_packages_missing_later(tmp_path):
    """Two folders travel one after the other; the second lacks packages that some rows of the first used."""
    run(tmp_path)
    _, _, rows = run(tmp_path, FAKE_PART="refused", FAKE_VERSION="2")
    assert rows["second"]["seconds"] == [0.5]


def test_unrunnable_part_has_one_row_until_it_runs(tmp_path, monkeypatch):
    machine = {"gpu": True, "machine": {"device": "H100"}, "file": "gpu_h100", "missing": {"megatron.core": "absent"}}
    monkeypatch.setattr(check, "ask_machine", lambda parts: machine)
    monkeypatch.setattr(check.PartRun, "run", lambda self: True)
    assert check.main(["--only", "steps", "--output", str(tmp_path)]) == 0
    assert rows_in(tmp_path)["steps"]["not_run"] == "missing: megatron.core (absent)"
    machine["missing"] = {}
    assert check.main(["--only", "steps", "--output", str(tmp_path)]) == 0
    assert rows_in(tmp_path) == {}


def wait_for_row(folder: Path, method: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if (folder / "seen").exists() and method in seen(folder):
            return
        time.sleep(0.05)
    raise AssertionError(f"{method} did not start")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_leaves_a_complete_file_and_no_process(tmp_path, number):
    process = start(tmp_path, FAKE_PART="hang")
    wait_for_row(tmp_path, "second")
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert list(rows_in(tmp_path)) == ["first"]
    assert f"stopped by {number.name}" in said
    running = run_process(["ps", "-eo", "args"], code=0).stdout
    assert [line for line in running.splitlines() if "gpu_check_parts.child" in line and str(tmp_path) in line] == []
    run(tmp_path)
    assert seen(tmp_path) == ["first", "second", "second", "third"]


@pytest.mark.ci
def test_exit_code_is_0_when_time_is_up(tmp_path):
    started = time.monotonic()
    code, said, rows = run(tmp_path, "--minutes", "0.3", FAKE_PART="hang")
    assert code == 0
    assert time.monotonic() - started < 40
    assert list(rows) in (["first"], [])  # a busy machine may not get as far
    assert "time is up; call it again to continue" in said


def test_output_goes_to_out_if_set(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    assert arguments.parse([]).output == tmp_path
    assert arguments.parse(["--output", "elsewhere"]).output == Path("elsewhere")
    monkeypatch.delenv("OUT")
    assert arguments.parse([]).output == ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("words", [["--only", "P4096"], ["--minutes", "0"], ["--repeats", "0"], ["--scale", "2"]])
def test_wrong_arguments_are_rejected(words):
    with pytest.raises(SystemExit) as ended:
        arguments.parse(words)
    assert ended.value.code == 2


def test_plan_names_missing_packages():
    planned = check.plan(
        list(PARTS.values()), {"megatron.core": "ModuleNotFoundError: no module", "liger_kernel": "no"}
    )
    reasons = {part.name: reason for part, reason in planned}
    assert reasons["steps"] == "missing: megatron.core (ModuleNotFoundError: no module)"
    assert reasons["parity"] == reasons["head"] == ""
    assert "without liger_kernel" in check.plan_text(planned, {"liger_kernel": "no"}, 9)


def test_missing_gpu_is_reported_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(check, "ask_machine", lambda parts: {"gpu": False, "missing": {}})
    assert check.main([]) == 2
    assert capsys.readouterr().err == "gpu_check: torch sees no GPU; run it on a machine with one\n"


def test_python_without_torch_is_named(monkeypatch, capsys):
    monkeypatch.setattr(check, "ask_machine", lambda parts: {"gpu": None, "missing": {"torch": "ModuleNotFoundError"}})
    assert check.main([]) == 2
    said = f"gpu_check: torch does not import in {sys.executable} (ModuleNotFoundError); name a Python with torch:"
    assert capsys.readouterr().err == f"{said} PYTHON=/path/to/python\n"


def test_file_stays_below_its_limit_and_has_no_nan(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "LARGEST_BYTES", 3000)
    file = ResultFile(tmp_path / RESULT, {"device": "H100"})
    for number in range(20):
        file.put({"part": "tests", "workload": str(number), "method": "", "mode": "", "used": {}, "text": "x" * 9999})
    file.put({"part": "head", "workload": "", "method": "", "mode": "", "used": {}, "error": float("nan")})
    content = (tmp_path / RESULT).read_text()
    assert len(content) < 3000 + 1000  # the names of omitted tests
    assert json.loads(content, parse_constant=pytest.fail)["left_out"]
    assert not [path for path in tmp_path.iterdir() if path.name != RESULT]


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / RESULT).write_text("{}")
    with pytest.raises(ValueError, match=rf"{RESULT}: not a result of scripts/gpu_check; move it to another folder"):
        ResultFile(tmp_path / RESULT, {})


def test_rows_depend_only_on_packages_that_they_used(tmp_path):
    """A package that a row does not load may change; our sources, the GPU and the settings may not."""
    context = Context(part="attention", options=Options(), device_name="H100")
    used = context.used("numpy", "no-such-package", sources=("scripts/gpu_check_parts",), rounds=5)
    assert set(used) == {"gpu", "numpy", "sources", "rounds"}
    key = context.key("forest", "triton")
    row = {**key._asdict(), "used": used, "seconds": [1.0]}
    again = Context(part="attention", options=Options(), device_name="H100", earlier=[row])
    assert again.is_done(key, used)
    assert not again.is_done(key, used | {"rounds": "6"})
    unfinished = Context(part="attention", options=Options(), device_name="H100", earlier=[row | {"unfinished": True}])
    assert not unfinished.is_done(key, used)
    assert hash_of(("scripts/gpu_check_parts",)) != hash_of(("scripts/gpu_check_parts/check.py",))
    with pytest.raises(FileNotFoundError, match="no_such"):
        hash_of(("scripts/no_such.py",))


def test_unfolded_batches_are_divided_by_memory():
    """P16384 needs more than an H100 has; in parts it fits, and every sample is in one of them."""
    lens = np.full(32, 18432)
    assert misfit(int(lens.sum()), LARGE, 78 * GIB) is not None
    assert misfit(81920, LARGE, 78 * GIB) is None
    parts = parts_that_fit(lens, LARGE, 70 * GIB)
    assert 2 <= len(parts) <= 4
    assert np.concatenate(parts).tolist() == lens.tolist()
    assert all(misfit(int(part.sum()), LARGE, 70 * GIB) is None for part in parts)
    # One that is too long by itself is left to the guard of its row.
    assert len(parts_that_fit(np.array([10**6, 5]), LARGE, GIB)) == 2
    assert bytes_per_token(LARGE) > 3 * 2 * 72 * 256


def test_rows_become_the_sections_that_documents_read(tmp_path):
    file = ResultFile(tmp_path / RESULT, {"device": "NVIDIA H100", "torch": "2.11.0"})
    shape = {"tokens": 8, "pairs": 20, "unfolded_tokens": 9, "unfolded_pairs": 30, "nodes": 2, "shape": {}}
    figures = {
        "name": "triton", "layout": "tree", "deterministic": True, "tokens": 8, "pairs": 20,
        "forward_seconds": [1.0, 2.0], "backward_seconds": [1.0, 2.0], "metadata_seconds": 0.1, "peak_bytes": 5,
        "tile_efficiency": {}, "difference": 0.0, "parts": 1, "settings": {"heads": 64}, "unfinished": True,
    }  # fmt: skip
    more = {"name": "torch", "layout": "unfolded", "forward_seconds": [1.0], "backward_seconds": [3.0]}
    for key, row in {
        ("attention", "machine", "ceilings"): {"matrix_tflops": 700.0, "copy_gbytes": 3000.0},
        ("attention", "forest", "shape"): shape,
        ("attention", "forest", "triton, tree"): figures,
        ("attention", "forest", "torch, unfolded"): figures | more,
        ("attention", "forest", "fa4, tree"): {"name": "fa4", "layout": "tree", "not_run": "not installed"},
        ("tests", "tests/gpu", "pytest"): {"tests": 3, "failures": 1, "errors": 0, "skipped": 1, "seconds": 2.0},
        ("steps", "one_gpu", "bench step"): {"result": {"kind": "step"}},
        ("steps", "quickstart", "bench step"): {"failed": "no memory"},
    }.items():
        file.put({**Key(*key, "")._asdict(), "used": {}, **row})
    found = sections_of(tmp_path / RESULT)
    (workload,) = found["attention"]["workloads"]
    assert [(row["method"], row["forward_seconds"]) for row in workload["rows"]] == [
        ("triton", [1.0]),
        ("torch", [1.0]),
    ]
    assert workload["missing"] == [{"method": "fa4", "layout": "tree", "reason": "not installed"}]
    assert found["tests"]["failures"] == 1
    assert found["steps"] == {"one_gpu": {"kind": "step"}}
    assert "head" not in found
    assert short_table(file.rows).startswith("6 measured, 1 failed, 1 not run\nsteps, quickstart, bench step: FAILED")


@pytest.mark.parametrize("words", [["--no-install", "--only", "steps"], ["--only", "steps", "--no-install"]])
def test_check_runs_on_an_installed_python(tmp_path, words):
    """With the package from the checkout, wherever the flag stands."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH"\necho "$@"\n')
    python.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": "", "PYTHON": "python3"}
    command = [str(ROOT / "scripts" / "gpu_check"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{ROOT}:{ROOT}/scripts\n-m gpu_check_parts {' '.join(words)}\n"


def test_head_that_needs_too_much_memory_never_starts(monkeypatch):
    """Nothing is allocated for a case of the head that does not fit; each of its rows reports it."""
    assert head.needed_bytes(16384, 4096, 131072) < 60 * GIB
    sent = []
    monkeypatch.setattr(Context, "_send", lambda self, line: sent.append(line))
    monkeypatch.setattr(head, "available_bytes", lambda device: 30 * GIB)
    context = Context(part="head", options=Options(), device_name="H100")
    head._run_case(context, "large", (32768, 4096, 131072, 1.0), head.torch.device("cpu"))
    reasons = [line["row"]["not_run"] for line in sent]
    assert "it would need about 60 GiB, and 30 GiB are free" in reasons


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A bare machine with a fake GPU, and the wheels for steps."""
    folder = tmp_path_factory.mktemp("bare")
    bare_machine.make(folder / "machine")
    bare_machine.wheels(folder / "wheels")
    return folder


def check_on(machine: Path, out: Path, *words: str, **more: str) -> tuple[str, list[dict]]:
    # The wheels are installed uncompiled; without the last, each process would compile megatron-core again.
    removed = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    bin_folder = machine / "machine" / "bin"
    env = kept | {
        "PATH": f"{bin_folder}:{kept['PATH']}",
        "PYTHON": str(bin_folder / "python"),
        "OUT": str(out),
        "TMPDIR": str(machine),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        **more,
    }
    command = [str(ROOT / "scripts" / "gpu_check"), "--smoke", "--repeats", "2", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode in (0, 1), done.stderr
    (file,) = out.glob("*.json")
    return done.stdout, results.rows_of(file)


@pytest.mark.ci
def test_every_part_runs_on_a_bare_machine(machine, tmp_path):
    """Without an index, with the packages missing there: every import, option, file and program."""
    said, rows = check_on(machine, tmp_path, "--wheels", str(machine / "wheels"))
    failed = [row for row in rows if "failed" in row]
    assert failed == [], said
    measured = {row["part"] for row in rows if results.is_measured(row)}
    assert measured == {part.rows for part in PARTS.values()}, said
    # FlashAttention-4 is not installed: its check is one row.
    (missing,) = (row for row in rows if row["part"] == "parity" and row["method"] == "fa4")
    assert "without flash-attn-4" in missing["not_run"]
    assert {row["workload"] for row in rows if row["part"] == "steps"} == {"rollouts", "one_gpu", "quickstart"}
    assert said.rstrip().endswith(short_table({Key(*(row[name] for name in Key._fields)): row for row in rows}))


@pytest.mark.ci
def test_bare_machine_reports_missing_packages_and_survives_a_crash(machine, tmp_path):
    words = ("--no-install", "--only", "parity", "--only", "steps")
    said, rows = check_on(machine, tmp_path, *words, FAKE_GPU_CRASH="triton")
    assert "[missing: megatron.core (ModuleNotFoundError" in said
    by_mode = {(row["method"], row["mode"]): row for row in rows if row["part"] == "parity" and row["workload"]}
    assert "SIGSEGV" in by_mode["triton", "deterministic"]["failed"]
    assert "without flash-attn-4" in by_mode["fa4", "deterministic"]["not_run"]
