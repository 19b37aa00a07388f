"""Settings of a run that scores samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic.dataclasses import dataclass

from mcore_prefix_tree.settings.section import STRICT, LocalPath, PositiveInt

if TYPE_CHECKING:
    from mcore_prefix_tree.objectives import Objective

# Columns of the file, which training reads: a policy's, and those that no objective names.
POLICY, REFERENCE, TEACHER = "old_logprobs", "ref_logprobs", "teacher"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScoreConfig:
    """A scoring run.

    Attributes:
        output: file to write, one sample per line in the data's order: JSON Lines (``.jsonl``, ``.json``, also
            ``.gz``), ``.parquet``, ``.arrow`` or ``.feather``.
        reference: folder of the checkpoints of a reference model with the same architecture; adds ``ref_logprobs``.
        all_tokens: whether to score every token, not only those of the loss mask.
        entropy: whether to write the entropies too.
        teacher_top_k: number of likeliest tokens to write per prediction instead, for ``distill`` to read.
        record_routes: whether to write ``routed_experts`` too, the experts that the policy sends each token to.
    """

    output: Annotated[str, LocalPath]
    reference: Annotated[str | None, LocalPath] = None
    all_tokens: bool = False
    entropy: bool = True
    teacher_top_k: PositiveInt | None = None
    record_routes: bool = False

    def column(self, objective: type[Objective]) -> str:
        """Return the column for the scores of a model that an objective trains."""
        return objective.scored_as if self.teacher_top_k is None else TEACHER

    def reads_mask(self, objective: type[Objective]) -> bool:
        """Return whether only scored tokens get scores, and not all, or the last of each sample."""
        return not self.all_tokens and objective.scored_as != "reward"

    def check(self, objective: type[Objective], *, setting: str, vocab_size: int | None) -> None:
        """Raise ValueError if the model does not support these settings; ``vocab_size`` is None if unknown."""
        k = self.teacher_top_k
        if k is not None and objective.scored_as != POLICY:
            raise ValueError(f"score.teacher_top_k requires a vocabulary, and {setting} has none")
        if k is not None and vocab_size is not None and k > vocab_size:
            raise ValueError(f"score.teacher_top_k={k}: it must be from 1 to the vocabulary's {vocab_size}")
        if self.record_routes and self.column(objective) != POLICY:
            raise ValueError(
                f"score.record_routes records the experts of a policy, but this model gives {self.column(objective)}; "
                "remove it"
            )
        if self.reference is not None and self.column(objective) != POLICY:
            raise ValueError(
                f"score.reference adds ref_logprobs to those of a policy, but this model gives only "
                f"{self.column(objective)}; score the reference in another run"
            )
