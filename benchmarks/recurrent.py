#!/usr/bin/env python3
"""Compare steps of hybrid models folded and unfolded: on the shipped rollouts, and on trees of several depths.

    OMP_NUM_THREADS=1 benchmarks/recurrent.py      # writes benchmarks/results/recurrent.json; a quarter of an hour
    scripts/render_results.py                      # writes the tables of docs/recurrent.md

Each is the step of ``mcore-prefix-tree bench step``, by the CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mcore_prefix_tree.bench import describe_machine, step_result
from mcore_prefix_tree.mcore.loop.jobs import compare_first, run_once
from mcore_prefix_tree.settings import load_recipe

ROOT = Path(__file__).parent.parent
SHAPE = ("device=cpu", "model.num_layers=8", "model.hidden_size=256", "model.ffn_hidden_size=768")
# Three of four mixers are recurrent.
MODELS = {
    "Gated DeltaNet": (
        *SHAPE,
        "model.hybrid_layer_pattern=G-G-G-*-",
        "model.transformer={linear_key_head_dim: 32, linear_value_head_dim: 32, linear_num_key_heads: 4, "
        "linear_num_value_heads: 8}",
    ),
    "Mamba-2": (
        *SHAPE,
        "model.hybrid_layer_pattern=M-M-M-*-",
        "model.transformer={mamba_state_dim: 32, mamba_head_dim: 32, mamba_num_groups: 2}",
    ),
}
VOCAB = 512
LEVELS, LENGTHS = (2, 6, 18), (8, 32, 128)


def deep_tree(levels: int, length: int) -> list[list[int]]:
    """Samples along a trunk that branches at the end of each segment of so many tokens."""
    rng = np.random.default_rng(levels * length)

    def run(tokens: int) -> list[int]:
        return rng.integers(0, VOCAB, tokens).tolist()

    trunk = run((levels - 1) * length)
    ends = [*range(1, levels), levels - 1]
    return [trunk[: end * length] + run(length) for end in ends]


def measure(overrides: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return the figures of a step."""
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", [*overrides, "checkpoint.save=null"])
    comparison, _ = run_once(recipe, partial(compare_first, repeats=rounds), is_trained=True)
    result = step_result({}, comparison)
    ways = result["comparison"]
    return {
        "logical_tokens": ways["logical_tokens"],
        "fold_ratio": ways["fold_ratio"],
        "cpu_seconds": {
            name: ways[name]["cpu_seconds"] for name in ("folded", "packed", "small", "stock") if ways.get(name)
        },
        "fastest": ways["fastest"],
        "gain": result["cpu_gain"],
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds on the shipped rollouts")
    parser.add_argument("--deep-rounds", type=int, default=2, help="timed rounds on each deep tree")
    parser.add_argument("--override", nargs="*", default=[], help="further overrides of the recipe")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "recurrent.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "steps": [], "trees": []}

    def add(part: str, row: dict[str, Any]) -> None:
        result[part].append(row)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        print(part, {name: value for name, value in row.items() if name not in ("cpu_seconds", "gain")}, flush=True)

    for model, overrides in MODELS.items():
        add("steps", {"model": model} | measure([*overrides, *arguments.override], arguments.rounds))
    with tempfile.TemporaryDirectory() as folder:
        for model, overrides in MODELS.items():
            for levels in LEVELS:
                for length in LENGTHS:
                    samples, data = deep_tree(levels, length), Path(folder) / "samples.jsonl"
                    data.write_text("".join(json.dumps({"tokens": one}) + "\n" for one in samples))
                    given = (
                        *(f"data.path={data}", "data.tokenizer=null", "data.expand_turns=false"),
                        *(f"model.vocab_size={VOCAB}", f"batch.global_batch_size={len(samples)}"),
                    )
                    found = measure([*overrides, *arguments.override, *given], arguments.deep_rounds)
                    add("trees", {"model": model, "levels": levels, "segment": length} | found)


if __name__ == "__main__":
    main()
