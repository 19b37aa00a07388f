"""Small jobs of TRL's own trainers, with the stock model or one that folds in its backbone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from harness.tokenizer_folders import CHATML, make_folder, official
from PIL import Image

from mcore_prefix_tree.integrations.trl import LogFolding, fold_backbone

STEPS = 3
# By default, TRL trains float32 weights under autocast, and recomputes layers.
EXACT = {"bf16": False, "gradient_checkpointing": False}
PROMPT = "look up the parcel and say where it is. "
ANSWERS = ["it is lost", "it is late", "the parcel is here", "it is lost"]
LABELLED = [{"prompt": PROMPT, "completion": ANSWERS[at % 4] + str(at), "label": at % 3 > 0} for at in range(STEPS * 4)]
COMPLETIONS = [{"prompt": row["prompt"], "completion": row["completion"]} for row in LABELLED]
PAIRS = [
    {"prompt": PROMPT + str(at), "chosen": ANSWERS[at % 3], "rejected": ANSWERS[(at + 1) % 3]}
    for at in range(STEPS * 4)
]
PROMPTS = [{"prompt": PROMPT}] * 8
PICTURES = [
    Image.fromarray((torch.rand(16, 24, 3, generator=torch.Generator().manual_seed(at)) * 255).byte().numpy())
    for at in range(2)
]
PICTURE, VIDEO, BEGIN, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
PICTURE_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}" + BEGIN + PICTURE + END + "{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def count_letters(completions: list[Any], **_: Any) -> list[float]:
    words = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [text.count("e") + 0.1 * len(text) for text in words]


def said(role: str, words: str) -> list[dict[str, str]]:
    return [{"role": role, "content": words}]


@dataclass(frozen=True)
class Job:
    """A trainer of TRL with its data; ``settings`` are of its configuration, ``arguments`` its own."""

    name: str
    rows: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def has_pictures(self) -> bool:
        return "images" in self.rows[0]

    def run(self, model: Any, folder: Path, **arguments: Any) -> list[dict[str, Any]]:
        """Train, and return the trainer's log of each step; for the arguments see :meth:`make`."""
        return train(self.make(model, folder, **arguments))

    def make(self, model: Any, folder: Path, *, settings: Any = None, **arguments: Any) -> Any:
        """Return the trainer of a model, or of the name of one."""
        tokenizer = transformers.AutoProcessor.from_pretrained(folder) if self.has_pictures else official(folder)
        config = getattr(trl, f"{self.name}Config")(
            output_dir=str(folder / "out"), max_steps=STEPS, logging_steps=1, per_device_train_batch_size=4, seed=3,
            # Adam would make a full step of a gradient that is rounding only.
            optim="sgd", learning_rate=1e-1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
            **self.settings | (settings or {}),
        )  # fmt: skip
        return getattr(trl, f"{self.name}Trainer")(
            model, args=config, train_dataset=Dataset.from_list(self.rows), processing_class=tokenizer,
            callbacks=[LogFolding()] if hasattr(model, "folding") else [], **self.arguments | arguments,
        )  # fmt: skip


def train(trainer: Any) -> list[dict[str, Any]]:
    """Train, and return the trainer's log of each step."""
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


ONLINE = {"num_generations": 4, "max_completion_length": 8}
JOBS = {
    "SFT": Job("SFT", COMPLETIONS),
    "SFT, padding-free": Job("SFT", COMPLETIONS, {"padding_free": True, "max_length": None}),
    "DPO": Job("DPO", PAIRS),
    "KTO": Job("KTO", LABELLED),
    "Reward": Job("Reward", PAIRS),
    "GRPO": Job("GRPO", PROMPTS, ONLINE | {"beta": 0.1}, {"reward_funcs": count_letters}),
    "RLOO": Job("RLOO", PROMPTS, ONLINE, {"reward_funcs": count_letters}),
}
# One picture of all rows, and online two, each with a group of its own.
PICTURE_JOBS = {
    "SFT": Job(
        "SFT",
        [
            {"images": PICTURES[:1], "prompt": said("user", PROMPT), "completion": said("assistant", row["completion"])}
            for row in COMPLETIONS
        ],
        {"max_length": None},
    ),
    "DPO": Job(
        "DPO",
        [
            {
                "images": PICTURES[:1],
                "prompt": said("user", row["prompt"]),
                "chosen": said("assistant", row["chosen"]),
                "rejected": said("assistant", row["rejected"]),
            }
            for row in PAIRS
        ],
        {"max_length": None},
    ),
    **{
        name: Job(
            name,
            [{"images": [PICTURES[at % 2]], "prompt": said("user", PROMPT)} for at in range(8)],
            JOBS[name].settings,
            JOBS[name].arguments,
        )
        for name in ("GRPO", "RLOO")
    },
}


def save_model(folder: Path, *, classifies: bool = False) -> None:
    """Save a tiny model with its tokenizer, from which trainers read their reference models."""
    make_folder(folder, CHATML)
    tokenizer = official(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=False, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    _auto(classifies).from_config(config).double().save_pretrained(folder)


def save_picture_model(folder: Path) -> None:
    """Save a tiny Qwen2.5-VL with its processor."""
    make_folder(folder, PICTURE_CHATML, joins=(PICTURE, VIDEO, BEGIN, END))
    tokenizer = official(folder)
    tokenizer.pad_token = tokenizer.eos_token
    patches = {"patch_size": 4, "temporal_patch_size": 2}
    transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(**patches, merge_size=2, min_pixels=64, max_pixels=4096),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(**patches, merge_size=2),
        chat_template=PICTURE_CHATML,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    tower = patches | {
        "depth": 2, "num_heads": 2, "in_channels": 3, "spatial_merge_size": 2, "hidden_size": 16,
        "intermediate_size": 24, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    names = {"image": PICTURE, "video": VIDEO, "vision_start": BEGIN, "vision_end": END}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **ids)
    transformers.Qwen2_5_VLForConditionalGeneration(config).double().save_pretrained(folder)


def load_picture_model(folder: Path, *, folds: bool) -> Any:
    """Load the saved model that reads pictures."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    return fold_backbone(model) if folds else model


def load_model(folder: Path, *, classifies: bool = False, dtype: torch.dtype = torch.float64, folds: bool) -> Any:
    """Load the saved model."""
    model = _auto(classifies).from_pretrained(folder, dtype=dtype)
    return fold_backbone(model) if folds else model


def _auto(classifies: bool) -> Any:
    return getattr(transformers, f"AutoModelFor{'SequenceClassification' if classifies else 'CausalLM'}")
