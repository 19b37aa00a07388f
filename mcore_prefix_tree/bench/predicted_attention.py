"""Times of attention on a GPU that is not here: the clocks of the compiled kernels' tiles, along the block lists.

Triton compiles the kernels for a Hopper GPU without one, and its ``nvdisasm`` prints the machine code. In a loop's
instructions, the products take what the tensor cores need for their shapes; meanwhile the schedulers are idle, because
every product of queries and keys is waited for. Then exponentials or other instructions, whichever take longer, follow.
A program adds up its tiles, and programs start on free processors, longest first.

What is left out is one factor, :data:`WAITING`. So a figure is a prediction: where a measurement exists, it is taken.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mcore_prefix_tree.attention import AttentionOptions, Case
from mcore_prefix_tree.attention.api import check_case
from mcore_prefix_tree.attention.auto import TreeShape, cost_table
from mcore_prefix_tree.attention.tile_blocks import block_plan, visible_pairs
from mcore_prefix_tree.attention.triton_tree.backward import key_value_kernel, query_kernel
from mcore_prefix_tree.attention.triton_tree.config import Launch, configs_for, part, rounded
from mcore_prefix_tree.attention.triton_tree.forward import forward_kernel
from mcore_prefix_tree.attention.triton_tree.kernel_calls import kv_heads_at_once, splits_for
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.plan import plan_step
from mcore_prefix_tree.sample import Sample

HOPPER = 90
# Time over the counted clocks, for waits at barriers, copies and what no loop has: of the forest "P4096 G16 R1024",
# measured on an H100. On the other measured forest the prediction is then less than 1 % off (docs/performance.md).
WAITING = 1.12
# Operations of one processor in a clock on bf16 operands, from the 989 TFLOP/s of NVIDIA's data sheet at 1.83 GHz; and
# lanes of its four schedulers' units for exponentials (CUDA C++ Programming Guide, throughput of instructions).
_PRODUCT_OPERATIONS, _EXPONENTIALS = 4096, 16
_SCHEDULERS, _LANES = 4, 32
# Types of the kernels' arguments: of tensors, other pointers and scalars; all others are int32.
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_POINTERS = {"lse": "fp32", "delta": "fp32", "sinks": "bf16", "end": "i32", "position": "i32", "schedule": "i32"}
_SCALARS = {"scale": "fp32", "softmax_scale": "fp32"}
# Heads of queries and of keys of the measurements in costs.json.
MEASURED_HEADS = (64, 8)


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A GPU: its name in measurements, processors, and the TFLOP/s of a large bf16 product, which give its clock."""

    name: str
    processors: int
    peak: float

    @property
    def clocks(self) -> float:
        """Clocks per second."""
        return self.peak * 1e12 / (self.processors * _PRODUCT_OPERATIONS)


# The peaks are measured.
CHIPS = {
    "h100": Chip(name="NVIDIA H100 80GB HBM3", processors=132, peak=814),
    "h200": Chip(name="NVIDIA H200", processors=132, peak=808),
}


class TileCost(NamedTuple):
    """Clocks that a processor's units need for one tile: tensor cores, exponentials, and the schedulers' issue."""

    products: float
    exponentials: float
    instructions: float

    @property
    def clocks(self) -> float:
        return self.products + max(self.exponentials, self.instructions)


class Times(NamedTuple):
    """Seconds of a forward and a backward; ``measured`` has those of both together, if they are known."""

    forward: float
    backward: float
    measured: float | None


def attention_case(heads: int, kv_heads: int, head_dim: int) -> Case:
    """Return the deterministic calls of a bf16 model on a Hopper GPU."""
    return Case(
        device=torch.device("cuda"),
        capability=divmod(HOPPER, 10),
        dtype=torch.bfloat16,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        needs_grad=True,
        options=AttentionOptions(softmax_scale=head_dim**-0.5, deterministic=True),
    )


def find_chip(name: str) -> Chip:
    """Return the chip of a name; raise ValueError for another one than :data:`CHIPS` has."""
    if name not in CHIPS:
        raise ValueError(f"--predict {name}: the kernels are counted for {' and '.join(CHIPS)}")
    return CHIPS[name]


