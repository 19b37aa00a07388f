"""The vocabulary head's kernels against torch's log_softmax in fp64, from the same rounded logits."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch
from interpreted_bf16 import bfloat16
from kernel_cases import DEVICE

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.logprob import (
    Edges,
    Head,
    edge_logprobs,
    head_chunks,
    head_edge_loss,
    head_logprobs,
    softmax,
    softmax_kernels,
)
from mcore_prefix_tree.logprob.softmax import EdgeGrads, LogitGrads, RowSums, softmax_backward, softmax_sums
from mcore_prefix_tree.logprob.softmax_kernels import COLUMNS, EDGES
from mcore_prefix_tree.utils.triton_here import ParityError

ROWS = 5
# Rows without edges, with one, and with more than the kernel takes at a time; some have their token in common.
ROW_OF_EDGE = [0, *[2] * (EDGES + 3), 3, 3]
# Of a sum of some thousand terms in fp32.
LIMIT = 3e-6
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


class Case:
    """Logits in some dtype, gradients of their outputs, and the results of torch in fp64."""

    def __init__(self, columns, dtype, *, scaled=False, padding=0):
        generator = torch.Generator().manual_seed(columns)

        def draw(*size):
            return torch.randn(size, generator=generator).to(DEVICE)

        self.logits = (4 * draw(ROWS, columns)).to(dtype)
        self.logits[1] += 300  # no sum of exponentials without its maximum
        if columns > 3:
            self.logits[4, 1] = -torch.inf
            self.logits[:, columns - padding :] = max(-1e30, torch.finfo(dtype).min / 2)
        self.scale = 0.5 + draw(ROWS).abs() if scaled else None
        self.row = torch.tensor(ROW_OF_EDGE, device=DEVICE)
        allowed = columns - padding
        self.column = torch.arange(len(ROW_OF_EDGE), device=DEVICE) * 7 % min(allowed, 40)
        self.grad, self.grad_entropy = draw(len(ROW_OF_EDGE)), draw(ROWS)
        # torch's gradient of a logit of -inf is NaN.
        leaf = self.logits.double().clamp(min=-1e4).requires_grad_()
        scores = leaf if self.scale is None else leaf * self.scale.double()[:, None]
        # Also the rounding of two logits of a row to fp32.
        self.limit = LIMIT + torch.finfo(torch.float32).eps * float(scores.detach()[self.logits > -1e3].abs().max())
        logprob = torch.log_softmax(scores, dim=1)
        self.logprob = logprob[self.row, self.column]
        self.entropy = -(logprob.exp() * logprob).sum(1)
        self.of_logprob, self.of_entropy = (
            torch.autograd.grad((grad.double() * value).sum(), leaf, retain_graph=True)[0]
            for grad, value in ((self.grad, self.logprob), (self.grad_entropy, self.entropy))
        )

    def grads(self, outputs, own=None, start=0):
        """Gradients of the named outputs, of edges to the columns ``own``."""
        here = torch.ones_like(self.row, dtype=torch.bool) if own is None else (self.column // own) * own == start
        width = own or self.logits.shape[1]
        edges = EdgeGrads(
            row=self.row, column=(self.column - start).clamp(0, width - 1), grad=torch.where(here, self.grad, 0)
        )
        per_row = torch.zeros(ROWS, device=DEVICE).index_add_(0, self.row, self.grad)
        return LogitGrads(
            row=per_row if "logprob" in outputs else None,
            entropy=self.grad_entropy if "entropy" in outputs else None,
            edges=edges if "logprob" in outputs else None,
        )

    def gradient(self, outputs):
        return sum(getattr(self, f"of_{output}") for output in outputs)

    def scores_of(self, sums):
        at_edges = self.logits[self.row, self.column].float()
        return sums[self.row].logprob(at_edges if self.scale is None else at_edges * self.scale[self.row])


def assert_close(actual, expected, dtype, limit=LIMIT):
    """Within rounding to the dtype of each number, and of fp32 sums relative to the largest one, or to 1."""
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    allowed = rounding * expected.abs() * (1 + 1e-3) + limit * max(1.0, expected.abs().max()) + least
    assert ((actual.double() - expected).abs() <= allowed).all()


OUTPUTS = [("logprob",), ("entropy",), ("logprob", "entropy")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "scaled", "padding"),
    [(1, False, 0), (41, True, 0), (COLUMNS, False, 0), (COLUMNS + 1, True, 0), (2 * COLUMNS + 11, False, 5)],
)
def test_sums_and_gradient(dtype, columns, scaled, padding):
    case = Case(columns, dtype, scaled=scaled, padding=padding)
    with bfloat16():
        sums = softmax_sums(case.logits, scale=case.scale, with_entropy=True)
        bare = softmax_sums(case.logits, scale=case.scale)
        assert bare.moment is None
        assert torch.equal(bare.total, sums.total)
        assert_close(case.scores_of(sums), case.logprob.detach(), torch.float32)
        assert_close(sums.entropy, case.entropy.detach(), torch.float32, limit=1e-5)
        for outputs in OUTPUTS:
            for to in {dtype, torch.float32}:
                out = torch.full(case.logits.shape, torch.nan, dtype=to, device=DEVICE)
                softmax_backward(case.logits, sums, case.grads(outputs), out=out, scale=case.scale)
                assert_close(out, case.gradient(outputs), to, case.limit)
                assert not out[:, columns - padding :].any()
            in_place = case.logits.clone()
            softmax_backward(in_place, sums, case.grads(outputs), out=in_place, scale=case.scale)
            assert_close(in_place, case.gradient(outputs), dtype, case.limit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_two_ranks(dtype):
    """Each rank's sums are joined by hand; edges to the other rank's tokens get nothing here."""
    case = Case(2 * 53, dtype, scaled=True, padding=60)  # the second rank has padding only
    halves = case.logits.split(53, dim=1)
    with bfloat16():
        own = [softmax_sums(half, scale=case.scale, with_entropy=True) for half in halves]
        maximum = torch.maximum(own[0].maximum, own[1].maximum)
        shifts = [sums.maximum - maximum for sums in own]
        total = sum(sums.total * shift.exp() for sums, shift in zip(own, shifts, strict=True))
        moment = sum((sums.moment + shift * sums.total) * shift.exp() for sums, shift in zip(own, shifts, strict=True))
        joined = RowSums(maximum, total, moment)
        assert_close(case.scores_of(joined), case.logprob.detach(), torch.float32)
        assert_close(joined.entropy, case.entropy.detach(), torch.float32, limit=1e-5)
        found = [
            softmax_backward(
                half, joined, case.grads(OUTPUTS[2], 53, start), out=torch.empty_like(half), scale=case.scale
            )
            for half, start in zip(halves, (0, 53), strict=True)
        ]
    assert_close(torch.cat(found, dim=1), case.gradient(OUTPUTS[2]), dtype, case.limit)


def test_no_number_hides_a_fault():
    logits = torch.randn(3, COLUMNS + 5, device=DEVICE)
    logits[0, 3], logits[1, COLUMNS] = torch.nan, torch.inf
    sums = softmax_sums(logits, with_entropy=True)
    assert sums.total.isnan().tolist() == [True, True, False]
    assert sums.entropy.isnan().tolist() == [True, True, False]
    grads = LogitGrads(row=torch.ones(3, device=DEVICE), entropy=None, edges=None)
    gradient = softmax_backward(logits, sums, grads, out=torch.empty_like(logits))
    assert gradient.isnan().all(1).tolist() == [True, True, False]


def heads(dtype):
    """Results and gradients of the head for any loss, for a known one, and without it, in one dtype."""
    samples = [Sample(tokens=[1, 2, branch, *range(length)]) for branch in range(5) for length in range(1, 4)]
    layout = fold(samples, pad_to_multiple_of=4)
    edges = Edges.from_layout(layout, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    sizes = (layout.padded_size, 6), (43, 6)
    hidden, weight = ((2 * torch.randn(size, generator=generator)).to(DEVICE, dtype).requires_grad_() for size in sizes)
    temperature = 0.3 + torch.rand(layout.padded_size, generator=generator).to(DEVICE)
    head = Head(edges=edges, multiplier=0.7, temperature=temperature, head_chunk_rows=4, vocab_size=41)
    rows = hidden[edges.row]

    def loss(logprob, entropy):
        per_row = logprob.new_zeros(len(edges.row)).index_add(0, edges.row_of_edge, logprob.sin())
        return (per_row * (1 + entropy)).sum()

    logprob, entropy = head_logprobs(rows, weight, head, with_entropy=True)
    gradient, of_edges, of_rows = head_edge_loss(rows, weight, head, loss=loss, with_entropy=True)
    logits = 0.7 * (hidden @ weight.T)
    logits = torch.cat([logits[:, :41], torch.full_like(logits[:, 41:], -1e30)], dim=1)
    plain = edge_logprobs(logits, edges, temperature=temperature, with_entropy=True, in_place=True)
    values = [logprob, entropy, of_edges, of_rows, *plain]
    totals = [logprob.sin().sum() + entropy.sum(), gradient, plain[0].sin().sum() + plain[1].sum()]
    return values + [
        grad for total in totals for grad in torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    ]


def test_the_heads_run_them():
    """In fp32; the same calls in fp64 have no kernel."""
    exact = heads(torch.float64)
    counted = mock.patch.object(softmax, "_kernel_sums", wraps=softmax._kernel_sums)
    with counted as kernel:
        actual = heads(torch.float32)
    assert kernel.called
    for one, other in zip(actual, exact, strict=True):
        assert (one.double() - other).abs().max() <= 1e-5 * other.abs().max()


def multiply_in_fp32(left, right, *, out):
    """A product as a GPU computes it, from 16-bit numbers into fp32."""
    torch.mm(left.float(), right.t().float().t(), out=out)


def add_in_fp32_(total, left, right):
    total.add_(left.float() @ right.float())


@pytest.mark.skipif(DEVICE.type != "cpu", reason="scripts/gpu_check measures a GPU's own products")
def test_ten_bytes_for_a_logit(monkeypatch):
    """The sums read a logit's 4 bytes, the gradient reads them again and writes 2; without kernels there are 44."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from gpu_check_parts import heads

    case = heads.Case(16, 8, 97, 1.0, torch.bfloat16, DEVICE)
    assert heads.bytes_per_logit(heads.Case.fused_sum, case) < 44
    for name, replacement in (
        ("widens", lambda _: True),
        ("multiply", multiply_in_fp32),
        ("add_product_", add_in_fp32_),
    ):
        monkeypatch.setattr(head_chunks, name, replacement)
    exact = heads.exact_gradients(case)
    with bfloat16():
        for way in (heads.Case.fused_sum, heads.Case.fused_whole, heads.Case.fused):
            assert heads.bytes_per_logit(way, case) == 10
            assert heads.error(way, case, exact) < torch.finfo(torch.bfloat16).eps
        monkeypatch.setattr(softmax, "kernels_take", lambda _: False)
        assert heads.bytes_per_logit(heads.Case.fused_sum, case) == 44 - 6


