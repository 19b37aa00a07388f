"""Configurations and headers of weights as a Hugging Face folder has them, without a model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_prefix_tree.settings import load_recipe

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}


def write_tensors(file: Path, names: list[str], dtype: str = "F32", shape: Sequence[int] = (1,)) -> None:
    """A safetensors file of equal tensors, as the format's page describes it."""
    size = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8}[dtype] * math.prod(shape)
    header = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size * len(names)))


def hf_recipe(folder: Path, *overrides: str) -> Any:
    file = folder.parent / "recipe.yaml"
    file.write_text(
        "data: {path: rows.jsonl}\nbatch: {global_batch_size: 2, max_tokens: 64}\ntrain_iters: 2\n"
        f"model: {{hf: {folder}}}\n"
    )
    return load_recipe(file, overrides)


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
