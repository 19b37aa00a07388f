"""Check that a tokenizer of a Hugging Face folder has tokens for text."""

from __future__ import annotations

import json
import os
from typing import Any

from mcore_prefix_tree.sample import INT32_MAX
from mcore_prefix_tree.utils.inputs import read_regular

# Text of most languages; a tokenizer of another one is tested with text of its tokens.
_TEXT = "the 0 la не 的 の 이 ال"
_TOKENS = 1000


def describe_code(folder: str) -> str | None:
    """Return a sentence about the code that a folder brings for its tokenizer, which is never run; None without any."""
    for name in ("tokenizer_config.json", "config.json"):
        found = _content(folder, name).get("auto_map")
        if isinstance(found, dict):  # by the name of the class that it replaces
            found = found.get("AutoTokenizer")
        if found:
            return f"the 'auto_map' of its {name} names custom code"
    return None


def check_ids(tokenizer: Any, folder: str) -> None:
    """Check that every token's id, also as the files have it, fits its type; raise ValueError with token and folder."""
    ids: dict[Any, Any] = dict(tokenizer.get_vocab())
    listed = _content(folder, "tokenizer.json").get("added_tokens")
    ids |= {one.get("content"): one.get("id") for one in listed or () if isinstance(one, dict)}
    by_id = _content(folder, "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(by_id, dict):
        ids |= {
            one.get("content"): int(token_id)
            for token_id, one in by_id.items()
            if isinstance(one, dict) and token_id.isdecimal()
        }
    for token, token_id in ids.items():
        if isinstance(token_id, int) and token_id > INT32_MAX:
            raise ValueError(
                f"tokenizer '{folder}': its token {str(token)[:40]!r} has the id {token_id}; token ids are 0 to "
                f"{INT32_MAX}"
            )


def _content(folder: str, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder; empty if it cannot be read, since transformers did without it."""
    try:
        found = json.loads(read_regular(os.path.join(folder, name)))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_encodes_text(tokenizer: Any, folder: str) -> None:
    """Raise ValueError, naming the folder, if every text becomes only control tokens and the unknown one.

    A folder whose vocabulary is empty, or lost its merges or its pieces, loads, but encodes no text.
    """
    added = tokenizer.added_tokens_decoder
    silent = {token_id for token_id, token in added.items() if token.special} | _unknown(tokenizer)
    if set(_ids(tokenizer, _TEXT)) <= silent and not any(
        set(_ids(tokenizer, tokenizer.decode([token_id]))) - silent
        for token_id in range(min(len(tokenizer), _TOKENS))
        if token_id not in silent
    ):
        what = "nothing" if not _ids(tokenizer, _TEXT) else "unknown or control tokens"
        raise ValueError(
            f"tokenizer '{folder}' makes {what} of every text: its vocabulary of {len(tokenizer)} tokens is empty or "
            "damaged; download the folder again"
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception:  # one without an unknown token raises for words that it does not have
        return []
    return ids


def _unknown(tokenizer: Any) -> set[int | None]:
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    piece = getattr(model, "unk_token", None)
    return {tokenizer.unk_token_id, None if piece is None else model.token_to_id(piece)}
