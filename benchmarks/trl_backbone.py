#!/usr/bin/env python3
"""Measure a step and a scoring pass of TRL with the stock model, and with the same model that folds in its backbone.

    OMP_NUM_THREADS=1 benchmarks/trl_backbone.py      # needs TRL; writes benchmarks/results/trl.json; minutes

Both models are called as TRL's trainers call them, through TRL's own fused head, with padded rows. Times are CPU
seconds of the process, which other processes disturb less than wall-clock time; every repetition runs each model once.
TRL's tree packing needs a GPU kernel, so only its work on the host is timed, and its tokens are counted.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from inside import (
    QUICKSTART,
    RESULTS,
    VOCAB,
    cost_of_nothing_shared,
    in_turn,
    nothing_shared,
    prompt_group,
    rollouts,
    seconds_of,
    write,
)
from trl.experimental.async_grpo.packing import TreeRow
from trl.trainer.utils import add_fused_lm_head

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.bench import describe_machine
from mcore_prefix_tree.integrations.trl import fold_backbone, read_rows
from mcore_prefix_tree.plan.flops import Counts, ExpectedSpeedup, ModelWork
from mcore_prefix_tree.utils.versions import installed_version_of

OUTPUT = RESULTS / "trl.json"
CPU = torch.device("cpu")
MODEL = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 768,
}  # fmt: skip
WORKLOADS: dict[str, Callable[[], list[Sample]]] = {
    "8 answers of 128 tokens to a prompt of 1,024": lambda: prompt_group(1024, 8, 128),
    "8 answers of 256 tokens to a prompt of 1,024": lambda: prompt_group(1024, 8, 256),
    "23 turns of 4 shipped rollouts": lambda: rollouts(QUICKSTART, 0, 4),
}
UNSHARED = ((2, 128), (8, 32), (64, 4))


def models(shape: dict[str, int]) -> tuple[Any, Any]:
    """Return a model with TRL's fused head, and a copy that folds."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(vocab_size=VOCAB, head_dim=32, max_position_embeddings=32768, **shape)
    stock = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    folds = fold_backbone(copy.deepcopy(stock))
    for model in (stock, folds):
        add_fused_lm_head(model)
    return stock, folds


