"""Which samples each step takes: a function of the seed and of how many samples were consumed, so it can be resumed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore_prefix_tree.sample import Sample


class SampleOrder:
    """An endless sequence of samples, epoch after epoch.

    Lines are drawn in a new order each epoch; the samples of one line stay together, because they share their prefix.

    Args:
        groups: the samples of each line, at least one sample in all.
        seed: of the order.
        shuffle: False keeps the order of the files in every epoch.
    """

    def __init__(self, groups: Sequence[Sequence[Sample]], *, seed: int, shuffle: bool) -> None:
        self._groups = groups
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._epoch_samples: list[Sample] = []
        self.samples_per_epoch = sum(len(group) for group in groups)
        if not self.samples_per_epoch:
            raise ValueError("there are no samples to train on")

    def take(self, consumed: int, count: int) -> list[Sample]:
        """The ``count`` samples that follow the first ``consumed`` ones; a batch may reach into the next epoch."""
        taken: list[Sample] = []
        while len(taken) < count:
            epoch, offset = divmod(consumed + len(taken), self.samples_per_epoch)
            taken += self._samples_of(epoch)[offset : offset + count - len(taken)]
        return taken

    def _samples_of(self, epoch: int) -> list[Sample]:
        if epoch != self._epoch:
            order = range(len(self._groups))
            drawn = np.random.default_rng((self._seed, epoch)).permutation(order) if self._shuffle else order
            self._epoch, self._epoch_samples = epoch, [sample for index in drawn for sample in self._groups[index]]
        return self._epoch_samples
