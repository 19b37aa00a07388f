"""Whole jobs of verl on a CPU: a tiny model, data, and the command lines that users type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hf_folders import VOCAB, saved_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
# What needs TransformerEngine's kernels.
FUSIONS = ("gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model_folder(where: Path, family: str = "Qwen3", **settings: Any) -> Path:
    """A tiny model with random weights and a tokenizer whose words are ``w0``, ``w1``, ..."""
    special = ["<pad>", "<end>", "<system>", "<user>", "<assistant>"]
    words = special + [f"w{i}" for i in range(VOCAB - len(special))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", additional_special_tokens=special[2:]
    )
    wrapped.chat_template = TEMPLATE
    saved_model(family, where, settings)
    wrapped.save_pretrained(where)
    return where


def text(rng: np.random.Generator, words: int) -> str:
    return " ".join(f"w{i}" for i in rng.integers(VOCAB - 5, size=words))


def conversations(where: Path, *, prompts: int = 4, answers: int = 4, seed: int = 0) -> Path:
    """A Parquet file of conversations for SFT: several answers to each prompt, one after the other."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(prompts):
        system, user = text(rng, 12), text(rng, 20)
        for _ in range(answers):
            reply = text(rng, int(rng.integers(4, 9)))
            roles = (("system", system), ("user", user), ("assistant", reply))
            rows.append([{"role": role, "content": content} for role, content in roles])
    pd.DataFrame({"messages": rows}).to_parquet(where)
    return where


def run(command: list[str], folder: Path, *, vendor: str, **environment: str) -> list[dict[str, Any]]:
    """Run a command of verl's in a folder; return what its trainer gave the tracker ``file``, step by step."""
    log = folder / "log.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "peers", ROOT / "tests"))),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_CPU_DTYPE": "float32",
        "VERL_ENGINE_VENDOR": vendor,
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(log),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "output.txt").open("w") as output:
        ran = subprocess.run(
            [sys.executable, "-m", *command],
            env=os.environ | settings | environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=1500,
        )
    assert ran.returncode == 0, (folder / "output.txt").read_text()[-8000:]
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def sft(ranks: int, model: Path, data: Path, *settings: str, steps: int = 3, batch: int = 8) -> list[str]:
    """The command line of verl's SFT trainer."""
    return [
        *("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "verl.trainer.sft_trainer"),
        *("engine=megatron", "optim=megatron"),
        f"model.path={model}",
        f"data.train_files={data}",
        f"data.train_batch_size={batch}",
        "data.max_token_len_per_gpu=128",
        "data.num_workers=0",
        f"trainer.total_training_steps={steps}",
        "trainer.logger=[console,file,tensorboard]",
        "trainer.total_epochs=8",
        "trainer.resume_mode=disable",
        *(f"+engine.override_transformer_config.{name}=False" for name in FUSIONS),
        *settings,
    ]
