"""The first micro-batch twice: folded, and each row by itself through the same weights with the tree switched off.

Each pipeline stage compares what it computes itself: it gives both runs the input that it was sent. So nothing is sent
twice, and if every stage is right, so is the model. The gradients are those of half the sum of the squared answers.
They never reach the parameters' ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

from mcore_prefix_tree.mcore.inside.answers import expand
from mcore_prefix_tree.mcore.inside.rows import FoldedRows

# By dtype. A wrong key costs 1e-2 and more. Megatron computes the loss of labels in fp32 whatever the dtype.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# A gradient below this share of the norm of all is judged as if it had it: some are zero but for rounding.
_LEAST_SHARE = 1e-3

Gradients = dict[str, torch.Tensor]


class FoldCheckError(RuntimeError):
    """The folded first micro-batch differs from the stock model's. The message says where and by how much."""


def check_comparable(config: Any) -> None:
    """Refuse models whose gradients cannot be asked for without reaching the parameters.

    Raises:
        NotImplementedError: names the setting.
    """
    recomputed = set(config.recompute_modules or ()) - {"core_attn"}
    if config.gradient_accumulation_fusion:
        reason = "gradient_accumulation_fusion=True, which writes gradients into DDP's buffers"
    elif config.recompute_granularity == "selective" and recomputed:
        reason = f"recompute_modules={sorted(recomputed)}, which torch.autograd.grad does not go through"
    else:
        return
    raise NotImplementedError(f"check_first does not support {reason}; change it for the run that checks")


def compare(
    model: Any,
    rows: FoldedRows,
    call: dict[str, Any],
    folded: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    tolerance: float | None = None,
) -> None:
    """Compare a stage's answers and gradients, folded and row by row.

    It takes the time of a micro-batch whose rows are computed one after the other, and memory for two more sets of
    gradients. Logits are compared, or the loss where there are ``labels``; hidden states on stages without a head.

    Args:
        model: bare, of this stage.
        rows: of the micro-batch.
        call: arguments that the trainer gave.
        folded: makes those of the folded micro-batch of them.
        tolerance: largest relative error of a row or a gradient; None is :data:`TOLERANCE` of the model's dtype.

    Raises:
        FoldCheckError: the first row, or the parameter with the worst gradient, that differs by more.
    """
    limit = TOLERANCE[model.config.params_dtype] if tolerance is None else tolerance
    call = {name: value for name, value in call.items() if not name.startswith("output_processor")}
    sent = None if model.pre_process else model.decoder.input_tensor
    with _stage_input(model, sent) as leaf:
        arguments = folded(call)
        output = model.forward(**arguments)
        if model.post_process:
            answers = arguments["packed_seq_params"].finish(output).squeeze(0)
        else:
            answers = expand(_whole(model, output), rows, dim=0)
        scored = _scored(model, rows, call)
        gradients = _gradients(model, leaf, answers * scored.to(answers.dtype).view(-1, *[1] * (answers.ndim - 1)))
        answers = answers.detach()
        stock: Gradients = {}
        spans = list(zip(rows.start.tolist(), rows.length.tolist(), strict=True))
        for index, (start, length) in enumerate(spans + [(0, 1)] * (_most(model, len(spans)) - len(spans))):
            answer = _row(model, rows, call, leaf, start, length)
            answer = answer * scored[start : start + length].to(answer.dtype).view(-1, *[1] * (answer.ndim - 1))
            gradient = _gradients(model, leaf, answer)
            if index >= len(spans):
                continue  # another rank of the expert-parallel group has more rows, and exchanges tokens with this one
            error = _error(answers[start : start + length], answer.detach())
            if not error <= limit:
                raise FoldCheckError(
                    f"check_first: row {index} (positions {start} to {start + length - 1}) differs from the stock model "
                    f"by {error:.1e}, and {limit:.0e} is allowed; do not train with folding, and report this"
                )
            stock = {name: stock[name] + part if name in stock else part for name, part in gradient.items()}
    _compare_gradients(model, gradients, stock, limit)


