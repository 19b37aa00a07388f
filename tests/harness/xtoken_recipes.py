"""Recipes of a student and a teacher with another tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from harness.commands import run_command
from harness.tokenizer_folders import PLAIN, make_folder
from harness.train_jobs import FLOAT64, train
from mcore_prefix_tree.data import load_tokenizer

WORDS = ["look", "up", "the", "parcel", "it", "is", "lost", "sorry", "you", "are", "terse", "no", "bye"]
RECIPE = """
data: {{path: {data}, tokenizer: {tokenizer}}}
model:
  dtype: float64
  num_layers: 2
  hidden_size: {hidden}
  num_attention_heads: 4
  num_query_groups: 2
  ffn_hidden_size: 48
batch: {{global_batch_size: 6, max_tokens: 60}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1, min_lr: 1e-3}}
train_iters: 6
compare: false
verify: {{enabled: false}}
"""


def write_texts(path: Path, tokenizer: Path) -> Path:
    """Write two-level trees of words in a tokenizer's tokens, some of them masked."""
    rng = np.random.default_rng(0)
    encoder = load_tokenizer(str(tokenizer))
    texts = []
    for _ in range(3):
        root = " ".join(rng.choice(WORDS, size=4))
        for _ in range(2):
            trunk = f"{root} {' '.join(rng.choice(WORDS, size=3))}"
            texts += [f"{trunk} {' '.join(rng.choice(WORDS, size=int(rng.integers(2, 5))))}" for _ in range(2)]
    texts.append(texts[0])
    with path.open("w") as stream:
        for text in texts:
            tokens = encoder.encode_text(text)
            mask = rng.choice([0.0, 0.5, 1.0], size=len(tokens), p=[0.2, 0.2, 0.6]).tolist()
            stream.write(json.dumps({"tokens": tokens, "loss_mask": mask}) + "\n")
    return path


def make_tokenizers(folder: Path) -> None:
    """Write the tokenizers of a student and a teacher, and the projection between their vocabularies."""
    for name, prepend_space in (("student", False), ("teacher", True)):
        (folder / name).mkdir()
        make_folder(folder / name, PLAIN, prepend_space=prepend_space)
    named = ["--student", str(folder / "student"), "--teacher", str(folder / "teacher")]
    run_command("xtoken", "build-projection", *named, folder / "w.safetensors", code=0)


def make_student_and_teacher(folder: Path) -> Path:
    """Write recipes with their tokenizers and data, a projection, and a teacher that was trained for some steps."""
    make_tokenizers(folder)
    saved = {"student": "", "teacher": f"checkpoint: {{save: {folder / 'teacher_runs'}}}\n"}
    for name, hidden in (("student", 32), ("teacher", 48)):
        data = write_texts(folder / f"{name}.jsonl", folder / name)
        recipe = RECIPE.format(data=data, tokenizer=folder / name, hidden=hidden)
        (folder / f"{name}.yaml").write_text(recipe + saved[name])
    train(folder / "teacher.yaml", "train_iters=12", "seed=3", "checkpoint.save_interval=12", *FLOAT64)
    return folder


def options(**changes: object) -> tuple[str, ...]:
    return tuple(f"objective.options.{name}={json.dumps(value)}" for name, value in changes.items())


def settings(folder: Path, mode: str = "p_kl", **changes: object) -> list[str]:
    """Overrides of the student's recipe, in float64."""
    if mode not in ("alm", "uld"):
        changes = {"projection": str(folder / "w.safetensors")} | changes
    teacher = f"objective.teacher_recipe={folder / 'teacher.yaml'}"
    return [*FLOAT64, "objective.name=xtoken", teacher, *options(mode=mode, **changes)]
