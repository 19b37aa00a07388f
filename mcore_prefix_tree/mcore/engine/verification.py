"""Folded against unfolded, on the user's own model, parallel layout and data: what changed besides the cost?

Both runs use the same weights and the same Megatron schedule. The unfolded one gives every sample to the stock forward
by itself and scores it with plain ``log_softmax``: it shares nothing with the code it judges. For a critic or reward
model, the values of the samples are compared instead, and half their square is the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.mcore.engine.forward_step import for_schedule, tree_forward
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.outcome import Outcome, Rows, compare_outcomes, measure_rounding
from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.engine.random_draws import (
    kept_buffers,
    kept_generators,
    temporary_settings,
    why_not_the_same,
)
from mcore_prefix_tree.mcore.engine.stand_ins import make_stand_in, plain
from mcore_prefix_tree.mcore.engine.step_planner import FoldedStep, fold_step
from mcore_prefix_tree.mcore.engine.unfolded import (
    StockBatch,
    UnfoldedStep,
    plan_unfolded,
    stock_forward,
    why_stock_does_not_fit,
)
from mcore_prefix_tree.mcore.ranks import everyone, has_logits
from mcore_prefix_tree.mcore.seam.experts import balancing_by_sample, compares_samples
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.plan.model_shape import DELTA_NETS, RECURRENT, layer_parts
from mcore_prefix_tree.sample import Sample

# In which dtype the stock model runs once more, to show how large its own rounding is.
COMPANION = {torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.float64: torch.float32}
# Both runs are off by rounding, and one batch is one draw of it. The folded error was 1.0 times the unfolded one in the
# geometric mean; 0.45 to 2.1 times in single draws over 60 sets of weights in bfloat16, 0.5 to 2.5 times over 220 in
# float32, widest for batches of one sample.
FACTOR = 3.0
# Errors up to this size are rounding, however small the unfolded run's own error is.
LEAST = {torch.bfloat16: 0.0, torch.float32: 1e-6, torch.float64: 1e-12}

# Upstream's delta rule computes in fp32 for any dtype, the reference's too. The gradients of its decays are the rest of
# sums that are thousands of times larger, so their rounding is measured against a share of all gradients.
OF_STATES, SMALL = 1e-4, 1e-3

Begun = Callable[[], None]  # called when a micro-batch of this rank begins


class CannotVerifyError(ValueError):
    """A job whose unfolded side cannot be run. The message says why."""


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Largest relative errors, ``|a - b| / |b|`` in the Euclidean norm."""

    # Largest error over samples of the vector of log-probabilities; None for a model with a scalar head.
    logprob_error: float | None = None
    # Largest error over samples of the vector of entropies; None for a model with a scalar head.
    entropy_error: float | None = None
    # Largest error over samples of the vector of values; None for a model with a vocabulary.
    value_error: float | None = None
    loss_error: float  # error of the step's loss
    gradient_error: float  # largest error over parameters and ranks of one parameter's gradient (its shard on one rank)
    worst_parameter: str  # name and rank of that parameter
    tolerance: float  # smallest limit of each error
    reference: str  # name of the run that the errors are measured against
    # Rounding errors of the unfolded run, by the same names; FACTOR times an error is allowed. The loss's error is the
    # sum of its samples' absolute errors, because errors of opposite signs can cancel. None when only verify.tolerance
    # decides.
    unfolded_errors: dict[str, float] | None
    samples: int
    logical_tokens: int
    physical_tokens: int  # tokens computed, over all micro-batches and ranks
    parameters: int  # number of tensors compared, over all ranks
    dtype: str
    # Name of a loss that is not compared, because it compares samples; None without such a loss.
    left_out: str | None = None

    @property
    def checks(self) -> dict[str, tuple[float, float]]:
        """Each error and its limit, by name."""
        names = ("logprob_error", "entropy_error", "value_error", "loss_error", "gradient_error")
        limits = self.unfolded_errors or {}
        errors = {name: getattr(self, name) for name in names}
        return {
            name: (error, max(self.tolerance, FACTOR * limits.get(name, 0.0)))
            for name, error in errors.items()
            if error is not None
        }

    @property
    def passed(self) -> bool:
        """Return whether every error is within its limit; a NaN is not."""
        return all(error <= limit for error, limit in self.checks.values())

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and ``passed``; JSON has no NaN, so an error that is not finite is null."""
        fields = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
        return fields | {"passed": self.passed}


def verify(
    chunks: Sequence[torch.nn.Module],
    samples: Sequence[Sample],
    job: Job,
    *,
    in_dtype: Callable[[torch.dtype], tuple[Sequence[torch.nn.Module], Any]],
    tolerance: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Run a batch folded and unfolded, and compare the model's outputs for each sample and the loss of :func:`plain`.

    Args:
        chunks: bare model chunks, before Megatron's DDP, in the mode that they train in; weights, gradients, buffers
            and random generators are left as they were.
        samples: samples of the batch, the same on every rank.
        in_dtype: function that builds the same model in another dtype, with its ``TransformerConfig``; the weights are
            copied.
        tolerance: largest relative error that passes. None measures both runs against a wider one, and allows
            :data:`FACTOR` times the unfolded run's own error.
        progress: callback that receives how many micro-batches of this rank's runs have begun, and their number.

    Returns:
        The same report on every rank.

    Raises:
        CannotVerifyError: a sample is too long for the stock attention.
        NotImplementedError: the model draws random numbers.
        SampleError: no token of the batch is scored, so there is nothing to compare.
    """
    make_stand_in(job).check(samples)
    companion = COMPANION[job.config.params_dtype] if tolerance is None else None
    obstacle = why_stock_does_not_fit(samples, job, companion=companion)
    if obstacle is not None:
        raise CannotVerifyError(f"verify cannot run the unfolded side: {obstacle}; verify on shorter samples")
    with kept_generators(), kept_buffers(chunks):
        return _verified(chunks, samples, job, in_dtype, tolerance, companion, progress)


