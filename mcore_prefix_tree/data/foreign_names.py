"""Names that other trainers and engines give to fields of rows of token ids, and the fields that they are here."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from mcore_prefix_tree.data.token_rows import MASKS, TOKEN_MARKS

_PROMPTS = ("prompt_ids", "prompt_token_ids", "prompt_input_ids", "prompts")
_RESPONSES = (
    "completion_ids", "completion_token_ids", "output_ids", "output_token_ids", "response_ids", "response_token_ids",
    "token_ids",
)  # fmt: skip
_IDS = {"input_ids": "tokens"} | dict.fromkeys(_PROMPTS, "prompt_tokens") | dict.fromkeys(_RESPONSES, "response_tokens")
_LENGTHS = dict.fromkeys(("completion_length", "response_len", "response_lengths"), "response_length")
# Words in foreign names, with the field that each means.
_MASK = re.compile(r"mask", re.IGNORECASE)
_LABELS = re.compile(r"(^|_)(labels|label_ids|target_ids|target_tokens)(_|$)", re.IGNORECASE)
_WEIGHTS = frozenset({"loss_scale", "loss_scales", "loss_weight", "loss_weights", "token_weights", "weights"})
_LOGPROBS = re.compile(r"log_?probs?(_|$)|(^|_)logps?(_|$)", re.IGNORECASE)
_WHOSE = (("teacher", "teacher"), ("ref", "ref_logprobs"), ("old", "old_logprobs"), ("prev", "old_logprobs"))
# Names for the length of the prompt, for a row of several samples, and for a sample that does not count, with the value
# that means so.
_PROMPT_LENGTHS = frozenset(
    {"num_prompt_tokens", "prompt_len", "prompt_length", "prompt_lengths", "source_len", "source_length"}
)
_POSITIONS = "position_ids"
_BORDERS = frozenset({"cu_seq_lens", "cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q"})
_LENGTHS_OF_MANY = frozenset({"seq_lengths", "seq_lens", "sequence_lengths"})
_NUMBERS = frozenset({"doc_ids", "document_ids", "seq_ids", "segment_ids", "sequence_ids"})
_LEFT_OUT = {"mask_sample": True, "remove_sample": True, "sample_mask": False}
_ASIDE = frozenset({*_PROMPT_LENGTHS, _POSITIONS, *_BORDERS, *_LENGTHS_OF_MANY, *_NUMBERS, *_LEFT_OUT})
# Names with such words whose content is never scored.
_HARMLESS = frozenset({"special_tokens_mask", "prompt_logprobs"})


@lru_cache(maxsize=4096)
def guess_field(name: str) -> str | None:
    """Return the field of ours that a field of this name seems to be; None if its name does not say."""
    if name in _HARMLESS or name in _ASIDE:
        return None
    if name in _IDS or name in _LENGTHS:
        return _IDS.get(name) or _LENGTHS[name]
    if _LOGPROBS.search(name):
        return next((ours for part, ours in _WHOSE if part in name.lower()), "rollout_logprobs")
    if _LABELS.search(name):
        return "labels"
    return "loss_mask" if _MASK.search(name) or name in _WEIGHTS else None


def is_telling(name: str) -> bool:
    """Return whether a field of this name changes what is trained on, though it is not read."""
    return name in _ASIDE or guess_field(name) is not None


def suggest_fields(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Return how ``names`` of a record without a mark could be given in ``data.fields``; empty if none is an id."""
    found: dict[str, str] = {}
    for name in names:
        meant = None if name in known else guess_field(name)
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
    """Return ``suggest_fields`` a record whose field of completions holds ids of the response."""
    mapping: dict[str, str | None] = {**suggest_fields([*names, _RESPONSES[0]], known)}
    if "response_tokens" in mapping:
        return mapping | {"response_tokens": mark}
    return mapping | {mark: None}


def shown(mapping: Mapping[str, str | None]) -> str:
    """Return the text of a mapping as ``data.fields`` takes it."""
    return json.dumps(dict(mapping), ensure_ascii=False)


