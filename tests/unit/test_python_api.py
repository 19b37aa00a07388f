"""First mistakes with the public functions, for example lists, dictionaries, names or None as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.data import load_tokenizer, read_samples
from mcore_prefix_tree.trie import build_trie

SAMPLE = Sample(tokens=[1, 2, 3])
NO_SAMPLE = r"samples\[0\] is a {}, not a Sample; give Sample\(tokens=\[...\]\) for each"
CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: fold([[1, 2]]), NO_SAMPLE.format("list")),  # type: ignore[list-item]
    (lambda: fold([{"tokens": [1]}]), NO_SAMPLE.format("dict")),  # type: ignore[list-item]
    (lambda: fold([None]), NO_SAMPLE.format("NoneType")),  # type: ignore[list-item]
    (lambda: fold(np.ones((2, 3), dtype=np.int64)), NO_SAMPLE.format("ndarray")),  # type: ignore[arg-type]
    (lambda: fold("ab"), NO_SAMPLE.format("str")),  # type: ignore[arg-type]
    (lambda: fold([SAMPLE, [1]]), r"samples\[1\] is a list, not a Sample"),  # type: ignore[list-item]
    (lambda: fold(None), "samples is a NoneType; give a list of Sample"),  # type: ignore[arg-type]
    (lambda: fold(SAMPLE), "samples is a Sample; give a list of Sample"),  # type: ignore[arg-type]
    (lambda: fold(one for one in [SAMPLE]), "samples is a generator; give a list"),  # type: ignore[arg-type]
    (lambda: build_trie([[1, 2]]), NO_SAMPLE.format("list")),  # type: ignore[list-item]
    (lambda: fold([SAMPLE], pad_to_multiple_of=2.5), "pad_to_multiple_of=2.5 must be an int"),  # type: ignore[arg-type]
    (lambda: fold([SAMPLE], padded_size="8"), "padded_size='8' must be an integer"),  # type: ignore[arg-type]
    (lambda: fold([SAMPLE], trie=[1]), "trie is a list; give the result of build_trie"),  # type: ignore[arg-type]
    (lambda: TreeMetadata.from_layout([SAMPLE]), "the layout is a list; give the result of mcore_pr"),  # type: ignore[arg-type]
    (lambda: TreeMetadata.from_layout(None), "the layout is a NoneType; give the result of mcore_pr"),  # type: ignore[arg-type]
    (lambda: read_samples(None), "a data path is a NoneType; give the name of a file"),  # type: ignore[arg-type]
    (lambda: read_samples([[1, 2]]), "a data path is a list; give the name of a file"),  # type: ignore[list-item]
    (lambda: read_samples([{"tokens": [1]}]), "a data path is a dict; give the name of a "),  # type: ignore[list-item]
    (
        lambda: read_samples("a.jsonl", tokenizer="mistral-v7"),  # type: ignore[arg-type]
        r"tokenizer is the string 'mistral-v7'; give load_tokenizer\('mistral-v7'\)",
    ),
    (
        lambda: read_samples("a.jsonl", renderings=["mistral-v7"]),  # type: ignore[list-item]
        "renderings is the string 'mistral-v7'; give load_tokenizer",
    ),
    (lambda: read_samples("a.jsonl", names={"tokens": "ids"}), r"names is a dict; give Fie"),  # type: ignore[arg-type]
    (lambda: load_tokenizer(None), "the tokenizer's name is a NoneType; give a name"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "says"), CASES, ids=[says[:40] for _, says in CASES])
def test_values_of_another_type_end_in_a_sentence(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(TypeError, match=f"^{says}"):
        call()
