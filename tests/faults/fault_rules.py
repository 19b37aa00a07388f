"""Definition of a valid input, in plain rules that share no code with the package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
PER_TOKEN = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "returns")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    if not is_number(value):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def is_count(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_key(value: Any) -> bool:
    return isinstance(value, str | int) or is_finite(value)


def record_is_valid(row: Any) -> bool:
    """Whether the object of a line is a sample of tokens."""
    if not isinstance(row, dict):
        return False
    row = {name: value for name, value in row.items() if value is not None}
    if "tokens" not in row or "messages" in row or any(map(_names_logprobs, row, row.values())):
        return False
    tokens = row["tokens"]
    if not (isinstance(tokens, list) and tokens and all(is_count(one, 0, INT32_MAX) for one in tokens)):
        return False
    mask = row.get("loss_mask", [1] * len(tokens))
    if not (isinstance(mask, list) and len(mask) == len(tokens) and all(map(_is_weight, mask))):
        return False
    scored = [at > 0 and mask[at] != 0 for at in range(len(tokens))]
    return (
        is_key(row.get("merge_key", 0))
        and is_finite(row.get("temperature", 1))
        and row.get("temperature", 1) >= 1e-3
        and _signals_are_valid(row, scored)
    )


def _names_logprobs(name: str, value: Any) -> bool:
    """Whether a field that is not ours has log-probabilities by its name; a reader may not leave it out."""
    return name not in PER_TOKEN and isinstance(value, list) and "logprobs" in name.lower()


def _is_weight(value: Any) -> bool:
    if isinstance(value, bool):
        return True
    if isinstance(value, int) and abs(value) >= 2**63:  # an array of integers cannot hold it
        return False
    return is_finite(value) and (value == 0 or 1e-45 < value <= FLOAT32_MAX)


def _signals_are_valid(row: dict[str, Any], scored: list[bool]) -> bool:
    turns = sum(now and not before for before, now in zip([False, *scored], scored, strict=False))
    reward, turn = row.get("reward", 0), row.get("turn")
    if turn is not None and not is_count(turn):
        return False
    if isinstance(reward, list):
        if not all(map(is_finite, reward)) or (len(reward) != turns if turn is None else turn >= len(reward)):
            return False
    elif not is_finite(reward):
        return False
    advantage = row.get("advantage", 0)
    if not (_per_token_is_valid(advantage, scored) if isinstance(advantage, list) else is_finite(advantage)):
        return False
    for name in PER_TOKEN:
        most = 1e-3 if name.endswith("logprobs") else math.inf
        if name in row and not _per_token_is_valid(row[name], scored, most):
            return False
    if ("pair" in row) != ("chosen" in row):
        return False
    if not all(is_key(row[name]) for name in ("group", "rollout", "pair") if name in row):
        return False
    if not all(isinstance(row[name], bool) for name in ("chosen", "label", "mismatched") if name in row):
        return False
    return "teacher" not in row or _teacher_is_valid(row["teacher"], scored)


def _per_token_is_valid(values: Any, scored: list[bool], most: float = math.inf) -> bool:
    if not isinstance(values, list) or len(values) != len(scored):
        return False
    if not all(value is None or is_number(value) for value in values):
        return False
    return all(
        not own or (is_finite(value) and abs(value) <= FLOAT32_MAX and value <= most)
        for value, own in zip(values, scored, strict=True)
    )


def _teacher_is_valid(teacher: Any, scored: list[bool]) -> bool:
    if not isinstance(teacher, dict) or set(teacher) != {"token_ids", "logprobs"}:
        return False
    ids, logprobs = teacher["token_ids"], teacher["logprobs"]
    for rows in (ids, logprobs):
        if not isinstance(rows, list) or len(rows) != len(scored):
            return False
        if not all(isinstance(row, list) and row and len(row) == len(ids[0]) for row in rows):
            return False
    if not all(is_count(one, -(2**63), 2**63 - 1) for row in ids for one in row):
        return False
    if not all(one is None or is_number(one) for row in logprobs for one in row):
        return False
    for at, own in enumerate(scored):
        if own and not (
            len(set(ids[at])) == len(ids[at])
            and all(0 <= one <= INT32_MAX for one in ids[at])
            and all(is_finite(one) and one >= -FLOAT32_MAX for one in logprobs[at])
            and sum(math.exp(min(one, 50.0)) for one in logprobs[at]) <= 1 + 1e-3
        ):
            return False
    return True


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        found["\0twice"] = True
    return found


def lines_are_valid(content: bytes) -> bool:
    """Whether a file of JSON Lines is all samples of tokens, at least one."""
    found = 0
    for number, line in enumerate(content.split(b"\n")):
        if number == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            text = line.decode("utf-8")
            if not text or text.isspace():
                continue
            row = json.loads(text, object_pairs_hook=_no_doubles)
        except (ValueError, RecursionError):
            return False
        if isinstance(row, dict) and "\0twice" in row:
            return False
        if not record_is_valid(row):
            return False
        found += 1
    return found > 0


def metrics_are_valid(content: bytes) -> bool:
    """Whether a file holds a run's metrics: steps, the last perhaps cut short by a kill."""
    lines = content.split(b"\n")
    beginning = b'{"iteration": '
    last = lines.pop()
    if last and not (last.startswith(beginning) or beginning.startswith(last)):
        return _is_step(last)
    return all(map(_is_step, lines))


