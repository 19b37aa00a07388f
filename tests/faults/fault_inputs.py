"""The good inputs that cases are made from, a folder each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import yaml

VOCAB = 64
RECIPE: dict[str, Any] = {
    "data": {"path": "data.jsonl"},
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "vocab_size": VOCAB,
    },
    "batch": {"global_batch_size": 2, "max_tokens": 40},
    "optimizer": {"lr": 1e-2},
    "train_iters": 1,
    "attention_backend": "path",
    "compare": False,
    "verify": {"enabled": False},
}
MASK = [0, 1, 0, 0.5, 1, 0]
SIGNALS: dict[str, Any] = {
    "reward": [1.0, -0.5],
    "group": "a",
    "rollout": 3,
    "advantage": [None, 0.5, None, -1.0, 2, None],
    "old_logprobs": [None, -0.5, None, -1.0, 0.0, None],
    "ref_logprobs": [None, -0.5, None, -1.0, -2, None],
    "rollout_logprobs": [None, -0.25, None, -1.0, -2, 5],
    "values": [0, 0.5, None, 1.0, -1.0, 9],
    "returns": [0, 0.5, None, 1.0, -1.0, 9],
    "pair": "p",
    "chosen": True,
    "label": False,
    "mismatched": False,
    "teacher": {
        "token_ids": [[5, 6], [7, 8], [9, 9], [1, 2], [3, 4], [5, 6]],
        "logprobs": [[None, 0], [-1.0, -2.0], [0, 0], [-0.5, -3], [-0.75, -1], [-1, -1]],
    },
}
ROWS: list[dict[str, Any]] = [
    {"tokens": [1, 2, 3, 4, 5, 6], "loss_mask": MASK, "merge_key": "k", "temperature": 0.75, **SIGNALS},
    {"tokens": [1, 2, 3, 9, 9], "loss_mask": [0, 0, 1, 1, 1]},
    {"tokens": [1, 2, 7, 8], "merge_key": None},
    {"tokens": [11, 12, 13], "reward": 1, "turn": 0},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Where is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "find", "arguments": {"n": 1}}}],
    },
    {"role": "tool", "content": "lost", "tool_call_id": "abcdefghi", "name": "find"},
    {"role": "assistant", "content": "It is lost."},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "find", "description": "Find.", "parameters": {"type": "object", "properties": {}}},
    }
]
STEPS = [{"iteration": 1, "loss": 4.0}, {"iteration": 2, "loss": 3.5, "grad_norm": None}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def lines(rows: list[Any]) -> bytes:
    """Rows as JSON Lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def recipe_bytes(recipe: dict[str, Any]) -> bytes:
    """A recipe as YAML."""
    return yaml.safe_dump(recipe, sort_keys=False).encode()


def table() -> pa.Table:
    """Many rows of tokens, so that the data are most of a file."""
    count = 200
    return pa.table(
        {
            "tokens": pa.array([[row % 60, 1, 2, row % 7, 5] for row in range(count)], type=pa.list_(pa.int32())),
            "loss_mask": pa.array([[0, 1, 1, 0.5, 1]] * count, type=pa.list_(pa.float32())),
            "group": [f"g{row // 4}" for row in range(count)],
        }
    )


def write_bases(folder: Path) -> None:
    """Write every good input but the checkpoint, which a command has to make."""
    plain = {"data.jsonl": lines(ROWS), "recipe.yaml": recipe_bytes(RECIPE)}
    bases: dict[str, dict[str, bytes]] = {
        "plain": plain,
        "chat": {"chat.jsonl": lines([{"messages": MESSAGES, "tools": TOOLS, "reward": 1.0}] * 2)},
        "gzip": {"data.jsonl.gz": gzip.compress(lines(ROWS * 20), mtime=0)},
        "metrics": {**plain, "metrics.jsonl": lines(STEPS)},
    }
    for name, files in bases.items():
        (folder / name).mkdir(parents=True)
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
    tables = folder / "tables"
    tables.mkdir()
    pq.write_table(table(), tables / "data.parquet", write_page_checksum=True, row_group_size=64)
    pyarrow.feather.write_feather(table(), str(tables / "data.feather"), compression="lz4")
    for file, new in (("data.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with new(tables / file, table().schema) as writer:
            writer.write_table(table(), max_chunksize=64)
    write_tokenizer(folder / "tokenizer" / "tok")
    chat = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}]
    (folder / "tokenizer" / "chat.jsonl").write_bytes(lines(chat))


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """A small Hugging Face tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["You are terse.", "yes", "hi"], trainer=trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
