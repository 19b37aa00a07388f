#!/usr/bin/env python3
"""Compare a trainer's step on stock packed rows with the same rows folded inside the model.

    OMP_NUM_THREADS=1 benchmarks/inside.py      # writes benchmarks/results/inside.json; minutes
    benchmarks/inside.py --device cuda          # bf16, with TransformerEngine's attention; writes inside_<GPU>.json
    benchmarks/inside.py --parts                # a micro-batch in parts; writes inside_parts.json

Both models are a stock GPTModel with the same weights. Megatron-Core has no attention for packed rows on a CPU, so both
use ``PackedAttention`` of ``mcore_prefix_tree.cpu.specs`` there: one call of torch's fused attention per row. Times on
a CPU are CPU seconds of the process, which other processes disturb less than wall-clock time. Every repetition runs
each model once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree import Sample
from mcore_prefix_tree.bench import describe_machine, name_in_files
from mcore_prefix_tree.cpu.emulation import SEED, cpu_emulation, single_process
from mcore_prefix_tree.utils.memory import PeakMemory

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICKSTART = ROOT / "recipes" / "data" / "quickstart_rollouts.jsonl"
TAU_BENCH = ROOT.parent / "shared" / "data" / "tau_bench_airline_gpt4o.jsonl"
VOCAB = 8192
# By device; --model changes them.
MODELS = {
    "cpu": {
        "num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 768
    },
    "cuda": {
        "num_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 14336
    },
}  # fmt: skip
# Numbers of rows that share nothing, and their tokens. The micro-batches are small: the cost is one of the host.
UNSHARED = ((1, 256), (8, 32), (64, 4))


def prompt_group(prompt: int, answers: int, answer: int) -> list[Sample]:
    """Answers to one prompt."""
    rng = np.random.default_rng(answer)
    begin = rng.integers(0, VOCAB, prompt)
    return [Sample(tokens=np.concatenate([begin, rng.integers(0, VOCAB, answer)])) for _ in range(answers)]


def rollouts(path: Path, first: int, last: int) -> list[Sample]:
    """Conversations ``first`` to ``last - 1`` of a file: one sample per assistant turn, with its history."""
    from mcore_prefix_tree.data import LineOptions, iter_sample_groups, load_tokenizer

    options = LineOptions(tokenizer=load_tokenizer("mistral-v7"), expand_turns=True)
    groups = itertools.islice(iter_sample_groups(path, options), first, last)
    rows = [sample.tokens for group in groups for sample in group]
    _, dense = np.unique(np.concatenate(rows), return_inverse=True)  # so that the vocabulary can be small
    return [Sample(tokens=row) for row in np.split(dense, np.cumsum([len(row) for row in rows])[:-1])]


def nothing_shared(rows: int, length: int) -> list[Sample]:
    """Rows that differ from the first token on."""
    rng = np.random.default_rng(3)
    return [Sample(tokens=[row, *rng.integers(0, VOCAB, length - 1)]) for row in range(rows)]


WORKLOADS: dict[str, Callable[[], list[Sample]]] = {
    "8 answers of 256 tokens to a prompt of 2,048": lambda: prompt_group(2048, 8, 256),
    "8 answers of 512 tokens to a prompt of 2,048": lambda: prompt_group(2048, 8, 512),
    "23 turns of 4 shipped rollouts": lambda: rollouts(QUICKSTART, 0, 4),
}
if TAU_BENCH.exists():
    WORKLOADS["5 turns of a rollout of τ-bench"] = lambda: rollouts(TAU_BENCH, 1, 2)
# A micro-batch of a prompt's tokens, answers and their tokens, and the sizes of the parts that it runs in.
PARTED, PARTS = (4096, 16, 768), (4096, 1024)


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Join a world of one."""
    if device.type == "cpu":
        with cpu_emulation(force=True), single_process():
            yield
        return
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(SEED)
        yield
    finally:
        torch.distributed.destroy_process_group()


