"""Checks and stand-ins of a job that follow from its objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.objectives import Critic, Objective, SupervisedFineTuning
from mcore_prefix_tree.objectives.scored import MissingSignalError
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import Signals

# The commands that write the fields that samples may lack.
_WRITERS = {
    "old_logprobs": "`mcore-prefix-tree score` with the checkpoints that the samples were drawn from writes it",
    "ref_logprobs": "`mcore-prefix-tree score --reference FOLDER` writes it",
    "values": "`mcore-prefix-tree score` of a critic writes it",
    "reward": "`mcore-prefix-tree score` of a reward model writes one",
    "teacher": "`mcore-prefix-tree score --teacher-top-k K` of the teacher writes it",
}


def check_samples(objective: Objective, samples: Sequence[Sample]) -> None:
    """Check before the first step that the objective can train on whole groups, rollouts or pairs.

    Args:
        objective: objective of the job.
        samples: samples of whole groups, rollouts or pairs.

    Raises:
        SampleError: a sample lacks what the objective reads, or contradicts the others of its group. Names the command
            or setting that adds the missing field, if any.
    """
    try:
        objective.check(samples)
    except MissingSignalError as error:
        ways_out = [table[error.field] for table in (_WRITERS, objective.remedies) if error.field in table]
        if not ways_out:
            raise
        raise SampleError(f"{error}; {', or '.join(ways_out)}") from None


def plain(job: Job, samples: Sequence[Sample]) -> tuple[Job, list[Sample]]:
    """Return stand-ins for a job and its samples in verification, comparison and calibration.

    The objective reads no signal, and compares no sample with another: for a model with a vocabulary it is the
    supervised loss; for one with a scalar head half the mean square of the values, a critic whose returns are all 0.
    """
    if not job.objective.has_scalar_head:
        return replace(job, objective=SupervisedFineTuning(), teacher=None), list(samples)
    regressed = [replace(sample, signals=Signals(returns=np.zeros(len(sample)))) for sample in samples]
    return replace(job, objective=Critic(returns="given", clip_eps=None), teacher=None), regressed
