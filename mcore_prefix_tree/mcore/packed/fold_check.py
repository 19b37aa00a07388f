"""A micro-batch twice: as it runs, folded or packed, and each row by itself through the same weights without a tree.

Both runs are in the mode that the model is in. In training mode a model that draws random numbers fails.

Each pipeline stage compares its own part and gives both runs the input that it received. So nothing is sent twice, and
if every stage is right, the model is. The gradients compared are those of half the sum of the squared answers; they do
not reach the parameters' ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore_prefix_tree.mcore.engine.random_draws import (
    kept_buffers,
    kept_generators,
    temporary_settings,
    why_not_the_same,
    without_fp8,
)
from mcore_prefix_tree.mcore.packed.answers import expand
from mcore_prefix_tree.mcore.packed.decoder_in_parts import (
    GradientsApart,
    PartedDecoderMixin,
    most_of_experts,
    recomputation,
    recomputed_modules,
)
from mcore_prefix_tree.mcore.packed.packed_rows import FoldedRows, PackedRows
from mcore_prefix_tree.mcore.seam.all_tokens import gather_tokens, padding_multiple, split_tokens
from mcore_prefix_tree.mcore.seam.experts import balancing_by_sample, replaying
from mcore_prefix_tree.mcore.seam.output_layer import unpadded_vocab_size
from mcore_prefix_tree.utils.upload import upload

# Relative errors that are allowed. A wrong key costs 1e-2 and more. Megatron computes the loss of labels in fp32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# A gradient below this share of the norm of all is judged as if it had it: some are zero but for rounding.
_LEAST_SHARE = 1e-3


# Makes the arguments of a micro-batch, folded or packed, from the trainer's.
Arguments: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


class FoldCheckError(RuntimeError):
    """A first micro-batch differs from its rows by themselves. The message says where, which way and by how much."""


def check_comparable(model: Any) -> None:
    """Raise NotImplementedError for models whose gradients cannot be computed by themselves, without a step."""
    config = model.config
    if config.gradient_accumulation_fusion:
        setting = "gradient_accumulation_fusion=True: its kernel writes into DDP's buffers"
    elif (recomputed := recomputed_modules(config)) is not None:
        setting = recomputed
    elif getattr(config, "dsa_indexer_loss_coeff", None):
        setting = f"dsa_indexer_loss_coeff={config.dsa_indexer_loss_coeff}: only a step knows the scale of its gradient"
    elif model.position_embedding_type == "mrope":
        setting = "position_embedding_type='mrope': it compares no pictures"
    else:
        return
    raise NotImplementedError(f"check_first does not support {setting}; change one")


def compare(model: Any, rows: PackedRows, call: dict[str, Any], arguments: Arguments) -> None:
    """Compare a stage's answers and gradients, of the micro-batch as it runs and row by row.

    It compares logits, or losses if ``labels`` are given, or hidden states on stages without a head. It takes the time
    of the rows one after another and memory for two more sets of gradients. Generators and buffers are restored; FP8 is
    off meanwhile.
    ``rows`` are folded or not, and ``arguments`` makes those of the micro-batch from ``call``, the trainer's.

    Raises:
        FoldCheckError: a row or parameter differs by more than :data:`TOLERANCE`, and the first is named; or the model
            draws random numbers.
    """
    limit = TOLERANCE[model.config.params_dtype]
    call = {name: value for name, value in call.items() if not name.startswith("output_processor")}
    if call.get("labels") is not None:
        call["labels"] = call["labels"].clamp(0, unpadded_vocab_size(model) - 1)  # others have no loss
    spans = list(zip(rows.start.tolist(), rows.length.tolist(), strict=True))
    way, advice = "folded", "do not train with folding, and report this"
    if not isinstance(rows, FoldedRows):
        way = f"packed and not folded (fold ratio {rows.fold_ratio:.2f})"
        advice = "set least_fold_ratio=0, which folds every micro-batch, and report this"
    stock: dict[str, torch.Tensor] = {}

    def check(what: str, value: torch.Tensor, reference: torch.Tensor, floor: float = 0.0) -> None:
        """Reject a value that differs from its reference, of the same shape, by more than ``limit`` of the norm."""
        reference = reference.detach().double()
        scale = max(float(reference.norm()), floor) or 1.0
        error = float((value.detach().double() - reference).norm()) / scale
        if not error <= limit:
            raise FoldCheckError(
                f"check_first: {what} differs from the stock model by {error:.1e} of its norm, and {limit:.0e} is "
                f"allowed; the micro-batch is {way}, and the stock model runs each row by itself; {advice}"
            )

    with _undisturbed(model) as sent:
        if model.training:
            with torch.no_grad():
                reason = why_not_the_same(lambda: _together(model, rows, arguments(call)))
            if reason is not None:
                raise FoldCheckError(f"check_first: {reason}")
        answers = _together(model, rows, arguments(call))
        gradients = _gradients(model, sent, answers)
        for index in range(most_of_experts(model, len(spans))):
            start, length = spans[index] if index < len(spans) else (0, 1)
            answer = _alone(model, rows, call, sent, start, length)
            parts = _gradients(model, sent, answer)
            if index < len(spans):
                check(f"row {index}", answers[start : start + length], answer)
                stock = {name: stock[name] + part if name in stock else part for name, part in parts.items()}
    parameters = dict(model.named_parameters())
    floor = _LEAST_SHARE * float(sum(grad.double().square().sum() for grad in stock.values())) ** 0.5
    for name, expected in stock.items():
        if getattr(parameters.get(name), "sequence_parallel", False):
            # A rank has the gradient of its own tokens, which change with folding.
            dist.all_reduce(gradients[name], group=model.tp_group)
            dist.all_reduce(expected, group=model.tp_group)
        check(f"the gradient of {name}", gradients[name], expected, floor)


def _together(model: Any, rows: PackedRows, arguments: dict[str, Any]) -> torch.Tensor:
    """Return the model's answers for the packed micro-batch, ``[T, ...]``."""
    output: torch.Tensor = model.forward(**arguments)
    if model.post_process:
        answers: torch.Tensor = arguments["packed_seq_params"].finish(output)[0]
        return answers
    output = gather_tokens(output, model)
    return expand(output, rows, dim=0) if isinstance(rows, FoldedRows) else output