def predict_step(
    samples: Sequence[Sample], max_tokens: int, case: Case, chip: Chip
) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield layout, pass, source (``measured`` or ``predicted``), seconds and TFLOP/s by visible pairs of a step.

    Raises:
        ValueError: the kernels refuse the case.
        BudgetError: a sample is longer than ``max_tokens``.
    """
    check_case("triton", case)
    cuts = plan_step(samples, max_tokens=max_tokens, dp_size=1).micro_batches[0]
    batches = [[samples[index] for index in cut] for cut in cuts]
    forests = {
        "folded": [TreeMetadata.from_layout(fold(batch)) for batch in batches],
        "unfolded": [_unfold([len(sample) for sample in batch]) for batch in batches],
    }
    for layout, found in forests.items():
        forward, backward = operations(sum(map(visible_pairs, found)), case)
        times = [predict(forest, case, chip) for forest in found]
        measured = [time.measured for time in times if time.measured is not None]
        if len(measured) == len(times):
            yield layout, "both", "measured", sum(measured), (forward + backward) / sum(measured) / 1e12
            continue
        sums = (sum(time.forward for time in times), sum(time.backward for time in times))
        passes = (("forward", sums[0], forward), ("backward", sums[1], backward))
        for name, seconds, done in (*passes, ("both", sum(sums), forward + backward)):
            yield layout, name, "predicted", seconds, done / seconds / 1e12


def _unfold(lens: Sequence[int]) -> TreeMetadata:
    """Return a micro-batch of samples that share nothing."""
    return TreeMetadata.from_nodes(np.cumsum([0, *lens]), np.full(len(lens), -1))


def operations(pairs: int, case: Case) -> tuple[int, int]:
    """Return the floating-point operations of the forward and the backward of visible pairs."""
    dims = (case.head_dim + case.value_dim, 3 * case.head_dim + 2 * case.value_dim)
    forward, backward = (2 * case.heads * pairs * dim for dim in dims)
    return forward, backward


def predict(forest: TreeMetadata, case: Case, chip: Chip) -> Times:
    """Return the times of a micro-batch's attention in one layer, by the ``triton`` back-end.

    Raises:
        RuntimeError: this Triton's machine code has other loops than the kernels.
    """
    configs = configs_for(case)
    clocks = []
    for name, launch in (("forward", configs.forward), ("key_value", configs.key_value), ("query", configs.query)):
        plan = block_plan(forest, launch.query_block, launch.key_block)
        tiles = plan.by_key if name == "key_value" else plan.by_query
        met = np.diff(tiles.bounds.astype(np.int64), axis=1)
        programs, heads = case.heads, 1
        if name == "key_value":
            group = case.heads // case.kv_heads
            rows = sum(rounded(width, launch.widest) for width in (case.head_dim, case.value_dim))
            size = 4 * forest.padded_size * case.kv_heads * rows
            blocks = len(met) * case.kv_heads
            splits = splits_for(blocks, group, processors=chip.processors, warps=launch.warps, bytes_undivided=size)
            programs, heads = case.kv_heads * splits, group // splits
        for tile in tile_costs(case, name):
            each = met @ np.array([cost.clocks for cost in tile]) * heads
            clocks.append(makespan(np.repeat(each[tiles.longest_first], programs), chip.processors))
    forward, *backward = (WAITING * one / chip.clocks for one in clocks)
    return Times(forward, sum(backward), find_measured(forest, case, chip))


def makespan(clocks: npt.NDArray[np.float64], processors: int) -> float:
    """Return when the last program ends; each starts on the first processor that is free. Registers allow one each."""
    ends = [0.0] * processors
    for one in clocks.tolist():
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def find_measured(forest: TreeMetadata, case: Case, chip: Chip) -> float | None:
    """Return the measured seconds of forward and backward of such a forest on such a GPU, if there are any."""
    shape = TreeShape.of([forest])
    for row in cost_table():
        kind = (row["device"], row["dtype"], row["head_dim"], row["deterministic"], TreeShape(**row["shape"]))
        if kind == (chip.name, "bfloat16", case.head_dim, True, shape) and "triton" in row["seconds"]:
            return float(row["seconds"]["triton"]) if (case.heads, case.kv_heads) == MEASURED_HEADS else None
    return None


@cache
def tile_costs(case: Case, name: str) -> list[tuple[TileCost, ...]]:
    """Return, for each launch of a kernel, the costs of a diagonal, a full and a tail tile."""
    configs = configs_for(case)
    launch = getattr(configs, name)
    absents: list[tuple[str, ...]] = [()]
    if name == "key_value":
        of_key, of_value = ("grad_key", "partial_key"), ("grad_value", "partial_value")
        absents = [of_value, of_key] if configs.apart else [()]
    kernel = {"forward": forward_kernel, "key_value": key_value_kernel, "query": query_kernel}[name]
    costs = []
    for absent in absents:
        compiled = compile_kernel(kernel, case, launch, engine=configs.engine, absent=absent, architecture=HOPPER)
        found = count_loops(disassemble(compiled.asm["cubin"], "nvdisasm", "-c"), launch.warps)
        # The kernel of dK and dV has one loop for diagonal and tail tiles.
        places = (0, 1, 0) if name == "key_value" else (0, 1, 2)
        if len(found) != len(set(places)):
            raise RuntimeError(
                f"Triton {triton.__version__} compiles the {name} kernel to {len(found)} loops with products, not "
                f"{len(set(places))}: its tiles cannot be counted; use the Triton of requirements/torch.txt"
            )
        costs.append(tuple(found[place] for place in places))
    return costs


def count_loops(code: str, warps: int) -> list[TileCost]:
    """Return what one pass of each innermost loop with matrix products costs, in the order of the machine code."""
    labels: dict[str, int] = {}
    operators: list[str] = []
    found = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(operators)
        if not (instruction := re.match(r"\s*/\*\w+\*/\s+(@\S+\s+)?([A-Z][\w.]*)(.*)", line)):
            continue
        operators.append(instruction[2])
        target = re.search(r"`\((\.L_\w+)\)", instruction[3])
        # A loop ends with a conditional branch back; waits that failed are elsewhere, and branch back always.
        if instruction[2] != "BRA" or not instruction[1] or target is None or target[1] not in labels:
            continue
        body = operators[labels[target[1]] :]
        shapes = [re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", operator) for operator in body]
        multiplied = sum(int(shape[1]) * int(shape[2]) * int(shape[3]) for shape in shapes if shape)
        if multiplied:
            # Four warps have one of these instructions together, and each scheduler issues those of its own warps.
            per_scheduler = warps / _SCHEDULERS
            exponentials = body.count("MUFU.EX2") * per_scheduler * _LANES * _SCHEDULERS / _EXPONENTIALS
            products = 2 * multiplied * per_scheduler / _PRODUCT_OPERATIONS
            found.append(TileCost(products, exponentials, len(body) * per_scheduler))
    return found


def compile_kernel(
    kernel: Any, case: Case, launch: Launch, *, engine: bool, absent: Sequence[str] = (), architecture: int
) -> Any:
    """Compile a kernel for a compute capability, times ten, without a GPU; ``absent`` arguments are None."""
    head_dim, value_dim = case.head_dim, case.value_dim
    rows, columns, widest = launch.query_block, launch.key_block, launch.widest
    tiles = {
        "query": (rows, head_dim), "key": (columns, head_dim), "value": (columns, value_dim), "out": (rows, value_dim),
        "grad_out": (rows, value_dim), "grad_key": (columns, head_dim), "grad_value": (columns, value_dim),
        "grad_query": (rows, head_dim),
    }  # fmt: skip
    partial = {"partial_key": (columns, head_dim), "partial_value": (columns, value_dim)}
    constants: dict[str, int | None] = {
        "KV_HEADS_AT_ONCE": kv_heads_at_once(case.kv_heads), "GROUP": case.heads // case.kv_heads,
        "HEAD_DIM": head_dim, "VALUE_DIM": value_dim,
        "HEAD_PART": part(head_dim, widest), "VALUE_PART": part(value_dim, widest),
        "BLOCK_M": rows, "BLOCK_N": columns, "STAGES": launch.stages, "ENGINE": engine,
        "LISTED": case.options.window is not None,
    }  # fmt: skip
    constants |= dict.fromkeys(absent)
    constants |= {name: None for name in ("window", "sinks") if getattr(case.options, name) is None}

    def kind_of(name: str) -> Any:
        if name in constants:
            return "constexpr"
        if name not in tiles | partial:
            return f"*{_POINTERS[name]}" if name in _POINTERS else _SCALARS.get(name, "i32")
        dtype = "fp32" if name in partial else _DTYPES[case.dtype]
        block, width = (tiles | partial)[name]
        if engine:
            return f"tensordesc<{dtype}[1, {block}, {part(width, widest)}]>"
        return "*fp32" if name in partial else (f"*{dtype}", "i32", "i32")

    signature = {name: kind_of(name) for name in kernel.arg_names}
    aligned: list[tuple[int, ...]] = []
    for place, kind in enumerate(signature.values()):
        if isinstance(kind, tuple):
            aligned += [(place, part) for part in range(3)]
        elif kind.startswith("*"):
            aligned.append((place,))
    return compile_source(kernel, signature, constants, aligned, launch.warps, architecture)


def compile_source(
    kernel: Any, signature: dict[str, Any], constants: dict[str, Any], aligned: Any, warps: int, architecture: int
) -> Any:
    """Return a kernel compiled for a GPU that is not here; 16 bytes divide the arguments at the ``aligned`` paths."""
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={name: value for name, value in constants.items() if name in kernel.arg_names},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": True})


def disassemble(cubin: bytes, tool: str, option: str) -> str:
    """Return what one of the CUDA tools that come with Triton prints about machine code."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
