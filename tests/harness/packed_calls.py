"""Packed rows of tiny models that fold inside, and what each row gives by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from harness.oracles import worst
from harness.seam_models import VOCAB, branching_samples
from harness.seam_runs import LATENT_SIZES
from mcore_prefix_tree import Sample
from mcore_prefix_tree.mcore.packed import RowLogprobs

FP64, FP32 = 1e-12, 1e-5
Rows = list[np.ndarray]


def rows_of(samples: list[Sample]) -> Rows:
    return [sample.tokens.astype(np.int64) for sample in samples]


ROWS = rows_of(branching_samples())


def packed(rows: Any, *, gap: int = 0, tail: int = 0, fill: int = 7, multiple: int | None = None) -> dict[str, Any]:
    """Rows one after another, in slots of a multiple, with ``gap`` more padding, and ``tail`` behind the last."""
    ids, borders, slots = [], [0], [0]
    for row in rows:
        ids += [*map(int, row), *[fill] * (gap + -len(row) % (multiple or 1))]
        borders.append(borders[-1] + len(row))
        slots.append(len(ids))
    cu, cu_padded = (torch.tensor(one, dtype=torch.int32) for one in (borders, slots))
    given = cu_padded if gap or multiple else None
    longest = max(map(len, rows), default=0) + gap
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=given,
        cu_seqlens_kv_padded=given,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    input_ids = torch.tensor([ids + [fill] * tail], dtype=torch.int64)
    return {"input_ids": input_ids, "position_ids": None, "attention_mask": None, "packed_seq_params": params}


def spans(call: dict[str, Any]) -> list[slice]:
    params = call["packed_seq_params"]
    slots = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    lengths = params.cu_seqlens_q.diff().tolist()
    return [slice(start, start + n) for start, n in zip(slots.tolist(), lengths, strict=False) if n]


def run_row(model: Any, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    found: torch.Tensor = model(input_ids=ids, position_ids=positions, attention_mask=None, **arguments)
    return found


def some_labels(call: dict[str, Any]) -> torch.Tensor:
    """Another label at every position, also where rows share a predictor."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, call["input_ids"].shape, generator=generator)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_gradients(model: Any, stock: Any, limit: float) -> None:
    actual, expected = gradients(model), gradients(stock)
    assert actual.keys() == expected.keys()
    assert expected
    for name, grad in expected.items():
        assert worst(actual[name], grad) <= limit, name


def cotangent(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def check_logits(model: Any, stock: Any, call: dict[str, Any], limit: float = FP64) -> None:
    """Logits and gradients of an arbitrary function of them; padding answers 0."""
    logits = model(**call)
    assert logits.shape[:2] == call["input_ids"].shape
    weight = cotangent(logits.shape, logits.dtype)
    padding = torch.ones(logits.shape[1], dtype=torch.bool)
    (logits * weight).sum().backward()
    for span in spans(call):
        expected = run_row(stock, call["input_ids"][:, span])
        assert worst(logits[:, span], expected) <= limit, span
        (expected * weight[:, span]).sum().backward()
        padding[span] = False
    assert not logits[:, padding].any()
    check_gradients(model, stock, limit)


def log_softmax_of_row(stock: Any, call: dict[str, Any], span: slice) -> torch.Tensor:
    return torch.log_softmax(run_row(stock, call["input_ids"][:, span])[0], dim=-1)


def check_losses(model: Any, stock: Any, call: dict[str, Any], limit: float = FP64) -> None:
    """The loss of each label, whose own gradient differs from position to position."""
    labels = some_labels(call)
    losses = model(**call, labels=labels)
    assert losses.shape == labels.shape
    weight = cotangent(losses.shape, losses.dtype)
    padding = torch.ones(losses.shape[1], dtype=torch.bool)
    (losses * weight).sum().backward()
    for span in spans(call):
        # Megatron's own loss is in fp32 for any dtype.
        assert worst(losses[:, span], run_row(stock, call["input_ids"][:, span], labels=labels[:, span])) <= 1e-6
        expected = -log_softmax_of_row(stock, call, span).gather(1, labels[0, span, None])[:, 0]
        assert worst(losses[0, span], expected) <= limit
        (expected * weight[0, span]).sum().backward()
        padding[span] = False
    assert not losses[:, padding].any()
    check_gradients(model, stock, limit)


def check_logprobs(model: Any, stock: Any, call: dict[str, Any], temperature: float = 1.0) -> None:
    """Log-probabilities of labels, entropies, and the gradients of their sum."""
    labels = some_labels(call)
    answer = model(**call, output_processor=RowLogprobs(labels=labels, temperature=temperature, entropy=True))
    assert answer.shape == (*labels.shape, 2)
    answer.sum().backward()
    padding = torch.ones(answer.shape[1], dtype=torch.bool)
    for span in spans(call):
        logprob = torch.log_softmax(run_row(stock, call["input_ids"][:, span])[0] / temperature, dim=-1)
        of_label, entropy = logprob.gather(1, labels[0, span, None])[:, 0], -(logprob.exp() * logprob).sum(dim=1)
        assert worst(answer[0, span, 0], of_label) <= FP64
        assert worst(answer[0, span, 1], entropy) <= FP64
        (of_label + entropy).sum().backward()
        padding[span] = False
    assert not answer[0, padding].any()
    check_gradients(model, stock, FP64)


def check_hidden(model: Any, stock: Any, call: dict[str, Any]) -> None:
    """Hidden states of models without a head, and gradients of the sum of their squares."""
    hidden = model(**call)
    hidden.square().sum().backward()
    for span in spans(call):
        expected = run_row(stock, call["input_ids"][:, span])
        assert worst(hidden[span], expected) <= FP64
        expected.square().sum().backward()
    check_gradients(model, stock, FP64)


def backend_of(config: Any) -> str:
    """Only this back-end of a CPU takes windows."""
    return "auto" if config.window_size is None else "reference"


MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "experts": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_router_load_balancing_type": "none",
    },
    "latent": LATENT_SIZES,
    "window": {"window_size": (3, 0)},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
