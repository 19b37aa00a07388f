"""A model that folds packed rows inside gives the stock model's outputs for each separate row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness.in_double import kept_double
from harness.marks import quick
from harness.models import HAS_OUTPUT_PROCESSOR
from harness.oracles import sample_lists, worst
from harness.packed_calls import (
    FP32,
    FP64,
    MODELS,
    ROWS,
    Rows,
    backend_of,
    check_gradients,
    check_hidden,
    check_logits,
    check_logprobs,
    check_losses,
    log_softmax_of_row,
    packed,
    rows_of,
    run_row,
    some_labels,
    spans,
)
from harness.seam_models import (
    DELTA_NET,
    GRAPHS,
    MAMBA,
    VOCAB,
    build,
    hybrid,
    hybrid_twins,
    local_spec,
    tiny_config,
    twins,
    with_long_memory,
)
from harness.seam_runs import SPARSE
from hypothesis import given
from hypothesis.strategies import integers, sampled_from, sets
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_layer import TransformerLayer

from mcore_prefix_tree import Sample
from mcore_prefix_tree.cpu.specs import PackedAttention, exchanged
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.layout import trainer_rows as rows_module
from mcore_prefix_tree.mcore import fold_inside, folding_model, follow_trees, with_prefix_tree, with_scalar_head
from mcore_prefix_tree.mcore.packed import FoldCheckError, RowLogprobs
from mcore_prefix_tree.mcore.packed.packed_rows import read_rows
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]


UNLIKE = [np.array([1, 2, 3]), np.array([2, 3]), np.array([4])]


# name: (pattern of a HybridModel, fields of the config, arguments of the model)
KINDS: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    **{name: (None, settings, {}) for name, settings in MODELS.items()},
    "tied": (None, {}, {"share_embeddings_and_output_weights": True}),
    "learned positions": (None, {}, {"position_embedding_type": "learned_absolute"}),
    "pattern: attention and MLPs": ("*-*-", {}, {}),
    "pattern: experts": ("*E*-", MODELS["experts"], {}),
    "pattern: state spaces": ("M-M*", MAMBA, {}),
}
RARE = {
    "pattern: tied, ends in attention": ("-**", {}, {"share_embeddings_and_output_weights": True}),
    "pattern: latent attention": ("+-", MODELS["latent"], {}),
    "pattern: recomputed": ("*-*-", MODELS["recomputed"], {}),
}


def has_layers(pattern: str) -> bool:
    if not HAS_HYBRID_MODEL:
        return False
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

    return set(pattern) <= Symbols.VALID_LAYERS


def inside(config: Any = None, pattern: str | None = None, *, check_first: bool = False, **model: Any) -> Any:
    """A model that folds, and a stock one with its weights."""
    config = tiny_config(num_layers=len(pattern or "***")) if config is None else config
    if pattern is not None and not has_layers(pattern):
        pytest.skip("such layers came with a later megatron-core")
    given = (config,) if pattern is None else (config, pattern)
    stock, tree = (twins if pattern is None else hybrid_twins)(*given, follows=False, **model)
    return fold_inside(tree, attention_backend=backend_of(tree.config), check_first=check_first), stock


@pytest.mark.parametrize("name", quick(*KINDS, of=KINDS | RARE))
def test_logits_and_losses(name: str) -> None:
    pattern, settings, arguments = (KINDS | RARE)[name]
    # Upstream's scores of experts are in fp32 for any dtype of the model, and so are decays and step biases of Mamba.
    limit = 1e-6 if {"num_moe_experts", "mamba_state_dim"} & settings.keys() else FP64
    layers = {} if pattern is None else {"num_layers": len(pattern)}
    model, stock = inside(tiny_config(**settings | layers), pattern, check_first=pattern is not None, **arguments)
    check_logits(model, stock, packed(ROWS, gap=1, tail=2), limit)
    check_losses(model, stock, packed(ROWS), limit)
    assert type(model) is type(stock)


@pytest.mark.parametrize(
    "call",
    [
        packed(ROWS, gap=2, tail=3),
        packed(ROWS, tail=5),
        packed([ROWS[0]]),
        packed([np.array([5])] * 3),
        packed(UNLIKE),
        packed([ROWS[0]] * 4),
        packed([ROWS[0], np.array([], dtype=np.int64), ROWS[1]]),
    ],
    ids=["slots and a tail", "a tail", "one row", "one token each", "nothing shared", "the same row", "an empty row"],
)
def test_packed_forms(call: dict[str, Any]) -> None:
    model, stock = inside()
    check_logits(model, stock, call)
    check_losses(model, stock, call)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("check_first", [False, True])
@pytest.mark.parametrize(("tokens", "borders"), [(0, [0]), (0, [0, 0]), (3, [0]), (2, [0, 0, 0])])
def test_a_micro_batch_without_tokens_answers_nothing(
    tokens: int, borders: list[int], check_first: bool, packs: bool
) -> None:
    """Also if the stock attention takes packed rows: its layers fail on no tokens."""
    config = tiny_config()
    spec = packed_attention_spec(config) if packs else local_spec(config)
    model = fold_inside(build(config, spec), check_first=check_first)
    ends, ids = torch.tensor(borders, dtype=torch.int32), torch.full((1, tokens), 7)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=0, max_seqlen_kv=0)
    call = {"input_ids": ids, "position_ids": None, "attention_mask": None, "packed_seq_params": params}
    assert model(**call).shape == (1, tokens, VOCAB)
    losses = model(**call, labels=ids)
    assert losses.tolist() == [[0.0] * tokens]
    losses.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    assert not model.folding._checked


@given(sample_lists(max_samples=6, min_samples=1))
def test_random_forests(samples: list[Sample]) -> None:
    model, stock = random_pair()
    call = packed(rows_of(samples), gap=len(samples) % 2)
    check_logits(model, stock, call)
    check_losses(model, stock, call)


_PAIR: list[tuple[Any, Any]] = []


def random_pair() -> tuple[Any, Any]:
    if not _PAIR:
        _PAIR.append(inside(tiny_config(num_layers=1)))
    return _PAIR[0]


def test_float32() -> None:
    model, stock = inside(tiny_config(torch.float32))
    check_logits(model, stock, packed(ROWS), FP32)
    check_losses(model, stock, packed(ROWS), FP32)


def test_bfloat16_sums_rows_in_float32() -> None:
    """1,000 rows end in the same token: each adds a gradient of 1 to its logit, and bf16 counts to 256."""
    model, _ = inside(tiny_config(torch.bfloat16, bf16=True, num_layers=1))
    call = packed([np.array([3])] * 1000)
    logits: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        output[0].retain_grad()
        logits.append(output[0])

    model.output_layer.register_forward_hook(keep)
    model(**call)[..., 5].sum().backward()
    assert logits[0].grad[0, 0, 5] == 1000


@pytest.mark.parametrize("model", [{}, {"parallel_output": False}], ids=["", "gathered logits"])
def test_labels_without_the_fused_head(model: dict[str, Any]) -> None:
    stock, tree = twins(tiny_config(), **model)
    check_losses(fold_inside(tree, fused_head=False), stock, packed(ROWS, gap=1))


def test_labels_outside_the_vocabulary_have_no_loss() -> None:
    model, stock = inside()
    call = packed(ROWS)
    labels = some_labels(call)
    ignored = torch.arange(labels.shape[1]) % 3 == 0
    losses = model(**call, labels=labels.masked_fill(ignored, -100))
    assert not losses[0, ignored].any()
    losses.sum().backward()
    for span in spans(call):
        expected = -log_softmax_of_row(stock, call, span).gather(1, labels[0, span, None])[:, 0]
        expected[~ignored[span]].sum().backward()
    check_gradients(model, stock, FP64)


@pytest.mark.parametrize(
    ("rows", "pattern"),
    [(ROWS, None), (UNLIKE, None), (ROWS, "*-*-")],
    ids=["shared", "nothing shared", "of a pattern"],
)
def test_logprobs_and_entropy_of_rows(rows: Rows, pattern: str | None) -> None:
    """Folding itself answers this output processor, also of a model that has no argument of that name."""
    check_logprobs(*inside(pattern=pattern), packed(rows, gap=1), temperature=0.7)


def test_a_hybrid_model_takes_no_other_output_processor() -> None:
    model, _ = inside(pattern="*-*-")
    with pytest.raises(NotImplementedError, match="HybridModel takes none; pass RowLogprobs, or labels"):
        model(**packed(ROWS), output_processor=lambda **_: torch.zeros(1))


@pytest.mark.skipif(not HAS_OUTPUT_PROCESSOR, reason="came with megatron-core 0.18")
def test_an_output_processor_sees_unfolded_rows() -> None:
    model, stock = inside()
    call = packed(ROWS, gap=1) | {"labels": torch.ones(1, 1)}
    seen = {}

    def process(*, hidden_states: Any, output_layer: Any, output_weight: Any, context: Any, **others: Any) -> Any:
        seen.update(others)
        logits, _ = output_layer(hidden_states, weight=output_weight)
        return logits.transpose(0, 1) * context

    answer = model(**call, output_processor=process, output_processor_context=2.0)
    answer.sum().backward()
    for name in ("labels", "input_ids", "packed_seq_params"):
        assert seen[name] is call[name]
    for span in spans(call):
        expected = 2 * run_row(stock, call["input_ids"][:, span])
        assert worst(answer[:, span], expected) <= FP64
        expected.sum().backward()
    # At padding the processor was given a hidden state of zeros, which the output layer's weight gets nothing from.
    check_gradients(model, stock, FP64)


def test_hidden_states_without_a_head() -> None:
    check_hidden(*inside(post_process=False), packed(ROWS, gap=1))


def test_values_of_a_scalar_head() -> None:
    stock, tree = (with_scalar_head(one) for one in twins(tiny_config()))
    tree.load_state_dict(stock.state_dict())
    check_logits(fold_inside(tree), stock, packed(ROWS, gap=1))


def test_forward_only_keeps_no_graph() -> None:
    model, stock = inside()
    with torch.no_grad():
        logits = model(**packed(ROWS))
        assert not logits.requires_grad
        assert worst(logits[:, : len(ROWS[0])], run_row(stock, packed(ROWS[:1])["input_ids"])) <= FP64


def test_arguments_by_position() -> None:
    """Positions that restart in every row are those that are used without any."""
    model, _ = inside()
    call = packed(ROWS)
    others = {name: call[name] for name in ("packed_seq_params",)}
    restarting = torch.cat([torch.arange(len(row)) for row in ROWS]).unsqueeze(0)
    for positions in (None, restarting):
        assert torch.equal(model(call["input_ids"], positions, None, **others), model(**call))


def test_logits_can_be_changed_in_place() -> None:
    """As trainers divide them by a temperature."""
    model, stock = inside()
    call = packed(ROWS)
    model(**call).div_(2).sum().backward()
    for span in spans(call):
        (run_row(stock, call["input_ids"][:, span]) / 2).sum().backward()
    check_gradients(model, stock, FP64)


@pytest.mark.parametrize(
    "pattern", [None, pytest.param("*-", marks=pytest.mark.skipif(not HAS_HYBRID_MODEL, reason="needs HybridModel"))]
)
def test_a_class_that_folds(pattern: str | None) -> None:
    config = tiny_config(num_layers=2)
    if pattern is None:
        stock, spec, layers = build(config, local_spec(config)), local_spec(config), {}
    else:
        from mcore_prefix_tree.cpu.hybrid import hybrid_stack

        stock, spec, layers = hybrid(config, pattern), hybrid_stack, {"hybrid_layer_pattern": pattern}
    kind = folding_model(type(stock), fused_head=False)
    assert issubclass(kind, type(stock))
    assert kind.__name__ == f"Folding{type(stock).__name__}"
    model = kind(config, spec, VOCAB, 64, **layers, position_embedding_type="rope").double()
    model.load_state_dict(stock.state_dict(), strict=True)
    check_logits(model, stock, packed(ROWS))


def test_state_dict_stays() -> None:
    model, stock = inside()
    assert model.state_dict().keys() == stock.state_dict().keys()


def test_a_provider_of_megatron_bridge() -> None:
    """Stands in for one: it asks its spec for layers, and lets hooks have the models before they are wrapped."""
    config, hooks = tiny_config(), []
    provider = SimpleNamespace(
        transformer_layer_spec=lambda config: local_spec(config), register_pre_wrap_hook=hooks.append
    )
    given = provider.transformer_layer_spec
    assert fold_inside(provider, fused_head=False) is provider
    assert provider.transformer_layer_spec is given  # checkpoints name it
    stock = build(config, local_spec(config))
    (model,) = hooks[0]([build(config, provider.transformer_layer_spec(config))])
    check_logits(model, stock, packed(ROWS))


def test_the_report() -> None:
    model, _ = inside()
    call = packed([ROWS[0]] * 4)
    for _ in range(2):
        model(**call)
    last = model.folding.last
    assert last.rows == 4
    assert last.fold_ratio == 4
    assert last.unique_tokens == len(ROWS[0])
    assert last.expected_speedup.ratio == pytest.approx(4)
    assert last.expanded_bytes == 3 * len(ROWS[0]) * VOCAB * 8
    model(**call, labels=some_labels(call))
    assert model.folding.last.expanded_bytes == 0
    step = model.folding.report()
    assert (step.micro_batches, step.rows, step.fold_ratio) == (3, 12, 4)
    assert step.to_log()["fold/fold_ratio"] == 4
    assert step.to_log()["fold/expected_speedup"] == pytest.approx(4)
    assert model.folding.report() is None
    with torch.no_grad():
        model(**call)
    assert model.folding.report(training_only=True) is None
    model(**call)
    with torch.no_grad():
        model(**call)
    assert model.folding.report(training_only=True).micro_batches == 1
    assert model.folding.report() is None


@pytest.mark.skipif(not HAS_HYBRID_MODEL, reason="needs HybridModel")
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


def test_the_log(caplog: pytest.LogCaptureFixture) -> None:
    _, tree = twins(tiny_config())
    model = fold_inside(tree, log_every=2)
    call = packed([ROWS[0]] * 4)
    unique = len(ROWS[0])
    with caplog.at_level("INFO", logger="mcore_prefix_tree"):
        for _ in range(5):
            model(**call)
    tokens = f"{2 * unique} of {8 * unique} tokens computed"
    told = f"prefix trees of 2 micro-batches: fold ratio 4.00 ({tokens}), expected speed-up 4.00x"
    ours = [record.message for record in caplog.records if record.name.startswith("mcore_prefix_tree")]
    assert ours == [told, told]
    with pytest.raises(ValueError, match="log_every=-1 is negative"):
        fold_inside(tree, log_every=-1)


def packed_attention_spec(config: Any) -> Any:
    return exchanged(local_spec(config), {DotProductAttention: PackedAttention})


def test_rows_without_sharing_use_the_stock_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    model = fold_inside(build(config, packed_attention_spec(config)))
    stock = build(config, local_spec(config))
    seen = []

    def see(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["packed_seq_params"])

    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.register_forward_pre_hook(see, with_kwargs=True)
    call = packed(UNLIKE)
    with monkeypatch.context() as patch:
        patch.setattr(rows_module, "fold", None)  # rows that share nothing are not laid out
        check_logits(model, stock, call)
    assert len(seen) == config.num_layers
    assert all(params == call["packed_seq_params"] for params in seen)
    assert model.folding.last.left_alone == 1
    assert model.folding.last.expected_speedup.ratio == 1
    labels = some_labels(call)
    answer = model(**call, output_processor=RowLogprobs(labels=labels, entropy=True))
    for span in spans(call):
        logprob = log_softmax_of_row(stock, call, span)
        assert worst(answer[0, span, 0], logprob.gather(1, labels[0, span, None])[:, 0]) <= FP64
        assert worst(answer[0, span, 1], -(logprob.exp() * logprob).sum(dim=1)) <= FP64
    check_logits(model, stock, packed(ROWS))
    assert model.folding.last.left_alone == 0


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
    if not has_layers(pattern):
        pytest.skip(f"layers {pattern} came with a later megatron-core")
    from mcore_prefix_tree.cpu.hybrid import hybrid_stack

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


LEFT_OUT = ("cu_seqlens_kv", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv")


@pytest.mark.parametrize("least_fold_ratio", [0.0, 99.0], ids=["folds", "packs"])
@given(sample_lists(max_samples=4, min_samples=1), integers(0, 3), integers(0, 3), sets(sampled_from(LEFT_OUT)))
def test_both_ways_answer_alike(
    least_fold_ratio: float, samples: list[Sample], gap: int, tail: int, left_out: set[str]
) -> None:
    """Each row by itself, 0 at padding and for labels outside the vocabulary, whatever else the trainer passes."""
    config = tiny_config(num_layers=1)
    settings = {"position_embedding_type": ("rope", "learned_absolute")[gap % 2]}
    stock = build(config, local_spec(config), **settings)
    tree = build(config, packed_attention_spec(config), **settings)
    model = fold_inside(tree, least_fold_ratio=least_fold_ratio, check_first=True)
    call = packed([row % VOCAB for row in rows_of(samples)], gap=gap, tail=tail)
    for name in left_out:
        setattr(call["packed_seq_params"], name, None)
    with kept_double():
        check_logits(model, stock, call)
        check_losses(model, stock, call)
        check_logprobs(model, stock, call)
    assert model.folding.report().left_alone == (3 if least_fold_ratio and not tail else 0)
    losses = model(**call, labels=torch.full_like(call["input_ids"], -100))
    losses.sum().backward()
    assert not losses.any()
    assert not any(parameter.grad.any() for parameter in model.parameters())


def leak(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hide from an attention where rows begin, if they do not fold."""
    if isinstance(kwargs["packed_seq_params"], PackedSeqParams) and args[0].ndim == 3:
        ends = torch.tensor([0, len(args[0])])
        kwargs = kwargs | {"packed_seq_params": PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends)}
    return args, kwargs


