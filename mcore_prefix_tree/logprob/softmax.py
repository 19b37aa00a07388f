"""The softmax of a block of rows of logits, forward and backward, for the paths with and without logits.

On a GPU, Triton kernels read each logit once a way (:mod:`mcore_prefix_tree.logprob.softmax_kernels`). Elsewhere, and
in fp64, each step is one of PyTorch's and overwrites its block; the kernels are compared with these before first use.

Legend: B rows of the block, R rows in all, E edges, Vl columns on this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from mcore_prefix_tree.utils.triton_here import can_compare, kernels_run_on, require_parity, worst_row

# Below it exp is 0 in every dtype: logits of -inf are taken for it where 0 * inf would be NaN.
_EXP_IS_ZERO = -1000.0
# Largest errors of the kernels in their comparison: in machine epsilons of a 16-bit gradient, and of other results,
# which sum the exponentials of thousands of logits in fp32.
_EPSILONS, _OF_SUMS = 4, 4e-6


@dataclass(frozen=True)
class RowSums:
    """Sums over the columns of each row, ``[B]`` or ``[R]``: all inputs of a softmax except the logits.

    The sum of ``exp(logits)`` stays in two factors, ``exp(maximum) * total``. The logarithm of their product would be
    rounded at the size of the maximum, and every log-probability with it.
    """

    maximum: torch.Tensor  # the largest logit
    total: torch.Tensor  # sum of exp(logits - maximum), at least 1 over all ranks
    moment: torch.Tensor | None  # sum of exp(logits - maximum) * (logits - maximum); None if no entropy is needed

    @classmethod
    def empty(cls, *size: int, with_entropy: bool, like: torch.Tensor) -> RowSums:
        """Return uninitialised sums ``[*size]`` on the device of ``like``, ``[...]``."""
        return cls(like.new_empty(size), like.new_empty(size), like.new_empty(size) if with_entropy else None)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.maximum, self.total, self.moment

    def __getitem__(self, rows: Any) -> RowSums:
        """Return the sums of some rows; of a slice, as views."""
        return RowSums(self.maximum[rows], self.total[rows], None if self.moment is None else self.moment[rows])

    def set(self, other: RowSums) -> None:
        for own, new in zip(self.parts, other.parts, strict=True):
            if own is not None:
                assert new is not None
                own.copy_(new)

    def logprob(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities, from logits ``[B]`` or ``[B, n]``."""
        maximum, log_total = self.maximum, self.total.log()
        if logits.ndim > maximum.ndim:
            maximum, log_total = maximum[..., None], log_total[..., None]
        return (logits - maximum) - log_total

    @property
    def entropy(self) -> torch.Tensor | None:
        """Entropies in nats, if they are asked for."""
        return None if self.moment is None else self.total.log() - self.moment / self.total


def kernels_take(logits: torch.Tensor) -> bool:
    """Return whether kernels compute the softmax of these logits ``[B, Vl]``."""
    return kernels_run_on(logits) and logits.stride(1) == 1


def softmax_sums_(block: torch.Tensor, *, shifted: torch.Tensor | None = None) -> RowSums:
    """Return the sums of this rank's columns.

    ``block``, logits ``[B, Vl]``, is left with ``exp(block - maximum)``, and ``shifted``, memory of the same size, with
    ``block - maximum``; without it there is no moment.
    """
    # A rank may have only logits of -inf, whose exponentials are 0 for any maximum.
    maximum = block.amax(dim=1).clamp_(min=torch.finfo(block.dtype).min)
    if shifted is None:
        return RowSums(maximum, block.sub_(maximum[:, None]).exp_().sum(dim=1), None)
    exp = torch.exp(torch.sub(block, maximum[:, None], out=shifted), out=block)
    # With out=, autocast does not change the dtype.
    moment = torch.linalg.vecdot(exp, shifted.clamp_(min=_EXP_IS_ZERO), out=torch.empty_like(maximum))
    return RowSums(maximum, exp.sum(dim=1), moment)


