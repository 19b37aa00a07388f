"""Samples that an objective compares with each other, as units that a step takes whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.stream import StreamedGroups
from mcore_prefix_tree.sample import Sample, SampleError

GroupedBy = Literal["group", "pair"]


def whole_groups(
    lines: Sequence[Sequence[Sample]], by: GroupedBy, *, step: int | None, setting: str
) -> list[list[Sample]]:
    """Join neighbouring lines of one group, or of one pair.

    Args:
        lines: the samples of each line; a line without any is left out.
        by: the field of ``Signals`` that says which samples belong together.
        step: samples per step, over all ranks, if steps count samples: then all groups have as many, and a step takes a
            whole number of them, so that no step cuts one in whichever order they are drawn. None if steps count
            groups, which then are of any sizes.
        setting: what needs the field, for messages.

    Raises:
        SampleError: a sample without the field; a group whose lines are not next to each other, or that a step would
            cut; a pair that is not two.
    """
    found: dict[Hashable, list[Sample]] = {}
    last: Hashable = None
    for sample in (sample for line in lines for sample in line):
        key = _key(sample, by=by, setting=setting)
        if key in found and key != last:
            raise _goes_on(sample, by)
        found.setdefault(key, []).append(sample)
        last = key
    groups = list(found.values())
    _check_sizes(groups, np.array([len(group) for group in groups], dtype=np.int32), by, step)
    return groups


def streamed_whole_groups(
    stream: Callable[..., StreamedGroups], by: GroupedBy, *, step: int | None, setting: str
) -> StreamedGroups:
    """The groups, or pairs, of files that memory does not hold.

    Args:
        stream: :class:`StreamedGroups` of them, but for its ``key``.
        by: as in :func:`whole_groups`.
        step: the same.
        setting: the same.

    Raises:
        SampleError: as there.
    """
    groups = stream(key=partial(_key, by=by, setting=setting))
    if groups.repeated is not None:
        raise _goes_on(groups[groups.repeated][0], by)
    _check_sizes(groups, groups.sizes, by, step)
    return groups


def _key(sample: Sample, *, by: GroupedBy, setting: str) -> Hashable:
    key: Hashable = getattr(sample.signals, by)
    if key is None:
        raise SampleError(f"{sample.source}: field '{by}' is missing, and {setting} needs it")
    return key


def _goes_on(sample: Sample, by: GroupedBy) -> SampleError:
    return SampleError(
        f"{sample.source}: {by} {getattr(sample.signals, by)!r} goes on here after others; put the lines of a {by} "
        "next to each other, and give each its own id"
    )


def _check_sizes(
    groups: Sequence[Sequence[Sample]], sizes: npt.NDArray[np.int32], by: GroupedBy, step: int | None
) -> None:
    if not len(sizes):
        return
    size = 2 if by == "pair" else int(sizes[0])
    different = np.flatnonzero(sizes != size)
    if len(different) and (by == "pair" or step is not None):
        samples, first = groups[int(different[0])], groups[0][0].signals.group
        key = getattr(samples[0].signals, by)
        if by == "pair":
            raise SampleError(
                f"{samples[-1].source}: pair {key!r} has {_samples(len(samples))}; a pair is two, one of them chosen"
            )
        raise SampleError(
            f"{samples[0].source}: group {key!r} has {_samples(len(samples))} and group {first!r} has {size}; a step "
            f"of batch.global_batch_size={step} takes whole groups, so give all of them as many, or count "
            "groups: batch.groups_per_step, and batch.global_batch_size=null"
        )
    if step is not None and step % size:
        sample = groups[0][0]
        raise SampleError(
            f"{sample.source}: {by} {getattr(sample.signals, by)!r} has {_samples(size)}, and steps of "
            f"batch.global_batch_size={step} would cut some; set a multiple of {size}"
        )


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"
