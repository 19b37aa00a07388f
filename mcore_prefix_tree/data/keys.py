"""Keys of other trainers, engines and data sets with a known meaning; all of them are read under our name, or refused.

A record of any format has keys that are read (:data:`mcore_prefix_tree.data.formats.READ`), keys of these tables, which
are errors that give the way out, and others, which are carried and named once (``Skipped.unread``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import product
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


def each(*parts: str) -> list[str]:
    """Return all combinations of words, one of each part; ``/`` is no word."""
    words = ([word.strip("/") for word in part.split()] for part in parts)
    return ["_".join(filter(None, combined)) for combined in product(*words)]


_LOGPROBS = "logprobs log_probs logprob log_prob logps logp per_token_logps token_logprobs token_log_probs"
_RATIOS = {
    "rollout_logprobs": "/ rollout sampling sampler response completion output output_token generation inference engine"
    " vllm sglang behavior behaviour actor policy",
    "old_logprobs": "old prev previous old_policy old_actor prev_policy",
    "ref_logprobs": "ref reference ref_policy reference_policy ref_model reference_model",
    "teacher": "teacher teacher_model",
}
_OF_TOKENS: Mapping[str, str] = {
    "input_ids": "tokens",
    **dict.fromkeys(each("prompt query", "ids token_ids input_ids"), "prompt_tokens"),
    "prompts": "prompt_tokens",
    **dict.fromkeys(each("completion output response generated answer", "ids token_ids"), "response_tokens"),
    "token_ids": "response_tokens",
    **dict.fromkeys(each("completion response output", "len lens lengths"), "response_length"),
    "completion_length": "response_length",
    **dict.fromkeys(
        each(
            "/ action agent answer assistant assistant_token assistant_tokens completion env env_token generation input"
            " label labels learn learnable loss output policy response role scored scoring student supervised target"
            " token token_loss tokens train trainable training turn",
            "mask masks",
        ),
        "loss_mask",
    ),
    **dict.fromkeys(each("loss token training target", "scale scales weight weights"), "loss_mask"),
    "weights": "loss_mask",
    "prompt_mask": "loss_mask",
    **dict.fromkeys(
        (*each("label target", "ids tokens"), *each("/ shifted target lm", "labels"), "labels_shifted"), "labels"
    ),
    **{name: ours for ours, whose in _RATIOS.items() for name in each(whose, _LOGPROBS)},
    **{f"{name}_{short}": ours for name in _LOGPROBS.split() for short, ours in
       {"old": "old_logprobs", "ref": "ref_logprobs", "rollout": "rollout_logprobs", "teacher": "teacher"}.items()},
}  # fmt: skip
# Names with such words whose content is never scored.
_HARMLESS = frozenset({"special_tokens_mask", "prompt_logprobs"})
_WEIGHTS = frozenset({"weights", *each("loss token training target", "scale scales weight weights")})
_OF_CHATS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *each("tool function api", "defs definitions schemas specs specifications descriptions list json"),
            *each("available provided given all openai system", "tools functions"),
            *each("/ tools functions apis", "schema spec definition json list def"),
            *("functions", "tool", "toolset", "tool_set", "toolbox", "apis", "api_list", "tools_str", "tool_schema"),
        ),
        "tools",
    ),
    **dict.fromkeys(each("system", "prompt message instruction msg"), "system"),
    **dict.fromkeys(
        each("chosen preferred winning better win good", "response answer output completion messages message"
              " conversation conversations text"), "chosen"),
    **dict.fromkeys(
        each(
            "rejected dispreferred non_preferred nonpreferred losing worse lose bad negative",
            "/ response responses answer answers output completion messages message conversation conversations text",
        ),
        "rejected",
    ),
}  # fmt: skip
# A weight of all of a record; and switches, of conversations, with the value that changes nothing.
_OF_RECORDS = frozenset(
    {"weight", *each("sample example instance loss record row data importance sampling train", "weight weights")}
)
_SWITCHES = dict.fromkeys(
    (*_OF_RECORDS, "weights", "loss", "loss_scale", "step_loss_mask", "train", "training", "trainable", "is_train",
     "train_on_turn"), 1
) | dict.fromkeys(("masked", "is_masked", "ignore_loss"), 0)  # fmt: skip
# Names for the length of the prompt, for a row of several samples, and for a sample that does not count, with the value
# that means so.
_PROMPT_LENGTHS = frozenset({"num_prompt_tokens", *each("prompt prompts source", "len lens length lengths")})
_POSITIONS = "position_ids"
_BORDERS = frozenset({"cu_seq_lens", "cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q"})
_LENGTHS_OF_MANY = frozenset({"seq_lengths", "seq_lens", "sequence_lengths"})
_NUMBERS = frozenset({"doc_ids", "document_ids", "seq_ids", "segment_ids", "sequence_ids"})
_LEFT_OUT = {"mask_sample": True, "remove_sample": True, "sample_mask": False}
_ASIDE = frozenset({*_PROMPT_LENGTHS, _POSITIONS, *_BORDERS, *_LENGTHS_OF_MANY, *_NUMBERS, *_LEFT_OUT})

_KNOWN = _ASIDE | _OF_TOKENS.keys() | _OF_CHATS.keys() | _SWITCHES.keys()


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """Return a name in one spelling: ``toolDefs``, ``Tool-Defs`` and ``tool_defs`` are one."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def meaning(name: str, *, of_tokens: bool) -> str | None:
    """Return the field of ours that a name is known to mean in a row of token ids, or in another record; or None."""
    return None if name in _HARMLESS else (_OF_TOKENS if of_tokens else _OF_CHATS).get(plain(name))


