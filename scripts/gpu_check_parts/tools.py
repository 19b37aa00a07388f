"""Parts ``sanitizer`` and ``profile``: NVIDIA's tools on kernels with a small forest, each in a process."""

from __future__ import annotations

import csv
import subprocess
import sys
from functools import partial
from typing import Any

import torch

from gpu_check_parts.context import ROOT, Context
from gpu_check_parts.results import FAILED
from gpu_check_parts.using import packages_of, sources_of, unchecked
from mcore_prefix_tree import TreeMetadata
from mcore_prefix_tree.attention import AttentionOptions
from mcore_prefix_tree.attention.api import load_backend

TOOLS = ("memcheck", "racecheck")
RUNS = (("triton", "deterministic"), ("fa4", "any"))
KERNELS = ("forward_kernel", "key_value_kernel", "query_kernel")
# Exit code of compute-sanitizer if it finds anything.
FOUND = 9
# Nodes that end on, before and after tile borders, an empty node, and a second root.
LENS, PARENTS = (127, 1, 65, 0, 62, 44, 1), (-1, 0, 1, 1, 0, -1, 5)
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "MemoryWorkloadAnalysis")


def run_sanitizer(context: Context) -> None:
    """Run every tool on every method and mode."""
    for tool in TOOLS:
        for method, mode in RUNS:
            key = context.key("300 tokens", f"{tool}, {method}", mode)
            used = context.used(*packages_of(method), sources=sources_of(method))
            if context.is_done(key, used):
                continue
            reason = _refusal(method, mode)
            if reason is not None:
                context.leave_out(key, used, reason)
                continue
            context.measure(key, used, partial(_sanitized, tool, method, mode))


def _refusal(method: str, mode: str) -> str | None:
    from gpu_check_parts.parity import PLAIN, Question

    return load_backend(method).refusal(Question(dims=PLAIN, deterministic=mode == "deterministic").case)


def _sanitized(tool: str, method: str, mode: str) -> dict[str, Any]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    # Libraries ask the driver for functions that it may not have.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    done = _run([*command, *_small_forest(method, mode)])
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    found: dict[str, Any] = {"exit_code": done.returncode, "said": lines[-1] if lines else ""}
    found["shown"] = found["said"].strip("= ") or "no report"
    # FlashAttention-4's own kernels are reported, but this project cannot mend them.
    if done.returncode and (tool, method) != ("racecheck", "fa4"):
        found[FAILED] = " / ".join(lines[:8]) or _end_of(done)
    return found


def run_profile(context: Context) -> None:
    """Profile one launch of each Triton kernel."""
    for kernel in KERNELS:
        key, used = (
            context.key("300 tokens", kernel),
            context.used(*packages_of("triton"), sources=sources_of("triton")),
        )
        if not context.is_done(key, used):
            context.measure(key, used, partial(_profiled, kernel))


def _profiled(kernel: str) -> dict[str, Any]:
    command = ["ncu", "--csv", "--page", "details", "--kernel-name", f"regex:{kernel}", "--launch-count", "1"]
    command += [word for section in SECTIONS for word in ("--section", section)]
    done = _run([*command, *_small_forest("triton", "deterministic")])
    # Lines of ncu and of the program come before the table, which begins with "ID".
    lines = done.stdout.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        return {FAILED: _end_of(done)}
    metrics = {
        row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}".strip()
        for row in csv.DictReader(lines[start:])
        if row.get("Metric Name")
    }
    return {"metrics": metrics, "shown": f"{len(metrics)} metrics, {metrics.get('Duration', 'no duration')}"}


def _small_forest(method: str, mode: str) -> list[str]:
    torch.cuda.empty_cache()
    return [sys.executable, "-m", "gpu_check_parts.tools", method, mode]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    return done


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    return " / ".join(done.stdout.strip().splitlines()[-5:])[-500:] or f"exit code {done.returncode}"


def main(method: str, mode: str) -> None:
    """Run a method forward and backward, in the mode ``deterministic`` or ``any``: the program that tools inspect."""
    borders = [0]
    for length in LENS:
        borders.append(borders[-1] + length)
    size = borders[-1] + 3
    tree = TreeMetadata.from_nodes(borders, PARENTS, padded_size=size, device=torch.device("cuda"))
    options = AttentionOptions(softmax_scale=128**-0.5, deterministic=mode == "deterministic")
    query, key, value = (
        torch.randn(size, heads, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)
    )
    out = unchecked(method)(query, key, value, tree, options)
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
