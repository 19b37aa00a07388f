"""``mcore-prefix-tree bench``: attention back-ends beside their alternatives, training steps beside unfolded ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_prefix_tree.cli.boundary import quiet_upstream
from mcore_prefix_tree.cli.options import check_output_option
from mcore_prefix_tree.data.write import whole_file
from mcore_prefix_tree.errors import FAILED, leave
from mcore_prefix_tree.inputs import MOST

if TYPE_CHECKING:
    from mcore_prefix_tree.bench.attention import AttentionResult, Settings
    from mcore_prefix_tree.bench.workloads import Workload

app = typer.Typer(no_args_is_help=True, help="Measure attention back-ends or training steps, and write the numbers.")

Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the numbers, the machine and its versions as JSON.")
]


@app.command()
def attention(
    output: Output = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON Lines, Parquet or Arrow: its records as one sample each, and as one sample per assistant turn.",
        ),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME", help="Of chat messages in --data.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="Of a micro-batch of --data.")] = 32768,
    scale: Annotated[
        float, typer.Option(min=0.0001, max=1000, metavar="F", help="Factor on all lengths; a CPU wants 0.05 or less.")
    ] = 1.0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Workloads whose name contains this; can be repeated.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=MOST, help="Query heads.")] = 64,
    kv_heads: Annotated[int, typer.Option(min=1, max=MOST, help="Key and value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, max=MOST, help="Of queries and keys.")] = 128,
    value_dim: Annotated[int | None, typer.Option(min=1, max=MOST, help="Of values; --head-dim if not given.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="Timed rounds.")] = 10,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a roofline into a PNG file.")] = None,
) -> None:
    """Time every way to attend on the same forests: back-ends, FlashAttention unfolded, dense causal, peers.

    Exit code 1 if one that should run fails; the others are measured all the same.
    """
    check_output_option("--output", output, [data or ""], make_folder=True)
    check_output_option("--plot", plot, [data or ""])
    quiet_upstream()
    from rich.console import Console

    from mcore_prefix_tree.bench import attention as bench
    from mcore_prefix_tree.bench.plot import draw_roofline

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
    console = Console()
    result = bench.bench_attention(
        workloads,
        settings,
        on_progress=lambda text: console.print(f"measuring {text}", style="dim", highlight=False),
        on_result=lambda found: None if output is None else _write(output, found.to_json()),
    )
    for table in _tables(result):
        console.print(table)
    if output is not None:
        _write(output, result.to_json())
    if plot is not None:
        with whole_file(plot) as unfinished:
            draw_roofline(result.to_json(), unfinished)
    failed = [one for each in result.workloads for one in each.missing if one["reason"].startswith(bench.FAILED)]
    if failed:
        first = failed[0]
        leave(FAILED, f"{len(failed)} measurements failed; the first: {first['method']} {first['reason']}")


@app.command()
def step(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file; see recipes/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example attention_backend=cascade.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="Timed rounds.")] = 5,
    output: Output = None,
) -> None:
    """Time forward and backward of a recipe's first batch, folded and unfolded. Under torchrun for several ranks."""
    from mcore_prefix_tree.recipe import load_recipe

    loaded = load_recipe(recipe, [*(overrides or []), "checkpoint.save=null"])
    check_output_option("--output", output, [recipe, *loaded.inputs], make_folder=True)
    quiet_upstream()
    from mcore_prefix_tree.bench.step import bench_step

    result, is_main = bench_step(loaded, repeats=repeats)
    if not is_main:
        return
    from rich.console import Console

    from mcore_prefix_tree.cli.console import comparison_table

    Console().print(comparison_table(result.comparison))
    if output is not None:
        _write(output, result.to_json())


def _settings(*, dtype: str, device: str, **more: int) -> Settings:
    import torch

    from mcore_prefix_tree.bench.attention import Settings

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
    from mcore_prefix_tree.bench.workloads import standard_workloads, workload_of_samples
    from mcore_prefix_tree.cli.samples import SampleOptions

    workloads = standard_workloads(scale)
    if data is not None:
        stem = Path(data).name.partition(".")[0]
        for view, expand in (("whole lines", False), ("a sample per turn", True)):
            samples = SampleOptions(files=[data], tokenizer=tokenizer, expand_turns=expand).read()
            workloads.append(workload_of_samples(f"{stem}, {view}", samples.all, max_tokens=max_tokens))
    chosen = [one for one in workloads if not only or any(name in one.name for name in only)]
    if not chosen:
        raise ValueError(f"--only {' '.join(only)} matches none of: {'; '.join(one.name for one in workloads)}")
    return chosen


def _tables(result: AttentionResult) -> list[object]:
    from rich.markup import escape
    from rich.table import Table

    from mcore_prefix_tree.bench.report import cells, columns, headline, lines_of

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
    """At once, so that whoever stops the command, or reads meanwhile, finds a whole file."""
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