def test_edges_are_added_before_rounding():
    """The gradient of a likely token is the small difference of its edge and its probability."""
    logits = torch.zeros(1, 9, device=DEVICE)
    logits[0, 4] = 12.0
    edge = EdgeGrads(row=torch.zeros(1, dtype=torch.int64, device=DEVICE), column=torch.tensor([4], device=DEVICE),
                     grad=torch.ones(1, device=DEVICE))  # fmt: skip
    grads = LogitGrads(row=torch.ones(1, device=DEVICE), entropy=None, edges=edge)
    with bfloat16() if DEVICE.type == "cpu" else contextlib.nullcontext():
        out = torch.empty(1, 9, dtype=torch.bfloat16, device=DEVICE)
        softmax_backward(logits, softmax_sums(logits), grads, out=out)
    expected = 1 - torch.softmax(logits.double(), 1)[0, 4]
    assert abs(out[0, 4].double() / expected - 1) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_comparison_before_first_use_passes(dtype, scaled, with_entropy):
    with bfloat16() if dtype == torch.bfloat16 else contextlib.nullcontext():
        softmax._check_kernels.__wrapped__(DEVICE, dtype, scaled, with_entropy)


def without_the_last_column(original):
    def sums(logits, scale, with_moment):
        return original(logits[:, :-1], scale, with_moment)

    return sums


