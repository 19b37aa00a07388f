"""Multi-token prediction in a model that folds inside: the losses and gradients of the stock model on the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.in_double import kept_double
from harness.packed_calls import FP64, ROWS, cotangent, packed, some_labels, spans
from harness.seam_models import DELTA_NET, MAMBA, build, hybrid_twins, local_spec, tiny_config, with_long_memory
from harness.seam_runs import FP32_INSIDE, LATENT, MOE, take_gradients
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from mcore_prefix_tree.cpu.specs import PackedAttention, exchanged
from mcore_prefix_tree.mcore import fold_inside
from mcore_prefix_tree.mcore.packed import RowLogprobs
from mcore_prefix_tree.mcore.release import HAS_DEPTHS, NEEDS_DEPTHS

pytestmark = [
    pytest.mark.usefixtures("megatron_on_the_cpu"),
    pytest.mark.filterwarnings("ignore:::megatron"),
    pytest.mark.skipif(not HAS_DEPTHS, reason=f"needs {NEEDS_DEPTHS}"),
]
TWO = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
LOGGED = ("loss_values", "correct_values", "total_values")


@pytest.fixture(autouse=True)
def _fresh_tracker() -> Iterator[None]:
    MTPLossLoggingHelper.tracker.clear()
    yield
    MTPLossLoggingHelper.tracker.clear()


def depth_twins(config: Any, *, attention: Any = DotProductAttention, **model: Any) -> tuple[Any, Any]:
    """A model with depths that folds, and a stock one with its weights."""
    spec = exchanged(local_spec(config), {DotProductAttention: attention})
    stock, tree = (
        build(config, spec, mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False), **model)
        for _ in range(2)
    )
    tree.load_state_dict(stock.state_dict(), strict=True)
    return fold_inside(tree, attention_backend="path"), stock


def run(model: Any, call: dict[str, Any], mask: torch.Tensor | None, *, labels: bool) -> dict[str, Any]:
    """Gradients of a packed micro-batch in which depths learn, and what they log; ``mask`` is the trainer's."""
    MTPLossLoggingHelper.tracker.clear()
    given = {"loss_mask": mask} | ({"labels": some_labels(call)} if labels else {})
    answer = model(**call, **given)
    weight = cotangent(answer.shape, answer.dtype)
    sum((answer[:, span] * weight[:, span]).sum() for span in spans(call)).backward()
    return {"grads": take_gradients(model), **{name: MTPLossLoggingHelper.tracker[name].clone() for name in LOGGED}}


def run_padded(model: Any, call: dict[str, Any], mask: torch.Tensor | None, *, labels: bool) -> dict[str, Any]:
    """The same of a stock model, with each row in a row of a padded batch, as stock attention on a CPU takes them."""
    MTPLossLoggingHelper.tracker.clear()
    size = max(span.stop - span.start for span in spans(call))

    def in_batch(values: torch.Tensor) -> torch.Tensor:
        rows = [values[0, span] for span in spans(call)]
        return torch.stack([torch.cat([row, row.new_zeros(size - len(row), *row.shape[1:])]) for row in rows])

    ids = in_batch(call["input_ids"])
    mask = in_batch(torch.ones(call["input_ids"].shape, dtype=torch.float64) if mask is None else mask)
    given = {"loss_mask": mask} | ({"labels": in_batch(some_labels(call))} if labels else {})
    answer = model(ids, torch.arange(size).expand(ids.shape), None, **given)
    shape = (*call["input_ids"].shape, *answer.shape[2:])
    (answer * in_batch(cotangent(torch.Size(shape), answer.dtype))).sum().backward()
    return {"grads": take_gradients(model), **{name: MTPLossLoggingHelper.tracker[name].clone() for name in LOGGED}}


def check(model: Any, stock: Any, call: dict[str, Any], limit: float = FP64, *, masked: bool = True) -> None:
    """Compare with labels that rows do not share, and with the next tokens."""
    generator, mask = torch.Generator().manual_seed(3), None
    if masked:
        mask = torch.rand(call["input_ids"].shape, generator=generator, dtype=torch.float64).round()
    for labels in (True, False):
        with kept_double():
            actual, expected = (way(one, call, mask, labels=labels) for way, one in ((run, model), (run_padded, stock)))
        for name in LOGGED:
            torch.testing.assert_close(actual[name].double(), expected[name].double(), rtol=1e-6, atol=0)
        assert actual["grads"].keys() == expected["grads"].keys()
        for name, wanted in expected["grads"].items():
            error = float((actual["grads"][name] - wanted).norm() / wanted.norm())
            assert error < limit, f"{name}: {error:.2e}"


