#!/usr/bin/env python3
"""Measure a trainer's step on a CPU: rows that share prefixes, folded inside the model and each by itself.

    OMP_NUM_THREADS=1 benchmarks/inside.py      # writes benchmarks/results/inside.json; takes minutes

The baseline runs the same rows through the same layers, each row a tree of its own: a packed batch, as Megatron-Core's
attention of a GPU takes it. Times are CPU seconds of the process, which other processes disturb less than the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.bench.machine import describe_machine
from mcore_prefix_tree.cpu.emulation import cpu_emulation
from mcore_prefix_tree.cpu.launcher import single_process

ROOT = Path(__file__).parent.parent
VOCAB = 8192
MODEL = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 768}


def prompt_group(prompt: int, answers: int, answer: int, seed: int) -> list[Sample]:
    """Answers to one prompt."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, VOCAB, prompt)
    return [Sample(tokens=np.concatenate([begin, rng.integers(0, VOCAB, answer)])) for _ in range(answers)]


def shipped_rollouts(count: int) -> list[Sample]:
    """The first samples of the quickstart: a sample per assistant turn, with its whole history."""
    from mcore_prefix_tree.data import iter_sample_groups, load_tokenizer

    path = ROOT / "recipes" / "data" / "quickstart_rollouts.jsonl"
    groups = iter_sample_groups(str(path), tokenizer=load_tokenizer("mistral-v7"), expand_turns=True)
    rows = [sample.tokens for group in groups for sample in group][:count]
    _, dense = np.unique(np.concatenate(rows), return_inverse=True)  # other ids, so that the vocabulary can be small
    borders = np.cumsum([len(row) for row in rows])[:-1]
    return [Sample(tokens=row) for row in np.split(dense, borders)]


def nothing_shared(rows: int, length: int) -> list[Sample]:
    """Rows that differ from the first token on."""
    rng = np.random.default_rng(3)
    return [Sample(tokens=[row, *rng.integers(0, VOCAB, length - 1)]) for row in range(rows)]


def build_model() -> Any:
    """Return a GPT that folds inside."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mcore_prefix_tree.mcore import fold_inside, local_layer_spec

    config = TransformerConfig(
        **MODEL,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    spec = local_layer_spec(normalization="RMSNorm")
    model = GPTModel(config, spec, VOCAB, 32768, position_embedding_type="rope")
    return fold_inside(model, attention_backend="path")


def packed(samples: Sequence[Sample]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a trainer's call, and its labels."""
    from megatron.core.packed_seq_params import PackedSeqParams

    borders = torch.tensor(np.cumsum([0, *map(len, samples)]), dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    ids = torch.from_numpy(np.concatenate([sample.tokens for sample in samples]).astype(np.int64)).unsqueeze(0)
    labels = torch.cat([ids[0, 1:], ids[0, :1]]).unsqueeze(0)
    return {"input_ids": ids, "position_ids": None, "attention_mask": None, "packed_seq_params": params}, labels


def each_by_itself(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the arguments of a micro-batch in which every row is a tree of its own, in the caller's order."""
    from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch

    alone = [Sample(tokens=sample.tokens, merge_key=index) for index, sample in enumerate(samples)]
    batch = MicroBatch.from_layout(fold(alone))
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "packed_seq_params": batch.packed_seq_params,
    }


def cpu_seconds(run: Callable[[], Any]) -> float:
    """Return the CPU time of one run."""
    started = time.process_time()
    run()
    return time.process_time() - started


def measure(model: Any, name: str, samples: Sequence[Sample], rounds: int) -> dict[str, Any]:
    """Return the medians of forward and backward, in turn, after a round that warms up."""
    call, labels = packed(samples)

    def trainer_reads_losses(call: dict[str, Any], labels: torch.Tensor) -> None:
        model.zero_grad()
        model(**call, labels=labels).mean().backward()

    def trainer_reads_logits() -> None:
        model.zero_grad()
        logits = model(**call)
        model.compute_language_model_loss(labels, logits.transpose(0, 1)).mean().backward()

    stock = each_by_itself(samples)
    stock_labels = torch.roll(stock["input_ids"], -1)
    ways = {
        "unfolded": lambda: trainer_reads_losses(stock, stock_labels),
        "labels": lambda: trainer_reads_losses(call, labels),
        "logits": trainer_reads_logits,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, run in ways.items():
            taken = cpu_seconds(run)
            if turn:
                seconds[way].append(taken)
    report = model.folding.last
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    return {
        "name": name,
        "rows": report.rows,
        "logical_tokens": report.logical_tokens,
        "fold_ratio": report.fold_ratio,
        "bound": report.bound.to_json(),
        "seconds": seconds,
        "median_seconds": medians,
        "speedup": {way: medians["unfolded"] / medians[way] for way in ("labels", "logits")},
    }


def host_cost(samples: Sequence[Sample], rounds: int = 9) -> dict[str, Any]:
    """Return the CPU time of folding rows on the host, which a micro-batch that shares nothing pays for."""
    from mcore_prefix_tree.mcore.inside.rows import read_rows

    call, _ = packed(samples)

    def read() -> None:
        read_rows(call["input_ids"], call["packed_seq_params"], device=torch.device("cpu"), pad_to_multiple_of=1)

    seconds = [cpu_seconds(read) for _ in range(rounds)]
    return {"rows": len(samples), "tokens": sum(map(len, samples)), "median_seconds": statistics.median(seconds)}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "inside.json")
    arguments = parser.parse_args()
    workloads = {
        "8 answers of 256 tokens to a prompt of 2,048": prompt_group(2048, 8, 256, seed=0),
        "8 answers of 1,024 tokens to a prompt of 2,048": prompt_group(2048, 8, 1024, seed=1),
        "24 turns of the shipped rollouts": shipped_rollouts(24),
        "8 rows of 1,024 tokens that share nothing": nothing_shared(8, 1024),
    }
    with cpu_emulation(force=True), single_process():
        torch.manual_seed(0)
        model = build_model()
        result = {
            "machine": describe_machine(),
            "model": MODEL | {"vocab_size": VOCAB},
            "rounds": arguments.rounds,
            "workloads": [measure(model, name, rows, arguments.rounds) for name, rows in workloads.items()],
            "host": [host_cost(nothing_shared(rows, length)) for rows, length in ((8, 4096), (64, 512), (256, 128))],
        }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    for row in result["workloads"]:
        print(row["name"], f"fold ratio {row['fold_ratio']:.2f} bound {row['bound']['ratio']:.2f}", row["speedup"])
    for row in result["host"]:
        print(row)


if __name__ == "__main__":
    main()
