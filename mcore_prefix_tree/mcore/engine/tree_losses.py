"""Losses of whole samples on trees that are cut into chunks: the scores first, then a step that is linear in them.

With L the loss of a tree as a function of the log-probabilities and entropies, or the values, s of its tokens, the
gradient of L at the weights is that of ``sum over tokens of (d L / d s) s`` with ``d L / d s`` held fixed. So a scoring
pass runs all chunks forward, from the first to the last, autograd differentiates L once at the scores, and each chunk
of the step trains its part of the sum. Value, metrics and bad samples are those of L, reported with the first chunk.

Legend: P padded tokens of a chunk, X tokens of later chunks that it predicts, M kept edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from mcore_prefix_tree.layout.tree_chunks import ChunkLayout
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Forward, StepHook
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.objectives import LossOutput, LossRows, Objective, TokenObjective
from mcore_prefix_tree.objectives.metrics import NO_SAMPLE
from mcore_prefix_tree.objectives.scored_rows import Terms
from mcore_prefix_tree.plan import Carrying
from mcore_prefix_tree.utils.upload import moved, upload

# Of a chunk, or of its tree: log-probabilities, or values; and entropies at the predictors, if the loss reads them.
SCORES, ENTROPY = "scores", "entropy"


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoringRows(LossRows):
    """Rows of a micro-batch in a scoring pass, whose report has the scores in place of metrics."""

    def loss_of(self, objective: TokenObjective, scores: torch.Tensor, entropy: torch.Tensor | None) -> LossOutput:
        """Return the scores, and the entropies if there are any, ``[P + X + M]`` each."""
        found = {SCORES: scores} | ({} if entropy is None else {ENTROPY: entropy})
        return LossOutput(loss=scores.sum(), metrics=found)


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearRows(LossRows):
    """A chunk's part of its tree's loss, linear in its scores."""

    # Derivatives of the tree's loss at the chunk's scores, and at its entropies, [P + X + M] each.
    slopes: Mapping[str, torch.Tensor]
    output: LossOutput  # the output that the chunk reports: the tree's, or zeros

    def terms_of(self, objective: TokenObjective) -> Terms:
        return "row"

    def loss_of(self, objective: TokenObjective, scores: torch.Tensor, entropy: torch.Tensor | None) -> LossOutput:
        """Return the reported output, with the chunk's gradient."""
        total = torch.dot(self.slopes[SCORES], scores)
        if entropy is not None:
            total = total + torch.dot(self.slopes[ENTROPY], entropy)
        return replace(self.output, loss=self.output.loss + (total - total.detach()))


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeLosses(StepHook):
    """The scoring pass before a step, for the trees of the step that are cut into chunks."""

    objective: TokenObjective
    folding: Folding

    def prepare(self, batches: Sequence[MicroBatch], carrying: Carrying | None = None) -> Sequence[MicroBatch]:
        """Return the micro-batches; those at places of the scoring pass have their turn in it, and what runs then."""
        made = list(batches)
        for turn, place in enumerate(() if carrying is None else carrying.scored):
            made[place] = replace(made[place], hook_data=(turn, self._scoring(made[place])))
        return made

    def _scoring(self, batch: MicroBatch) -> MicroBatch:
        scored = batch.for_scoring() if _is_chunk(batch) else self.folding.micro_batch([])
        return replace(scored, rows=ScoringRows(count=0))

    def before_step(self, batches: Sequence[MicroBatch], student: Forward) -> Sequence[MicroBatch]:
        """Return the micro-batches; on the last stage chunks have the parts of their trees' losses."""
        turns = sorted((batch.hook_data for batch in batches if batch.hook_data is not None), key=lambda one: one[0])
        if not turns:
            return batches
        with torch.no_grad():
            found = [report["metrics"] for report in student([scoring for _, scoring in turns])]
        trees: dict[int, list[int]] = {}
        for place, batch in enumerate(batches):
            if batch.hook_data is not None and _is_chunk(batch):
                trees.setdefault(id(_layout(batch).whole), []).append(place)
        made = [replace(batch, hook_data=None) for batch in batches]
        for places in trees.values() if found else ():
            own = [(made[place], found[batches[place].hook_data[0]]) for place in places]
            for place, rows in zip(places, self._parts(own), strict=True):
                made[place] = replace(made[place], rows=rows)
        return made

    def _parts(self, chunks: Sequence[tuple[MicroBatch, Mapping[str, torch.Tensor]]]) -> list[LinearRows]:
        """Return the parts of a tree's loss from its chunks and their scores, ``[P + X + M]`` each."""
        _, like = chunks[0]
        (whole,) = (batch.rows for batch, _ in chunks if batch.layout.counts_samples)
        assert whole is not None, "the objective makes them"
        size, device = _layout(chunks[0][0]).whole.num_places, like[SCORES].device
        places = [self._places(_layout(batch), device) for batch, _ in chunks]
        leaves = {name: values.new_zeros(size) for name, values in like.items()}
        for of_chunk, (_, values) in zip(places, chunks, strict=True):
            for name, leaf in leaves.items():
                here, there = of_chunk[name]
                leaf[there] = values[name][here]
        with torch.enable_grad():
            inputs = [leaf.requires_grad_() for leaf in leaves.values()]
            output = moved(whole, device).loss_of(self.objective, leaves[SCORES], leaves.get(ENTROPY))
            slopes = torch.autograd.grad(output.loss, inputs, allow_unused=True)
        output = replace(output, loss=output.loss.detach())
        made = []
        for of_chunk, (batch, values) in zip(places, chunks, strict=True):
            own = {name: torch.zeros_like(one) for name, one in values.items()}
            for name, slope in zip(leaves, slopes, strict=True):
                here, there = of_chunk[name]
                if slope is not None:
                    own[name][here] = slope[there]
            rows, is_first = batch.rows, batch.layout.counts_samples
            assert rows is not None, "the objective makes them"
            made.append(LinearRows(count=rows.count, slopes=own, output=output if is_first else _nothing(output)))
        return made

    def _places(self, layout: ChunkLayout, device: torch.device) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the places of each kind of scores in a chunk and in its tree, int64 ``[n]``."""
        here, there = zip(layout.token_places, layout.kept_places, strict=True)
        of_tokens = np.concatenate(here), np.concatenate(there)
        both = {SCORES: of_tokens if self.objective.output == "values" else layout.scored_places, ENTROPY: of_tokens}
        return {name: (upload(here, device), upload(there, device)) for name, (here, there) in both.items()}


def make_hook(objective: Objective, folding: Folding) -> StepHook:
    """Return the work before a step of a job without teachers."""
    if objective.sums_edges or not objective.reads_scores:
        return StepHook()
    return TreeLosses(objective=cast("TokenObjective", objective), folding=folding)


def _is_chunk(batch: MicroBatch) -> bool:
    return isinstance(batch.layout, ChunkLayout) and not batch.forward_only


def _layout(batch: MicroBatch) -> ChunkLayout:
    assert isinstance(batch.layout, ChunkLayout), "a chunk has it"
    return batch.layout


def _nothing(output: LossOutput) -> LossOutput:
    """Return an output with the same metrics, all of weight 0."""
    metrics = {name: torch.zeros_like(pair) for name, pair in output.metrics.items()}
    bad = None if output.bad_sample is None else torch.full_like(output.bad_sample, NO_SAMPLE)
    return LossOutput(loss=torch.zeros_like(output.loss), metrics=metrics, bad_sample=bad)