def fault_of_unread(row: Mapping[str, Any], read: Collection[str], given: Mapping[str, str | None]) -> str | None:
    """Return the fault of unread fields, not in ``given``, that change what a row of token ids trains; None without."""
    has_mask = bool(row.keys() & {*MASKS, "response_length", "response_tokens"})
    for name in row:
        fault = _fault_aside(name, row, given, has_mask=has_mask) if name in _ASIDE else None
        if fault is not None:
            return fault
        meant = None if name in read else guess_field(name)
        if meant is None or meant in given or meant in row:
            continue
        if name in _IDS or name in _LENGTHS:
            if has_mask or name == "input_ids":
                continue
        elif not _has_entries(row[name]) or _is_settled(name, meant, row):
            continue
        if name in _IDS:
            return (
                f"field '{name}' is not read, and without a mask the prompt is scored too; give 'loss_mask' or "
                f"'response_length', or add {shown({meant: None})} to data.fields if all is to be scored"
            )
        if name == "prompt_mask":
            return (
                "field 'prompt_mask' is not read; give the prompt without padding, and 'loss_mask' with an entry for "
                "each token of prompt and response"
            )
        return (
            f"field '{name}' is not read, though its name says that it is '{meant}'; add {shown({meant: name})} to "
            f"data.fields, or {shown({meant: None})} if it has nothing to do with training"
        )
    return None


def _fault_aside(name: str, row: Mapping[str, Any], given: Mapping[str, str | None], *, has_mask: bool) -> str | None:
    """Return what is wrong with a field that no field of ours is the same as."""
    if name in _PROMPT_LENGTHS:
        if has_mask or "loss_mask" in given:
            return None
        return (
            f"field '{name}' is not read, and without a mask the prompt is scored too; give 'response_length', the "
            f"number of tokens behind the prompt, or 'loss_mask', or add {shown({'loss_mask': None})} to data.fields "
            "if all is to be scored"
        )
    if name in _LEFT_OUT:
        if (
            row[name] != _LEFT_OUT[name]
            or "exclude" in row
            or "exclude" in given
            or not np.any(row.get("loss_mask", 1))
        ):
            return None
        return (
            f"field '{name}' is not read, though it says that the sample is left out; give a 'loss_mask' of zeros, or "
            f"'exclude' if its reward must not count either, or add {shown({'exclude': None})} to data.fields"
        )
    if _has_several(name, row):
        return f"field '{name}' says that the row holds several samples, one behind the other; give each its own row"
    return None


def _has_several(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether a field of a row of token ids says that it is packed."""
    try:
        values = np.asarray(row[name])
        seen = np.asarray(row.get("attention_mask", np.ones(len(values)))).astype(bool)
    except (TypeError, ValueError):
        return False
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        return False
    if name in _BORDERS:
        return len(np.unique(values)) > 2
    if name in _LENGTHS_OF_MANY:
        return int(np.count_nonzero(values)) > 1
    if seen.shape != values.shape:
        return False
    shown_values = values[seen]
    return bool((np.diff(shown_values) < 0).any() if name == _POSITIONS else len(np.unique(shown_values)) > 1)


def _is_settled(name: str, meant: str, row: Mapping[str, Any]) -> bool:
    """Return whether other fields of the row already decide this one's content."""
    if name == "prompt_mask" and "prompt_tokens" in row:  # nothing of the prompt is scored; without padding it is even
        return len(np.unique(np.asarray(row[name], dtype=object).astype(str))) == 1
    return name not in _WEIGHTS and meant in ("loss_mask", "labels") and bool(row.keys() & {"loss_mask", "labels"})


def _has_entries(value: object) -> bool:
    """Return whether a value has entries as a field per token has: a list of anything but text, or an object."""
    if isinstance(value, (list, np.ndarray)):
        return len(value) > 0 and not isinstance(value[0], str)
    return isinstance(value, dict)
