"""Definition of a valid input, in plain rules that share no code with the package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
Rule = Callable[[Any], bool]
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
    if "tokens" not in row or "messages" in row:
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


def _is_weight(value: Any) -> bool:
    if isinstance(value, bool):
        return True
    if isinstance(value, int) and abs(value) >= 2**63:  # an array of integers cannot hold it
        return False
    return is_finite(value) and (value == 0 or 1e-45 < value <= FLOAT32_MAX)


def _signals_are_valid(row: dict[str, Any], scored: list[bool]) -> bool:
    turns = sum(now and not before for before, now in zip([False, *scored], scored, strict=False))
    reward, turn = row.get("reward", 0), row.get("turn")
    if turn is not None and not is_count(turn, 0, INT32_MAX):
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


def flag(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def one(value: Any) -> bool:
    return is_finite(value) and value == 1


def integer(least: int) -> Rule:
    return lambda value: is_finite(value) and value == int(value) and value >= least


def one_of(*names: str) -> Rule:
    return lambda value: isinstance(value, str) and value in names


def optional(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def never(value: Any) -> bool:
    """For keys whose values here are all wrong."""
    return False


# Keys of a recipe whose validity does not depend on another's value, for values of types.
RECIPE: dict[str, Rule] = {
    key: rule
    for rule, keys in (
        (never, "data data.path model model.hidden_size model.vocab_size batch"),
        (optional(never), "data.tokenizer model.yarn objective.teacher_recipe checkpoint.pretrained_checkpoint"),
        (optional(never), "parallel.virtual_pipeline_model_parallel_size validation.path log.metrics"),
        (lambda value: value == {}, "data.chat_template_kwargs model.transformer objective objective.options parallel"),
        (lambda value: value == {}, "optimizer checkpoint validation log verify"),
        (flag, "data.expand_turns data.streaming model.rope_scaling model.swiglu model.add_bias_linear fused_head"),
        (flag, "model.qk_layernorm model.untie_embeddings_and_output_weights deterministic_attention compare"),
        (flag, "optimizer.use_distributed_optimizer verify.enabled"),
        (one_of("shuffled", "folded", "file"), "data.order"),
        (one_of("raise", "skip"), "data.on_error"),
        (one_of("rope", "none"), "model.position_embedding_type"),
        (one_of("RMSNorm", "LayerNorm"), "model.normalization"),
        (one_of("float32"), "model.dtype"),
        (one_of("local"), "model.transformer_impl"),
        (one_of("all", "prompt"), "batch.share"),
        (one_of("auto", "path", "reference"), "attention_backend"),
        (one_of("auto", "cpu"), "device"),
        (one_of("sft"), "objective.name"),
        (one_of("constant", "linear", "cosine"), "optimizer.lr_decay_style"),
        (integer(0), "data.num_workers batch.min_shared_tokens seed"),
        # A sample longer than max_tokens is cut.
        (integer(1), "model.num_layers model.num_attention_heads model.max_position_embeddings model.rotary_base"),
        (integer(1), "batch.max_tokens batch.global_batch_size train_iters checkpoint.save_interval"),
        (integer(1), "validation.eval_interval"),
        (optional(integer(1)), "model.num_query_groups model.ffn_hidden_size head_chunk_rows checkpoint.keep_last"),
        (optional(integer(1)), "distributed_timeout_minutes"),
        (
            one,
            "parallel.tensor_model_parallel_size parallel.pipeline_model_parallel_size parallel.context_parallel_size",
        ),
        (lambda value: value is False, "parallel.sequence_parallel"),
        (lambda value: integer(0)(value) and value == 0, "optimizer.lr_warmup_steps"),
        (lambda value: value is None or value == [], "batch.length_buckets"),
        (lambda value: is_finite(value) and 0 < value <= 1, "model.rotary_percent"),
        (lambda value: is_finite(value) and 0 <= value <= 1e-2, "optimizer.min_lr"),
        (lambda value: is_finite(value) and 0 <= value < 1, "optimizer.adam_beta1 optimizer.adam_beta2"),
        (lambda value: value is None or (is_finite(value) and 0 <= value < 1), "optimizer.lr_warmup_fraction"),
        (lambda value: is_finite(value) and value >= 0, "optimizer.weight_decay optimizer.clip_grad"),
        (positive, "model.rope_scaling_factor optimizer.lr"),
        (optional(positive), "verify.tolerance"),
        (optional(lambda value: isinstance(value, str) and value != ""), "checkpoint.save"),
        (optional(lambda value: isinstance(value, str)), "log.tensorboard"),
    )
    for key in keys.split()
}