@pytest.mark.parametrize("training", [True, False])
def test_the_check_follows_the_way_that_runs(training: bool) -> None:
    """Rows that share fold, and are right; others go through the stock model, and are not."""
    config = tiny_config(num_layers=1)
    models = [build(config, packed_attention_spec(config)).train(training) for _ in range(2)]
    model = fold_inside(models[0], check_first=True)
    model.decoder.layers[0].self_attention.core_attention.register_forward_pre_hook(leak, with_kwargs=True)
    for _ in range(2):
        model(**packed(ROWS))
    with pytest.raises(FoldCheckError, match=r"row 1 differs .* packed and not folded .* set least_fold_ratio=0"):
        model(**packed(UNLIKE))
    folds = fold_inside(models[1], check_first=True, least_fold_ratio=0)
    check_logits(folds, build(config, local_spec(config)), packed(UNLIKE))


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5},
        {"moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.5]},
        {"moe_z_loss_coeff": 0.5},
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    ],
    ids=lambda settings: next(iter(settings)) + str(next(iter(settings.values()))),
)
def test_padding_is_not_balanced(settings: dict[str, Any]) -> None:
    """Upstream would balance all rows together, and their padding."""
    config = tiny_config(**MODELS["experts"] | settings)
    found = []
    for layout in ({}, {"gap": 3, "tail": 5}):
        model = fold_inside(build(config, packed_attention_spec(config)).train())
        call = packed(UNLIKE, **layout)
        sum(model(**call)[:, span].square().sum() for span in spans(call)).backward()
        assert model.folding.last.left_alone == 0
        counts = {name: one for name, one in model.named_buffers() if "tokens_per_expert" in name}
        found.append(counts | {name: one.grad for name, one in model.named_parameters()})
    for name, expected in found[0].items():
        assert worst(found[1][name], expected) <= FP32, name


