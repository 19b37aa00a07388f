"""Part ``tune``: the Triton kernels with the launches of the table, and with other launches that may be faster.

A launch consists of block sizes of queries and of keys, the widest part of a head dimension, warps and stages. The
launches of one kernel run in turn, round by round, on the same tensors; a ratio above 1 means that a launch is faster
than the table's. A launch that does not compile, spills registers or gives another result than the table's launch is
omitted, with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from attention_bench.contest import difference, seconds_of
from attention_bench.settings import Settings
from attention_bench.workloads import standard_workloads

from gpu_check_parts.context import Context
from gpu_check_parts.results import FAILED
from gpu_check_parts.using import packages_of, sources_of
from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.attention.triton_tree import kernel_calls
from mcore_prefix_tree.attention.triton_tree.block_order import DevicePlan
from mcore_prefix_tree.attention.triton_tree.config import Configs, Launch, configs_for
from mcore_prefix_tree.attention.triton_tree.kernel_calls import Call
from mcore_prefix_tree.metadata import TreeMetadata

DIMS = ((128, 128), (64, 64), (192, 128), (256, 256))
GROUPS = (8, 4, 1)
HEADS = 32
# One launch computes dK and dV; wide heads need one launch each.
PARTS = ("forward", "key_value", "query", "key", "value")
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


def problems(
    dims: Sequence[tuple[int, int]], groups: Sequence[int], heads: int, scale: float, device: torch.device
) -> Iterator[tuple[tuple[int, int], str, Problem]]:
    """Return rollouts of one prompt, and one sequence with as many visible pairs."""
    star = standard_workloads(scale)[0]
    trees = {star.name: star.folded(device), f"one sequence, as many pairs as {star.name}": star.dense(device)}
    for (head_dim, value_dim), group in ((dim, group) for dim in dims for group in groups):
        settings = Settings(
            heads=heads,
            kv_heads=heads // group,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype="bfloat16" if device.type == "cuda" else "float16",  # the interpreter has no bfloat16
            device=device.type,
            repeats=1,
        )
        for name, tree in trees.items():
            yield (head_dim, value_dim), name, Problem.of(tree, settings.case)


def run(context: Context) -> None:
    """Measure every part of every shape, on two trees."""
    dims, groups, heads, scale = (DIMS[1:2], (2,), 2, 0.004) if context.options.smoke else (DIMS, GROUPS, HEADS, 1.0)
    measure_all(context, dims, groups, heads, scale, torch.device("cuda"))


def measure_all(
    context: Context,
    dims: Sequence[tuple[int, int]],
    groups: Sequence[int],
    heads: int,
    scale: float,
    device: torch.device,
) -> None:
    """Measure every part of the problems that :func:`problems` makes of these sizes."""
    used = context.used(*packages_of("triton"), sources=(*sources_of("triton"), "scripts/gpu_check_parts/tune.py"))
    for part in PARTS:
        for dim, tree, problem in problems(dims, groups, heads, scale, device):
            case = problem.case
            name = f"{dim[0]}/{dim[1]}, {case.heads} heads on {case.kv_heads}, {tree}"
            key = context.key(name, part)
            if context.is_done(key, used) or not context.options.wants(name) or not problem.launches(part, dim):
                continue
            about = {
                "head_dim": dim[0],
                "value_dim": dim[1],
                "heads": case.heads,
                "kv_heads": case.kv_heads,
                "dtype": str(case.dtype).removeprefix("torch."),
                "tree": tree,
                "tokens": problem.metadata.num_tokens,
            }
            context.measure(key, used, partial(_launches, problem, part, dim, context.options.repeats, about))


def _launches(problem: Problem, part: str, dim: tuple[int, int], repeats: int, about: dict[str, Any]) -> dict[str, Any]:
    rows = measure(problem, part, dim, repeats)
    found: dict[str, Any] = {**about, "launches": rows}
    wrong = [row for row in rows if "failed" in row or (row["table"] and "skipped" in row)]
    if wrong:
        found[FAILED] = str(wrong[0].get("failed") or wrong[0]["skipped"])
    ratios = [row["ratio"]["median"] for row in rows if "ratio" in row]
    found["shown"] = f"{len(ratios)} of {len(rows)} launches, the best {max(ratios, default=1.0):.2f} times the table's"
    return found