# name: (fields of the config, arguments of GPTModel, limit)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "one depth": ({"mtp_num_layers": 1}, {}, FP64),
    "two depths": (TWO, {}, FP64),
    "mean over the tokens of a step": (TWO | {"calculate_per_token_loss": True}, {}, FP64),
    "tied, detached heads": (TWO | {"mtp_detach_heads": True}, {"share_embeddings_and_output_weights": True}, FP64),
    "learned positions": (TWO, {"position_embedding_type": "learned_absolute"}, FP64),
    "full recompute": (
        TWO | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {},
        FP64,
    ),
    "latent attention": (TWO | LATENT, {}, FP32_INSIDE),
    "experts": (TWO | MOE, {}, FP32_INSIDE),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_depths_learn_from_every_row(name: str) -> None:
    settings, arguments, limit = VARIANTS[name]
    check(*depth_twins(tiny_config(**settings), **arguments), packed(ROWS), limit)


@pytest.mark.parametrize("layout", [{"tail": 3}, {"gap": 2, "tail": 1}])
@pytest.mark.parametrize("masked", [True, False])
def test_padding_does_not_count(layout: dict[str, int], masked: bool) -> None:
    check(*depth_twins(tiny_config(**TWO)), packed(ROWS, **layout), masked=masked)


def test_a_mask_of_zeros_teaches_nothing() -> None:
    model, _ = depth_twins(tiny_config(**TWO))
    model(**packed(ROWS), loss_mask=torch.zeros(packed(ROWS)["input_ids"].shape, dtype=torch.bool)).sum().backward()
    assert not any(parameter.grad.any() for name, parameter in model.mtp.named_parameters())


@pytest.mark.parametrize(
    ("pattern", "settings"), [("*-*-/*-/*-", {}), ("M*-/M-/M-", MAMBA), ("G-*-/G-/G-", DELTA_NET)], ids=["*", "M", "G"]
)
def test_hybrid_models(pattern: str, settings: dict[str, Any]) -> None:
    stock, tree = with_long_memory(hybrid_twins(tiny_config(**TWO | settings), pattern, follows=False))
    check(fold_inside(tree, attention_backend="path"), stock, packed(ROWS))


@pytest.mark.parametrize("layout", [{}, {"tail": 3}, {"gap": 2, "tail": 1}], ids=["rows", "tail", "slots"])
def test_rows_without_sharing_fold(layout: dict[str, int]) -> None:
    """Upstream would take targets from padding, and leave no logits for the head that answers log-probabilities."""
    model, stock = depth_twins(tiny_config(**TWO), attention=PackedAttention)
    call = packed([torch.arange(first, first + size).numpy() for first, size in ((1, 7), (2, 5), (3, 1))], **layout)
    check(model, stock, call)
    assert model.folding.last.left_alone == 0
    labels = some_labels(call)
    with kept_double():
        answer = model(**call | {"loss_mask": torch.ones(labels.shape)}, output_processor=RowLogprobs(labels=labels))
        for span in spans(call):
            ids = call["input_ids"][:, span]
            expected = stock(ids, torch.arange(ids.shape[1])[None], None).log_softmax(-1)
            expected = expected.gather(-1, labels[:, span].unsqueeze(-1))
            torch.testing.assert_close(answer[:, span], expected, rtol=FP64, atol=FP64)


def test_depths_do_not_run_without_gradients() -> None:
    model, stock = depth_twins(tiny_config(**TWO))
    with torch.no_grad():
        answer = model(**packed(ROWS))
        assert not MTPLossLoggingHelper.tracker
        expected = stock(torch.from_numpy(ROWS[0])[None], torch.arange(len(ROWS[0]))[None], None)
    torch.testing.assert_close(answer[:, : len(ROWS[0])], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("setting", [{"fused_head": False}, {"max_tokens": 8}, {"check_first": True}])
def test_settings_that_are_refused(setting: dict[str, Any]) -> None:
    config = tiny_config(**TWO)
    spec = local_spec(config)
    model = build(config, spec, mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False))
    ((name, value),) = setting.items()
    with pytest.raises(NotImplementedError, match=f"{name}={value} with mtp_num_layers=2"):
        fold_inside(model, **setting)


def test_a_frozen_depth_changes_nothing() -> None:
    """With a factor of 0 depths neither run nor learn."""
    model, _ = depth_twins(tiny_config(**TWO | {"mtp_loss_scaling_factor": 0.0}))
    model(**packed(ROWS)).sum().backward()
    assert all(parameter.grad is None for parameter in model.mtp.parameters())
