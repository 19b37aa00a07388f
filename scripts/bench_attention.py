#!/usr/bin/env python3
"""Time every attention method on the same forests: back-ends, FlashAttention unfolded, dense causal, peers.

scripts/bench_attention.py --scale 0.02 --device cpu --dtype float32
scripts/bench_attention.py --data rollouts.jsonl --output attention.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from attention_bench.contest import FAILED as METHOD_FAILED
from attention_bench.measure import AttentionResult, bench_attention
from attention_bench.report import cells, columns, headline, lines_of
from attention_bench.settings import Settings
from attention_bench.workloads import Workload, standard_workloads, workload_of_samples
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mcore_prefix_tree.cli.boundary import quiet_upstream
from mcore_prefix_tree.cli.options import check_output_option
from mcore_prefix_tree.cli.samples import SampleOptions
from mcore_prefix_tree.data.write import whole_file
from mcore_prefix_tree.utils.errors import FAILED, exit_with, readable_errors
from mcore_prefix_tree.utils.inputs import MOST

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def attention(
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the numbers, the machine and its versions as JSON.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON Lines, Parquet or Arrow: its records as one sample each, and as one sample per assistant turn.",
        ),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME", help="Tokenizer of chat messages in --data.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="Per micro-batch of --data.")] = 32768,
    scale: Annotated[
        float, typer.Option(min=0.0001, max=1000, metavar="F", help="Factor on all lengths; use 0.05 or less on a CPU.")
    ] = 1.0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Workloads whose name contains this; can be repeated.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=MOST, help="Query heads.")] = 64,
    kv_heads: Annotated[int, typer.Option(min=1, max=MOST, help="Key and value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, max=MOST, help="Size of queries and keys.")] = 128,
    value_dim: Annotated[int | None, typer.Option(min=1, max=MOST, help="Size of values; default: --head-dim.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="Timed rounds.")] = 10,
) -> None:
    """Time every attention method on the same forests: back-ends, FlashAttention unfolded, dense causal, peers.

    Exit code 1 if a method that should run fails; the others are still measured.
    """
    is_new = output is not None and not output.parent.exists()
    check_output_option("--output", None if is_new else output, [data or ""])
    quiet_upstream()
    settings = _settings(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        dtype=dtype,
        device=device,
        repeats=repeats,
    )
    workloads = _workloads(scale, data, tokenizer, max_tokens, only or [])
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    result = bench_attention(
        workloads,
        settings,
        on_progress=lambda text: console.print(f"measuring {text}", style="dim", highlight=False),
        on_result=lambda found: None if output is None else _write(output, found.to_json()),
    )
    for table in _tables(result):
        console.print(table)
    if output is not None:
        _write(output, result.to_json())
    failed = [one for each in result.workloads for one in each.missing if one["reason"].startswith(METHOD_FAILED)]
    if failed:
        first = failed[0]
        exit_with(FAILED, f"{len(failed)} measurements failed; the first: {first['method']} {first['reason']}")


def _settings(*, dtype: str, device: str, **more: int) -> Settings:
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"--dtype {dtype} is not one of bfloat16, float16, float32")
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device {device} is not one of auto, cuda, cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU; use --device cpu")
    if more["heads"] % more["kv_heads"]:
        raise ValueError(f"--heads {more['heads']} is not a multiple of --kv-heads {more['kv_heads']}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Settings(dtype=dtype, device=device, **more)


def _workloads(
    scale: float, data: str | None, tokenizer: str | None, max_tokens: int, only: list[str]
) -> list[Workload]:
    workloads = standard_workloads(scale)
    if data is not None:
        workloads += workloads_of_file(data, tokenizer, max_tokens)
    chosen = [one for one in workloads if not only or any(name in one.name for name in only)]
    if not chosen:
        raise ValueError(f"--only {' '.join(only)} matches none of: {'; '.join(one.name for one in workloads)}")
    return chosen


def workloads_of_file(data: str, tokenizer: str | None, max_tokens: int) -> list[Workload]:
    """Two views of a file of samples: its records as one sample each, and as one sample per assistant turn."""
    stem = Path(data).name.partition(".")[0]
    found = []
    for view, expand in (("whole lines", False), ("a sample per turn", True)):
        samples = SampleOptions(files=[data], tokenizer=tokenizer, expand_turns=expand).read()
        found.append(workload_of_samples(f"{stem}, {view}", samples.all, max_tokens=max_tokens))
    return found


def _tables(result: AttentionResult) -> list[object]:
    content = result.to_json()
    tables: list[object] = []
    for workload in content["workloads"]:
        missing = "; ".join(f"{one['method']} ({one['layout']}): {one['reason']}" for one in workload["missing"])
        table = Table(
            title=headline(workload),
            caption=escape(f"not run: {missing}") if missing else None,
            title_justify="left",
            caption_justify="left",
        )
        for column in columns(content):
            table.add_column(column, justify="left" if column in ("method", "layout") else "right")
        for line in lines_of(workload, content):
            table.add_row(*(escape(cell) for cell in cells(line, content)))
        tables.append(table)
    return tables


def _write(path: Path, content: object) -> None:
    """Write the file atomically, so that it is always complete, also if the command is stopped."""
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    with readable_errors():
        app()