def _is_step(line: bytes) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and is_count(found.get("iteration"))


def positive(value: Any) -> bool:
    return is_finite(value) and value > 0


def not_negative(value: Any) -> bool:
    return is_finite(value) and value >= 0


def share(value: Any) -> bool:
    return is_finite(value) and 0 < value <= 1


def below_one(value: Any) -> bool:
    return is_finite(value) and 0 <= value < 1


def integer(least: int) -> Callable[[Any], bool]:
    return lambda value: is_finite(value) and value == int(value) and value >= least


def flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: value in names if isinstance(value, str) else False


def optional(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or rule(value)


def never(value: Any) -> bool:
    """For keys whose values here are all wrong."""
    return False


# Keys of a recipe whose validity does not depend on another's value, for values of types.
RECIPE: dict[str, Callable[[Any], bool]] = {
    "data": never,
    "data.path": never,
    "data.tokenizer": optional(never),
    "data.chat_template_kwargs": lambda value: value == {},
    "data.expand_turns": flag,
    "data.order": one_of("shuffled", "folded", "file"),
    "data.on_error": one_of("raise", "skip"),
    "data.streaming": flag,
    "data.num_workers": integer(0),
    "model": never,
    "model.num_layers": integer(1),
    "model.hidden_size": never,
    "model.num_attention_heads": integer(1),
    "model.num_query_groups": optional(integer(1)),
    "model.ffn_hidden_size": optional(integer(1)),
    "model.vocab_size": never,
    "model.max_position_embeddings": integer(1),
    "model.position_embedding_type": one_of("rope", "none"),
    "model.rotary_base": integer(1),
    "model.rotary_percent": share,
    "model.rope_scaling": flag,
    "model.rope_scaling_factor": positive,
    "model.yarn": optional(never),
    "model.normalization": one_of("RMSNorm", "LayerNorm"),
    "model.swiglu": flag,
    "model.add_bias_linear": flag,
    "model.qk_layernorm": flag,
    "model.untie_embeddings_and_output_weights": flag,
    "model.dtype": one_of("float32"),
    "model.transformer_impl": one_of("local"),
    "model.transformer": lambda value: value == {},
    "batch": never,
    "batch.max_tokens": integer(1),  # a longer sample is cut
    "batch.global_batch_size": integer(1),
    "batch.share": one_of("all", "prompt"),
    "batch.min_shared_tokens": integer(0),
    "batch.length_buckets": lambda value: value is None or value == [],
    "train_iters": integer(1),
    "seed": integer(0),
    "attention_backend": one_of("auto", "path", "reference"),
    "deterministic_attention": flag,
    "fused_head": flag,
    "head_chunk_rows": optional(integer(1)),
    "device": one_of("auto", "cpu"),
    "distributed_timeout_minutes": optional(integer(1)),
    "compare": flag,
    "objective": lambda value: value == {},
    "objective.name": one_of("sft"),
    "objective.options": lambda value: value == {},
    "objective.teacher_recipe": optional(never),
    "parallel": lambda value: value == {},
    "parallel.tensor_model_parallel_size": lambda value: integer(1)(value) and value == 1,
    "parallel.pipeline_model_parallel_size": lambda value: integer(1)(value) and value == 1,
    "parallel.virtual_pipeline_model_parallel_size": optional(never),
    "parallel.context_parallel_size": lambda value: integer(1)(value) and value == 1,
    "parallel.sequence_parallel": lambda value: value is False,
    "optimizer": lambda value: value == {},
    "optimizer.lr": positive,
    "optimizer.min_lr": lambda value: not_negative(value) and value <= 1e-2,
    "optimizer.lr_decay_style": one_of("constant", "linear", "cosine"),
    "optimizer.lr_warmup_steps": lambda value: integer(0)(value) and value == 0,
    "optimizer.lr_warmup_fraction": optional(below_one),
    "optimizer.weight_decay": not_negative,
    "optimizer.adam_beta1": below_one,
    "optimizer.adam_beta2": below_one,
    "optimizer.clip_grad": not_negative,
    "optimizer.use_distributed_optimizer": flag,
    "checkpoint": lambda value: value == {},
    "checkpoint.save": optional(text),
    "checkpoint.pretrained_checkpoint": optional(never),
    "checkpoint.save_interval": integer(1),
    "checkpoint.keep_last": optional(integer(1)),
    "validation": lambda value: value == {},
    "validation.path": optional(never),
    "validation.eval_interval": integer(1),
    "log": lambda value: value == {},
    "log.metrics": optional(never),
    "log.tensorboard": optional(lambda value: isinstance(value, str)),
    "verify": lambda value: value == {},
    "verify.enabled": flag,
    "verify.tolerance": optional(positive),
}
