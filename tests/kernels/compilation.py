"""Compiling the kernels for a chip that is not present, and reading the result.

``python tests/kernels/compilation.py 90 100`` prints a line for every kernel of every row of the table: the way to see
the result of another version of Triton.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import triton
from harness.commands import run_process
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.attention.chosen_keys.index_scores import LAUNCH, LAUNCH_FP32, STAGES, index_kernel
from mcore_prefix_tree.attention.triton_tree.backward import delta_kernel, key_value_kernel, query_kernel
from mcore_prefix_tree.attention.triton_tree.config import UP_TO, Launch, configs_for, part, rounded
from mcore_prefix_tree.attention.triton_tree.forward import forward_kernel
from mcore_prefix_tree.attention.triton_tree.kernel_calls import ROW_SUMS, kv_heads_at_once
from mcore_prefix_tree.logprob.softmax_kernels import COLUMNS, EDGES, WARPS

# Largest shared memory of one program, in bytes: CUDA C++ Programming Guide, compute capabilities.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# The PTX instruction that each chip's matrix products should become.
MATRIX_INSTRUCTION = {
    80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync",
}  # fmt: skip
# Types of the kernels' arguments: of tensors, other pointers and scalars; all others are int32.
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTERS = {"lse": "fp32", "delta": "fp32", "sinks": "bf16", "end": "i32", "position": "i32", "schedule": "i32"}
SCALARS = {"scale": "fp32", "softmax_scale": "fp32"}
KERNELS = ("forward", "row_sums", "key_value", "query")
OPTIONS = {"plain": {}, "window": {"window": 1000}, "all": {"window": 1000, "sinks": torch.zeros(32)}}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Resources of one kernel."""

    kernel: str
    registers: int
    spilled: int
    shared: int
    matrix_instructions: int = 0
    warpgroup_products: int = 0
    warpgroup_waits: int = 0
    multiplied: int = 0  # pairs of numbers, by one run through the code of all warps
    needed: int = 0  # of them, in the products of its tiles

    @property
    def multiplies(self):
        """Whether it has matrix products: all have but the sums of rows."""
        return self.kernel != delta_kernel.__name__

    @property
    def serialized(self):
        """Whether Hopper's matrix instructions, which run asynchronously, wait for each other instead, one by one.

        ptxas does so if something else writes their sums while they may be running: each gets a separate wait.
        Sound kernels have a wait for each product of tiles, of several instructions: 0.4 of them or fewer.
        """
        return self.warpgroup_waits > 0.5 * self.warpgroup_products


def case_of(architecture, head_dim, value_dim, *, dtype=torch.bfloat16, options=None):
    return Case(
        device=torch.device("cuda"),
        capability=divmod(architecture, 10),
        dtype=dtype,
        heads=32,
        kv_heads=8,
        head_dim=head_dim,
        value_dim=value_dim,
        needs_grad=True,
        options=AttentionOptions(softmax_scale=0.1, **(options or {})),
    )


def softmax_report(kernel, logits, out, architecture, *, absent=()):
    """Resources and machine code of a kernel of the vocabulary head, for rows that 16 bytes divide."""
    constants = {"COLUMNS": COLUMNS, "EDGES": EDGES, **dict.fromkeys(absent)}
    pointers = {"logits": logits, "out": out, "edge_logit": logits, "first": "i64", "edge_column": "i64"}
    compiled = compile_aligned(kernel, pointers, ("stride", "columns", "out_stride"), constants, WARPS, architecture)
    found = report_of(kernel, dump(compiled.asm["cubin"], "cuobjdump", "--dump-resource-usage"), compiled)
    return found, dump(compiled.asm["cubin"], "nvdisasm", "-c")


def index_report(dtype, dim, architecture, *, heads=64, relu=True):
    """Resources of the kernel of an indexer's scores."""
    (rows, keys, warps), name = (LAUNCH_FP32, "fp32") if dtype == torch.float32 else (LAUNCH, "bf16")
    constants = {"HEADS": heads, "DIM": dim, "WIDTH": triton.next_power_of_2(dim), "RELU": relu, "STAGES": STAGES}
    constants |= {"BLOCK_M": rows, "BLOCK_N": keys}
    pointers = {"query": name, "key": name, "weight": name, "end": "i32", "columns": "i64"}
    scalars = ("first", "queries", "keys")
    compiled = compile_aligned(index_kernel, pointers, scalars, constants, warps, architecture)
    code = dump(compiled.asm["cubin"], "nvdisasm", "-c")
    return report_of(
        index_kernel,
        dump(compiled.asm["cubin"], "cuobjdump", "--dump-resource-usage"),
        compiled,
        matrix_instructions=compiled.asm["ptx"].count(MATRIX_INSTRUCTION[architecture]),
        warpgroup_products=code.count("HGMMA."),
        warpgroup_waits=code.count("WARPGROUP.DEPBAR.LE"),
    )


def compile_aligned(kernel, pointers, scalars, constants, warps, architecture):
    """Return a kernel compiled for aligned arguments; pointers without a type are to fp32."""
    signature = {
        name: "constexpr" if name in constants else "i32" if name in scalars else f"*{pointers.get(name, 'fp32')}"
        for name in kernel.arg_names
    }
    special = [(one.num,) for one in kernel.params if one.name not in constants and not one.do_not_specialize]
    return compile_source(kernel, signature, constants, special, warps, architecture)


