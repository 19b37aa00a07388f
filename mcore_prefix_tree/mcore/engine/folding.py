"""Folding of a step's samples into micro-batches: the settings that planning and folding have to agree on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.attention.api import load_backend
from mcore_prefix_tree.layout import NO_PADDING, FlatLayout, Padding, fold
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.routes import check_sample_routes
from mcore_prefix_tree.plan import BudgetError, CostModel, ForestPlan, fewest_micro_batches, plan_step
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import SHARE_ALL, Sharing, build_trie, sort_samples
from mcore_prefix_tree.utils.choices import OverBudget


@dataclass(frozen=True, kw_only=True)
class Folding:
    """Settings of a job's folding. All but ``device`` are the same on every rank, so all ranks make the same plan.

    Raises:
        ValueError: no length bucket holds ``max_tokens``; raised on construction.
    """

    max_tokens: int  # physical tokens that a micro-batch may hold, before padding
    dp_size: int
    # cost_model, bubble: see mcore_prefix_tree.plan.plan_step.
    cost_model: CostModel | None
    device: torch.device
    micro_batch_multiple: int = 1  # divisor of the number of micro-batches per rank
    bubble: float = 0.0
    sharing: Sharing = SHARE_ALL  # choice of the common prefixes that are shared
    padding: Padding = NO_PADDING
    attention_backend: str = "path"
    # Attention calls of the layers, whose plans are made while folding; without any, the first layer makes them.
    attention_cases: tuple[Case, ...] = ()
    deterministic_attention: bool = False  # whether attention has to give the same bits twice
    only_supervised: bool = False  # whether to score only the tokens with a non-zero loss mask
    head_chunk_rows: int | None = None  # see MicroBatch
    # Megatron-core's TransformerConfig of the model, which routes of samples have to fit; None leaves them to the
    # model.
    config: Any = None
    depths: int = 0  # number of depths of multi-token prediction that the job trains
    over_budget: OverBudget = "repeat"  # way to cut trees above max_tokens; see mcore_prefix_tree.plan.plan_step
    scores_first: bool = False  # whether the loss of a tree that is cut otherwise needs a scoring pass before the step
    why_repeat: str = ""  # reason why it is repeat, for the message about a sample above max_tokens

    def __post_init__(self) -> None:
        self.padding.check_holds(self.max_tokens)

    def plan(
        self,
        samples: Sequence[Sample],
        *,
        micro_batches: int | None = None,
        together: Sequence[Hashable] | None = None,
        trains: bool = True,
    ) -> ForestPlan:
        """Plan a step of all ranks, as :func:`mcore_prefix_tree.plan.plan_step`; ``micro_batches`` is per rank.

        Raises SampleError for a sample whose routes do not fit the model, too.
        """
        if self.config is not None:
            for sample in samples:
                check_sample_routes(self.config, sample)
        with self._explained():
            return plan_step(
                samples,
                **self._limits,
                together=together,
                micro_batches=micro_batches,
                bubble=self.bubble,
                trains=trains,
            )

    @property
    def _limits(self) -> dict[str, Any]:
        """Return the settings that decide how many micro-batches samples take."""
        return {
            "max_tokens": self.max_tokens,
            "dp_size": self.dp_size,
            "micro_batch_multiple": self.micro_batch_multiple,
            "cost_model": self.cost_model,
            "sharing": self.sharing,
            "over_budget": self.over_budget,
            "scores_first": self.scores_first,
        }

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add to a BudgetError why keys and values are not carried."""
        try:
            yield
        except BudgetError as error:
            if not self.why_repeat:
                raise
            raise BudgetError(f"{error} (batch.over_budget=carry is not possible: {self.why_repeat})") from None

    def fewest_micro_batches(self, samples: Sequence[Sample], *, together: Sequence[Hashable] | None = None) -> int:
        """Return the number of micro-batches each rank needs for a step; for arguments and errors see :meth:`plan`."""
        with self._explained():
            return fewest_micro_batches(samples, **self._limits, together=together)

    def physical_tokens(self, samples: Sequence[Sample]) -> int:
        """Count the unique tokens of a micro-batch of these samples, before padding."""
        _, shared = sort_samples(samples, self.sharing)
        return sum(map(len, samples)) - int(shared.sum())

    def layout(self, samples: Sequence[Sample]) -> FlatLayout:
        """Fold one micro-batch's samples."""
        trie = build_trie(samples, self.sharing)
        return fold(
            samples,
            trie=trie,
            pad_to_multiple_of=self.padding.multiple,
            padded_size=self.padding.size(trie.num_tokens),
            depths=self.depths,
        )

    def micro_batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """Fold a micro-batch of a planned step on the host, without a call to the device: any thread may run it."""
        layout = self.layout(samples)
        batch = self.with_settings(layout, needed=layout.edge_weight != 0 if self.only_supervised else None)
        plan_attention(batch, self.attention_backend, self.attention_cases)
        return batch

    def with_settings(self, layout: FlatLayout, *, needed: npt.NDArray[np.bool_] | None) -> MicroBatch:
        """Return the micro-batch of a layout, without plans of attention; ``needed`` as in :class:`MicroBatch`."""
        batch = MicroBatch.from_layout(
            layout,
            attention_backend=self.attention_backend,
            deterministic_attention=self.deterministic_attention,
            needed=needed,
            head_chunk_rows=self.head_chunk_rows,
        )
        return replace(batch, routes_fit=self.config is not None)


def plan_attention(batch: MicroBatch, backend: str, cases: Sequence[Case]) -> None:
    """Make a back-end's plans of a micro-batch's tree for calls of these cases, and keep them with the tree."""
    for params in (batch.packed_seq_params, *batch.packed_seq_params.depths):
        for case in cases:
            metadata = params.tree_metadata
            if params.carry is not None:
                metadata = params.carry.within(case.options.window).keys
            assert metadata is not None, "a folded micro-batch has it"
            load_backend(backend).plan(metadata, case)