def test_little_sharing_is_not_folded() -> None:
    """Exactly as much as the layout would have: a common first token, and rows in slots."""
    config = tiny_config()
    tree = build(config, with_prefix_tree(packed_attention_spec(config)))
    model = fold_inside(tree, least_fold_ratio=1.2)
    first = [np.array([1, *range(10 * row, 10 * row + 9)]) for row in range(1, 5)]
    for rows, left_alone in ((first, True), ([*first, first[0]], False)):
        model(**packed(rows, gap=1))
        assert model.folding.last.left_alone == left_alone
        assert model.folding.last.logical_tokens == sum(map(len, rows))
        assert model.folding.last.rows == len(rows)


@given(sample_lists(max_samples=6, min_samples=1))
def test_rows_are_sorted_as_samples_are(samples: list[Sample]) -> None:
    """The sort that recognises sharing is the one that folding would do."""
    rows = rows_of(samples)
    call = packed(rows, gap=len(samples) % 2)
    read = read_rows(call["input_ids"], call["packed_seq_params"], device=torch.device("cpu"))
    expected = fold([Sample(tokens=row) for row in rows])
    found = read.fold(pad_to_multiple_of=1).layout
    assert read.fold_ratio == expected.fold_ratio
    for name in ("input_ids", "sample_order", "sample_shared", "sample_map", "subtree_end"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_the_first_micro_batch_is_checked() -> None:
    for settings in MODELS.values():
        _, tree = twins(tiny_config(**settings))
        model = fold_inside(tree, check_first=True, attention_backend=backend_of(tree.config))
        call = packed(ROWS, gap=1)
        model.train()
        loss = model(**call, labels=some_labels(call))
        assert all(module.training for module in model.modules())
        assert all(parameter.grad is None for parameter in model.parameters())
        loss.sum().backward()


@pytest.mark.parametrize("fault", ["answers", "gradients"])
def test_the_check_finds_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that computes something else for folded tokens, or gives them another gradient."""
    plain = TransformerLayer.forward

    def wrong(layer: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, context = plain(layer, *args, **kwargs)
        if kwargs.get("packed_seq_params") is None or layer.layer_number != 2:
            return hidden, context
        changed = hidden * 1.01
        return changed if fault == "answers" else changed - changed.detach() + hidden.detach(), context

    def wrong_pair(layer: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, context = wrong(layer, *args, **kwargs)
        return (hidden[0] if isinstance(hidden, tuple) else hidden), context

    monkeypatch.setattr(TransformerLayer, "forward", wrong_pair)
    _, tree = twins(tiny_config())
    model = fold_inside(tree, check_first=True)
    expected = "row 0 differs from the stock model" if fault == "answers" else "the gradient of .* differs"
    with pytest.raises(FoldCheckError, match=expected):
        model(**packed(ROWS))


def refused_calls() -> dict[str, tuple[dict[str, Any], str]]:
    call = packed(ROWS)
    params = call["packed_seq_params"]

    def with_params(**changes: Any) -> dict[str, Any]:
        return call | {"packed_seq_params": PackedSeqParams(**{"qkv_format": "thd"} | changes)}

    ends = params.cu_seqlens_q
    return {
        "a mask": (call | {"attention_mask": torch.ones(1, 1, 2, 2)}, "attention_mask"),
        "embeddings": (call | {"decoder_input": torch.ones(1)}, "decoder_input"),
        "generation": (call | {"inference_context": object()}, "inference_context"),
        "no rows": (call | {"packed_seq_params": None}, "qkv_format='thd'.*not None"),
        "another format": (with_params(qkv_format="bshd", cu_seqlens_q=ends), "not qkv_format='bshd'"),
        "no borders": (with_params(), "cu_seqlens_q is missing"),
        "no first border": (with_params(cu_seqlens_q=ends[:0]), "cu_seqlens_q has no entry"),
        "too many tokens": (with_params(cu_seqlens_q=ends + ends.max()), "must both begin at 0"),
        "beyond the end": (with_params(cu_seqlens_q=torch.tensor([0, 10_000])), "ends at 10000"),
        "a row larger than its slot": (
            with_params(cu_seqlens_q=torch.tensor([0, 4]), cu_seqlens_q_padded=torch.tensor([0, 3])),
            "fit into its slot",
        ),
        "split over ranks": (with_params(cu_seqlens_q=ends, local_cp_size=2), "local_cp_size"),
        "no ids": (call | {"input_ids": None}, "not None; every pipeline stage"),
        "a batch": (call | {"input_ids": torch.ones(2, 3)}, r"not a tensor of \[2, 3\]"),
    }


@pytest.mark.parametrize("name", refused_calls())
def test_calls_that_are_refused(name: str) -> None:
    model, _ = inside(tiny_config(num_layers=1))
    call, message = refused_calls()[name]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        model(**call)


def test_positions_that_do_not_restart_are_refused() -> None:
    model, _ = inside(tiny_config(num_layers=1), position_embedding_type="learned_absolute")
    call = packed(ROWS)
    restarting = torch.cat([torch.arange(len(row)) for row in ROWS]).unsqueeze(0)
    model(**call | {"position_ids": restarting})
    with pytest.raises(ValueError, match="position_ids of row 1 must count from 0"):
        model(**call | {"position_ids": torch.arange(restarting.shape[1]).unsqueeze(0)})


def test_models_that_are_refused() -> None:
    config = tiny_config()
    spec = local_spec(config)
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    with pytest.raises(NotImplementedError, match="attn_mask_type=no_mask"):
        fold_inside(build(config, spec))
    model = build(config, local_spec(config))
    model.decoder.layers[1] = torch.nn.Identity()
    for way in (fold_inside, follow_trees):
        with pytest.raises(NotImplementedError, match="layers of class Identity: use one of TransformerLayer"):
            way(model)
    with pytest.raises(TypeError, match="not a Linear"):
        fold_inside(torch.nn.Linear(1, 1))
    model, _ = inside(config)
    with pytest.raises(ValueError, match="folds inside already"):
        fold_inside(model)
    for name, value, message in (
        ("context_parallel_size", 2, "context_parallel_size=2"),
        ("attention_dropout", 0.1, "attention_dropout"),
        ("moe_enable_routing_replay", True, "moe_enable_routing_replay=True"),
        ("fp8", "e4m3", "fp8"),
        ("cuda_graph_impl", "transformer_engine", "cuda_graph_impl='transformer_engine': graphs have one length"),
        ("pipeline_model_parallel_size", 2, "variable_seq_lengths"),
        ("virtual_pipeline_model_parallel_size", 2, "overlap_p2p_comm=False with pipeline_model_parallel_size=2"),
    ):
        changed = tiny_config(num_moe_experts=2, moe_router_load_balancing_type="none", num_layers=1)
        _, tree = twins(changed)
        if name == "virtual_pipeline_model_parallel_size":
            changed.pipeline_model_parallel_size, changed.variable_seq_lengths = 2, True
        for graphed in GRAPHS if name == "cuda_graph_impl" else ():
            setattr(changed, graphed, GRAPHS[graphed])
        setattr(changed, name, value)
        with pytest.raises(NotImplementedError, match=message):
            fold_inside(tree)
    _, tree = twins(tiny_config(num_layers=1))
    with pytest.raises(ValueError, match="nonsense"):
        fold_inside(tree, attention_backend="nonsense")
    tree.config.gradient_accumulation_fusion = True
    with pytest.raises(NotImplementedError, match="gradient_accumulation_fusion"):
        fold_inside(tree, check_first=True)
