"""The vocabulary head, forward and backward, in several ways: fused, unfused, torch's and Liger's.

Every row has one target, because all heads support that; the share of supervised rows varies. Liger's kernels need a
GPU. Kept sets are random, so that rows have few ids in common; those of an engine overlap, and are faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_prefix_tree import Sample, SamplingMask, Signals, fold
from mcore_prefix_tree.logprob import Edges, Head, edge_logprobs, head_edge_loss, head_logprobs, head_weighted_sum
from mcore_prefix_tree.logprob.edges import slices
from mcore_prefix_tree.logprob.kept_logits import KeptRows

# Ids that an engine kept for each token.
KEPT = (1, 64, 512)
# Sequences of equal length, at most one chunk of rows each, except in the GPU's last case.
SEQUENCES = 8
# Rows of the exact gradients at a time: in float64 the logits of all rows would not fit a GPU.
EXACT_ROWS = 2048


class Case:
    """Hidden states of some sequences, a weight, and which of the rows are supervised."""

    def __init__(
        self, rows: int, hidden: int, vocab: int, supervised: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        samples = []
        for part in np.array_split(np.arange(rows), min(rows, SEQUENCES)):
            tokens = torch.randint(0, vocab, (len(part) + 1,), generator=generator)
            tokens[0] = len(samples)  # nothing is shared
            mask = (torch.rand(len(tokens), generator=generator) < supervised).float()
            samples.append(Sample(tokens=tokens.numpy(), loss_mask=mask.numpy()))
        layout = fold(samples)
        self.kept = {size: kept_edges(samples, size, vocab, device) for size in KEPT}
        size = layout.physical_tokens
        self.hidden = torch.randn(size, hidden, generator=generator).to(device, dtype).requires_grad_()
        self.weight = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(device, dtype).requires_grad_()
        self.loss_weight = torch.from_numpy(layout.loss_weight).to(device).float()
        self.all = Edges.from_layout(layout, device=device)
        self.needed = Edges.from_layout(layout, needed=layout.loss_weight != 0, device=device)
        whole = np.zeros(len(self.needed.host_row), dtype=np.int64)
        self.needed_whole = self.needed.scored_together(self.needed.host_row, whole)
        # For heads without weights: torch's ignored label excludes rows.
        self.labels = torch.full((size,), -100, device=device)
        self.labels[self.needed.predictor] = self.needed.token_id

    def unfused(self) -> torch.Tensor:
        """Run the stock output layer's product, and edge log-probabilities whose gradient overwrites the logits."""
        logprob = edge_logprobs(F.linear(self.hidden, self.weight), self.all, in_place=True)[0]
        return -torch.dot(logprob, self.loss_weight)

    def fused(self) -> torch.Tensor:
        """For any loss."""
        rows = self.hidden[self.needed.row]
        logprob, _ = head_logprobs(rows, self.weight, Head(edges=self.needed))
        return -torch.dot(logprob, self.loss_weight)

    def fused_rows(self) -> torch.Tensor:
        """Run the head for a loss whose terms read one row each; the head does not know that the loss is linear."""
        return self._fused_edges(self.needed, by_rows=True)

    def fused_sequences(self) -> torch.Tensor:
        """Run the head for a loss whose terms read one sequence each."""
        return self._fused_edges(self.needed, by_rows=False)

    def fused_whole(self) -> torch.Tensor:
        """Run the head for a loss of one term, which reads all sequences."""
        return self._fused_edges(self.needed_whole, by_rows=False)

    def fused_whole_at_once(self) -> torch.Tensor:
        """Run the same loss with all rows in one chunk: it then saves only the rows that are not scored."""
        return self._fused_edges(self.needed_whole, by_rows=False, head_chunk_rows=len(self.needed_whole.host_row))

    def _fused_edges(self, edges: Edges, *, by_rows: bool, head_chunk_rows: int | None = None) -> torch.Tensor:
        edge_weight = self.loss_weight[edges.token]

        def loss(logprob: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
            return -torch.dot(logprob, edge_weight)

        gradient, logprob, _ = head_edge_loss(
            self.hidden[edges.row],
            self.weight,
            Head(edges=edges, head_chunk_rows=head_chunk_rows),
            loss=loss,
            by_rows=by_rows,
        )
        return loss(logprob, None) + gradient

    def fused_sum(self) -> torch.Tensor:
        """Run the head for a loss that is linear in the log-probabilities."""
        rows = self.hidden[self.needed.row]
        edge_weight = self.loss_weight[self.needed.token]
        return -head_weighted_sum(rows, self.weight, Head(edges=self.needed), edge_weight=edge_weight)[0]

    def fused_kept(self, size: int) -> torch.Tensor:
        """Run the head for any loss of tokens that were drawn from ``size`` kept ids each."""
        edges = self.kept[size]
        logprob, _ = head_logprobs(self.hidden[edges.head_row], self.weight, Head(edges=edges))
        return -torch.dot(logprob[edges.kept.place], self.loss_weight[edges.kept.predictor + 1])

    def torch_two_steps(self) -> torch.Tensor:
        """``linear`` and ``cross_entropy``."""
        return F.cross_entropy(F.linear(self.hidden, self.weight).float(), self.labels, reduction="sum")

    def torch_chunked(self) -> torch.Tensor:
        """Run ``linear_cross_entropy`` with torch's default options."""
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(
            self.hidden, self.weight, self.labels, reduction="sum", ignore_index=-100, options=options
        )

    def liger(self) -> torch.Tensor:
        """Liger-Kernel's fused linear cross-entropy."""
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(self.hidden, self.weight, self.labels, reduction="sum")


def kept_edges(samples: list[Sample], size: int, vocab: int, device: torch.device) -> Edges:
    """Return the scored edges if every token of the samples was drawn from ``size`` ids, or all of fewer."""
    size = min(size, vocab)
    others = np.random.default_rng(size).choice(vocab - 1, size=size - 1, replace=False) + 1
    ids = np.concatenate([np.zeros(1, dtype=np.int64), others])
    masked = [
        replace(
            sample,
            signals=Signals(sampling_mask=SamplingMask.from_rows(list((sample.tokens[:, None] + ids) % vocab))),
        )
        for sample in samples
    ]
    layout = fold(masked)
    return Edges.from_layout(layout, needed=layout.edge_weight != 0, device=device)


def ways(device: torch.device) -> tuple[dict[str, Callable[[Case], torch.Tensor]], dict[str, str]]:
    """Return the heads that can run here, and why the others cannot."""
    runs = {
        "fused, any loss": Case.fused,
        "fused, loss by rows": Case.fused_rows,
        "fused, loss of sequences": Case.fused_sequences,
        "fused, loss of all rows": Case.fused_whole,
        "fused, loss of all rows in one chunk": Case.fused_whole_at_once,
        "fused, linear loss": Case.fused_sum,
        **{f"fused, any loss, {size} kept": partial(Case.fused_kept, size=size) for size in KEPT},
        "unfused": Case.unfused,
        "torch: linear, cross_entropy": Case.torch_two_steps,
    }
    missing = {}
    if hasattr(F, "linear_cross_entropy"):
        runs["torch: linear_cross_entropy"] = Case.torch_chunked
    else:
        missing["torch: linear_cross_entropy"] = f"torch {torch.__version__} has none"
    if device.type == "cuda" and find_spec("liger_kernel"):
        runs["Liger-Kernel"] = Case.liger
    else:
        missing["Liger-Kernel"] = "not installed" if device.type == "cuda" else "its kernels need a GPU"
    return runs, missing


def kept_by(way: Callable[[Case], torch.Tensor]) -> int | None:
    """Return how many ids the tokens of a head were drawn from; None for the whole vocabulary."""
    size: int | None = getattr(way, "keywords", {}).get("size")
    return size


def seconds(way: Callable[[Case], torch.Tensor], case: Case) -> float:
    """Return the seconds of one forward and backward."""
    case.hidden.grad = case.weight.grad = None
    clock = time.process_time if case.hidden.device.type == "cpu" else time.perf_counter
    synchronize(case)
    started = clock()
    way(case).backward()
    synchronize(case)
    return clock() - started


class Traffic(TorchDispatchMode):
    """Count the bytes of logits that operators read and write, apart from matrix products: ``bytes``.

    A matrix with as many columns as the vocabulary has logits, or their gradients.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.bytes = columns, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        schema, name = func._schema, func.overloadpacket.__name__
        if name in UNCOUNTED or any(result.alias_info and not result.alias_info.is_write for result in schema.returns):
            return results
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
        given |= kwargs or {}
        for argument in schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            only = argument.name == "out" or name in ("copy_", "zero_", "fill_")
            self.bytes += self._size(given.get(argument.name)) * (1 + (written and not only))
        if not any(result.alias_info for result in schema.returns):
            self.bytes += sum(map(self._size, tree_leaves(results)))
        return results

    def _size(self, value: Any) -> int:
        is_block = isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[1] == self.columns
        return value.numel() * value.element_size() if is_block else 0


# Matrix products, operators that read or write a few of the numbers, and memory that nothing is written to.
UNCOUNTED = {
    *("mm", "addmm", "index", "index_put_", "_index_put_impl_", "nll_loss_forward"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
}


def bytes_per_logit(way: Callable[[Case], torch.Tensor], case: Case) -> float:
    """Return the bytes of logits that forward and backward move for each one that is scored."""
    case.hidden.grad = case.weight.grad = None
    with Traffic(len(case.weight)) as traffic:
        way(case).backward()
    return traffic.bytes / (len(case.needed.host_row) * len(case.weight))


def synchronize(case: Case) -> None:
    if case.hidden.device.type == "cuda":
        torch.cuda.synchronize()


def error(way: Callable[[Case], torch.Tensor], case: Case, exact: tuple[torch.Tensor, ...]) -> float:
    """Return the larger relative error of the two gradients; 0 if both are 0, as of a single kept id."""
    case.hidden.grad = case.weight.grad = None
    way(case).backward()
    return max(
        float((leaf.grad.double() - grad).norm() / grad.norm().clamp(min=torch.finfo(grad.dtype).tiny))
        for leaf, grad in zip((case.hidden, case.weight), exact, strict=True)
    )


def exact_gradients(case: Case, kept: KeptRows | None = None) -> tuple[torch.Tensor, ...]:
    """Compute the gradients in float64, in torch's two steps, with logits of -inf outside the kept sets."""
    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in (case.hidden, case.weight))
    for rows in slices(len(case.labels), EXACT_ROWS):
        logits = F.linear(hidden[rows], weight)
        if kept is not None:
            predictor = kept.predictor[kept.row_of_id]
            here = (predictor >= rows.start) & (predictor < rows.stop)
            drops = torch.ones_like(logits, dtype=torch.bool)
            drops[predictor[here] - rows.start, kept.token_id[here]] = False
            logits = logits.masked_fill(drops & (case.labels[rows] >= 0)[:, None], -torch.inf)
        F.cross_entropy(logits, case.labels[rows], reduction="sum").backward()
    return hidden.grad, weight.grad