def padded(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return a trainer's call: rows padded on the right."""
    width = max(map(len, samples))
    ids, mask = (torch.zeros(len(samples), width, dtype=torch.long) for _ in range(2))
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = torch.from_numpy(sample.tokens.astype(np.int64))
        mask[row, : len(sample)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "fused_lm_head": True}


def step(model: Any, call: dict[str, Any]) -> float:
    """Forward and backward; returns the loss."""
    model.zero_grad()
    loss = model(**call).loss
    loss.backward()
    return float(loss.detach())


def score(model: Any, call: dict[str, Any]) -> float:
    """Log-probabilities without gradients; returns their mean."""
    with torch.no_grad():
        return float(-model(**call).log_probs.sum() / (call["labels"][:, 1:] != -100).sum())


def measure(stock: Any, folds: Any, name: str, samples: Sequence[Sample], rounds: int) -> dict[str, Any]:
    """Return CPU seconds of each way to compute rows that share tokens."""
    call = padded(samples)
    seconds: dict[str, dict[str, list[float]]] = {what: {"stock": [], "folds": []} for what in ("step", "score")}
    answers: dict[str, set[float]] = {"step": set(), "score": set()}
    for _ in range(rounds):
        for what, run in (("step", step), ("score", score)):
            for way, model in (("stock", stock), ("folds", folds)):
                taken = seconds_of(lambda: answers[what].add(run(model, call)), CPU)  # noqa: B023
                seconds[what][way].append(taken)
    assert all(math.isclose(min(losses), max(losses), rel_tol=1e-5) for losses in answers.values()), answers
    layout = fold(samples)
    medians = {what: {way: statistics.median(taken) for way, taken in ways.items()} for what, ways in seconds.items()}
    bound = expected(samples, layout)
    return {
        "name": name,
        "rows": len(samples),
        "logical_tokens": layout.logical_tokens,
        "fold_ratio": layout.logical_tokens / layout.physical_tokens,
        "expected_speedup": {"step": bound.ratio, "score": bound.forward_ratio},
        "seconds": seconds,
        "median_seconds": medians,
        "speedup": {what: ways["stock"] / ways["folds"] for what, ways in medians.items()},
        "packing": packing(samples, call, layout),
    }


def expected(samples: Sequence[Sample], layout: Any) -> ExpectedSpeedup:
    """Return the speed-up by FLOPs, with a head that scores each row's tokens, as TRL's does on a CPU."""
    work = ModelWork.from_dimensions(
        num_layers=MODEL["num_hidden_layers"],
        hidden_size=MODEL["hidden_size"],
        ffn_hidden_size=MODEL["intermediate_size"],
        num_attention_heads=MODEL["num_attention_heads"],
        vocab_size=VOCAB,
        num_query_groups=MODEL["num_key_value_heads"],
        kv_channels=32,
        swiglu=True,
        fused_head=True,
    )
    unfolded = Counts.of_lengths(np.array([len(sample) for sample in samples]), None)
    folded = Counts.folded([layout], None)._replace(predictors=unfolded.predictors)
    return ExpectedSpeedup(folded=work.of(folded), unfolded=work.of(unfolded))


def packing(samples: Sequence[Sample], call: dict[str, Any], layout: Any, rounds: int = 3) -> dict[str, Any]:
    """Compare the host's work for folding with TRL's tree packing of the same rows."""
    examples = [
        {
            "input_ids": torch.from_numpy(sample.tokens.astype(np.int64)),
            "completion_mask": torch.ones(len(sample)),
            "old_log_probs": torch.zeros(len(sample)),
            "advantage": 1.0,
            "group_id": 0,
        }
        for sample in samples
    ]

    def pack() -> dict[str, torch.Tensor]:
        tree = TreeRow()
        for example in examples:
            tree.add(example)
        return tree.pack()

    def ours() -> None:
        rows = read_rows(call["input_ids"], call["attention_mask"])
        made = rows.make_layout()
        TreeMetadata.from_layout(made)
        rows.places_in(made)

    packed = pack()
    seconds = in_turn({"trl": pack, "folds": ours}, rounds, CPU)
    return {
        "host_seconds": {way: statistics.median(taken) for way, taken in seconds.items()},
        "tokens": {"trl": len(packed["input_ids"]), "folds": int(layout.physical_tokens)},
        "copied_keys": {"trl": len(packed["tree_kv_index"]), "folds": 0},
    }


def measure_unshared(stock: Any, folds: Any, rows: int, length: int, rounds: int) -> dict[str, Any]:
    """Return the cost of rows that share nothing: of a step, and of the folding model's hook."""
    call = padded(nothing_shared(rows, length))
    runs = {way: partial(step, model, call) for way, model in (("stock", stock), ("folds", folds))}
    asked = {"input_ids": call["input_ids"], "attention_mask": call["attention_mask"], "use_cache": False}
    found = cost_of_nothing_shared(runs, partial(folds.folding.before, folds.model, (), asked), rounds, CPU)
    counts = folds.folding.report(with_grad=True)
    assert counts.left_alone == counts.calls > rounds
    return {"rows": rows, "tokens": rows * length} | found


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of rows that share tokens")
    parser.add_argument("--unshared-rounds", type=int, default=40, help="repetitions of rows that share nothing")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="result file")
    arguments = parser.parse_args()
    stock, folds = models(MODEL)
    for model in (stock, folds):  # warms up
        step(model, padded(prompt_group(64, 2, 8)))
    folds.folding.report(with_grad=True)
    versions = {name: installed_version_of(name) for name in ("transformers", "trl")}
    result: dict[str, Any] = {
        "machine": describe_machine() | versions,
        "model": MODEL | {"vocab_size": VOCAB},
        "rounds": {"shared": arguments.rounds, "unshared": arguments.unshared_rounds},
        "workloads": [],
        "unshared": [],
    }
    for rows, length in UNSHARED:
        result["unshared"].append(measure_unshared(stock, folds, rows, length, arguments.unshared_rounds))
        write(result, "unshared", arguments.output)
    for name, samples in WORKLOADS.items():
        result["workloads"].append(measure(stock, folds, name, samples(), arguments.rounds))
        write(result, "workloads", arguments.output)


if __name__ == "__main__":
    main()
