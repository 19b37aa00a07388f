"""Part ``tests``: tests that need a GPU, one row per file, sent again after each of its tests."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_check_parts.context import ROOT, Context
from gpu_check_parts.results import FAILED, Key

# Tests that compile for GPUs of all kinds run on any machine, and take minutes.
FILES = (
    "tests/gpu/test_attention_backends.py",
    "tests/kernels/test_triton.py",
    "tests/kernels/test_operator.py",
    "tests/kernels/test_index_scores.py",
    "tests/gpu/test_pretrain_on_gpu.py",
)
SMOKE = ["-k", "takes_one_that_runs"]
# A file with many failures has one cause.
MOST_FAULTS = 10
PACKAGES = ("torch", "triton", "flash-attn-4", "megatron-core", "numpy", "pytest", "hypothesis")


class Rows:
    """A plugin of pytest: counts outcomes of one file, and sends its row after each test."""

    def __init__(self, context: Context, key: Key, used: dict[str, str]) -> None:
        self._context, self._key, self._used = context, key, used
        self.found: dict[str, Any] = {
            **dict.fromkeys(("tests", "failures", "errors", "skipped"), 0),
            "faults": [],
            "skips": {},
            "figures": {},
            "seconds": 0.0,
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a stage of a test."""
        found = self.found
        found["seconds"] = round(found["seconds"] + report.duration, 3)
        name = report.nodeid.removeprefix("tests/")
        if report.when == "call" or (report.when == "setup" and report.skipped):
            found["tests"] += 1
        if report.skipped:
            found["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            found["skips"][reason[:200]] = found["skips"].get(reason[:200], 0) + 1
        if report.failed:
            found["failures" if report.when == "call" else "errors"] += 1
            if len(found["faults"]) < MOST_FAULTS:
                crash = getattr(report.longrepr, "reprcrash", None)
                message = crash.message if crash is not None else str(report.longrepr)
                found["faults"].append({"test": name, "message": message[:300]})
        if report.when == "call" and report.user_properties:
            found["figures"][name] = {label: float(str(value)) for label, value in report.user_properties}
        if report.when == "teardown":
            self._context.measure(self._key, self._used, lambda: {**self._so_far(), "unfinished": True})

    def _so_far(self) -> dict[str, Any]:
        wrong = self.found["failures"] + self.found["errors"]
        passed = self.found["tests"] - wrong - self.found["skipped"]
        return {**self.found, "shown": f"{passed} passed, {wrong} failed, {self.found['skipped']} skipped"}

    def ended(self, code: int) -> dict[str, Any]:
        """Return the complete row."""
        found = self._so_far()
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            first = next((fault["message"] for fault in found["faults"]), f"pytest ended with exit code {code}")
            found[FAILED] = f"{found['shown']}; {first}"
        return found


def run(context: Context) -> None:
    """Run pytest once per file."""
    for file in FILES:
        key = context.key(file, "pytest")
        used = context.used(*PACKAGES, sources=("mcore_prefix_tree", file))
        if context.is_done(key, used) or not context.options.wants(file):
            continue
        rows = Rows(context, key, used)
        more = SMOKE if context.options.smoke else []
        code = pytest.main([str(ROOT / file), "-p", "no:cacheprovider", *more], plugins=[rows])
        context.measure(key, used, lambda rows=rows, code=code: rows.ended(code))  # type: ignore[misc]
