"""Calls with rows of a Transformers model that folds in its backbone, against each row by itself in double precision."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracles import worst

transformers = pytest.importorskip("transformers")
from test_integration_transformers import SMALL, InDouble, gradients  # noqa: E402

from mcore_prefix_tree.integrations.trl import LogFolding, fold_backbone  # noqa: E402

VOCAB = SMALL["vocab_size"]
PAD = 0
SIZES = SMALL | {"pad_token_id": PAD, "attn_implementation": "sdpa"}
FAMILIES = {
    "Qwen3": {},
    "Llama": {},
    "GPTNeoX": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Qwen3Moe": {
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    },
}
# Branches at several depths, duplicates, a strict prefix, rows of one token, and padding only.
ROWS = [[5, 6, 7, 8, 9], [5, 6, 7, 3], [5, 6, 7, 8, 9], [5, 6], [5], [], [11, 12, 13], [5, 6, 7, 8, 4, 2], [11]]


def make(family="Qwen3", *, head="CausalLM", **settings):
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | settings)
    auto = getattr(transformers, f"AutoModelFor{head}")
    return auto.from_config(config, attn_implementation="sdpa").double().train()


def padded(rows, side="right", extra=0):
    """Padded rows as a call, and the columns of each row's tokens."""
    width = max([1, *map(len, rows)]) + extra
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    columns = [range(width - len(row), width) if side == "left" else range(len(row)) for row in rows]
    for at, (row, places) in enumerate(zip(rows, columns, strict=True)):
        ids[at, list(places)] = torch.tensor(row, dtype=torch.long)
        mask[at, list(places)] = 1
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}, columns


def packed(rows):
    """Rows behind each other, as in padding-free batches."""
    rows = [row for row in rows if row]
    ids = torch.tensor([token for row in rows for token in row])[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    return {"input_ids": ids, "position_ids": positions, "use_cache": False}


def rows_of_padded(model, rows, **layout):
    call, columns = padded(rows, **layout)
    logits = model(**call).logits
    return [logits[at, list(places)] for at, places in enumerate(columns) if len(places)]


def rows_of_packed(model, rows):
    return list(model(**packed(rows)).logits[0].split([len(row) for row in rows if row]))


def rows_alone(model, rows):
    return [model(torch.tensor([row]), use_cache=False).logits[0] for row in rows if row]


def loss_of(logits, seed=0):
    """A loss that weighs every token of every row differently."""
    rng = torch.Generator().manual_seed(seed)
    return sum(
        (row.log_softmax(-1) * torch.randn(row.shape, generator=rng, dtype=torch.float64)).sum() for row in logits
    )


def assert_exact(stock, folds, rows, call, *, folded=True):
    folds.folding.report(with_grad=True)
    with InDouble():
        expected, actual = rows_alone(stock, rows), call(folds, rows)
        assert max(worst(one, other) for one, other in zip(actual, expected, strict=True)) < 1e-12
        wanted, found = gradients(stock, loss_of(expected)), gradients(folds, loss_of(actual))
    assert wanted.keys() == found.keys()
    # In rows of one token, queries and keys have a gradient of rounding only: compare with that of the layer's values.
    floor = 1e-3 * max(grad.norm() for grad in wanted.values())
    for name, grad in wanted.items():
        assert (found[name] - grad).norm() < 1e-12 * max(grad.norm(), floor), name
    report = folds.folding.report(with_grad=True)
    assert report.logical_tokens == sum(map(len, rows))
    assert (report.calls, report.left_alone) == (1, not folded)


CALLS = {
    "right padding": rows_of_padded,
    "left padding": lambda model, rows: rows_of_padded(model, rows, side="left", extra=2),
    "padding-free": rows_of_packed,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_each_row_by_itself(family, call):
    stock = make(family)
    folds = fold_backbone(copy.deepcopy(stock))
    if family == "GPT2" and call == "left padding":
        with pytest.raises(ValueError, match="row 0 begins at position 3, and the model's positions are not rotary"):
            CALLS[call](folds, ROWS)
        return
    assert_exact(stock, folds, ROWS, CALLS[call])


MODELS = {}


@given(
    st.lists(st.lists(st.integers(1, 4), max_size=6), min_size=1, max_size=6).filter(any),
    st.sampled_from(sorted(CALLS)),
)
def test_random_rows_equal_each_row_by_itself(rows, call):
    if not MODELS:
        MODELS["stock"] = make()
        MODELS["folds"] = fold_backbone(make(), least_fold_ratio=1.0)
    shares = len({row[0] for row in rows if row}) < sum(map(bool, rows))
    assert_exact(MODELS["stock"], MODELS["folds"], rows, CALLS[call], folded=shares)
