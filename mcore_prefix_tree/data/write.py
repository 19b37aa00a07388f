"""Samples to JSON Lines that :mod:`mcore_prefix_tree.data.jsonl` reads back, in files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample, Tempered
from mcore_prefix_tree.signals import Signals, Teacher


def row_of(sample: Sample) -> dict[str, Any]:
    """The JSON object of a sample with everything that it carries; ``source`` is for people and is not read back."""
    key = sample.merge_key
    row: dict[str, Any] = {
        "source": sample.source,
        "tokens": sample.tokens.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
    }
    if isinstance(key, Tempered):
        row["temperature"], key = key.temperature, key.key
    if key is not None:
        row["merge_key"] = key
    for field in fields(Signals):
        value = getattr(sample.signals, field.name)
        if value is not field.default:
            row[field.name] = _plain(value)
    return row


def numbers(values: npt.NDArray[np.floating]) -> list[float | None]:
    """A list for JSON, which has no NaN: null stands for it."""
    return [None if value != value else value for value in values.tolist()]


def _plain(value: Any) -> Any:
    if isinstance(value, Teacher):
        return {"token_ids": value.token_ids.tolist(), "logprobs": [numbers(row) for row in value.logprobs]}
    if isinstance(value, np.ndarray):
        return numbers(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


@contextmanager
def whole_file(path: str | Path) -> Iterator[TextIO]:
    """Write a text file that appears under its name once all of it is written, and not at all after an error.

    Raises:
        OSError: its folder cannot be written to.
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
