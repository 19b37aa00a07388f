#!/usr/bin/env python
"""Time the Triton kernels with the launches of the table, and with other launches that may be faster.

    scripts/tune_triton.py                                 # into benchmarks/results/tune_<the GPU's name>.json
    scripts/tune_triton.py --dims 128 128 --part forward   # only these; writes a file only with --output

A launch consists of block sizes of queries and of keys, the widest part of a head dimension, warps and stages. The
launches of one kernel run in turn, round by round, on the same tensors; a ratio above 1 means that a launch is faster
than the table's. A launch that does not compile, spills registers or gives another result than the table's launch is
omitted, with its reason. Without a GPU, Triton's interpreter (TRITON_INTERPRET=1) shows that the launches compute the
same; its times are meaningless.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from attention_bench.clock import seconds_of
from attention_bench.contest import difference
from attention_bench.workloads import standard_workloads
from rich.console import Console
from rich.table import Table

from mcore_prefix_tree.attention import AttentionOptions, Case
from mcore_prefix_tree.attention.triton_tree import kernel_calls
from mcore_prefix_tree.attention.triton_tree.block_order import DevicePlan
from mcore_prefix_tree.attention.triton_tree.config import Configs, Launch, configs_for
from mcore_prefix_tree.attention.triton_tree.kernel_calls import Call
from mcore_prefix_tree.bench.machine import describe_machine, name_in_files
from mcore_prefix_tree.data.write import whole_file
from mcore_prefix_tree.metadata import TreeMetadata

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
GROUPS = (1, 4, 8)
# One launch computes dK and dV; wide heads need one launch each.
PARTS = ("forward", "query", "key_value", "key", "value")
# Candidates by part and head dimensions: half the table's blocks and twice the programs at a time, or larger tiles.
# None has been measured; a launch that spills or does not compile is omitted on the GPU that would run it.
CANDIDATES = {
    ("forward", (64, 64)): [Launch(128, 64, 4, 3), Launch(128, 64, 8, 3)],
    ("forward", (128, 128)): [Launch(128, 64, 8, 3)],
    ("forward", (192, 128)): [Launch(128, 64, 8, 3)],
    ("query", (64, 64)): [Launch(64, 64, 4, 2)],
    ("query", (128, 128)): [Launch(64, 64, 4, 2)],
    ("query", (192, 128)): [Launch(128, 32, 8, 2), Launch(64, 64, 4, 2)],
    ("query", (256, 256)): [Launch(64, 32, 4, 2)],
    ("key_value", (64, 64)): [Launch(64, 64, 4, 2)],
    ("key_value", (128, 128)): [Launch(64, 64, 4, 2)],
    ("key_value", (192, 128)): [Launch(32, 64, 4, 2), Launch(64, 64, 8, 2)],
    ("key", (256, 256)): [Launch(32, 64, 4, 2)],
    ("value", (256, 256)): [Launch(64, 128, 8, 2)],
}
# Largest difference relative to the norm of the table's result, in machine epsilons; correct kernels are within 1.
EPSILONS = 2
KERNELS = ("forward_kernel", "key_value_kernel", "query_kernel")


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One forest with one shape of heads, and the inputs of the backward kernels from a forward."""

    metadata: TreeMetadata
    case: Case
    inputs: list[torch.Tensor]
    grad_out: torch.Tensor

    @classmethod
    def of(cls, metadata: TreeMetadata, case: Case) -> Problem:
        generator = torch.Generator(case.device).manual_seed(0)

        def draw(heads: int, width: int) -> torch.Tensor:
            shape = (metadata.padded_size, heads, width)
            return torch.randn(shape, generator=generator, dtype=case.dtype, device=case.device)

        inputs = [
            draw(case.heads, case.head_dim),
            draw(case.kv_heads, case.head_dim),
            draw(case.kv_heads, case.value_dim),
        ]
        return cls(metadata=metadata, case=case, inputs=inputs, grad_out=draw(case.heads, case.value_dim))

    @property
    def configs(self) -> Configs:
        """The table's launches."""
        return configs_for(self.case)

    def with_launch(self, part: str, one: Launch) -> tuple[Call, DevicePlan]:
        """Return a call with the table's launches except for one part."""
        field = "key_value" if part in ("key", "value") else part
        configs = replace(self.configs, **{field: one})
        plan = DevicePlan.of(self.metadata, configs, None)
        return Call(
            configs=configs,
            end=plan.end,
            position=plan.position,
            softmax_scale=self.case.options.softmax_scale,
            window=None,
        ), plan

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-sum-exps and ``sum(out * grad_out)`` of each row, from the table's forward."""
        call, plan = self.with_launch("forward", self.configs.forward)
        out, lse = kernel_calls.forward(*self.inputs, None, plan.schedules[0], call)
        return lse, kernel_calls.row_sums(out, self.grad_out, call)

    def runner(
        self, part: str, one: Launch, given: tuple[torch.Tensor, torch.Tensor]
    ) -> Callable[[], list[torch.Tensor]]:
        """Run a part with a launch, and return its results."""
        call, plan = self.with_launch(part, one)
        arguments = (*self.inputs, self.grad_out, *given)
        if part == "forward":
            return lambda: list(kernel_calls.forward(*self.inputs, None, plan.schedules[0], call))
        if part == "query":
            return lambda: [kernel_calls.query_grads(*arguments, plan.schedules[2], call)]
        made = {"key": (True, False), "value": (False, True), "key_value": (True, True)}[part]

        def key_value() -> list[torch.Tensor]:
            grads = kernel_calls.key_value_grads(*arguments, plan.schedules[1], call, made=made)
            return [grad for grad, asked in zip(grads, made, strict=True) if asked]

        return key_value

    def launches(self, part: str, dims: tuple[int, int]) -> list[Launch]:
        """Return the launches of a part, the table's first; none if other parts make the gradients of these heads."""
        configs = self.configs
        if part in ("key_value", "key", "value") and configs.apart != (part != "key_value"):
            return []
        own = {"forward": configs.forward, "query": configs.query}.get(part, configs.key_value)
        return [own, *(one for one in CANDIDATES.get((part, dims), []) if one != own)]


