"""Units that a step takes as one: samples that an objective compares with each other or counts as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import GroupedBy


def is_later_turn(before: Sample, sample: Sample) -> bool:
    """Return whether a sample is a later turn of the rollout of the sample before it; both must name them."""
    first, second = before.signals, sample.signals
    rollout = second.unit("rollout")
    if rollout is None or second.turn is None or first.turn is None:
        return False
    return rollout == first.unit("rollout") and first.turn < second.turn


def with_later_turns(lines: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Join neighbouring lines that hold successive turns of a rollout, for example from ``score``."""
    joined: list[list[Sample]] = []
    for line in lines:
        if line and joined and joined[-1] and is_later_turn(joined[-1][-1], line[0]):
            joined[-1] += line
        else:
            joined.append(list(line))
    return joined


def unit_of(sample: Sample, by: GroupedBy, setting: str) -> Hashable:
    """Return the id of a sample's unit; None for a rollout by itself. Raises SampleError for a missing other id."""
    key = sample.signals.unit(by)
    if key is None and by != "rollout":
        raise SampleError(f"{sample.source}: field '{by}' is missing, and {setting} needs it")
    return key


def whole_groups(
    lines: Sequence[Sequence[Sample]], by: GroupedBy, *, step: int | None, setting: str
) -> list[list[Sample]]:
    """Join the lines of each group, rollout or pair, in the order of their first lines; skip lines without samples.

    Lines with one id are one group, wherever they lie.

    Args:
        by: kind of unit that is joined. A sample without ``rollout`` is a separate rollout; a sample without ``group``
            or ``pair`` is an error.
        step: number of samples per step, over all ranks, if steps count samples: then all groups must have the same
            size, a divisor of it, so that no order cuts one. None if steps count groups, of any sizes.

    Raises:
        SampleError: a sample lacks the field; a step would cut a group; a pair is not two samples.
    """
    groups: list[list[Sample]] = []
    places: dict[Hashable, int] = {}
    for sample in (sample for line in lines for sample in line):
        key = unit_of(sample, by, setting)
        place = len(groups) if key is None else places.setdefault(key, len(groups))
        if place == len(groups):
            groups.append([])
        groups[place].append(sample)
    check_sizes(groups, np.array([len(group) for group in groups], dtype=np.int32), by, step)
    return groups


def check_sizes(
    groups: Sequence[Sequence[Sample]], sizes: npt.NDArray[np.int32], by: GroupedBy, step: int | None
) -> None:
    """Check that all groups have the same size, a divisor of ``step``; ``sizes`` is int32 ``[G]``."""
    if not len(sizes):
        return
    size = 2 if by == "pair" else int(sizes[0])
    different = np.flatnonzero(sizes != size)
    if len(different) and (by == "pair" or step is not None):
        samples, first = groups[int(different[0])], groups[0]
        if by == "pair":
            raise SampleError(f"{samples[-1].source}: {_named(samples, by)}; a pair is two samples, one of them chosen")
        raise SampleError(
            f"{samples[0].source}: {_named(samples, by)} and {_named(first, by)}; a step of "
            f"batch.global_batch_size={step} takes {by}s of one size; to take any sizes, set batch.groups_per_step and "
            "batch.global_batch_size=null"
        )
    if step is not None and step % size:
        raise SampleError(
            f"{groups[0][0].source}: {_named(groups[0], by)}, and steps of batch.global_batch_size={step} would cut "
            f"some; set a multiple of {size}"
        )


def _named(samples: Sequence[Sample], by: GroupedBy) -> str:
    """Return a name with size, for example ``group 'a' has 2 samples``; a rollout without an id gives its place."""
    key = getattr(samples[0].signals, by)
    name = samples[0].source if key is None else repr(key)
    return f"{by} {name} has {len(samples)} sample{'' if len(samples) == 1 else 's'}"
