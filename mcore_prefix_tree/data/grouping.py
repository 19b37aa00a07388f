"""Units that a step takes as one: samples that an objective compares with each other or counts as one."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.data.stream import StreamedGroups
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.signals import GroupedBy
from mcore_prefix_tree.utils.launchers import is_first_rank
from mcore_prefix_tree.utils.ranks import ALONE, Ranks


def whole_groups(
    lines: Sequence[Sequence[Sample]],
    by: GroupedBy,
    *,
    step: int | None,
    setting: str,
) -> list[list[Sample]]:
    """Join the lines of each group, rollout or pair, in the order of their first lines; skip lines without samples.

    Args:
        by: kind of unit that is joined. A sample without ``rollout`` is a separate rollout; a sample without ``group``
            or ``pair`` is an error.
        step: number of samples per step, over all ranks, if steps count samples: then all groups must have the same
            size, a divisor of it, so that no order cuts one. None if steps count groups, of any sizes.

    Raises:
        SampleError: a sample lacks the field; separate lines of a group have other prompts; a step would cut a group; a
            pair is not two samples.
    """
    groups: list[list[Sample]] = []
    places: dict[Hashable, int] = {}
    apart: set[int] = set()
    last = -1
    for sample in (sample for line in lines for sample in line):
        key = _key(sample, by=by, setting=setting)
        place = len(groups) if key is None else places.setdefault(key, len(groups))
        if place == len(groups):
            groups.append([])
        elif place != last:
            apart.add(place)
        groups[place].append(sample)
        last = place
    for place in sorted(apart):
        _check_apart(groups[place], by=by)
    _check_sizes(groups, np.array([len(group) for group in groups], dtype=np.int32), by, step)
    return groups


def streamed_whole_groups(
    stream: Callable[..., StreamedGroups],
    by: GroupedBy,
    *,
    step: int | None,
    setting: str,
) -> StreamedGroups:
    """Return :func:`whole_groups` of files larger than memory; ``stream`` makes StreamedGroups with a ``key``."""
    groups = stream(key=partial(_key, by=by, setting=setting), check_apart=partial(_check_apart, by=by))
    _check_sizes(groups, groups.sizes, by, step)
    return groups


def _key(sample: Sample, *, by: GroupedBy, setting: str) -> Hashable:
    key = sample.signals.unit(by)
    if key is None and by != "rollout":
        raise SampleError(f"{sample.source}: field '{by}' is missing, and {setting} needs it")
    return key


def _check_apart(samples: Sequence[Sample], *, by: GroupedBy) -> None:
    """Check that separate lines with one id are one group, and not two groups of two files or epochs."""
    # Two groups show if a turn of a rollout appears twice: ids that restart in each file or epoch. Otherwise it is one
    # group if all samples begin with its prompt, the shortest unscored beginning. Samples of subagents have other
    # prompts: then each has to name its rollout and, among several, its turn, and the lines must not fall into two
    # successive parts that share neither a rollout nor a prompt. Pairs are recognised by their size.
    if by == "pair":
        return
    name = repr(getattr(samples[0].signals, by))
    way_out = f"give each {by} its own id, or put its lines next to each other"
    turns: dict[tuple[Hashable, int | None], Sample] = {}
    for sample in samples:
        rollout, turn = sample.signals.rollout, sample.signals.turn
        if rollout is None or turns.setdefault((rollout, turn), sample) is sample or turn is None:
            continue
        of_group = "" if by == "rollout" else f" of group {name}"
        raise SampleError(
            f"{sample.source}: turn {turn} of rollout {rollout!r}{of_group} is at {turns[rollout, turn].source} too; "
            f"{way_out}"
        )
    prompts = [_prompt(sample) for sample in samples]
    first = min(range(len(samples)), key=lambda at: len(prompts[at]))
    other = next((at for at, sample in enumerate(samples) if not _begins(sample, prompts[first])), None)
    is_named = len(turns) == len(samples)
    if is_named and other is not None:
        first, other = 0, _second_part(samples, prompts)
    if other is not None:
        named = "" if is_named else "; lines of one group may lie apart if each has its 'rollout' and 'turn'"
        raise SampleError(
            f"{samples[other].source}: {by} {name} has another prompt here than at {samples[first].source}, and other "
            f"lines between; {way_out}{named}"
        )


def _second_part(samples: Sequence[Sample], prompts: Sequence[npt.NDArray[np.int32]]) -> int | None:
    """Return the first sample that, with all after it, shares no rollout or prompt ``[n]`` with others, or None."""
    last = {sample.signals.rollout: at for at, sample in enumerate(samples)}
    reach = 0
    for at in range(1, len(samples)):
        reach = max(reach, last[samples[at - 1].signals.rollout])
        if reach < at and not any(
            _begins(samples[after], prompts[before]) or _begins(samples[before], prompts[after])
            for after in range(at, len(samples))
            for before in range(at)
        ):
            return at
    return None


def _begins(sample: Sample, prompt: npt.NDArray[np.int32]) -> bool:
    """Return whether a sample's tokens begin with those of a prompt ``[n]``."""
    return np.array_equal(sample.tokens[: len(prompt)], prompt)


def _prompt(sample: Sample) -> npt.NDArray[np.int32]:
    """Return the tokens before the first that is scored; all of them if none is."""
    scored = np.flatnonzero(sample.loss_mask[1:])
    return sample.tokens[: int(scored[0]) + 1] if len(scored) else sample.tokens


def _check_sizes(
    groups: Sequence[Sequence[Sample]],
    sizes: npt.NDArray[np.int32],
    by: GroupedBy,
    step: int | None,
) -> None:
    """Check that all groups have the same size, a divisor of ``step``; ``sizes`` is int64 ``[G]``."""
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


logger = logging.getLogger(__name__)

_PLACE = re.compile(r"(?::| row )(\d+)( .*)?$")


@dataclass(kw_only=True)
class EqualPairs:
    """Finds equal pairs while their samples are checked by ``ranks`` ranks; ``found`` has their places in order."""

    ranks: Ranks = ALONE
    found: dict[str, None] = field(default_factory=dict)

    def noting(self, check: Callable[[Sequence[Sample]], None] | None) -> Callable[[Sequence[Sample]], None]:
        """Return ``check``, which also notes the pairs among the samples that it is called with."""

        def noted(samples: Sequence[Sample]) -> None:
            self._note(samples)
            if check is not None:
                check(samples)

        return noted

    def _note(self, samples: Sequence[Sample]) -> None:
        first: dict[Hashable, Sample] = {}
        for sample in samples:
            other = first.setdefault(sample.signals.pair, sample)
            pairs = ((sample.tokens, other.tokens), (sample.loss_mask, other.loss_mask))
            if other is not sample and all(np.array_equal(*pair) for pair in pairs):
                self.found[other.source] = None

    def warn(self) -> None:
        """Warn on the first rank, once for each file; all ranks together."""
        found = {source: None for of_rank in self.ranks.gather(self.found) for source in of_rank}
        if not is_first_rank():
            return
        of_files: dict[str, list[str]] = defaultdict(list)
        for source in found:
            of_files[_PLACE.sub("", source)].append(source)
        for path, sources in of_files.items():
            first, count = min(sources, key=_number), len(sources)
            what = "1 pair has two equal answers" if count == 1 else f"{count} pairs have two equal answers each"
            logger.warning("%s: %s, which teach no preference; remove them (the first: %s)", path, what, first)


def _number(source: str) -> int:
    place = _PLACE.search(source)
    return 0 if place is None else int(place[1])