def is_known(name: str) -> bool:
    """Return whether a field of this name has a known meaning, though it is not read."""
    return plain(name) in _KNOWN and name not in _HARMLESS


def is_known_in_chats(name: str) -> bool:
    """Return whether a field of this name has a known meaning in a record that is no row of token ids."""
    return plain(name) in _OF_CHATS or plain(name) in _SWITCHES


def suggest_fields(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Return how ``names`` of a record without a mark could be given in ``data.fields``; empty if none is an id."""
    found: dict[str, str] = {}
    for name in names:
        meant = None if name in known else meaning(name, of_tokens=True)
        if meant is not None:
            found.setdefault(meant, name)
    if found.get("response_tokens") == "token_ids" and not found.keys() & {"tokens", "prompt_tokens"}:
        found["tokens"] = "token_ids"
    if found.keys() >= {"prompt_tokens", "response_tokens"}:
        surplus = {"tokens", "response_length"}
    elif "tokens" in found:
        surplus = {"prompt_tokens", "response_tokens"}
    else:
        surplus = set()
    mapping = {meant: name for meant, name in found.items() if meant not in surplus}
    return mapping if mapping.keys() & set(TOKEN_MARKS) else {}


def mapping_beside(mark: str, names: Iterable[str], known: Collection[str]) -> dict[str, str | None]:
    """Return :func:`suggest_fields` for a record whose field of completions holds ids of the response."""
    mapping: dict[str, str | None] = {**suggest_fields([*names, "completion_ids"], known)}
    if "response_tokens" in mapping:
        return mapping | {"response_tokens": mark}
    return mapping | {mark: None}


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
        known = plain(name)
        if of_tokens and known in _OF_RECORDS and isinstance(value, (int, float)):
            fault = None if value == 1 else _fault_of_weight(name, of_tokens=True)
        elif not of_tokens and known in _SWITCHES and not isinstance(value, str):
            is_list = hasattr(value, "__len__")
            fault = None if not is_list and value == _SWITCHES[known] else _fault_of_weight(name, of_tokens=False)
        elif of_tokens:
            fault = _fault_of_tokens(name, row, given, has_mask=has_mask)
        else:
            meant = meaning(name, of_tokens=False)
            is_settled = meant is None or meant in given or meant in row or not _says(value)
            fault = None if is_settled or meant is None else _fault_of_name(name, meant)
        if fault is not None:
            return fault
    return None


def _says(value: object) -> bool:
    return bool(len(value) if hasattr(value, "__len__") else value) and value != "[]"


def _fault_of_name(name: str, meant: str) -> str:
    return (
        f"field '{name}' is not read, though its name says that it is '{meant}'; add {shown({meant: name})} to "
        f"data.fields, or {shown({meant: None})} if it has nothing to do with training"
    )


def _fault_of_weight(name: str, *, of_tokens: bool) -> str:
    way_out = "multiply 'loss_mask' by it" if of_tokens else "give it to each assistant message as 'weight'"
    return (
        f"field '{name}' of the record is not read, though it says how much the record is trained on; {way_out}, mark "
        f"what must not count with 'exclude', or leave it unread: data.fields={shown({name: None})}"
    )


def _fault_of_tokens(
    name: str, row: Mapping[str, Any], given: Mapping[str, str | None], *, has_mask: bool
) -> str | None:
    if plain(name) in _ASIDE:
        return _fault_aside(name, row, given, has_mask=has_mask)
    meant, known = meaning(name, of_tokens=True), plain(name)
    if meant is None or meant in given or meant in row:
        return None
    if meant in ("tokens", "prompt_tokens", "response_tokens", "response_length"):
        if has_mask or meant == "tokens":
            return None
        if meant != "response_length":
            return (
                f"field '{name}' is not read, and without a mask the prompt is scored too; give 'loss_mask' or "
                f"'response_length', or add {shown({meant: None})} to data.fields if all is to be scored"
            )
    elif not _has_entries(row[name]) or _is_settled(known, meant, row):
        return None
    if known == "prompt_mask":
        return (
            "field 'prompt_mask' is not read; give the prompt without padding, and 'loss_mask' with an entry for "
            "each token of prompt and response"
        )
    return _fault_of_name(name, meant)


def _fault_aside(name: str, row: Mapping[str, Any], given: Mapping[str, str | None], *, has_mask: bool) -> str | None:
    """Return what is wrong with a field that no field of ours is the same as."""
    known = plain(name)
    if known in _PROMPT_LENGTHS:
        if has_mask or "loss_mask" in given:
            return None
        return (
            f"field '{name}' is not read, and without a mask the prompt is scored too; give 'response_length', the "
            f"number of tokens behind the prompt, or 'loss_mask', or add {shown({'loss_mask': None})} to data.fields "
            "if all is to be scored"
        )
    if known in _LEFT_OUT:
        if (
            row[name] != _LEFT_OUT[known]
            or "exclude" in row
            or "exclude" in given
            or not np.any(row.get("loss_mask", 1))
        ):
            return None
        return (
            f"field '{name}' is not read, though it says that the sample is left out; give a 'loss_mask' of zeros, or "
            f"'exclude' if its reward must not count either, or add {shown({'exclude': None})} to data.fields"
        )
    if _has_several(known, row[name], row):
        return f"field '{name}' says that the row holds several samples, one behind the other; give each its own row"
    return None


def _has_several(known: str, value: Any, row: Mapping[str, Any]) -> bool:
    """Return whether a field of a row of token ids says that it is packed."""
    try:
        values = np.asarray(value)
        seen = np.asarray(row.get("attention_mask", np.ones(len(values)))).astype(bool)
    except (TypeError, ValueError):
        return False
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        return False
    if known in _BORDERS:
        return len(np.unique(values)) > 2
    if known in _LENGTHS_OF_MANY:
        return int(np.count_nonzero(values)) > 1
    if seen.shape != values.shape:
        return False
    shown_values = values[seen]
    return bool((np.diff(shown_values) < 0).any() if known == _POSITIONS else len(np.unique(shown_values)) > 1)


def _is_settled(known: str, meant: str, row: Mapping[str, Any]) -> bool:
    """Return whether other fields of the row already decide this one's content."""
    if known == "prompt_mask" and "prompt_tokens" in row:  # nothing of the prompt is scored; without padding it is even
        return len(np.unique(np.asarray(row["prompt_mask"], dtype=object).astype(str))) == 1
    return known not in _WEIGHTS and meant in ("loss_mask", "labels") and bool(row.keys() & {"loss_mask", "labels"})


def _has_entries(value: object) -> bool:
    """Return whether a value has entries as a field per token has: a list of anything but text, or an object."""
    if isinstance(value, (list, np.ndarray)):
        return len(value) > 0 and not isinstance(value[0], str)
    return isinstance(value, dict)
