"""Part ``steps``: ``mcore-prefix-tree bench step`` on the recipes that need only a GPU, each in a process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_check_parts.context import ROOT, Context
from gpu_check_parts.results import FAILED

# The larger model first: the other is for a CPU, and mostly measures kernel launches.
RECIPES = ("one_gpu", "quickstart")
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
NEEDED_BYTES = {"one_gpu": 40 << 30, "quickstart": 8 << 30}


def run(context: Context) -> None:
    """Measure a step of each recipe."""
    for name in RECIPES:
        key = context.key(name, "bench step")
        used = context.used(
            *PACKAGES, sources=("mcore_prefix_tree",), recipe=(ROOT / "recipes" / f"{name}.yaml").stat().st_size
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
        command = [sys.executable, "-m", "mcore_prefix_tree", "bench", "step", f"recipes/{name}.yaml", *OVERRIDES]
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
