"""Keys of other trainers, engines and data sets with a known meaning; all of them are read under our name, or refused.

A record of any format has keys that are read (:data:`mcore_prefix_tree.data.formats.READ`), keys of these tables, which
are errors that give the way out, and others, which are carried and named once (``Skipped.unread``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from mcore_prefix_tree.data.token_rows import MASKS, TOKEN_MARKS

# Tables of ``data.format``: their names of our fields, None for a field that repeats others. Names of messages too.
FORMATS_BY_NAME: Mapping[str, Mapping[str, str | None]] = {
    "trl": {
        "input_ids": "tokens", "prompt_ids": "prompt_tokens", "completion_ids": "response_tokens",
        "logprobs": "rollout_logprobs", "sampling_per_token_logps": "rollout_logprobs", "env_mask": "loss_mask",
        "old_per_token_logps": "old_logprobs", "ref_per_token_logps": "ref_logprobs", "advantages": "advantage",
    },
    "verl": {
        "input_ids": "tokens", "prompts": None, "responses": None, "position_ids": None, "uid": "group",
        "prompt_ids": "prompt_tokens", "response_ids": "response_tokens", "response_logprobs": "rollout_logprobs",
        "old_log_probs": "old_logprobs", "ref_log_prob": "ref_logprobs", "rollout_log_probs": "rollout_logprobs",
        "advantages": "advantage",
    },
    "slime": {
        "rollout_log_probs": "rollout_logprobs", "teacher_log_probs": None, "group_index": "group", "label": None,
        "step_loss_mask": "loss", "rollout_routed_experts": "routed_experts", "prompt": None, "response": None,
    },
    "vllm": {
        "prompt_token_ids": "prompt_tokens", "token_ids": "response_tokens", "logprobs": "rollout_logprobs",
        "prompt_logprobs": None, "text": None, "prompt": None,
    },
}  # fmt: skip


# Patterns of names in one spelling (:func:`plain`), by the field of ours that they mean: in rows of token ids, ...
_LOGPROBS = "(logprobs?|log_probs?|logps?|per_token_logps|token_logprobs|token_log_probs)"
_SCALES = "(loss|token|training|target)_(scales?|weights?)|weights"
_OF_TOKENS = {
    "tokens": "input_ids",
    "prompt_tokens": "(prompt|query)_(ids|token_ids|input_ids)|prompts",
    "response_tokens": "((completion|output|response|generated|answer)_)(token_)?ids|token_ids",
    "response_length": "(completion|response|output)_(len|lens|lengths)|completion_length",
    "loss_mask": "((action|agent|answer|assistant|assistant_tokens?|completion|env|env_token|generation|input|labels?|"
    "learn|learnable|loss|output|policy|response|role|scored|scoring|student|supervised|target|token|token_loss|tokens|"
    f"train|trainable|training|turn)_)?masks?|prompt_mask|{_SCALES}",
    "labels": "(label|target)_(ids|tokens)|((shifted|target|lm)_)?labels|labels_shifted",
    "rollout_logprobs": "((rollout|sampling|sampler|response|completion|output|output_token|generation|inference|"
    f"engine|vllm|sglang|behaviou?r|actor|policy)_)?{_LOGPROBS}|{_LOGPROBS}_rollout",
    "old_logprobs": f"(old|prev|previous|old_policy|old_actor|prev_policy)_{_LOGPROBS}|{_LOGPROBS}_old",
    "ref_logprobs": f"(ref|reference)(_policy|_model)?_{_LOGPROBS}|{_LOGPROBS}_ref",
    "teacher": f"teacher(_model)?_{_LOGPROBS}|{_LOGPROBS}_teacher",
}
# ... and in other records.
_OF_CHATS = {
    "tools": "(tool|function|api)_(defs|definitions|schemas|specs|specifications|descriptions|list|json)|"
    "(available|provided|given|all|openai|system)_(tools|functions)|"
    "((tools|functions|apis)_)?(schema|spec|definition|json|list|def)|"
    "functions|tool|toolset|tool_set|toolbox|apis|api_list|tools_str|tool_schema",
    "system": "system_(prompt|message|instruction|msg)",
    "chosen": "(chosen|preferred|winning|better|win|good)_"
    "(response|answer|output|completion|messages?|conversations?|text)",
    "rejected": "(rejected|dispreferred|non_?preferred|losing|worse|lose|bad|negative)"
    "(_(responses?|answers?|output|completion|messages?|conversations?|text))?",
}
# Names with such words whose content is never scored.
_HARMLESS = frozenset({"special_tokens_mask", "prompt_logprobs"})
# Weights of all of a record; and switches, of conversations, with the value that changes nothing.
_WEIGHTS = (
    "((sample|example|instance|loss|record|row|data|importance|sampling|train)_)?weight|"
    "(sample|example|instance|loss|record|row|data|importance|sampling|train)_weights"
)
_ON = f"{_WEIGHTS}|weights|loss|loss_scale|step_loss_mask|train|training|trainable|is_train|train_on_turn"
_OFF = "masked|is_masked|ignore_loss"
_SWITCHES = f"{_ON}|{_OFF}"
# Fields that no field of ours is the same as: the length of the prompt; those of a row of several samples; and a sample
# that is left out, with the value that means so.
_PROMPT_LENGTH = "num_prompt_tokens|(prompts?|source)_(lens?|lengths?)"
_POSITIONS, _BORDERS, _LENGTHS = "position_ids", "cu_seq_?lens(_q)?", "(seq|sequence)_lengths|seq_lens"
_NUMBERS = "(doc|document|seq|segment|sequence)_ids"
_LEFT_OUT = {"mask_sample": True, "remove_sample": True, "sample_mask": False}
_ASIDE = "|".join((_PROMPT_LENGTH, _POSITIONS, _BORDERS, _LENGTHS, _NUMBERS, *_LEFT_OUT))


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """Return a name in one spelling: ``toolDefs``, ``Tool-Defs`` and ``tool_defs`` are one."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


