"""Savings by folding inside a model, for the trainer's log."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.plan.flops import DIMENSIONS, Counts, ExpectedSpeedup, ModelWork
from mcore_prefix_tree.plan.model_shape import layer_parts


@dataclass(frozen=True, kw_only=True)
class FoldReport:
    """Micro-batches that a model folded; reports add up.

    Attributes:
        work: FLOPs of the entire model, with all pipeline stages.
        folded: counts of the computed tokens, with their pairs and predictors.
        unfolded: counts of the same rows, each by itself.
        micro_batches: number of forward passes.
        left_alone: number of forward passes that the stock model computed, because their rows share too little.
        expanded_bytes: memory of the answers beyond that of the folded output: logits, if rows share theirs.
    """

    work: ModelWork
    folded: Counts
    unfolded: Counts
    micro_batches: int = 1
    left_alone: int = 0
    rows: int = 0
    expanded_bytes: int = 0

    @classmethod
    def of(cls, layout: FlatLayout, work: ModelWork, *, head_rows: int | None = None) -> FoldReport:
        """Report a folded micro-batch; the head computes ``head_rows`` positions, None is the unique tokens."""
        folded = Counts.folded([layout], work.window)
        folded = folded._replace(predictors=folded.tokens if head_rows is None else head_rows)
        unfolded = Counts.of_lengths(np.diff(layout.cu_sample_lens), work.window)
        return cls(work=work, folded=folded, unfolded=unfolded, rows=layout.num_samples)

    @classmethod
    def of_stock(cls, lengths: npt.NDArray[np.int64], work: ModelWork) -> FoldReport:
        """Report a micro-batch of rows, int64 ``[S]``, that the stock model computes."""
        counts = Counts.of_lengths(lengths, work.window)
        return cls(work=work, folded=counts, unfolded=counts, left_alone=1, rows=len(lengths))

    def __add__(self, other: FoldReport) -> FoldReport:
        sums: dict[str, Any] = {}
        for name in (field.name for field in fields(self) if field.name != "work"):
            mine, theirs = getattr(self, name), getattr(other, name)
            sums[name] = (
                Counts(*map(sum, zip(mine, theirs, strict=True))) if isinstance(mine, Counts) else mine + theirs
            )
        return FoldReport(work=self.work, **sums)

    def over_ranks(self, group: dist.ProcessGroup, device: torch.device) -> FoldReport:
        """Return the sum of the reports of a data-parallel group; a collective on a device of the group's back-end."""
        names = ("micro_batches", "left_alone", "rows", "expanded_bytes")
        numbers = [*self.folded, *self.unfolded, *(getattr(self, name) for name in names)]
        total = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.all_reduce(total, group=group)
        size, sums = len(self.folded), total.tolist()
        folded, unfolded = Counts(*sums[:size]), Counts(*sums[size : 2 * size])
        return FoldReport(
            work=self.work, folded=folded, unfolded=unfolded, **dict(zip(names, sums[2 * size :], strict=True))
        )

    def __str__(self) -> str:
        return (
            f"prefix trees of {self.micro_batches:,} micro-batches: fold ratio {self.fold_ratio:.2f} "
            f"({self.unique_tokens:,} of {self.logical_tokens:,} tokens computed), expected speed-up "
            f"{self.expected_speedup.ratio:.2f}x"
        )

    @property
    def logical_tokens(self) -> int:
        return self.unfolded.tokens

    @property
    def unique_tokens(self) -> int:
        """Tokens that the layers computed, before padding."""
        return self.folded.tokens

    @property
    def fold_ratio(self) -> float:
        """Ratio of logical to unique tokens; 1 for no tokens."""
        return self.logical_tokens / self.unique_tokens if self.unique_tokens else 1.0

    @property
    def expected_speedup(self) -> ExpectedSpeedup:
        """Speed-up to expect by FLOPs."""
        return ExpectedSpeedup(folded=self.work.of(self.folded), unfolded=self.work.of(self.unfolded))

    def to_log(self) -> dict[str, float]:
        """Return numbers by name, as loggers take them."""
        names = ("micro_batches", "left_alone", "rows", "logical_tokens", "unique_tokens", "fold_ratio")
        numbers = {f"fold/{name}": getattr(self, name) for name in names}
        expected = self.expected_speedup.ratio
        return numbers | {"fold/expanded_bytes": self.expanded_bytes, "fold/expected_speedup": expected}


def count_model_flops(model: Any) -> ModelWork:
    """Count the FLOPs of a ``GPTModel`` or ``HybridModel`` with all its pipeline stages."""
    config = model.config
    return ModelWork.from_dimensions(
        **{name: getattr(config, name) for name in DIMENSIONS},
        vocab_size=model.vocab_size,
        num_query_groups=config.num_query_groups,
        swiglu=config.gated_linear_unit,
        fused_head=True,  # a report counts the positions that the head computes
        settings=vars(config),
        parts=layer_parts(getattr(model, "hybrid_layer_pattern", None)),
    )
