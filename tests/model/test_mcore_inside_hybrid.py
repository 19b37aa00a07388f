"""A hybrid model that folds packed rows inside gives the stock HybridModel's outputs for each separate row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness.in_double import kept_double
from harness.marks import quick
from harness.seam_models import DELTA_NET, MAMBA, VOCAB, hybrid, hybrid_twins, tiny_config, with_long_memory
from harness.seam_runs import SPARSE
from megatron.core.transformer.dot_product_attention import DotProductAttention
from packed_calls import (
    FP64,
    MODELS,
    ROWS,
    check_logits,
    check_logprobs,
    check_losses,
    packed,
)

from mcore_prefix_tree.cpu.specs import PackedAttention, exchanged
from mcore_prefix_tree.mcore import fold_inside, folding_model
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL

if not HAS_HYBRID_MODEL:
    pytest.skip("this megatron-core has no HybridModel", allow_module_level=True)

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_model import HybridModel

from mcore_prefix_tree.cpu.hybrid import hybrid_stack

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]


# pattern of the layers, fields of the config, arguments of HybridModel
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "attention and MLPs": ("*-*-", {}, {}),
    "tied, ends in attention": ("-**", {}, {"share_embeddings_and_output_weights": True}),
    "experts": ("*E*-", MODELS["experts"], {}),
    "latent attention": ("+-", MODELS["latent"], {}),
    "recomputed": ("*-*-", MODELS["recomputed"], {}),
    "state spaces": (
        "M-M*",
        {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": 4},
        {},
    ),
}


def inside(name: str, **settings: Any) -> tuple[Any, Any]:
    pattern, fields, model = VARIANTS[name]
    if not set(pattern) <= Symbols.VALID_LAYERS:
        pytest.skip("latent attention in a pattern came with megatron-core 0.19")
    stock, tree = hybrid_twins(tiny_config(num_layers=len(pattern), **fields), pattern, follows=False, **model)
    return fold_inside(tree, **settings), stock


@pytest.mark.parametrize("name", quick("attention and MLPs", "experts", "state spaces", of=VARIANTS))
def test_logits_and_losses(name: str) -> None:
    # Upstream's scores of experts are in fp32 for any dtype of the model, and so are decays and step biases of Mamba.
    limit = 1e-6 if name in ("experts", "state spaces") else FP64
    model, stock = inside(name, check_first=True)
    check_logits(model, stock, packed(ROWS, gap=1, tail=2), limit)
    check_losses(model, stock, packed(ROWS), limit)
    assert type(model) is HybridModel


def test_logprobs_and_entropy_of_rows() -> None:
    """Folding itself answers this output processor; the model has no argument of that name."""
    check_logprobs(*inside("attention and MLPs"), packed(ROWS, gap=1))


def test_a_class_that_folds() -> None:
    config = tiny_config(num_layers=2)
    stock = hybrid(config, "*-")
    model = folding_model(HybridModel)(
        config, hybrid_stack, VOCAB, 64, hybrid_layer_pattern="*-", position_embedding_type="rope"
    )
    assert type(model).__name__ == "FoldingHybridModel"
    model.double().load_state_dict(stock.state_dict(), strict=True)
    check_logits(model, stock, packed(ROWS))


def test_the_report_counts_the_layers_of_the_pattern() -> None:
    """Attention in one layer of three: its work is that layer's, and MLPs are in the others."""
    config = tiny_config(num_layers=1)  # upstream does not compare it with the pattern
    few, many = (fold_inside(hybrid_twins(config, pattern)[1]) for pattern in ("*--", "***"))
    call = packed([*ROWS, ROWS[0]])
    for model in (few, many):
        model(**call)
    assert few.folding.last.fold_ratio == many.folding.last.fold_ratio
    assert few.folding.last.work.layers == 1
    assert many.folding.last.work.layers == 3
    assert few.folding.last.work.token != many.folding.last.work.token


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        *((pattern, MAMBA) for pattern in ("M", "M-M-", "M*", "-M")),
        *((pattern, DELTA_NET) for pattern in ("G", "G-*")),
        *((pattern, {}) for pattern in ("-", "--", "*-")),
        ("E", MODELS["experts"]),
        ("DD", SPARSE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("counts", [False, True], ids=["", "total_tokens"])
@pytest.mark.parametrize("layout", [{}, {"gap": 2, "tail": 3}], ids=["rows", "slots"])
def test_rows_that_share_nothing(pattern: str, settings: dict[str, Any], counts: bool, layout: dict[str, int]) -> None:
    """A state never runs from a row into the next, and stacks without attention need no attention for packed rows."""
    if not set(pattern) <= Symbols.VALID_LAYERS:
        pytest.skip(f"layers {pattern} came with megatron-core 0.19")
    spec = exchanged(hybrid_stack, {DotProductAttention: PackedAttention})
    config = tiny_config(**settings | {"num_layers": len(pattern)})
    with kept_double():
        stock, tree = with_long_memory((hybrid(config, pattern), hybrid(config, pattern, spec)))
        tree.load_state_dict(stock.state_dict())
        model = fold_inside(tree, check_first=True)
        call = packed([np.arange(first, first + size) for first, size in ((1, 9), (2, 5), (3, 1), (4, 12))], **layout)
        if counts:
            total = call["input_ids"].shape[1]
            call["packed_seq_params"] = replace(call["packed_seq_params"], total_tokens=total)
        check_logits(model, stock, call)
        check_losses(model, stock, call)


def test_unsupported_calls_are_rejected() -> None:
    model, _ = inside("attention and MLPs")
    with pytest.raises(NotImplementedError, match="HybridModel takes none; pass RowLogprobs, or labels"):
        model(**packed(ROWS), output_processor=lambda **_: torch.zeros(1))
