"""Reasons why samples do not share more, as lines and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mcore_prefix_tree.cli import numbers

if TYPE_CHECKING:
    from mcore_prefix_tree.cli.samples import Samples
    from mcore_prefix_tree.data.causes import Cause, Causes

_SHOWN = 48
_PAGE = "see docs/howto/token-ids.md"
# By cause and, for those of prompts, kind of the words: title, and the way out.
_TITLES: dict[tuple[str, str], tuple[str, str]] = {
    ("retokenised", ""): ("the same text in other tokens", f"train on the token ids that the engine returned; {_PAGE}"),
    ("thinking", ""): (
        "thinking dropped from earlier turns",
        f"keep it if the engine saw it; {_PAGE}",
    ),
    ("call ids", ""): ("random tool-call ids", "number the calls of a conversation instead of drawing ids"),
    ("prompt", "date"): ("another date in the prompt", "give all samples one date, or write it after the shared part"),
    ("prompt", "id"): ("another id in the prompt", "omit the id, or write it after the shared part"),
    ("prompt", "number"): ("another number in the prompt", "give all samples one, or write it after the shared part"),
    ("prompt", "words"): ("another system prompt", "give all samples the same words"),
    ("prompt", "tools"): ("other tools", "give all samples the same tools, in the same order"),
    ("rewritten", ""): ("history rewritten", f"train on the history that the engine saw; {_PAGE}"),
    ("unknown", ""): ("other tokens, cause unknown", "give --tokenizer to see the text"),
}


def find_causes_in_samples(samples: Samples) -> Causes:
    """Find the causes in samples that were read; texts are compared if their tokenizer is known."""
    from mcore_prefix_tree.data.causes import find_causes

    tokenizer = samples.tokenizer.loaded
    decode = None
    if tokenizer is not None:
        known, vocab_size = tokenizer, tokenizer.vocab_size

        def decode(tokens: Sequence[int]) -> str | None:
            return known.decode(tokens) if max(tokens, default=0) < vocab_size else None

    return find_causes(samples.all, decode=decode, sharing=samples.options.sharing)


def causes_lines(causes: Causes, fold_ratio: float, *, has_text: bool) -> list[str]:
    """Return lines about the causes, none if samples do not diverge; ``has_text`` if texts were compared."""
    if not causes.causes:
        if not causes.branches:
            return []
        if not has_text:
            return ["No cause found in token ids; give --tokenizer to compare their text."]
        return ["No cause found why samples share no more: their continuations differ."]
    lines = ["Samples would share more without (fold ratio now, and if mended):"]
    for cause in causes.causes:
        title, way_out = _TITLES[cause.name, cause.detail]
        at_most = "at most " if cause.is_bound else "" if causes.is_complete else "at least "
        lines += [
            f"- {title}, {numbers.plural(cause.samples, 'sample')}: {numbers.ratio(fold_ratio)}, {at_most}"
            f"{numbers.ratio(cause.fold_ratio)}",
            f"  {cause.source} parts from {cause.other} after {numbers.plural(cause.at, 'token')}{_words(cause)}",
            f"  {way_out}",
        ]
    return lines


def _words(cause: Cause) -> str:
    words = cause.example.words
    if words is None:
        return ""
    if words.left == words.right:
        return f": both have {_shown(words.left)}"
    return f": {_shown(words.right)} instead of {_shown(words.left)}"


def _shown(text: str) -> str:
    """Return text on one line, without characters that could move the cursor, cut to a few words."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f'"{plain[:_SHOWN].rstrip()}…"' if len(plain) > _SHOWN else f'"{plain}"'


def causes_json(causes: Causes) -> dict[str, Any]:
    """Return the causes for programs."""
    return {"complete": causes.is_complete, "found": [_json(cause) for cause in causes.causes]}


def _json(cause: Cause) -> dict[str, Any]:
    words = cause.example.words
    return {
        "cause": cause.name,
        "detail": cause.detail or None,
        "samples": cause.samples,
        "fold_ratio": cause.fold_ratio,
        "physical_tokens": cause.physical_tokens,
        "is_upper_bound": cause.is_bound,
        "source": cause.source,
        "other": cause.other,
        "common_tokens": cause.at,
        "words": None if words is None else words.right[:_SHOWN],
        "other_words": None if words is None else words.left[:_SHOWN],
    }