@lru_cache(maxsize=16384)
def is_named(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name in one spelling."""
    return re.fullmatch(pattern, plain(name)) is not None


def meaning(name: str, *, of_tokens: bool) -> str | None:
    """Return the field of ours that a name is known to mean in a row of token ids, or in another record; or None."""
    patterns = {} if name in _HARMLESS else _OF_TOKENS if of_tokens else _OF_CHATS
    return next((ours for ours, pattern in patterns.items() if is_named(name, pattern)), None)


def is_known(name: str) -> bool:
    """Return whether a field of this name has a known meaning, though it is not read."""
    known = (_ASIDE, _SWITCHES, *_OF_TOKENS.values(), *_OF_CHATS.values())
    return name not in _HARMLESS and any(is_named(name, pattern) for pattern in known)


def is_known_in_chats(name: str) -> bool:
    """Return whether a field of this name has a known meaning in a record that is no row of token ids."""
    return any(is_named(name, pattern) for pattern in (_SWITCHES, *_OF_CHATS.values()))


def suggest_fields(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Return how ``names`` of a record without a mark could be given in ``data.fields``; empty if none is an id."""
    found: dict[str, str] = {}
    for name in names:
        meant = None if name in known else meaning(name, of_tokens=True)
        if meant is not None:
            found.setdefault(meant, name)
    if found.get("response_tokens") == "token_ids" and not found.keys() & {"tokens", "prompt_tokens"}:
        found["tokens"] = "token_ids"
    surplus = {"prompt_tokens", "response_tokens"} if "tokens" in found else set[str]()
    if found.keys() >= {"prompt_tokens", "response_tokens"}:
        surplus = {"tokens", "response_length"}
    mapping = {meant: name for meant, name in found.items() if meant not in surplus}
    return mapping if mapping.keys() & set(TOKEN_MARKS) else {}


def shown(mapping: Mapping[str, str | None]) -> str:
    """Return the text of a mapping as ``data.fields`` takes it."""
    return json.dumps(dict(mapping), ensure_ascii=False)


def fault_of_unread(
    row: Mapping[str, Any], read: Collection[str], given: Mapping[str, str | None], *, of_tokens: bool
) -> str | None:
    """Return the fault of fields that are neither ``read`` nor in ``given`` and change what is trained, or None."""
    has_mask = bool(row.keys() & {*MASKS, "response_length", "response_tokens"})
    for name, value in row.items():
        if name in read:
            continue
        meant, fault = meaning(name, of_tokens=of_tokens), None
        if meant is not None and (meant in given or meant in row):
            meant = None  # it repeats a field that is read
        is_number = isinstance(value, (int, float)) or not (of_tokens or isinstance(value, str))
        if is_number and is_named(name, _WEIGHTS if of_tokens else _SWITCHES):  # how much all of the record counts
            if hasattr(value, "__len__") or value != (0 if is_named(name, _OFF) else 1):
                way_out = "multiply 'loss_mask' by it" if of_tokens else "give it to each assistant message as 'weight'"
                fault = (
                    f"field '{name}' of the record is not read, though it says how much the record is trained on; "
                    f"{way_out}, mark what must not count with 'exclude', or leave it unread: "
                    f"data.fields={shown({name: None})}"
                )
        elif of_tokens:
            fault = _fault_of_tokens(name, value, row, given, meant, has_mask=has_mask)
        elif meant is not None and has_entries(value) and value != "[]":
            fault = _fault_of_name(name, meant)
        if fault is not None:
            return fault
    return None


def _fault_of_tokens(
    name: str, value: Any, row: Mapping[str, Any], given: Mapping[str, str | None], meant: str | None, *, has_mask: bool
) -> str | None:
    """Return the fault of a field of a row of token ids, which could be ``meant`` as one of ours."""
    # Fields that say which tokens are the prompt's: without any mask, the prompt is scored.
    if not has_mask and is_named(name, _PROMPT_LENGTH) and "loss_mask" not in given:
        way_out = "give 'response_length', the number of tokens behind the prompt, or 'loss_mask'"
        return _fault_of_prompt(name, way_out, "loss_mask")
    if not has_mask and meant in ("prompt_tokens", "response_tokens"):
        return _fault_of_prompt(name, "give 'loss_mask' or 'response_length'", meant)
    is_left_out = plain(name) in _LEFT_OUT and value == _LEFT_OUT[plain(name)]
    if is_left_out and "exclude" not in row and "exclude" not in given and np.any(row.get("loss_mask", 1)):
        return (
            f"field '{name}' is not read, though it says that the sample is left out; give a 'loss_mask' of zeros, or "
            f"'exclude' if its reward must not count either, or add {shown({'exclude': None})} to data.fields"
        )
    if _has_several(name, value, row):
        return f"field '{name}' says that the row holds several samples, one behind the other; give each its own row"
    if meant is None or not _is_news(name, value, row, meant, has_mask=has_mask):
        return None
    if plain(name) == "prompt_mask":
        return (
            "field 'prompt_mask' is not read; give the prompt without padding, and 'loss_mask' with an entry for "
            "each token of prompt and response"
        )
    return _fault_of_name(name, meant)


def _is_news(name: str, value: Any, row: Mapping[str, Any], meant: str, *, has_mask: bool) -> bool:
    """Return whether a field of a row of token ids that is ``meant`` as one of ours tells what no other field does."""
    if meant in ("tokens", "prompt_tokens", "response_tokens"):
        return False
    if meant == "response_length":
        return not has_mask
    has_numbers = isinstance(value, (list, np.ndarray)) and has_entries(value) and not isinstance(value[0], str)
    if not (has_numbers or isinstance(value, dict)):
        return False
    if plain(name) == "prompt_mask" and "prompt_tokens" in row:  # nothing of the prompt is scored, but it may be padded
        return len(np.unique(np.asarray(value, dtype=object).astype(str))) > 1
    is_mask = meant in ("loss_mask", "labels") and not is_named(name, _SCALES)
    return not (is_mask and row.keys() & {"loss_mask", "labels"})


def has_entries(value: Any) -> bool:
    """Return whether a value is neither empty nor null, false or zero."""
    return bool(len(value) if hasattr(value, "__len__") else value)


def _fault_of_prompt(name: str, way_out: str, ours: str) -> str:
    return (
        f"field '{name}' is not read, and without a mask the prompt is scored too; {way_out}, or add "
        f"{shown({ours: None})} to data.fields if all is to be scored"
    )


def _fault_of_name(name: str, meant: str) -> str:
    return (
        f"field '{name}' is not read, though its name says that it is '{meant}'; add {shown({meant: name})} to "
        f"data.fields, or {shown({meant: None})} if it has nothing to do with training"
    )


def _has_several(name: str, value: Any, row: Mapping[str, Any]) -> bool:
    """Return whether a field of a row of token ids says that it is packed."""
    if not is_named(name, "|".join((_POSITIONS, _BORDERS, _LENGTHS, _NUMBERS))):
        return False
    try:
        values = np.asarray(value)
        seen = np.asarray(row.get("attention_mask", np.ones(len(values)))).astype(bool)
    except (TypeError, ValueError):
        return False
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        return False
    if is_named(name, _BORDERS):
        return len(np.unique(values)) > 2
    if is_named(name, _LENGTHS):
        return int(np.count_nonzero(values)) > 1
    if seen.shape != values.shape:
        return False
    values = values[seen]
    return bool((np.diff(values) < 0).any() if is_named(name, _POSITIONS) else len(np.unique(values)) > 1)
