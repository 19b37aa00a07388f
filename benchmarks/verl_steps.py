#!/usr/bin/env python3
"""Measure steps of verl with its own Megatron engine, and with the one that folds inside: both in one process.

    OMP_NUM_THREADS=1 benchmarks/verl_steps.py      # writes benchmarks/results/verl_steps.json; takes minutes

Needs the packages of requirements/verl.txt. The model is a random Qwen3 folder that Megatron-Bridge loads. On a CPU,
tests/peers/verl_cpu.py replaces TransformerEngine's layers by plain torch. Times are CPU seconds of the process, which
other processes disturb less than wall-clock time. Every repetition runs each engine once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "peers"))
os.environ.update(VERL_ENGINE_VENDOR="mcore_prefix_tree", VERL_ENGINE_DEVICE="cuda", VERL_CPU_DTYPE="float32")
import verl_cpu  # noqa: F401  # before verl

# isort: split
from inside import QUICKSTART, RESULTS, VOCAB, in_turn, prompt_group, rollouts
from megatron.core.utils import unwrap_model
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss, sft_loss
from verl_jobs import FUSIONS, model_folder

from mcore_prefix_tree import Sample
from mcore_prefix_tree.bench import describe_machine
from mcore_prefix_tree.utils.versions import installed_version_of

OUTPUT = RESULTS / "verl_steps.json"
ENGINES = {"stock": "nvidia", "folds": "mcore_prefix_tree"}
MODEL = {
    "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 768, "vocab_size": VOCAB, "max_position_embeddings": 4096,
}  # fmt: skip
BUDGET = 4096  # tokens of a micro-batch: of all rows in verl's engine, unique ones in ours
ANSWER = 128
WORKLOADS: dict[str, Callable[[], list[Sample]]] = {
    f"8 answers of {ANSWER} tokens to a prompt of 1,024": lambda: prompt_group(1024, 8, ANSWER),
    "23 turns of 4 shipped rollouts": lambda: rollouts(QUICKSTART, 0, 4),
}


def engine(vendor: str, folder: Path) -> Any:
    """Return the engine that verl's registry chooses, initialized."""
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    config = McoreEngineConfig(override_transformer_config=dict.fromkeys(FUSIONS, False))
    optimizer = McoreOptimizerConfig(lr=1e-5, total_training_steps=1000)
    model = HFModelConfig(path=str(folder))
    made = EngineRegistry.new("language_model", "megatron", model, config, optimizer, CheckpointConfig())
    made.initialize()
    return made


def batch(samples: Sequence[Sample], *, supervised: bool) -> Any:
    """Return a mini-batch as verl's trainers send it; in SFT, loss masks are as long as rows."""
    rng = np.random.default_rng(0)
    rows = [torch.from_numpy(sample.tokens.astype(np.int64)) for sample in samples]
    answers = [row[-min(ANSWER, len(row) - 1) :] for row in rows]

    def jagged(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    def noise() -> torch.Tensor:
        return jagged([torch.from_numpy(rng.standard_normal(len(answer))).float() for answer in answers])

    mask = jagged([torch.ones(len(answer)) for answer in answers])
    tensors = {
        "input_ids": jagged(rows),
        "prompts": jagged([row[: -len(answer)] for row, answer in zip(rows, answers, strict=True)]),
        "responses": jagged(answers),
        "response_mask": mask,
        "loss_mask": jagged([torch.ones(len(row)) for row in rows]) if supervised else mask,
        "old_log_probs": noise() - 9,
        "advantages": noise(),
    }
    settings = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": BUDGET,
        "temperature": 1.0,
        "disable_auto_offload": True,
        "global_batch_size": len(rows),
    }
    return tu.get_tensordict(tensors, settings)


def update(made: Any, data: Any, loss: Callable[..., Any]) -> float:
    """Update the model; returns the gradient norm."""
    with made.train_mode(disable_auto_offload=True):
        output = made.train_batch(data, loss)
    return float(output["metrics"]["grad_norm"])


def score(made: Any, data: Any) -> float:
    """Old log-probabilities and entropies; returns the mean of the first, without each row's last token."""
    tu.assign_non_tensor(data, calculate_entropy=True)
    with made.eval_mode(disable_auto_offload=True):
        output = made.infer_batch(data)["model_output"]
    return float(torch.cat([row[:-1] for row in output["log_probs"].unbind()]).mean())


ACTOR = ActorConfig(strategy="megatron", rollout_n=8, use_dynamic_bsz=True)
# By name: the call, whether all tokens are supervised, and the expectation in the report.
STEPS: dict[str, tuple[Callable[[Any, Any], float], bool, str]] = {
    "actor update": (partial(update, loss=partial(ppo_loss, ACTOR)), False, "ratio"),
    "old log-probabilities": (score, False, "forward_ratio"),
    "SFT step": (partial(update, loss=partial(sft_loss, ACTOR)), True, "ratio"),
}


def measure(engines: dict[str, Any], name: str, samples: Sequence[Sample], rounds: int) -> dict[str, Any]:
    """Return seconds of each kind of step with each engine."""
    steps: dict[str, Any] = {}
    for what, (run, supervised, expected) in STEPS.items():
        data = batch(samples, supervised=supervised)
        answers: dict[str, list[float]] = {way: [] for way in engines}

        def once(way: str) -> None:
            answers[way].append(run(engines[way], data.clone()))  # noqa: B023

        seconds = in_turn({way: partial(once, way) for way in engines}, rounds, torch.device("cpu"))
        for first, second in zip(*answers.values(), strict=True):  # both engines have trained as often
            assert math.isclose(first, second, rel_tol=1e-5), (name, what, answers)
        report = unwrap_model(engines["folds"].module[-1]).folding.last
        assert report.micro_batches == 1, report
        medians = {way: statistics.median(taken) for way, taken in seconds.items()}
        steps[what] = {
            "expected_speedup": report.expected_speedup.to_json()[expected],
            "seconds": seconds,
            "speedup": medians["stock"] / medians["folds"],
        }
        print(name, what, medians, flush=True)
    return {
        "name": name, "logical_tokens": report.logical_tokens, "fold_ratio": report.fold_ratio, "steps": steps
    }  # fmt: skip


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each step")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="result file")
    arguments = parser.parse_args()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name), "Qwen3", **MODEL)
        engines = {way: engine(vendor, folder) for way, vendor in ENGINES.items()}
        workloads = [measure(engines, name, make(), arguments.rounds) for name, make in WORKLOADS.items()]
    versions = {name: installed_version_of(name) for name in ("verl", "megatron-core", "megatron-bridge")}
    result = {
        "machine": describe_machine() | versions,
        "model": MODEL,
        "rounds": arguments.rounds,
        "budget": BUDGET,
        "workloads": workloads,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
