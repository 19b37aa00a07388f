"""Pairs whose two samples are equal: a preference between them teaches nothing, and is a slip of who made the data."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_prefix_tree.data.fingerprint import ALONE, Ranks
from mcore_prefix_tree.sample import Sample

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
            if other is not sample and _are_equal(sample, other):
                self.found[other.source] = None

    def warn(self) -> None:
        """Warn on the first rank, once for each file; all ranks together."""
        found = {source: None for of_rank in self.ranks.gather(self.found) for source in of_rank}
        if os.environ.get("RANK", "0") != "0":
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


def _are_equal(one: Sample, other: Sample) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.loss_mask, other.loss_mask)