class Watched:
    """Stand-in for a kernel that keeps the compiled kernels of its launches."""

    def __init__(self, kernel: Any, compiled: list[Any]) -> None:
        self.kernel = kernel
        self.compiled = compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self.compiled.append(self.kernel[grid](*arguments, **options))


@contextmanager
def watching() -> Iterator[list[Any]]:
    """Yield the compiled kernels of the launches in the block; None for each in the interpreter."""
    compiled: list[Any] = []
    with mock.patch.multiple(
        kernel_calls, **{name: Watched(getattr(kernel_calls, name), compiled) for name in KERNELS}
    ):
        yield compiled


def why_not(
    run: Callable[[], list[torch.Tensor]], expected: list[torch.Tensor] | None, epsilon: float
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the results of a launch, and its figures: the reason under ``failed`` or ``skipped`` if it is omitted."""
    try:
        with watching() as compiled:
            results = run()
    except torch.OutOfMemoryError:
        return [], {"skipped": "out of memory"}
    except Exception as error:  # from the compiler, or a launch that does not fit the chip
        return [], {"skipped": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    spilled = max((one.n_spills for one in compiled if one is not None), default=0)
    if expected is None:
        return results, {"spilled": spilled}
    if spilled:
        return [], {"skipped": f"it spills {spilled} registers", "spilled": spilled}
    # Log-sum-exps of rows past the end are not finite.
    finite = [other.isfinite() for other in expected]
    apart = difference(
        [one[known] for one, known in zip(results, finite, strict=True)],
        [other[known] for other, known in zip(expected, finite, strict=True)],
    )
    if not apart <= EPSILONS * epsilon:  # NaN is not
        return [], {"failed": f"it differs by {apart:.1e} from the table's result", "difference": apart}
    return results, {"spilled": spilled, "difference": apart}


def measure(problem: Problem, part: str, dims: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
    """Return the seconds of each launch, and the ratio of the table's to them; or why it is omitted."""
    given = problem.statistics()
    expected: list[torch.Tensor] | None = None
    rows, runs = [], []
    for one in problem.launches(part, dims):
        run = problem.runner(part, one, given)
        results, known = why_not(run, expected, torch.finfo(problem.case.dtype).eps)
        rows.append({"launch": list(one), "table": expected is None, **known})
        if results:
            runs.append((run, rows[-1]))
            rows[-1]["seconds"] = []
        if expected is None:
            if not results:
                break  # without the table's launch there is no baseline
            expected = results
    for _ in range(repeats):
        for run, row in runs:
            row["seconds"].append(seconds_of(run, problem.case.device))
    for _, row in runs:
        ratios = [own / other for own, other in zip(runs[0][1]["seconds"], row["seconds"], strict=True)]
        row["ratio"] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return rows


def table(found: dict[str, Any]) -> Table:
    title = (
        f"{found['part']}, head_dim {found['head_dim']}/{found['value_dim']}, {found['heads']} heads on "
        f"{found['kv_heads']}, {found['tree']} ({found['tokens']:,} tokens)"
    )
    shown = Table("queries x keys, widest part, warps, stages", "ms", "x the table's", "difference", title=title)
    for row in found["launches"]:
        one = Launch(*row["launch"])
        name = f"{one.query_block} x {one.key_block}, {one.widest}, {one.warps}, {one.stages}"
        name += " (table)" if row["table"] else ""
        if "ratio" not in row:
            shown.add_row(name, row.get("failed") or row["skipped"])
            continue
        ratio = row["ratio"]
        spread = f"{ratio['median']:.3f} ({ratio['least']:.3f}-{ratio['most']:.3f})"
        shown.add_row(
            name, f"{1e3 * statistics.median(row['seconds']):.3f}", spread, f"{row.get('difference', 0.0):.0e}"
        )
    return shown


def problems(
    dims: Sequence[tuple[int, int]], groups: Sequence[int], heads: int, scale: float, device: torch.device
) -> Iterator[tuple[tuple[int, int], str, Problem]]:
    """Return rollouts of one prompt, and one sequence with as many visible pairs."""
    star = standard_workloads(scale)[0]
    trees = {star.name: star.folded(device), f"one sequence, as many pairs as {star.name}": star.dense(device)}
    for (head_dim, value_dim), group in ((dim, group) for dim in dims for group in groups):
        case = Case(
            device=device,
            capability=torch.cuda.get_device_capability() if device.type == "cuda" else None,
            # The interpreter has no bfloat16.
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float16,
            heads=heads,
            kv_heads=heads // group,
            head_dim=head_dim,
            value_dim=value_dim,
            needs_grad=True,
            options=AttentionOptions(softmax_scale=head_dim**-0.5),
        )
        for name, tree in trees.items():
            yield (head_dim, value_dim), name, Problem.of(tree, case)


def arguments_of(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", nargs=2, type=int, action="append", metavar=("D", "W"), help="head dimensions")
    parser.add_argument("--group", type=int, action="append", metavar="N", help="query heads per key head")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths")
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    arguments = parser.parse_args(given)
    for group in arguments.group or GROUPS:
        if arguments.heads % group:
            parser.error(f"--heads {arguments.heads} is not a multiple of --group {group}")
    return arguments


def main(given: Sequence[str]) -> int:
    arguments = arguments_of(given)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not triton.knobs.runtime.interpret:
        print("tune_triton: torch sees no GPU; TRITON_INTERPRET=1 runs it without one", file=sys.stderr)
        return 2
    machine = describe_machine()
    output = arguments.output
    if output is None and on_gpu and not (arguments.dims or arguments.group or arguments.part):
        output = RESULTS / f"tune_{name_in_files(machine)}.json"
    dims = [tuple(one) for one in arguments.dims or DIMS]
    device = torch.device("cuda" if on_gpu else "cpu")
    result: dict[str, Any] = {"kind": "tune_triton", "machine": machine, "interpreted": not on_gpu, "cases": []}
    console = Console()
    for (head_dim, value_dim), tree, problem in problems(
        dims, arguments.group or GROUPS, arguments.heads, arguments.scale, device
    ):
        for part in arguments.part or PARTS:
            launches = measure(problem, part, (head_dim, value_dim), arguments.repeats)
            if not launches:
                continue
            case = problem.case
            found = {
                "part": part,
                "head_dim": head_dim,
                "value_dim": value_dim,
                "heads": case.heads,
                "kv_heads": case.kv_heads,
                "dtype": str(case.dtype).removeprefix("torch."),
                "tree": tree,
                "tokens": problem.metadata.num_tokens,
                "launches": launches,
            }
            result["cases"].append(found)
            console.print(table(found))
            if output is not None:
                output.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(output) as unfinished:
                    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    rows = [row for case in result["cases"] for row in case["launches"]]
    wrong = [row for row in rows if "failed" in row or (row["table"] and "skipped" in row)]
    if wrong:
        print(f"tune_triton: {len(wrong)} launches failed; the tables show the reasons", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