def models(shape: dict[str, int], device: torch.device, parts: Sequence[int] = ()) -> tuple[Any, ...]:
    """Return a stock GPT, one with its weights that folds inside, and others that do so in parts of so many tokens."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mcore_prefix_tree.cpu.specs import PackedAttention, exchanged
    from mcore_prefix_tree.mcore import fold_inside

    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    config = TransformerConfig(
        **shape,  # type: ignore[arg-type]
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=on_cpu,
        params_dtype=dtype,
        bf16=not on_cpu,
    )
    if on_cpu:
        local = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        spec = exchanged(local, {DotProductAttention: PackedAttention})
    else:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    stock, *trees = (
        GPTModel(config, one, VOCAB, 32768, position_embedding_type="rope").to(device, dtype)
        for one in (spec, *[spec] * (1 + len(parts)))
    )
    for tree, most in zip(trees, (None, *parts), strict=True):
        tree.load_state_dict(stock.state_dict())
        fold_inside(tree, max_tokens=most)
    return stock, *trees


def packed(samples: Sequence[Sample], device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a trainer's call, and its labels."""
    from megatron.core.packed_seq_params import PackedSeqParams

    borders = torch.tensor(np.cumsum([0, *map(len, samples)]), dtype=torch.int32, device=device)
    longest = max(map(len, samples))
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
    ids = torch.from_numpy(tokens).unsqueeze(0).to(device)
    call = {"input_ids": ids, "position_ids": None, "attention_mask": None, "packed_seq_params": params}
    return call, ids.roll(-1, dims=1)


def step(model: Any, call: dict[str, Any], labels: torch.Tensor, reads: str) -> torch.Tensor:
    """Forward and backward of a trainer that reads losses or logits; returns its loss."""
    model.zero_grad()
    if reads == "losses":
        losses = model(**call, labels=labels)
    else:
        losses = model.compute_language_model_loss(labels, model(**call).transpose(0, 1))
    loss: torch.Tensor = losses.mean()
    loss.backward()
    return loss.detach()


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Return the CPU time of one run, or on a GPU the time until it is done."""
    clock = time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
        clock = time.perf_counter
    started = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def in_turn(runs: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each way: a first round warms up, and every other round runs in reverse order."""
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    for turn in range(rounds + 1):
        for way in list(runs)[:: 1 if turn % 2 else -1]:
            taken = seconds_of(runs[way], device)
            if turn:
                seconds[way].append(taken)
    return seconds


def cost_of_nothing_shared(
    runs: dict[str, Callable[[], Any]], hook: Callable[[], Any], rounds: int, device: torch.device
) -> dict[str, Any]:
    """Return the seconds of a step of rows that share nothing, and of the hook of the model that folds."""
    seconds = in_turn(runs, rounds, device)
    taken = statistics.median(seconds_of(hook, device) for _ in range(rounds))
    return {"seconds": seconds, "hook_seconds": taken, "hook_share": taken / statistics.median(seconds["stock"])}


def measure(stock: Any, folds: Any, name: str, samples: Sequence[Sample], rounds: int) -> dict[str, Any]:
    """Return medians of seconds and the peak memory of each way to compute a micro-batch that shares tokens."""
    device = next(stock.parameters()).device
    call, labels = packed(samples, device)
    ways = {"stock": (stock, "losses"), "losses": (folds, "losses"), "logits": (folds, "logits")}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses, peaks = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for _ in range(rounds):
        for way, (model, reads) in ways.items():
            found: list[torch.Tensor] = []
            peak = PeakMemory(device)
            taken = seconds_of(lambda: found.append(step(model, call, labels, reads)), device)  # noqa: B023
            seconds[way].append(taken)
            losses[way], peaks[way] = float(found[0]), max(peaks[way], peak.bytes() or 0)
            model.zero_grad()
    assert all(math.isclose(losses[way], losses["stock"], rel_tol=1e-2 if device.type == "cuda" else 1e-5)
               for way in ways), losses  # fmt: skip
    report = folds.folding.last
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    return {
        "name": name,
        "rows": report.rows,
        "logical_tokens": report.logical_tokens,
        "fold_ratio": report.fold_ratio,
        "expected_speedup": report.expected_speedup.to_json(),
        "seconds": seconds,
        "median_seconds": medians,
        "speedup": {way: medians["stock"] / medians[way] for way in ("losses", "logits")},
        "peak_bytes": peaks,
    }