@contextmanager
def _undisturbed(model: Any) -> Iterator[torch.Tensor | None]:
    """Let the model run in its own mode without recomputation, yield the stage's input as a leaf, and restore all."""
    sent = None if model.pre_process else model.decoder.input_tensor
    leaf = None if sent is None else sent.detach().clone().requires_grad_()
    with ExitStack() as restored:
        restored.enter_context(kept_generators())
        restored.enter_context(kept_buffers([model]))
        restored.enter_context(balancing_by_sample([model]))
        # torch.autograd.grad does not go through it; and offloading waits for a schedule.
        settings = recomputation(model)
        if isinstance(model.decoder, PartedDecoderMixin):
            apart = GradientsApart(needed=torch.zeros((), device=next(model.parameters()).device, requires_grad=True))
            settings.append((model.decoder, "apart", apart))
        restored.enter_context(temporary_settings(settings))
        restored.enter_context(without_fp8([model]))
        restored.callback(model.set_input_tensor, sent)
        model.set_input_tensor(leaf)
        with torch.enable_grad():
            yield leaf


def _alone(
    model: Any, rows: PackedRows, call: dict[str, Any], sent: torch.Tensor | None, start: int, length: int
) -> torch.Tensor:
    """Return the stock model's answer for one row, ``[n, ...]``."""
    padding = -length % padding_multiple(model)
    if sent is not None:
        every = gather_tokens(sent, model)
        place = rows.place[start : start + length].clamp(max=len(every) - 1)  # of no rows there is padding
        row = F.pad(every.index_select(0, place), (0, 0, 0, 0, 0, padding))
        model.set_input_tensor(split_tokens(row, model))
    given = {
        name: F.pad(value.to(rows.device)[:, start : start + length], (0, padding))
        for name in ("input_ids", "labels")
        if (value := call.get(name)) is not None
    }
    positions = torch.arange(length + padding, device=rows.device).unsqueeze(0)
    routes = None
    if isinstance(rows, FoldedRows) and rows.layout.routes is not None:
        # Of the folded tokens: a row's last token takes that of a row that continues.
        of_row = upload(rows.layout.routes, rows.device).index_select(0, rows.place[start : start + length])
        routes = F.pad(of_row, (0, 0, 0, 0, 0, padding), value=-1)
    with replaying(model, routes):
        output = model.forward(**given, position_ids=positions, attention_mask=None, packed_seq_params=None)
    answer: torch.Tensor = output[0] if model.post_process else gather_tokens(output, model)
    return answer[:length]


def _gradients(model: Any, sent: torch.Tensor | None, answers: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of half the squared norm of ``answers``, of any shape, in fp32 or wider."""
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if sent is not None:
        wanted["the stage's input"] = sent
    if not wanted:
        return {}
    loss = answers.to(torch.promote_types(answers.dtype, torch.float32)).square().sum() / 2
    # A decoder that ran in parts sums the gradients of its parameters itself.
    apart: GradientsApart | None = getattr(model.decoder, "apart", None)
    leaves = [*wanted.values(), *([] if apart is None else [apart.needed])]
    found = dict(zip(wanted, torch.autograd.grad(loss, leaves, materialize_grads=True), strict=False))
    if apart is not None:
        found |= {name: found[name] + apart.sums[leaf] for name, leaf in wanted.items() if leaf in apart.sums}
        apart.sums.clear()
    return {name: grad.to(torch.promote_types(grad.dtype, torch.float32)) for name, grad in found.items()}