@contextmanager
def _stage_input(model: Any, sent: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
    """Run the model in evaluation mode, which recomputes nothing, and give it back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    leaf = None if sent is None else sent.detach().clone().requires_grad_()
    model.eval()
    try:
        if leaf is not None:
            model.set_input_tensor(leaf)
        with torch.enable_grad():
            yield leaf
    finally:
        for module, mode in modes:
            module.training = mode
        if sent is not None:
            model.set_input_tensor(sent)


def _row(
    model: Any, rows: FoldedRows, call: dict[str, Any], leaf: torch.Tensor | None, start: int, length: int
) -> torch.Tensor:
    """Return the stock model's answer for one row, ``[n, ...]``."""
    multiple = model.tp_group.size() if model.config.sequence_parallel else 1
    padding = -length % multiple
    if leaf is not None:
        place = rows.place[start : start + length].clamp(max=rows.layout.padded_size - 1)
        own = F.pad(_whole(model, leaf).index_select(0, place), (0, 0, 0, 0, 0, padding))
        model.set_input_tensor(scatter_to_sequence_parallel_region(own, group=model.tp_group) if multiple > 1 else own)
    given = {
        name: F.pad(value.to(rows.device)[:, start : start + length], (0, padding))
        for name in ("input_ids", "labels")
        if (value := call.get(name)) is not None
    }
    positions = torch.arange(length + padding, device=rows.device).unsqueeze(0)
    output = model.forward(**given, position_ids=positions, attention_mask=None, packed_seq_params=None)
    answer: torch.Tensor = output.squeeze(0)[:length] if model.post_process else _whole(model, output)[:length]
    return answer


def _whole(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    if not model.config.sequence_parallel:
        return hidden
    whole: torch.Tensor = gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False, group=model.tp_group
    )
    return whole


def _scored(model: Any, rows: FoldedRows, call: dict[str, Any]) -> torch.Tensor:
    """Return bool ``[T]``: positions that have an answer. A label outside the vocabulary has none."""
    labels = call.get("labels") if model.post_process else None
    if labels is None:
        return torch.ones(rows.size, dtype=torch.bool, device=rows.device)
    flat: torch.Tensor = labels.reshape(-1)
    return (flat >= 0) & (flat < model.vocab_size)


def _most(model: Any, rows: int) -> int:
    """Return the largest number of rows in the expert-parallel group."""
    if model.config.expert_model_parallel_size == 1:
        return rows
    most = torch.tensor(rows, device=next(model.parameters()).device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_expert_model_parallel_group())
    return int(most)


def _gradients(model: Any, leaf: torch.Tensor | None, answers: torch.Tensor) -> Gradients:
    """Return the gradients of half the squared norm, in fp32 or wider."""
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if leaf is not None:
        wanted["its input"] = leaf
    loss = answers.to(torch.promote_types(answers.dtype, torch.float32)).square().sum() / 2
    if not wanted:
        return {}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        name: grad.to(torch.promote_types(grad.dtype, torch.float32))
        for name, grad in zip(wanted, found, strict=True)
        if grad is not None
    }


def _compare_gradients(model: Any, folded: Gradients, stock: Gradients, limit: float) -> None:
    parameters = dict(model.named_parameters())
    for name in [name for name in stock if name in folded]:
        if getattr(parameters.get(name), "sequence_parallel", False):
            # Each rank has its own tokens' part, and folding gives it others than the stock model does.
            dist.all_reduce(folded[name], group=model.tp_group)
            dist.all_reduce(stock[name], group=model.tp_group)
    floor = _LEAST_SHARE * float(sum(grad.double().square().sum() for grad in stock.values())) ** 0.5
    errors = {name: _error(folded[name], grad, floor) for name, grad in stock.items() if name in folded}
    worst = max(errors, key=errors.__getitem__, default="")
    if errors and not errors[worst] <= limit:
        raise FoldCheckError(
            f"check_first: the gradient of {worst} differs from the stock model's by {errors[worst]:.1e}, and "
            f"{limit:.0e} is allowed; do not train with folding, and report this"
        )


def _error(value: torch.Tensor, reference: torch.Tensor, floor: float = 0.0) -> float:
    """Return the relative error in the Euclidean norm; infinite where it is NaN, absolute where the reference is 0."""
    scale = max(float(reference.double().norm()), floor) or 1.0
    error = float((value.double() - reference.double()).norm()) / scale
    return float("inf") if error != error else error
