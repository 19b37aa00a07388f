"""``scripts/gpu_check``: what it runs, writes and passes on, on a machine that it takes for one with a GPU."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_check(monkeypatch, tmp_path):
    """The script as a module, on a machine that it takes for one with a GPU, with results in a folder of their own."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "lib"))
    import gpu_check

    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gpu_check, "describe_machine", lambda: {"device": "NVIDIA H200", "torch": "2.13.0"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return gpu_check


@pytest.fixture
def gpu_parts(gpu_check, monkeypatch):
    """Its parts replaced: each takes down what it was asked, and gives what is put here under its name."""
    parts = {"tests": {"tests": 2, "failures": 0, "errors": 0, "skipped": 0, "asked": []}}

    def bench(folder, name, *arguments, on_written=None):
        parts["tests"]["asked"].append((name, arguments))
        return parts.get(name, {"kind": name})

    monkeypatch.setattr(gpu_check, "run_tests", lambda folder: parts["tests"])
    monkeypatch.setattr(gpu_check, "run_bench", bench)
    return parts


def gpu_result(gpu_check):
    return json.loads((gpu_check.RESULTS / "gpu_nvidia_h200.json").read_text())


def test_gpu_check_says_that_there_is_no_gpu(monkeypatch, capsys):
    """The script as a program, but in this process: nothing here depends on what a busy machine does to another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "scripts" / "lib" / "gpu_check.py"), run_name="__main__")
    assert left.value.code == 2
    assert capsys.readouterr().err == "gpu_check: torch sees no GPU; run it on a machine with one\n"


@pytest.mark.parametrize(("capability", "code"), [((8, 0), 1), ((9, 0), 0), ((10, 3), 0), ((12, 0), 1)])
def test_gpu_check_knows_which_gpus_run_fa4(gpu_check, monkeypatch, capability, code):
    """The script installs flash-attn-4 on these only."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert gpu_check.main(["--gpu-runs-fa4"]) == code
    assert "python scripts/lib/gpu_check.py --gpu-runs-fa4" in (ROOT / "scripts" / "gpu_check").read_text()


def test_gpu_check_reads_what_pytest_writes(tmp_path, monkeypatch, gpu_check):
    def write(command, **more):
        suite = ElementTree.Element("testsuite", tests="3", failures="1", errors="0", skipped="1")
        for name, fault in (("good", None), ("bad", "failure"), ("left_out", "skipped")):
            case = ElementTree.SubElement(suite, "testcase", classname="tests.gpu", name=name)
            if fault is None:
                measured = ElementTree.SubElement(case, "properties")
                ElementTree.SubElement(measured, "property", name="folded loss error", value="5.1e-05")
            else:
                ElementTree.SubElement(case, fault, message=f"{name}!")
        root = ElementTree.Element("testsuites")
        root.append(suite)
        ElementTree.ElementTree(root).write(command[-1].removeprefix("--junitxml="))

    monkeypatch.setattr(gpu_check.subprocess, "run", write)
    tests = gpu_check.run_tests(tmp_path)
    assert {name: tests[name] for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": 3,
        "failures": 1,
        "errors": 0,
        "skipped": 1,
    }
    assert tests["faults"] == [{"test": "tests.gpu::bad", "message": "bad!"}]
    assert tests["skips"] == {"left_out!": 1}
    assert tests["figures"] == {"tests.gpu::good": {"folded loss error": 5.1e-05}}


@pytest.mark.parametrize("report", [None, "", "<testsuites><testsuite tests="])
def test_gpu_check_survives_a_pytest_that_dies(tmp_path, monkeypatch, gpu_check, report):
    def die(command, **more):
        if report is not None:
            Path(command[-1].removeprefix("--junitxml=")).write_text(report)
        return subprocess.CompletedProcess(command, -11)

    monkeypatch.setattr(gpu_check.subprocess, "run", die)
    assert gpu_check.run_tests(tmp_path)["failed"] == "pytest ended with exit code -11 and wrote no report"


def test_gpu_check_goes_on_after_tests_that_died(gpu_check, gpu_parts):
    gpu_parts["tests"] = {"failed": "pytest ended", "asked": []}
    assert gpu_check.main([]) == 1
    result = gpu_result(gpu_check)
    assert result["tests"]["failed"] == "pytest ended"
    assert result["attention"] == {"kind": "attention"}
    assert set(result["steps"]) == {"quickstart", "one_gpu"}
    assert result["head"] == {"kind": "head"}


def test_gpu_check_measures_the_head(gpu_check, gpu_parts):
    assert gpu_check.main(["--only", "head"]) == 0
    assert set(gpu_result(gpu_check)) == {"kind", "machine", "head"}
    name, (script,) = gpu_parts["tests"]["asked"][0]
    assert (name, Path(script)) == ("head", ROOT / "scripts" / "bench_head.py")
    gpu_parts["head"] = {"kind": "head", "failed": "out of memory"}
    assert gpu_check.main(["--only", "head"]) == 1


def test_gpu_check_tunes_where_it_is_asked_to(gpu_check, gpu_parts):
    assert gpu_check.main(["--only", "tune"]) == 0
    assert set(gpu_result(gpu_check)) == {"kind", "machine", "tune"}
    name, (script,) = gpu_parts["tests"]["asked"].pop()
    assert (name, Path(script)) == ("tune", ROOT / "scripts" / "tune_triton.py")
    assert Path(script).exists()
    assert gpu_check.main([]) == 0
    assert "tune" not in gpu_result(gpu_check)
    assert gpu_parts["tests"]["asked"]
    assert all(name != "tune" for name, _ in gpu_parts["tests"]["asked"])


def test_steps_of_a_gpu_are_rendered():
    render = runpy.run_path(str(ROOT / "scripts" / "render_results.py"))
    step = json.loads((ROOT / "benchmarks" / "results" / "step_quickstart_cpu.json").read_text())
    step["machine"]["device"] = "NVIDIA H200"
    shown = render["steps_on_gpus"]([{"steps": {"one_gpu": step, "quickstart": {"failed": "no memory"}}}])
    assert shown.startswith("`recipes/one_gpu.yaml`, NVIDIA H200:\n\n| model | times faster | by CPU time | bound |")
    assert "quickstart" not in shown
    assert render["steps_on_gpus"]([]) == "On a GPU: not yet measured."


def test_gpu_check_writes_after_every_part(gpu_check, gpu_parts, monkeypatch):
    bench, found = gpu_check.run_bench, []

    def stopped(folder, name, *arguments, on_written=None):
        found.append(set(gpu_result(gpu_check)))
        if name == "one_gpu":
            raise KeyboardInterrupt
        if on_written is not None:
            on_written({"kind": name, "workloads": ["the first"]})
            found.append(gpu_result(gpu_check)["attention"])
        return bench(folder, name, *arguments)

    monkeypatch.setattr(gpu_check, "run_bench", stopped)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main([])
    written = {"kind", "machine", "tests"}
    unfinished = {"kind": "attention", "workloads": ["the first"], "failed": "it did not come to its end"}
    assert found == [written, unfinished, written | {"attention"}, written | {"attention", "steps"}]
    assert set(gpu_result(gpu_check)["steps"]) == {"quickstart"}
    assert [file.name for file in gpu_check.RESULTS.iterdir()] == ["gpu_nvidia_h200.json"]


def test_gpu_check_adds_parts_to_what_there_is(gpu_check, gpu_parts, monkeypatch, capsys):
    assert gpu_check.main(["--only", "tests"]) == 0
    assert set(gpu_result(gpu_check)) == {"kind", "machine", "tests"}
    gpu_parts["attention"] = {"kind": "new", "failed": "one measurement"}
    assert gpu_check.main(["--only", "steps", "--only", "attention", "--scale", "2", "--", "--only", "P4096"]) == 1
    result = gpu_result(gpu_check)
    assert set(result) == {"kind", "machine", "tests", "attention", "steps"}
    assert result["attention"]["kind"] == "new"
    name, arguments = gpu_parts["tests"]["asked"][0]
    of_bench = (str(ROOT / "scripts" / "bench_attention.py"),)
    assert (name, arguments) == ("attention", (*of_bench, "--scale", "2", "--only", "P4096"))

    monkeypatch.setattr(gpu_check, "describe_machine", lambda: {"device": "NVIDIA H200", "torch": "2.14.0"})
    assert gpu_check.main(["--only", "tests"]) == 2
    assert "was measured with torch 2.13.0 (now 2.14.0); move it away, or run all parts" in capsys.readouterr().err
    assert gpu_result(gpu_check) == result
    del gpu_parts["attention"]
    assert gpu_check.main([]) == 0
    assert gpu_result(gpu_check)["machine"]["torch"] == "2.14.0"


def test_gpu_check_takes_parts_by_their_names(gpu_check, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--only", "P4096"])
    assert "invalid choice: 'P4096'" in capsys.readouterr().err


BENCH = """
import json, pathlib, sys, time
output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
print("as told", file=sys.stderr)
for count in (1, 2):
    output.write_text(json.dumps({"workloads": count}))
    while count == 1 and not output.with_suffix(".seen").exists():
        time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 1])
def test_gpu_check_passes_on_what_a_benchmark_has_written_so_far(gpu_check, monkeypatch, tmp_path, code):
    monkeypatch.setattr(gpu_check, "POLL_SECONDS", 0.01)
    popen = subprocess.Popen

    def start(command, **more):
        return popen([sys.executable, "-c", BENCH, str(code), *command[1:]], **more)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", start)
    found = []

    def on_written(written):
        found.append(written)
        (tmp_path / "attention.seen").touch()

    result = gpu_check.run_bench(tmp_path, "attention", "attention", on_written=on_written)
    assert found[0] == {"workloads": 1}
    assert result == {"workloads": 2} | ({"failed": "as told\n"} if code else {})


def test_gpu_check_says_what_a_benchmark_said_that_wrote_nothing(gpu_check, monkeypatch, tmp_path):
    popen = subprocess.Popen
    monkeypatch.setattr(
        gpu_check.subprocess, "Popen", lambda command, **more: popen([sys.executable, "-c", "exit('no GPU')"], **more)
    )
    assert gpu_check.run_bench(tmp_path, "attention") == {"failed": "no GPU\n"}


def test_gpu_check_without_installing_anything(tmp_path):
    """The Python at hand runs it, with the package from the checkout, wherever the flag stands."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH"\necho "$@"\n')
    python.chmod(0o755)
    for arguments in (["--no-install", "--only", "steps"], ["--only", "steps", "--no-install"]):
        done = subprocess.run(
            [str(ROOT / "scripts" / "gpu_check"), *arguments],
            cwd=tmp_path,
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": "", "PYTHON": "python3"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{ROOT}\nscripts/lib/gpu_check.py --only steps\n"