def softmax_sums(logits: torch.Tensor, *, scale: torch.Tensor | None = None, with_entropy: bool = False) -> RowSums:
    """Return the sums of this rank's columns of ``scale * logits``, which are unchanged.

    ``logits`` are ``[B, Vl]`` in any floating dtype; ``scale`` is ``[B]``, the sums are ``[B]`` in fp32 or wider.
    """
    if kernels_take(logits):
        return _kernel_sums(logits, scale, with_entropy)
    block = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if scale is not None:
        block.mul_(scale[:, None])
    return softmax_sums_(block, shifted=torch.empty_like(block) if with_entropy else None)


def _kernel_sums(logits: torch.Tensor, scale: torch.Tensor | None, with_entropy: bool) -> RowSums:
    """Return :func:`softmax_sums` ``[B]`` of ``[B, Vl]`` by a kernel, which is compared on its first use on a GPU."""
    if logits.is_cuda and can_compare():
        _check_kernels(logits.device, logits.dtype, scale is not None, with_entropy)
    return _unchecked_sums(logits, scale, with_entropy)


def _unchecked_sums(logits: torch.Tensor, scale: torch.Tensor | None, with_entropy: bool) -> RowSums:
    from mcore_prefix_tree.logprob import softmax_kernels

    maximum, total, moment = softmax_kernels.softmax_sums(
        logits, None if scale is None else scale.contiguous(), with_entropy
    )
    return RowSums(maximum, total, moment if with_entropy else None)


def over_ranks(sums: RowSums, group: dist.ProcessGroup | None) -> RowSums:
    """Join the sums of the ranks, each over the columns of that rank, over the group."""
    if group is None:
        return sums
    maximum = sums.maximum.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    shift = sums.maximum - maximum
    total = sums.total * shift.exp()
    # One reduction for each: the bits of the log-probabilities do not depend on whether the entropy is asked for.
    moment = None if sums.moment is None else (sums.moment + shift * sums.total) * shift.exp()
    for part in (total, moment):
        if part is not None:
            dist.all_reduce(part, group=group)
    return RowSums(maximum, total, moment)


@dataclass(frozen=True, kw_only=True)
class EdgeGrads:
    """Gradients of some edges' log-probabilities, ``[E]``; 0, at any column, for tokens on another rank.

    ``row`` and ``column``, int64 ``[E]``, are the places of each edge's token in the block.
    """

    row: torch.Tensor
    column: torch.Tensor
    grad: torch.Tensor

    def times(self, scale: torch.Tensor) -> EdgeGrads:
        """Multiply the gradients by a factor for each row ``[B]``."""
        return replace(self, grad=self.grad * scale[self.row])

    def add_to_(self, block: torch.Tensor) -> None:
        """Add each gradient at its token in ``[B, Vl]``; several edges may share one."""
        block.index_put_((self.row, self.column), self.grad, accumulate=True)


@dataclass(frozen=True, kw_only=True)
class LogitGrads:
    """Gradients of the outputs of a softmax of rows, from which those of its logits follow."""

    # [B], the sum of the gradients of all edges of a row, on all ranks; None, with edges, if unused.
    row: torch.Tensor | None
    entropy: torch.Tensor | None  # [B], gradients of the rows' entropies; None if unused
    edges: EdgeGrads | None  # gradients of the edges, in the order of their rows

    def times(self, scale: torch.Tensor | None) -> LogitGrads:
        """Multiply all gradients of each row by a factor ``[B]``; None is 1."""
        if scale is None:
            return self
        return LogitGrads(
            row=None if self.row is None else self.row * scale,
            entropy=None if self.entropy is None else self.entropy * scale,
            edges=None if self.edges is None else self.edges.times(scale),
        )


