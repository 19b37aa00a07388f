"""Forward-only scoring: every sample's log-probabilities and entropies, or values, folded, by the training code.

Old-policy and reference scores come from the same plan, back-end and head as the training step that reads them, so on
one machine and one set of weights they are equal to what that step computes: the first importance ratios are exactly 1
on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.tree_chunks import ChunkLayout
from mcore_prefix_tree.mcore.engine.carried_trees import fold_carrying
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.pipeline import forward_only
from mcore_prefix_tree.mcore.outputs import ExportedRows, Readout, SampleScores, TopLogprobs, Values
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives.scored import refuse_routes, refuse_sampling_masks
from mcore_prefix_tree.sample import Sample

T = TypeVar("T")


class ScoreError(ValueError):
    """A sample with scores that are not finite. The message names it."""


S = TypeVar("S", bound=SampleScores)
S_co = TypeVar("S_co", bound=SampleScores, covariant=True)


class Scorer(Readout[Any], Protocol[S_co]):
    """A readout that scores each sample."""

    def flat(self, output: torch.Tensor, batch: MicroBatch) -> Any:
        """Read a micro-batch's output, ``[1, P, ...]``, onto the host."""

    def joined(self, layouts: Sequence[FlatLayout], flats: Sequence[Any]) -> Any:
        """Return :meth:`flat` of a tree, ``[P, ...]``, from those of its chunks."""

    def sample_scores(self, flat: Any, tokens: npt.NDArray[np.int32], scored: npt.NDArray[np.bool_]) -> S_co:
        """Return a sample's scores from :meth:`flat`; ``tokens`` int32 ``[n]`` are places, ``scored`` bool ``[n]``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoringStep:
    """Samples planned and folded, to be scored under any weights of the model: the policy's, a reference's."""

    samples: Sequence[Sample]
    sample_index: tuple[tuple[int, ...], ...]  # indices of the samples of each of this rank's micro-batches
    micro_batches: list[MicroBatch]  # this rank's micro-batches, on the host
    physical_tokens: int  # unique tokens of the micro-batches of all ranks, without padding
    all_tokens: bool  # whether to score every token that has a predictor, not only those with a non-zero loss mask
    # Whether to send the scores only to the main rank: on GPUs each rank would otherwise hold everyone's while they are
    # sent.
    for_main_rank: bool = False

    @classmethod
    def plan(
        cls, samples: Sequence[Sample], folding: Folding, *, all_tokens: bool = False, for_main_rank: bool = False
    ) -> ScoringStep:
        """Plan and fold samples, the same on every rank; in a training step's order they are planned as that step."""
        folding = replace(folding, only_supervised=not all_tokens)
        plan, rank = folding.plan(samples), parallel_state.get_data_parallel_rank()
        mine = plan.micro_batches[rank]
        batches = fold_carrying(samples, mine, plan.carrying_of(rank), folding)
        return cls(
            samples=samples,
            sample_index=mine,
            micro_batches=[batch.without_backward() for batch in batches],
            physical_tokens=sum(map(sum, plan.physical_tokens)),
            all_tokens=all_tokens,
            for_main_rank=for_main_rank,
        )

    def score(self, chunks: Sequence[Any], readout: Scorer[S]) -> list[S]:
        """Return each sample's scores under the current weights; all ranks call it together.

        With ``for_main_rank``, the other ranks get an empty list.

        Raises:
            ScoreError: a score is NaN or infinite; names the sample, on every rank.
            SampleError: a sample has a sampling mask, and the readout is of the whole vocabulary; or routes, and it is
                of a scalar head.
        """
        if isinstance(readout, TopLogprobs | ExportedRows):
            refuse_sampling_masks(self.samples, "distillation")
        if isinstance(readout, Values):
            refuse_routes(self.samples, "a critic or reward model")
        own: dict[int, S] = {}
        found = forward_only(chunks, self.micro_batches, readout, readout.flat)
        for layout, flat, indices in self.joined(found, readout.joined):
            for place, index in enumerate(indices):
                tokens = layout.sample_tokens(place)
                scored = layout.predictor[tokens] >= 0
                if not self.all_tokens:
                    scored &= self.samples[index].loss_mask != 0
                own[index] = readout.sample_scores(flat, layout.sample_places(place), scored)
        faults = ((index, own[index].fault(self.samples[index])) for index in sorted(own))
        of_each = everyone(next(((index, fault) for index, fault in faults if fault is not None), None))
        first = min((fault for fault in of_each if fault is not None), default=None)
        if first is not None:
            raise ScoreError(first[1])
        # Tensor-parallel ranks all know the scores of their replica; one of them speaks for it.
        spoken = own if parallel_state.get_tensor_model_parallel_rank() == 0 else {}
        of_all = on_main_rank_only(spoken) if self.for_main_rank else everyone(spoken)
        if of_all is None:
            return []
        together: dict[int, S] = {index: one for part in of_all for index, one in part.items()}
        return [together[index] for index in range(len(self.samples))]

    def joined(
        self, flats: Sequence[Any], join: Callable[[Sequence[FlatLayout], Sequence[Any]], Any]
    ) -> Iterator[tuple[FlatLayout, Any, tuple[int, ...]]]:
        """Yield layout, output and samples of each micro-batch; of the chunks of a tree once, their outputs joined."""
        of_each = zip(self.micro_batches, flats, self.sample_index, strict=False)
        # A first pass scores nothing.
        found = ((batch.layout, flat, indices) for batch, flat, indices in of_each if not batch.forward_only)
        for _, group in groupby(found, key=lambda one: id(getattr(one[0], "whole", one[0]))):
            parts = list(group)
            layout, flat, indices = parts[0]
            if isinstance(layout, ChunkLayout):
                flat = join([one for one, _, _ in parts], [one for _, one, _ in parts])
                layout = layout.whole
            yield layout, flat, indices


def on_main_rank_only(value: T) -> list[T] | None:
    """Return the value of every rank on the main one, and None on the others."""
    of_all: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, of_all, dst=0)
    return of_all


def score(
    chunks: Sequence[Any], samples: Sequence[Sample], folding: Folding, readout: Scorer[S], *, all_tokens: bool = False
) -> list[S]:
    """Call :meth:`ScoringStep.plan` and :meth:`ScoringStep.score`; arguments and errors are theirs."""
    return ScoringStep.plan(samples, folding, all_tokens=all_tokens).score(chunks, readout)
