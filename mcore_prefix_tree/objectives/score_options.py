"""Options of a run that scores samples, whoever describes the job: a command, or Megatron-LM's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_prefix_tree.objectives.objective import Objective

# Columns of the file, which training reads: a policy's, and those that no objective names.
POLICY, REFERENCE, TEACHER = "old_logprobs", "ref_logprobs", "teacher"


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Options of a scoring run.

    Attributes:
        reference: folder of a second model's weights, which gives ``ref_logprobs``.
        all_tokens: whether to score all tokens, not only those with a non-zero loss mask.
        entropy: whether to write the entropies too.
        teacher_top_k: number of likeliest tokens to write of each prediction of a teacher; None for other models.
        prefix: prefix of the options' names, for messages.
    """

    reference: str | Path | None = None
    all_tokens: bool = False
    entropy: bool = True
    teacher_top_k: int | None = None
    prefix: str = "--"

    def column(self, objective: type[Objective]) -> str:
        """Return the column for the scores of a model that an objective trains."""
        return objective.scored_as if self.teacher_top_k is None else TEACHER

    def reads_mask(self, objective: type[Objective]) -> bool:
        """Return whether only scored tokens get scores, and not all, or the last of each sample."""
        return not self.all_tokens and objective.scored_as != "reward"

    def check(self, objective: type[Objective], *, setting: str, vocab_size: int | None) -> None:
        """Check that the model supports these options.

        Args:
            objective: objective that trains the model.
            setting: setting that names the objective, for messages.
            vocab_size: size of the vocabulary before padding; None where it is not known yet.

        Raises:
            ValueError: the model does not support them.
        """
        k = self.teacher_top_k
        if k is not None and objective.scored_as != POLICY:
            raise ValueError(f"{self.prefix}teacher-top-k wants a vocabulary, and {setting} has none")
        if k is not None and (k < 1 or (vocab_size is not None and k > vocab_size)):
            raise ValueError(
                f"{self.prefix}teacher-top-k {k}: it must be from 1 to the vocabulary's {vocab_size or 'size'}"
            )
        if self.reference is not None and self.column(objective) != POLICY:
            raise ValueError(
                f"{self.prefix}reference gives ref_logprobs beside those of a policy, but this model gives "
                f"{self.column(objective)} alone; score the reference in a run of its own"
            )