def report_of(kernel, resources, compiled, **counts):
    return Report(
        kernel=kernel.__name__,
        registers=int(re.search(r"REG:(\d+)", resources)[1]),
        # The kernels have no local arrays, so all data on the stack were spilled.
        spilled=int(re.search(r"STACK:(\d+)", resources)[1]) + int(re.search(r"LOCAL:(\d+)", resources)[1]),
        shared=compiled.metadata.shared,
        **counts,
    )


def reports(architecture, which, case):
    """One report for each launch of ``which`` of the kernels."""
    configs = configs_for(case)
    if which == "forward":
        return [report(forward_kernel, case, configs.forward, configs.engine, architecture)]
    if which == "row_sums":
        return [report(delta_kernel, case, ROW_SUMS, configs.engine, architecture)]
    if which == "query":
        return [report(query_kernel, case, configs.query, configs.engine, architecture)]
    of_key, of_value = {"grad_key", "partial_key"}, {"grad_value", "partial_value"}
    launches = [of_key, of_value] if configs.apart else [of_key | of_value]
    return [
        report(key_value_kernel, case, configs.key_value, configs.engine, architecture, (of_key | of_value) - written)
        for written in launches
    ]


def report(kernel, case, launch, engine, architecture, absent=()):
    compiled = compile_kernel(kernel, case, launch, engine=engine, absent=absent, architecture=architecture)
    resources = dump(compiled.asm["cubin"], "cuobjdump", "--dump-resource-usage")
    instructions = dump(compiled.asm["cubin"], "nvdisasm", "-c") if architecture == 90 else ""
    # Four warps have one of Hopper's instructions together, and each warp a separate older one.
    shapes = re.findall(r"HGMMA\.(\d+)x(\d+)x(\d+)", instructions) * (launch.warps // 4)
    shapes += re.findall(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", compiled.asm["ptx"]) * launch.warps
    return report_of(
        kernel,
        resources,
        compiled,
        matrix_instructions=compiled.asm["ptx"].count(MATRIX_INSTRUCTION[architecture]),
        warpgroup_products=instructions.count("HGMMA."),
        warpgroup_waits=instructions.count("WARPGROUP.DEPBAR.LE"),
        multiplied=sum(prod(map(int, shape)) for shape in shapes),
        needed=needed(kernel, case, launch, absent),
    )


def needed(kernel, case, launch, absent):
    """Pairs of numbers in the products of one tile in each of a kernel's loops."""
    head, value = (rounded(width, launch.widest) for width in (case.head_dim, case.value_dim))
    if kernel is forward_kernel:
        loops, products = 3, head + value
    elif kernel is query_kernel:
        loops, products = 3, 2 * head + value
    elif kernel is key_value_kernel:
        makes_key, makes_value = (f"grad_{name}" not in absent for name in ("key", "value"))
        loops, products = 2, head + value * makes_value + (value + head) * makes_key
    else:
        loops, products = 0, 0
    return loops * products * launch.query_block * launch.key_block


def dump(cubin, tool, option):
    """Return the output for machine code of one of CUDA's tools that come with Triton.

    It is kept for the next run of the tests, by the code itself, the tool and its version; Triton keeps the code, by
    its source, its target and its options.
    """
    said_of = hashlib.sha256(f"{triton.__version__} {tool} {option} ".encode() + cubin).hexdigest()
    kept = KEPT / said_of
    if not kept.exists():
        said = disassemble(cubin, tool, option)
        KEPT.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_text(said)
        unfinished.replace(kept)
    return kept.read_text()


KEPT = Path(__file__).parents[2] / ".pytest_cache" / "machine_code"
# Every row of the table, and dimensions that a row rounds up.
HEAD_DIMS = sorted({*UP_TO, (32, 32), (96, 96)})


def main(architectures):
    print("triton", triton.__version__)
    for architecture, (head_dim, value_dim), which, (name, options) in itertools.product(
        architectures, HEAD_DIMS, KERNELS, OPTIONS.items()
    ):
        case = case_of(architecture, head_dim, value_dim, options=options)
        for found in reports(architecture, which, case):
            fits = found.shared <= SHARED_MEMORY[architecture] and not found.spilled
            fits = fits and (found.matrix_instructions > 0 or not found.multiplies) and not found.serialized
            fits = fits and found.multiplied in (found.needed, 0)
            print(architecture, f"{head_dim}/{value_dim}", which, name, "" if fits else "FAULT", found, flush=True)


def compile_kernel(
    kernel: Any, case: Case, launch: Launch, *, engine: bool, absent: Sequence[str] = (), architecture: int
):
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

    def kind_of(name: str):
        if name in constants:
            return "constexpr"
        if name not in tiles | partial:
            return f"*{POINTERS[name]}" if name in POINTERS else SCALARS.get(name, "i32")
        dtype = "fp32" if name in partial else DTYPES[case.dtype]
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
):
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
        return run_process([tools / tool, option, file.name], code=0).stdout


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
