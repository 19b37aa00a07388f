"""Padding that Megatron-LM adds to a vocabulary has no probability under ``--prefix-tree``, in no layout.

The stock loop gives it some. The oracle is the stock run of a vocabulary without padding, whose checkpoints Megatron-LM
reads into a padded one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm import (
    CPU,
    ENTRY,
    FIRST,
    FOLDED,
    ITERATIONS,
    LOSS,
    MODEL,
    TRAIN,
    VOCAB,
    Stock,
    assert_same_tensors,
    megatron,
    require_checkout,
    trained,
)

require_checkout()

TP2 = "--tensor-model-parallel-size 2"
UNPADDED = f"--padded-vocab-size {VOCAB} --vocab-size {VOCAB}"
LAYOUTS = {
    "one process": (1, f"--vocab-size {VOCAB} --padded-vocab-size 200"),
    "tp2": (2, f"--vocab-size {VOCAB} --make-vocab-size-divisible-by 96 {TP2}"),
    "tp2, all on one rank": (2, f"--vocab-size {VOCAB} --padded-vocab-size 300 {TP2}"),
    "tp2, logits": (2, f"--vocab-size {VOCAB} --padded-vocab-size 300 --prefix-tree-no-fused-head {TP2}"),
    "pp2": (2, f"--vocab-size {VOCAB} --padded-vocab-size 200 --pipeline-model-parallel-size 2"),
}


@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(name, marks=pytest.mark.ci) for name in LAYOUTS if name != "tp2")]
)
def test_training_is_that_of_the_vocabulary_without_padding(
    stock: Stock, base: Path, tmp_path: Path, layout: str
) -> None:
    ranks, vocabulary = LAYOUTS[layout]
    model = MODEL.replace(UNPADDED, vocabulary)
    run = trained(ENTRY, CPU, model, TRAIN, FOLDED, stock.data, f"--load {base} --save {tmp_path}", ranks=ranks)
    for iteration in range(FIRST + 1, ITERATIONS + 1):
        assert run.losses[iteration] == pytest.approx(stock.losses[iteration], rel=LOSS), iteration
    assert_same_tensors(tmp_path, stock.folder, ITERATIONS, padded=True)


def test_a_token_in_the_padding_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"tokens": [1, 2, 3]}\n{"tokens": [1, 2, 130]}\n')
    model = MODEL.replace(UNPADDED, LAYOUTS["one process"][1])
    run = megatron(ENTRY, CPU, model, TRAIN, FOLDED, f"--prefix-tree-data-path {data}")
    assert run.status != 0
    assert f"has 130 at index 2, outside the model's vocabulary of {VOCAB}" in run.output
