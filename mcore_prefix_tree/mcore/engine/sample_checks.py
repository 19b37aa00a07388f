"""Checks of samples that follow from an objective."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.objectives.scored import MissingSignalError
from mcore_prefix_tree.sample import Sample, SampleError

# The commands that write the fields that samples may lack.
_WRITERS = {
    "old_logprobs": "`mcore-prefix-tree score` with the checkpoints that the samples were drawn from writes it",
    "ref_logprobs": "`mcore-prefix-tree score --reference FOLDER` writes it",
    "values": "`mcore-prefix-tree score` of a critic writes it",
    "reward": "`mcore-prefix-tree score` of a reward model writes one",
    "teacher": "`mcore-prefix-tree score --teacher-top-k K` of the teacher writes it",
}


def check_samples(objective: Objective, samples: Sequence[Sample]) -> None:
    """Check before the first step that the objective can train on complete groups, rollouts or pairs.

    Raises:
        SampleError: a sample lacks a field that the objective reads, or contradicts the others of its group. Names the
            command or setting that adds the missing field, if any.
    """
    try:
        objective.check(samples)
    except MissingSignalError as error:
        ways_out = [table[error.field] for table in (_WRITERS, objective.remedies) if error.field in table]
        if not ways_out:
            raise
        raise SampleError(f"{error}; {', or '.join(ways_out)}") from None
