"""Samples that an objective compares with each other, as units that a step takes whole."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

from mcore_prefix_tree.sample import Sample, SampleError

GroupedBy = Literal["group", "pair"]


def whole_groups(lines: Sequence[Sequence[Sample]], by: GroupedBy, *, step: int, setting: str) -> list[list[Sample]]:
    """Join neighbouring lines of one group, or of one pair.

    All have as many samples, and a step takes a whole number of them: then no step cuts one, in whichever order they
    are drawn.

    Args:
        lines: the samples of each line; a line without any is left out.
        by: the field of ``Signals`` that says which samples belong together.
        step: samples per step, over all ranks.
        setting: what needs the field, for messages.

    Raises:
        SampleError: a sample without the field; a group whose lines are not next to each other, or that a step would
            cut.
    """
    found: dict[Hashable, list[Sample]] = {}
    last: Hashable = None
    for sample in (sample for line in lines for sample in line):
        key = getattr(sample.signals, by)
        if key is None:
            raise SampleError(f"{sample.source}: field '{by}' is missing, and {setting} needs it")
        if key in found and key != last:
            raise SampleError(
                f"{sample.source}: {by} {key!r} goes on here after others; put the lines of a {by} next to each other, "
                "and give each its own id"
            )
        found.setdefault(key, []).append(sample)
        last = key
    _check_sizes(found, by, step)
    return list(found.values())


def _check_sizes(groups: dict[Hashable, list[Sample]], by: GroupedBy, step: int) -> None:
    first = next(iter(groups), None)
    size = 2 if by == "pair" else len(groups[first]) if groups else 1
    for key, samples in groups.items():
        if len(samples) == size:
            continue
        if by == "pair":
            raise SampleError(
                f"{samples[-1].source}: pair {key!r} has {_samples(len(samples))}; a pair is two, one of them chosen"
            )
        raise SampleError(
            f"{samples[0].source}: group {key!r} has {_samples(len(samples))} and group {first!r} has {size}; a step "
            f"of batch.global_batch_size={step} takes whole groups, so give all of them as many"
        )
    if groups and step % size:
        raise SampleError(
            f"{groups[first][0].source}: {by} {first!r} has {_samples(size)}, and steps of "
            f"batch.global_batch_size={step} would cut some; set a multiple of {size}"
        )


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"