def sum_per_row(per_edge: torch.Tensor, row_of_edge: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[R]``, the sums of ``[E]`` over the edges of each row; ``like`` has the size."""
    return torch.zeros_like(like).index_add_(0, row_of_edge, per_edge)


def softmax_backward(
    logits: torch.Tensor,
    sums: RowSums,
    grads: LogitGrads,
    *,
    out: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """Return the gradient of logits ``[B, Vl]`` in any floating dtype.

    Args:
        sums: sums of ``scale * logits``, over all ranks.
        out: ``[B, Vl]`` in any floating dtype, for the gradient; None overwrites the logits. The gradient is rounded
            after everything is added.
        scale: ``[B]``, factors of the logits; None is 1.
        overwrite: whether logits in the dtype of the sums may be overwritten, too, to save memory.
    """
    out = logits if out is None else out
    if kernels_take(logits):
        return _kernel_backward(logits, sums, grads, out, scale)
    # In fp32 or wider for any dtype of the gradient: a target's rounding error would be permanent.
    wide = sums.total.dtype
    if out.dtype == wide:
        block = out
    else:
        block = logits if overwrite and logits.dtype == wide else torch.empty_like(out, dtype=wide)
    if block is not logits:
        block.copy_(logits)
    if scale is not None:
        block.mul_(scale[:, None])
    softmax_backward_(block, sums, grads.times(scale))
    return block if out is block else out.copy_(block)


def _kernel_backward(
    logits: torch.Tensor, sums: RowSums, grads: LogitGrads, out: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """Run :func:`softmax_backward` of ``[B, Vl]`` by a kernel."""
    from mcore_prefix_tree.logprob import softmax_kernels

    first = column = logit = grad = None
    edges = grads.edges
    if edges is not None:
        first = torch.searchsorted(edges.row, torch.arange(len(logits) + 1, device=logits.device))
        # Read before the kernel may overwrite them.
        column, logit, grad = edges.column, logits[edges.row, edges.column], edges.grad
    vectors = (scale, *sums.parts, grads.row, grads.entropy, first, column, logit, grad)
    # The gradient of a sum is one number, broadcast.
    dense = (None if vector is None else vector.contiguous() for vector in vectors)
    softmax_kernels.softmax_gradient(logits, out, *dense)
    return out


def softmax_backward_(block: torch.Tensor, sums: RowSums, grads: LogitGrads) -> torch.Tensor:
    """Turn logits ``[B, Vl]`` into their gradient, in place; ``sums`` are over all ranks."""
    shifted = block.sub_(sums.maximum[:, None])
    if grads.entropy is None:
        assert grads.row is not None
        shifted.exp_().mul_(-(grads.row / sums.total)[:, None])
    else:
        assert sums.moment is not None
        # log p + H, without the logarithm of the total that both have.
        weight = shifted.clamp_(min=_EXP_IS_ZERO) - (sums.moment / sums.total)[:, None]
        weight.mul_(-(grads.entropy / sums.total)[:, None])
        if grads.row is not None:
            weight.sub_((grads.row / sums.total)[:, None])
        shifted.exp_().mul_(weight)
    if grads.edges is not None:
        grads.edges.add_to_(block)
    return block


class BlockSoftmax:
    """The softmax of a block of logits ``[B, Vl]`` in fp32 or wider, which takes its memory.

    Attributes:
        sums: sums of this rank's columns.
    """

    def __init__(
        self,
        block: torch.Tensor,
        *,
        scale: torch.Tensor | None,
        with_entropy: bool,
        scratch: Callable[[], torch.Tensor],
    ) -> None:
        """Take the sums of ``scale * block``; ``scratch`` returns more memory of the block's size."""
        self._block, self._scale = block, scale
        self._by_kernel = kernels_take(block)
        self._shifted: torch.Tensor | None = None
        if self._by_kernel:
            self.sums = _kernel_sums(block, scale, with_entropy)
            return
        if scale is not None:
            block.mul_(scale[:, None])
        self._shifted = scratch() if with_entropy else None
        self.sums = softmax_sums_(block, shifted=self._shifted)

    def gradient(self, rows: slice, joined: RowSums, grads: LogitGrads, *, out: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of some rows ``[rows, Vl]``, in ``out`` or in the block; it can be taken once.

        ``joined`` is over all ranks.
        """
        block, scale = self._block[rows], None if self._scale is None else self._scale[rows]
        if self._by_kernel:
            return _kernel_backward(block, joined, grads, block if out is None else out, scale)
        shift = self.sums.maximum[rows] - joined.maximum
        grads = grads.times(scale)
        if grads.entropy is None:
            assert grads.row is not None
            assert grads.edges is not None
            # The block has the exponentials already.
            block.mul_(-(grads.row * shift.exp() / joined.total)[:, None])
            grads.edges.add_to_(block)
        else:
            assert self._shifted is not None
            block = softmax_backward_(self._shifted[rows], replace(joined, maximum=-shift), grads)
        return block if out is None else out.copy_(block)


@cache
def _check_kernels(device: torch.device, dtype: torch.dtype, scaled: bool, with_entropy: bool) -> None:
    """Raise ParityError if both kernels differ from torch in fp64 on four rows, once per process and kind of call."""
    require_parity(
        "the kernel of the vocabulary head's softmax",
        lambda: _kernel_errors(device, dtype, scaled=scaled, with_entropy=with_entropy),
        lambda what: max(_OF_SUMS, _EPSILONS * torch.finfo(dtype).eps if what == "gradient" else 0.0),
        f"{dtype}{', scaled' * scaled}{', entropy' * with_entropy}",
        "install Triton 3.6.0, 3.7.1 or 3.9.0, with which it was tested, and report the version",
    )


def _kernel_errors(device: torch.device, dtype: torch.dtype, *, scaled: bool, with_entropy: bool) -> dict[str, float]:
    """Largest error of a row of each result, relative to the row."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float32, device="cpu").to(device)

    def grads_in(dtype: torch.dtype) -> LogitGrads:
        return LogitGrads(
            row=sum_per_row(per_edge, row, per_row).to(dtype),
            entropy=per_row.to(dtype) if with_entropy else None,
            edges=EdgeGrads(row=row, column=column, grad=per_edge.to(dtype)),
        )

    # Columns of two blocks, the second cut off; a row of more edges than a block of these, some to one column.
    logits, row = (3 * draw(4, 2500)).to(dtype), torch.tensor([0, *[2] * 20, 3, 3], device=device)
    column = torch.arange(len(row), device=device) % 9 * 300
    per_edge, per_row = draw(len(row)), draw(4)
    scale = 0.5 + draw(4).abs() if scaled else None
    sums = _unchecked_sums(logits, scale, with_entropy)
    gradient = _kernel_backward(logits, sums, grads_in(torch.float32), torch.empty_like(logits), scale)
    exact, factor = logits.double(), None if scale is None else scale.double()
    truth = softmax_sums(exact, scale=factor, with_entropy=with_entropy)
    wanted = softmax_backward(exact, truth, grads_in(torch.float64), out=None, scale=factor)
    found = {"gradient": worst_row(gradient, wanted, may_vanish=True)}  # of a row without an edge
    for name, own, true in zip(("maximum", "total", "moment"), sums.parts, truth.parts, strict=True):
        if own is not None and true is not None:
            found[name] = worst_row(own[:, None], true[:, None])
    return found


def log1mexp(values: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 - exp(x))``, ``[...]`` (Maechler, "Accurately Computing log(1 - exp(-|a|))", 2012).

    At 0 and above (a certain token, or rounding), the result is that of the last number below 0.
    """
    below = values.clamp(max=-torch.finfo(values.dtype).tiny)
    near = below > -0.6931471805599453
    # Either branch is given numbers that keep the other one's gradient finite.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, below, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, below))),
    )
