"""Checks of samples that follow from an objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.objectives.scored import MissingSignalError
from mcore_prefix_tree.sample import Sample, SampleError


@dataclass(frozen=True, kw_only=True)
class ScoreCommand:
    """Names of the commands that write the fields that samples may lack, for messages.

    Attributes:
        name: name of the command or the argument.
        reference: command or arguments that score a reference model.
        teacher: command or arguments that write a teacher's likeliest tokens.
    """

    name: str
    reference: str
    teacher: str

    def writing(self, field: str) -> list[str]:
        """Return a phrase for the command that writes a field; empty if none does."""
        ways = {
            "old_logprobs": f"`{self.name}` with the checkpoints that the samples were drawn from writes it",
            "ref_logprobs": f"`{self.reference}` writes it",
            "values": f"`{self.name}` of a critic writes it",
            "reward": f"`{self.name}` of a reward model writes one",
            "teacher": f"`{self.teacher}` of the teacher writes it",
        }
        return [ways[field]] if field in ways else []


RECIPE_SCORES = ScoreCommand(
    name="mcore-prefix-tree score",
    reference="mcore-prefix-tree score --reference FOLDER",
    teacher="mcore-prefix-tree score --teacher-top-k K",
)


def check_samples(objective: Objective, samples: Sequence[Sample], *, scored_by: ScoreCommand = RECIPE_SCORES) -> None:
    """Check before the first step that the objective can train on whole groups, rollouts or pairs.

    Args:
        objective: objective of the job.
        samples: samples of whole groups, rollouts or pairs.
        scored_by: names of the commands that add missing fields in the user's interface.

    Raises:
        SampleError: a sample lacks what the objective reads, or contradicts the others of its group. Names the command
            or setting that adds the missing field, if any.
    """
    try:
        objective.check(samples)
    except MissingSignalError as error:
        ways_out = scored_by.writing(error.field)
        if error.field in objective.remedies:
            ways_out.append(objective.remedies[error.field])
        if not ways_out:
            raise
        raise SampleError(f"{error}; {', or '.join(ways_out)}") from None
