#!/usr/bin/env python3
"""Sample rollouts from a Hugging Face model folder, reward them, and print the mean reward.

    python examples/rollouts.py models/Qwen3-0.6B prompts.jsonl --output rollouts.jsonl

Each line of the prompts' file has ``prompt``. Each line of the output is a rollout for the objective ``grpo``:
``tokens``, ``loss_mask``, ``reward`` and ``group``, the line of its prompt. Replace :func:`reward` with your own. For
more than a few prompts, sample with vLLM or SGLang and write the same lines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def reward(prompt: str, completion: str) -> float:
    """Return the reward of a completion: shorter is better, and 100 characters have the reward 0.5."""
    return 1 / (1 + len(completion) / 100)


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens that the model continues."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def sample_group(model: Any, tokenizer: Any, prompt: str, *, count: int, longest: int) -> list[dict[str, Any]]:
    """Return completions of one prompt, as lines of the output."""
    start = prompt_tokens(tokenizer, prompt)
    # Without top-k and top-p, the sampled policy equals the trained policy.
    drawn = model.generate(
        torch.tensor([start], device=model.device),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=count,
        max_new_tokens=longest,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    rows = []
    for tokens in drawn[:, len(start) :].tolist():
        length = next((i + 1 for i, token in enumerate(tokens) if token == tokenizer.eos_token_id), len(tokens))
        completion = tokenizer.decode(tokens[:length], skip_special_tokens=True)
        rows.append(
            {
                "tokens": start + tokens[:length],
                "loss_mask": [0] * len(start) + [1] * length,
                "reward": reward(prompt, completion),
            }
        )
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("prompts", type=Path, help="JSON Lines with 'prompt'")
    parser.add_argument("--output", type=Path, required=True, help="JSON Lines to write")
    parser.add_argument("--completions", type=int, default=8, help="completions of each prompt (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    rewards = []
    with given.output.open("w") as output, torch.no_grad():
        for group, line in enumerate(given.prompts.read_text().splitlines()):
            prompt = json.loads(line)["prompt"]
            for row in sample_group(model, tokenizer, prompt, count=given.completions, longest=given.longest):
                output.write(json.dumps(row | {"group": group}) + "\n")
                rewards.append(row["reward"])
    print(f"mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)} rollouts in {given.output}")


if __name__ == "__main__":
    main()