def measure_parts(folds: Sequence[Any], samples: Sequence[Sample], rounds: int) -> list[dict[str, Any]]:
    """Return the seconds and the peak memory of a micro-batch by the size of parts, that of the first model at once."""
    device = next(folds[0].parameters()).device
    call, labels = packed(samples, device)
    rows: list[dict[str, Any]] = [{"seconds": [], "peak_bytes": 0} for _ in folds]
    for _ in range(rounds):
        for model, row in zip(folds, rows, strict=True):
            peak = PeakMemory(device)
            row["seconds"].append(seconds_of(lambda: step(model, call, labels, "losses"), device))  # noqa: B023
            row["peak_bytes"] = max(row["peak_bytes"], peak.bytes() or 0)
            model.zero_grad()
            report = model.folding.last
            row |= {"tokens": report.unique_tokens, "recomputed": report.recomputed_tokens}
    return [row | {"median_seconds": statistics.median(row["seconds"])} for row in rows]


def measure_unshared(stock: Any, folds: Any, rows: int, length: int, rounds: int) -> dict[str, Any]:
    """Return the cost of a micro-batch that shares nothing: of the step, and of the folding model's hook."""
    device = next(stock.parameters()).device
    call, labels = packed(nothing_shared(rows, length), device)
    runs = {way: partial(step, model, call, labels, "losses") for way, model in (("stock", stock), ("folds", folds))}
    step(folds, call, labels, "losses")
    assert folds.folding.last.left_alone
    hook = partial(folds.folding.before, folds, (), call | {"labels": labels})
    return {"rows": rows, "tokens": rows * length} | cost_of_nothing_shared(runs, hook, rounds, device)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=MODELS, default="cpu")
    parser.add_argument("--model", metavar="FIELD=NUMBER", nargs="*", default=[], help="fields of TransformerConfig")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of a micro-batch that shares tokens")
    parser.add_argument("--unshared-rounds", type=int, default=60, help="repetitions of one that shares nothing")
    parser.add_argument("--parts", action="store_true", help="measure a micro-batch in parts, and nothing else")
    parser.add_argument("--output", type=Path, help="result file")
    arguments = parser.parse_args()
    device, machine = torch.device(arguments.device), describe_machine()
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; use --device cpu")
    name = "inside_parts" if arguments.parts else "inside"
    name += f"_{name_in_files(machine)}" * (device.type != "cpu")
    output = arguments.output or RESULTS / f"{name}.json"
    shape = MODELS[arguments.device] | {key: int(value) for key, value in (one.split("=") for one in arguments.model)}
    with one_rank(device):
        torch.manual_seed(0)
        stock, folds, *in_parts = models(shape, device, PARTS if arguments.parts else ())
        step(stock, *packed(nothing_shared(2, 64), device), "losses")  # warms up
        step(folds, *packed(prompt_group(64, 2, 8), device), "losses")
        result: dict[str, Any] = {
            "machine": machine | {"device": arguments.device} if device.type == "cpu" else machine,
            "model": shape | {"vocab_size": VOCAB},
            "rounds": {"shared": arguments.rounds, "unshared": arguments.unshared_rounds},
        }
        if arguments.parts:
            found = measure_parts([folds, *in_parts], prompt_group(*PARTED), arguments.rounds)
            result["parts"] = [{"max_tokens": most} | row for most, row in zip((None, *PARTS), found, strict=True)]
            write(result, "parts", output)
            return
        result |= {"workloads": [], "unshared": []}
        for workload, samples in WORKLOADS.items():
            result["workloads"].append(measure(stock, folds, workload, samples(), arguments.rounds))
            write(result, "workloads", output)
        for rows, length in UNSHARED:
            result["unshared"].append(measure_unshared(stock, folds, rows, length, arguments.unshared_rounds))
            write(result, "unshared", output)


def write(result: dict[str, Any], part: str, output: Path) -> None:
    """Write the results so far, and print the last one of a part."""
    output.write_text(json.dumps(result, indent=1) + "\n")
    print({name: value for name, value in result[part][-1].items() if name not in ("seconds", "bound")}, flush=True)


if __name__ == "__main__":
    main()