def _verified(
    chunks: Sequence[torch.nn.Module],
    samples: Sequence[Sample],
    job: Job,
    in_dtype: Callable[[torch.dtype], tuple[Sequence[torch.nn.Module], Any]],
    tolerance: float | None,
    companion: torch.dtype | None,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    recurs = has_states(_bare(chunks[0]))
    dtype, least = job.config.params_dtype, SMALL if recurs else 0.0
    job, samples = plain(job, samples)
    step = fold_step(samples, job)
    alone = plan_unfolded(samples, job)
    total, number = len(step.micro_batches) + (1 if companion is None else 2) * len(alone.micro_batches), count(1)

    def begun() -> None:
        if progress is not None:
            progress(next(number), total)

    rows = _repeated(partial(make_stand_in(job).folded_rows, chunks, samples, job))
    folded = replace(_run_folded(chunks, step, job, begun), rows=dict(enumerate(rows)))
    unfolded = _run_unfolded(chunks, alone, samples, job, begun)
    reference, rounding = unfolded, None
    if companion is not None:
        copies, config = in_dtype(companion)
        for target, source in zip(copies, chunks, strict=True):
            target.load_state_dict(_bare(source).state_dict())
        other = _run_unfolded(copies, alone, samples, replace(job, config=config), begun)
        if dtype is torch.float64:
            # Nothing is wider: the rounding of float32, scaled to the digits of float64.
            scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
            rounding = {
                name: scale * error for name, error in measure_rounding(other, unfolded, samples, least=least).items()
            }
        else:
            reference, rounding = other, measure_rounding(unfolded, other, samples, least=least)
    errors, worst, parameters = compare_outcomes(folded, reference, least=least)
    return VerifyReport(
        **errors,
        worst_parameter=worst,
        tolerance=_least_limit(job.config, recurs=recurs) if tolerance is None else tolerance,
        reference="unfolded" if reference is unfolded else f"the same weights in {_name(companion)}, unfolded",
        unfolded_errors=rounding,
        samples=len(samples),
        logical_tokens=step.logical_tokens,
        physical_tokens=step.physical_tokens,
        parameters=parameters,
        dtype=_name(dtype) + (" with FP8" if job.config.fp8 else ""),
        left_out="global_aux_loss" if compares_samples(job.config) else None,
    )


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def has_states(model: Any) -> bool:
    """Return whether layers of a model carry a state along the path, whichever of its stages has them."""
    parts = layer_parts(getattr(model, "hybrid_layer_pattern", None)) or ()
    return model.config.experimental_attention_variant in DELTA_NETS or not RECURRENT.keys().isdisjoint(parts)


def _least_limit(config: Any, *, recurs: bool) -> float:
    dtype: torch.dtype = config.params_dtype
    if recurs:
        return OF_STATES
    fp32_inside = config.num_moe_experts is not None or config.qk_l2_norm or config.attention_output_gate
    # The router, the L2 norm and the gate always compute in fp32: a shared token's gradient is rounded
    # there once instead of once per sample. So does Megatron's cross-entropy of the depths.
    fp32_inside = fp32_inside or bool(config.mtp_num_layers)
    # So does sparse attention in upstream's reference form.
    fp32_inside = fp32_inside or getattr(config, "dsa_indexer_topk", None) is not None
    return 1e-5 if dtype is torch.float64 and fp32_inside else LEAST[dtype]


def _run_folded(chunks: Sequence[torch.nn.Module], step: FoldedStep, job: Job, begun: Begun) -> Outcome:
    """Return the loss and the gradients of the same step that training takes."""

    def loss(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, list[Rows]]:
        """Return the loss of the output ``[1, P, ...]``."""
        return job.readout.read(output, batch).loss, []

    forward, no_rows = partial(tree_forward, readout=job.readout), tuple(() for _ in step.micro_batches)
    return _run(chunks, step.micro_batches, no_rows, forward, loss, for_schedule, job, begun)


def _repeated(run: Callable[[], list[Rows]]) -> list[Rows]:
    """Return the rows of a run, which are the same on every rank, if another run gives them too."""
    rows: list[Rows] = []

    def flat() -> torch.Tensor:
        rows[:] = run()
        return torch.from_numpy(np.concatenate([values for row in rows for values in row.values()]))

    reason = why_not_the_same(flat)
    if reason is not None:
        raise NotImplementedError(f"verify: {reason}")
    return rows


def _run_unfolded(
    chunks: Sequence[torch.nn.Module], step: UnfoldedStep, samples: Sequence[Sample], job: Job, begun: Begun
) -> Outcome:
    score = make_stand_in(job).stock_rows
    ratio = sum(map(len, samples)) / sum(np.count_nonzero(sample.loss_mask[1:]) for sample in samples)

    def divide(batch: StockBatch, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return a loss and its divisor: scored tokens, or all, which stock layers multiply their losses by."""
        return (loss * ratio, batch.length) if job.divides_by_tokens else (loss, batch.loss_mask.count_nonzero())

    depths = job.config.mtp_loss_scaling_factor if job.divides_by_tokens and job.config.mtp_num_layers else None
    # A depth's loss is a sum over scored tokens, as the main loss is.
    scaled = [] if depths is None else [(job.config, "mtp_loss_scaling_factor", depths * ratio)]
    with temporary_settings(scaled):
        return _run(chunks, step.micro_batches, step.sample_index, stock_forward, score, divide, job, begun)


def _run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Any],
    sample_index: Sequence[tuple[int, ...]],
    forward: Callable[[Any, Any], torch.Tensor],
    score: Callable[[Any, torch.Tensor], tuple[torch.Tensor, list[Rows]]],
    divide: Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor | int]],
    job: Job,
    begun: Begun,
) -> Outcome:
    """Run forward and backward of micro-batches; ``forward`` returns ``[1, P, ...]`` or ``[1, n, ...]``."""
    rows: dict[int, Rows] = {}
    losses: list[tuple[float, int]] = []
    indices = iter(sample_index)

    def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(data_iterator)
        if model is chunks[0]:  # of chunks of a virtual pipeline, each has a turn
            begun()

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            """Return the loss of the output ``[1, P, ...]``, or ``[1, n, ...]`` for one sample."""
            loss, scored = score(batch, output)
            divided, divisor = divide(batch, loss)
            losses.append((float(loss.detach()), int(divisor)))
            # A batch of padding has rows of no sample.
            rows.update(zip(next(indices), scored, strict=False))
            return divided, torch.zeros((), dtype=torch.int, device=output.device), None

        return forward(model, batch), loss_func

    with balancing_by_sample(chunks), _gradient_sums(chunks, job.config) as gradients:
        run_schedule(chunks, micro_batches, forward_step)
        _reduce(chunks, gradients)
    # Tensor-parallel ranks all know the rows of their replica; one of them speaks for it.
    of_all = everyone((rows, losses) if has_logits() else ({}, []))
    loss, divisor = map(sum, zip(*(one for _, of_rank in of_all for one in of_rank), strict=True))
    return Outcome(
        rows={index: row for rank_rows, _ in of_all for index, row in rank_rows.items()},
        loss=loss,
        gradients={name: gradient / divisor for name, gradient in gradients.items()},
    )


@contextmanager
def _gradient_sums(chunks: Sequence[torch.nn.Module], config: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Collect gradients over micro-batches in fp32 or better, as DDP's buffers do, and leave no trace on the model."""
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    sums: dict[str, torch.Tensor] = {}
    hooks = []
    for name, parameter in _named_parameters(chunks):
        sums[name] = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))

        def collect(parameter: torch.Tensor, total: torch.Tensor = sums[name]) -> None:
            """Add the gradient of a parameter to ``total``, of its shape."""
            assert parameter.grad is not None
            total += parameter.grad
            parameter.grad = None

        hooks.append(parameter.register_post_accumulate_grad_hook(collect))
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
        config.finalize_model_grads_func = finalize


def _bare(chunk: torch.nn.Module) -> torch.nn.Module:
    bare: torch.nn.Module = getattr(chunk, "module", chunk)
    return bare


def _named_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Trainable parameters, by a name that is unique on this rank."""
    for index, chunk in enumerate(chunks):
        for name, parameter in _bare(chunk).named_parameters():
            if parameter.requires_grad:
                yield (f"chunk {index}: {name}" if len(chunks) > 1 else name), parameter


def _reduce(chunks: Sequence[torch.nn.Module], gradients: dict[str, torch.Tensor]) -> None:
    """Reduce gradients, shaped as their parameters, as ``finalize_model_grads``; an expert's over the ranks with it."""
    for name, parameter in _named_parameters(chunks):
        is_of_expert = not getattr(parameter, "allreduce", True)
        replicas = (
            parallel_state.get_expert_data_parallel_group()
            if is_of_expert
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        dist.all_reduce(gradients[name], group=replicas)
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradients[name], group=parallel_state.get_tensor_model_parallel_group())
        if getattr(parameter, "shared_embedding", False) and parallel_state.is_rank_in_embedding_group():
            dist.all_reduce(gradients[name], group=parallel_state.get_embedding_group())
