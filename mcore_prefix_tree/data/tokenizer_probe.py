"""Check that a tokenizer of a Hugging Face folder has tokens for text."""

from __future__ import annotations

from typing import Any

# Something of most languages; a tokenizer of another one is asked for text of its own tokens.
_TEXT = "the 0 la не 的 の 이 ال"
_TOKENS = 1000


def check_encodes_text(tokenizer: Any, folder: str) -> None:
    """Check that some text becomes tokens other than control tokens and the unknown one.

    A folder whose vocabulary is empty, or lost its merges or its pieces, loads, and makes of every text nothing.

    Raises:
        ValueError: no text does; names the folder.
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