def without_one_edge(original):
    def gradient(logits, out, *vectors):
        *others, grad = vectors
        original(logits, out, *others, None if grad is None else torch.cat([grad[:-1], grad[-1:] * 0]))

    return gradient


def fails(_):
    def kernel(*_):
        raise RuntimeError("no kernel image\nis available")

    return kernel


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("softmax_sums", without_the_last_column, "is wrong on this machine: (gradient|total) is off by .*, entropy"),
        ("softmax_gradient", without_one_edge, "is wrong on this machine: gradient is off by .*float32, entropy"),
        ("softmax_sums", fails, "does not run on this machine: RuntimeError: no kernel image is available"),
    ],
)
def test_a_wrong_kernel_is_found_on_first_use(name, wrong, says, monkeypatch):
    """On a GPU; torch.compile and the interpreter compare nothing."""
    softmax._check_kernels.cache_clear()
    monkeypatch.setattr(softmax_kernels, name, wrong(getattr(softmax_kernels, name)))
    logits = torch.randn(3, 40, device=DEVICE)
    monkeypatch.setattr(softmax, "can_compare", lambda: False)
    if wrong is not fails:
        softmax_sums(logits, with_entropy=True)
    monkeypatch.setattr(softmax, "can_compare", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(softmax, "kernels_take", lambda logits: logits.dtype != torch.float64)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    with pytest.raises(ParityError, match=f"^the kernel of the vocabulary head's softmax {says}.*; install Triton 3"):
        softmax_sums(logits, with_entropy=True)


def test_kernels_are_compared_once_for_each_kind_of_call(monkeypatch):
    calls = []
    softmax._check_kernels.cache_clear()
    monkeypatch.setattr(softmax, "_kernel_errors", lambda *given, **more: calls.append((*given, more)) or {})
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(softmax, "can_compare", lambda: True)
    monkeypatch.setattr(softmax, "kernels_take", lambda logits: True)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    for logits in (torch.randn(3, 40), torch.randn(7, 9)):
        for _ in range(2):
            softmax_sums(logits.to(DEVICE))
    assert len(calls) == 1
    softmax_sums(torch.randn(3, 40, device=DEVICE), with_entropy=True)
    softmax_sums(torch.randn(3, 40, device=DEVICE).half())
    assert len(calls) == 3
    softmax._check_kernels.cache_clear()
