"""Part ``steps``: ``mcore-prefix-tree bench step`` on the recipes that need only a GPU, each in a process.

``rollouts`` is the model of ``one_gpu`` on rollouts whose lengths fill a GPU; the recipes' own data is small.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_check_parts.context import ROOT, Context
from gpu_check_parts.results import FAILED

# The most valuable first. The model of the last is for a CPU, and mostly measures kernel launches.
RECIPES = {"rollouts": "one_gpu", "one_gpu": "one_gpu", "quickstart": "quickstart"}
# Of ``rollouts``: tokens of the prompt and of each of its answers.
PROMPT, ANSWERS, ANSWER = 4096, 16, 1024
VOCAB = 32768
OVERRIDES = ("model.dtype=bfloat16", "verify.enabled=false", "compare=false", "device=cuda")
SMOKE = (
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.ffn_hidden_size=64",
    "model.num_attention_heads=2",
    "model.num_query_groups=1",
    "model.kv_channels=32",
    "batch.global_batch_size=2",
)
PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "flash-attn-4", "numpy")
# Weights, gradients and buffers of 0.6 billion parameters, also one unfolded micro-batch of 16,384 tokens, and its
# logits over 32,768 entries in fp32 with their gradient: an estimate; the row reports the measured peak.
NEEDED_BYTES = {"rollouts": 60 << 30, "one_gpu": 40 << 30, "quickstart": 8 << 30}


def run(context: Context) -> None:
    """Measure a step of each recipe."""
    for name, recipe in RECIPES.items():
        key = context.key(name, "bench step")
        used = context.used(
            *PACKAGES, sources=("mcore_prefix_tree",), recipe=(ROOT / "recipes" / f"{recipe}.yaml").stat().st_size
        )
        if context.is_done(key, used) or not context.options.wants(name):
            continue
        free, needed = torch.cuda.mem_get_info()[0], NEEDED_BYTES[name]
        if free < needed and not context.options.smoke:
            context.leave_out(key, used, f"it would need about {needed >> 30} GiB, and {free >> 30} GiB are free")
            continue
        context.measure(key, used, partial(_step, context, name))


def _step(context: Context, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "step.json")
        command = [sys.executable, "-m", "mcore_prefix_tree", "bench", "step", f"recipes/{RECIPES[name]}.yaml"]
        command += OVERRIDES
        if name == "rollouts":
            command += _rollouts(Path(folder), smoke=context.options.smoke)
        elif context.options.smoke:
            command += _short_chat(Path(folder))
        command += SMOKE if context.options.smoke else ()
        command += ["--repeats", str(context.options.repeats), "--output", str(output)]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        print(done.stderr, file=sys.stderr, flush=True)
        if done.returncode or not output.exists():
            return {
                FAILED: " / ".join(done.stderr.split("\n")[-6:]).strip(" /")[-500:] or f"exit code {done.returncode}"
            }
        found = json.loads(output.read_text())
    speedup = found["gain"]["speedup"]["median"]
    return {"result": found, "shown": f"{speedup:.2f} times faster, {found['gain']['bound']['ratio']:.2f} at most"}


def _rollouts(folder: Path, *, smoke: bool) -> list[str]:
    """Write rollouts of one prompt, as tokens, and return the recipe's settings for them."""
    prompt, answer, vocab = (64, 16, 256) if smoke else (PROMPT, ANSWER, VOCAB)
    draw = random.Random(0)
    tokens = [draw.randrange(vocab) for _ in range(prompt)]
    lines = [
        {"tokens": tokens + [draw.randrange(vocab) for _ in range(answer)], "loss_mask": [0] * prompt + [1] * answer}
        for _ in range(ANSWERS)
    ]
    return [
        *(_data(folder, lines), "data.tokenizer=null", "data.expand_turns=false", f"model.vocab_size={vocab}"),
        *(f"batch.global_batch_size={ANSWERS}", "batch.max_tokens=32768"),
    ]


def _short_chat(folder: Path) -> list[str]:
    """Write conversations of few tokens: Triton's interpreter takes milliseconds for each that is scored."""
    roles = {"user": "Yes or no?", "assistant": "No."}
    lines = [{"messages": [{"role": role, "content": words} for role, words in roles.items()]}] * ANSWERS
    return [_data(folder, lines)]


def _data(folder: Path, lines: list[dict[str, Any]]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return f"data.path={path}"
