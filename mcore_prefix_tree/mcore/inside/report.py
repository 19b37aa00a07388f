"""What folding inside a model was worth, for the trainer's log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.plan.work import Bound, Counts, ModelWork

_NOTHING = Counts(0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class FoldReport:
    """Micro-batches that a model folded. Reports add up.

    Attributes:
        work: FLOPs of the whole model, all pipeline stages; for :attr:`speedup`.
        micro_batches: number of forward passes.
        left_alone: how many of them went through the stock model, because they share too little.
        rows: number of rows.
        logical_tokens: tokens of all rows.
        unique_tokens: tokens that the layers computed, before padding.
        expanded_bytes: memory of logits that were copied for rows that share them, on this rank. A trainer that passes
            ``labels`` or :class:`~mcore_prefix_tree.mcore.inside.answers.RowLogprobs` has none.
        folded: what was computed.
        unfolded: what the rows would take, each by itself.
    """

    work: ModelWork
    micro_batches: int = 0
    left_alone: int = 0
    rows: int = 0
    logical_tokens: int = 0
    unique_tokens: int = 0
    expanded_bytes: int = 0
    folded: Counts = _NOTHING
    unfolded: Counts = _NOTHING

    @classmethod
    def of(
        cls, layout: FlatLayout, work: ModelWork, *, left_alone: bool = False, head_rows: int | None = None
    ) -> FoldReport:
        """Report one micro-batch.

        Args:
            layout: folded rows.
            work: of the model.
            left_alone: whether it goes through the stock model.
            head_rows: positions that the head computes; None is the unique tokens.
        """
        unfolded = Counts.unfolded([layout], work.window)._replace(predictors=layout.logical_tokens)
        folded = unfolded
        if not left_alone:
            predictors = layout.physical_tokens if head_rows is None else head_rows
            folded = Counts.folded([layout], work.window)._replace(predictors=predictors)
        return cls(
            work=work,
            micro_batches=1,
            left_alone=int(left_alone),
            rows=layout.num_samples,
            logical_tokens=unfolded.tokens,
            unique_tokens=folded.tokens,
            folded=folded,
            unfolded=unfolded,
        )

    def __add__(self, other: FoldReport) -> FoldReport:
        """Sum of both."""
        mine, theirs = vars(self), vars(other)
        sums = {name: mine[name] + theirs[name] for name in mine if isinstance(mine[name], int)}
        counts = {
            name: Counts(*map(sum, zip(mine[name], theirs[name], strict=True))) for name in ("folded", "unfolded")
        }
        return FoldReport(work=self.work, **sums, **counts)

    @property
    def fold_ratio(self) -> float:
        """Logical over unique tokens; 1 for no tokens."""
        return self.logical_tokens / self.unique_tokens if self.unique_tokens else 1.0

    @property
    def bound(self) -> Bound:
        """FLOPs of forward and backward, folded and unfolded, by parts."""
        return Bound(folded=self.work.of(self.folded), unfolded=self.work.of(self.unfolded))

    @property
    def speedup(self) -> float:
        """Bound of the speed-up by FLOPs."""
        return self.bound.ratio

    def to_log(self, prefix: str = "fold/") -> dict[str, Any]:
        """Return plain numbers under names, as loggers take them."""
        names = ("micro_batches", "left_alone", "rows", "logical_tokens", "unique_tokens", "expanded_bytes")
        names += ("fold_ratio", "speedup")
        return {prefix + name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"{self.rows} rows, {self.logical_tokens} tokens, {self.unique_tokens} unique: fold ratio "
            f"{self.fold_ratio:.2f}, expected speed-up {self.bound}"
        )


def work_of(model: Any) -> ModelWork:
    """Count the FLOPs of a ``GPTModel`` with all its pipeline stages, whose head is counted by the rows it computes."""
    config = model.config
    return ModelWork.from_dimensions(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        vocab_size=model.vocab_size,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        swiglu=config.gated_linear_unit,
        fused_head=True,
        settings=vars(config),
    )
