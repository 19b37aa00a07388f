"""Full jobs of verl on a CPU: a tiny model, data, and the command lines that users type."""

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
# Settings that need TransformerEngine's kernels.
FUSIONS = ("gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion")
# verl's agent loop looks for the last two in a tokenizer of Qwen's.
SPECIAL = ["<pad>", "<end>", "<system>", "<user>", "<assistant>", "\n", "<|im_end|>"]
WORDS = VOCAB - len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model_folder(where: Path, family: str = "Qwen3", **settings: Any) -> Path:
    """A tiny model with random weights and a tokenizer whose words are ``w0``, ``w1``, ..."""
    words = SPECIAL + [f"w{i}" for i in range(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", additional_special_tokens=SPECIAL[2:]
    )
    wrapped.chat_template = TEMPLATE
    saved_model(family, where, settings)
    wrapped.save_pretrained(where)
    return where


def text(rng: np.random.Generator, words: int) -> str:
    return " ".join(f"w{i}" for i in rng.integers(WORDS, size=words))


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


def prompts(where: Path, *, count: int = 8, seed: int = 0) -> Path:
    """A Parquet file of prompts for RL."""
    rng = np.random.default_rng(seed)
    rows = [[{"role": "user", "content": text(rng, 20)}] for _ in range(count)]
    rewards = [{"style": "rule", "ground_truth": "w1"}] * count
    pd.DataFrame({"prompt": rows, "data_source": "random", "reward_model": rewards}).to_parquet(where)
    return where


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(map(len, solution_str.split())) % 7 / 7
"""


def ppo(ranks: int, model: Path, data: Path, *settings: str, steps: int = 2, batch: int = 4) -> list[str]:
    """The command line of verl's PPO trainer, here GRPO without a reference model."""
    reward = data.parent / "reward.py"
    reward.write_text(REWARD)
    roles = {"actor": "actor_rollout_ref.actor.megatron", "critic": "critic.megatron"}
    return [
        *("verl.trainer.main_ppo", "model_engine=megatron", "algorithm.adv_estimator=grpo"),
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.train_batch_size={batch}",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        f"reward.custom_reward_function.path={reward}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=random",
        "actor_rollout_ref.rollout.n=4",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=256",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        *(f"+{role}.override_transformer_config.{name}=False" for role in roles.values() for name in FUSIONS),
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=8",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file,tensorboard]",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=8",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        "+ray_kwargs.ray_init.include_dashboard=False",
        *settings,
    ]


def run(command: list[str], folder: Path, *, vendor: str, **environment: str) -> list[dict[str, Any]]:
    """Run a command of verl's in a folder; return its trainer's values for the tracker ``file``, step by step."""
    log = folder / "log.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "peers", ROOT / "tests"))),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_random",
        "VERL_CPU_DTYPE": "float32",
        "VERL_ENGINE_VENDOR": vendor,
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(log),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        # Ray gives up on processes that a busy machine starts slowly, and starts one for each CPU ahead.
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",  # at Ray's 15, a busy machine hardly runs them
        "HOME": str(folder),  # of Ray's token
    }
    # Ray takes the empty list that hides GPUs from tests for the number of GPUs.
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with (folder / "output.txt").open("w") as output:
        ran = subprocess.run(
            [sys.executable, "-m", *command],
            env=inherited | settings | environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=3000,
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
