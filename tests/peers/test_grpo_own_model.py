"""The page "GRPO on your own model": its commands, on a model of random weights, make the rewarded behaviour rise.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import commands_of

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
import transformers
from harness import torchrun_jobs
from harness.tokenizer_folders import CHATML, make_folder
from hf_folders import SIZES
from hf_jobs import PROGRAM

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "grpo-own-model.md"
# Settings of a tiny model on a CPU, instead of the page's.
TINY = {
    "mcore-prefix-tree": (
        "device=cpu",
        "model.dtype=float32",
        "model.transformer_impl=local",
        "batch.max_tokens=2048",
        "batch.groups_per_step=4",
        "optimizer.lr=1e-2",
        "train_iters=20",
        "objective.options.clip_eps_high=20",  # so that one round shows more than a fifth
    ),
    "python": ("--longest", "12", "--completions", "64"),
}


def save_model(folder: Path) -> None:
    """Write a random model with a tokenizer and a chat template."""
    make_folder(folder, CHATML)
    words = len(transformers.AutoTokenizer.from_pretrained(folder))
    end = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    settings = SIZES | {"vocab_size": words + words % 2, "eos_token_id": end, "bos_token_id": None}
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings)).float().save_pretrained(folder)


def rewards_in(rollouts: Path) -> np.ndarray:
    return np.array([json.loads(line)["reward"] for line in rollouts.read_text().splitlines()])


@pytest.mark.ci
def test_commands_of_the_page_raise_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "models" / "mine")
    prompts = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert prompts is not None
    (tmp_path / "prompts.jsonl").write_text(prompts[1])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    ran = []
    for program, *words in commands_of(PAGE):
        if program not in TINY:  # of other machines
            continue
        target = (str(ROOT / words.pop(0)),) if program == "python" else PROGRAM
        done = torchrun_jobs.run(1, *words, *TINY[program], program=target)
        assert done.code == 0, done.err
        ran.append(words[0] if program == "mcore-prefix-tree" else program)
    assert ran == ["python", "verify", "score", "train", "python"]
    before, after = (rewards_in(tmp_path / name) for name in ("rollouts.jsonl", "after.jsonl"))
    assert len(before) == len(after) == 256
    error = np.sqrt(before.var() / len(before) + after.var() / len(after))
    assert after.mean() - before.mean() > 5 * error
