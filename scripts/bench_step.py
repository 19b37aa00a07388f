#!/usr/bin/env python
"""Step time and peak memory of a recipe's first batch, folded against unfolded, in one process.

    scripts/bench_step.py recipes/quickstart.yaml --output benchmarks/results/step_quickstart_cpu.json

Under torchrun for several ranks. Prints the table that `train` ends with; writes the numbers, with the machine's name.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from mcore_prefix_tree.cli.boundary import quiet_upstream
from mcore_prefix_tree.cli.console import comparison_table
from mcore_prefix_tree.recipe import load_recipe


def machine() -> dict[str, object]:
    """What ran the benchmark: processor or GPU, cores, threads, versions."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpu": model,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each way, after one that is not")
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, "checkpoint.save=null"])
    quiet_upstream()
    from mcore_prefix_tree.mcore.train.jobs import run_compare

    comparison, is_main = run_compare(recipe, repeats=arguments.repeats)
    if not is_main:
        return
    Console().print(comparison_table(comparison))
    if arguments.output is not None:
        result = {
            "machine": machine(),
            "recipe": asdict(recipe),
            "comparison": asdict(comparison),
            "speedup": comparison.speedup,
            "speedup_over_fold_ratio": comparison.speedup / comparison.fold_ratio,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
