"""Files of samples with their scores, whoever describes the job: a recipe, or Megatron-LM's arguments.

Legend: P tokens of a micro-batch, L of them on this rank, n tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.fields import FieldNames
from mcore_prefix_tree.data.write import make_row, rows_file
from mcore_prefix_tree.layout.tree_chunks import join_scores
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.scoring import S, Scorer, ScoringStep, on_main_rank_only
from mcore_prefix_tree.mcore.outputs import Logprobs, SampleScores, TopLogprobs, Values
from mcore_prefix_tree.mcore.ranks import is_main_rank
from mcore_prefix_tree.mcore.seam.experts import recording
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.settings import RecipeError
from mcore_prefix_tree.settings.score_section import POLICY, REFERENCE, ScoreConfig
from mcore_prefix_tree.signals.routed_experts import RoutedExperts, check_routed_experts

_ENTROPY = "entropy"


@dataclass(frozen=True, kw_only=True)
class ScoreReport:
    """Summary of the written file."""

    # Iteration of the checkpoint, or release; the policy's, the critic's, the reward model's or the teacher's.
    iteration: int | str
    reference_iteration: int | str | None  # iteration of the reference's checkpoint
    skipped: str  # description of the samples that were skipped; empty without any
    samples: int = 0  # number of lines in the file
    tokens: int = 0  # scored tokens of all samples
    logical_tokens: int = 0
    physical_tokens: int = 0  # tokens computed by each model, without padding

    def with_step(self, step: ScoringStep, scores: Sequence[SampleScores]) -> ScoreReport:
        return replace(
            self,
            samples=self.samples + len(step.samples),
            tokens=self.tokens + sum(int(one.scored.sum()) for one in scores),
            logical_tokens=self.logical_tokens + sum(map(len, step.samples)),
            physical_tokens=self.physical_tokens + step.physical_tokens,
        )

    def lines(self, output: str) -> list[str]:
        """Return the report about the file ``output`` in lines of text."""
        by = self.iteration if isinstance(self.iteration, str) else f"iteration {self.iteration}"
        if self.reference_iteration is not None:
            by += f" and the reference's {self.reference_iteration}"
        written = (
            f"{output}: {self.samples:,} samples, {self.tokens:,} scored tokens by {by}; "
            f"{self.logical_tokens:,} tokens folded into {self.physical_tokens:,}"
        )
        return [written, f"not scored: {self.skipped}"] if self.skipped else [written]


def make_readouts(
    options: ScoreConfig, objective: type[Objective], *, vocab_size: int | None, fused_head: bool
) -> dict[str, Scorer[Any]]:
    """Return each model's readout by column, the objective's own first; ``vocab_size`` is the size before padding."""
    column = options.column(objective)
    main: Scorer[Any] = Values()
    if column == POLICY:
        main = Logprobs(entropy=options.entropy, fused=fused_head)
    elif options.teacher_top_k is not None:
        main = TopLogprobs(k=options.teacher_top_k, vocab_size=vocab_size)
    reference = {} if options.reference is None else {REFERENCE: Logprobs(fused=fused_head)}
    return {column: main, **reference}


def write_scores(
    output: str | Path,
    order: SampleOrder,
    models: Mapping[str, Sequence[Any]],
    readouts: Mapping[str, Scorer[Any]],
    report: ScoreReport,
    *,
    per_step: int,
    folding: Folding,
    names: FieldNames,
    options: ScoreConfig,
) -> ScoreReport:
    """Score one epoch and write its samples with their scores, in the data's order; all ranks call it together.

    The file appears once it is complete; the main rank writes it.

    Args:
        models: this rank's model chunks, by the column that they give.
        readouts: readout of each model, by column; the first is reported.
        report: report to add to, which is returned.
        per_step: number of samples, or groups, that are planned together.
        names: the file's names of our fields.
        options: tokens to score, and whether to write the experts that the first model chose, too.

    Raises:
        RecipeError: the routes of a model without experts are asked for.
        ScoreError: a score is NaN or infinite; nothing is written.
        SampleError, OSError: see :func:`rows_file`.
    """
    main = next(iter(readouts))
    with rows_file(output) if is_main_rank() else nullcontext() as writer:
        for samples in batches(order, per_step):
            step = ScoringStep.plan(samples, folding, all_tokens=options.all_tokens, for_main_rank=True)
            routes: Sequence[RoutedExperts] | None = None
            scores = {}
            for column, readout in readouts.items():
                if options.record_routes and column == main:
                    scores[column], routes = score_and_record(step, models[column], readout, folding.config)
                else:
                    scores[column] = step.score(models[column], readout)
            if writer is not None:
                report = report.with_step(step, scores[main])
                writer.add(
                    [
                        _row(sample, {column: of_all[index] for column, of_all in scores.items()}, names)
                        | ({} if routes is None else {names.theirs("routed_experts"): routes[index]})
                        for index, sample in enumerate(samples)
                    ]
                )
    return report


def batches(order: SampleOrder, size: int) -> Iterator[list[Sample]]:
    """Yield the samples of one epoch, ``size`` samples or groups at a time."""
    with order.stream(0) as stream:
        for start in range(0, order.per_epoch, size):
            yield stream.take(min(size, order.per_epoch - start))


def _row(sample: Sample, scores: dict[str, SampleScores], names: FieldNames) -> dict[str, Any]:
    row = make_row(sample, names)
    row.pop(_ENTROPY, None)  # of another scoring
    for column, one in scores.items():
        row |= {names.theirs(name): value for name, value in one.columns(column).items()}
    return row


def score_and_record(
    step: ScoringStep, chunks: Sequence[Any], readout: Scorer[S], config: Any
) -> tuple[list[S], list[RoutedExperts]]:
    """Return :meth:`ScoringStep.score`, and each sample's experts in every layer; all ranks call it together.

    The ranks but the main one get no experts. A layer without experts has the first ones, which nothing reads.
    ``config`` is the model's ``TransformerConfig``. Raises RecipeError for a model without experts.
    """
    if config.num_moe_experts is None:
        raise RecipeError("score.record_routes=true requires a model with experts, and this one has none")
    with recording(chunks) as routers:
        scores = step.score(chunks, readout)
        own: dict[int, dict[int, Any]] = {index: {} for indices in step.sample_index for index in indices}
        for router in (one for one in routers if one.recorded):  # depths do not run
            experts = [
                _whole(of_batch, batch.layout.padded_size).cpu().numpy().astype(np.int16)
                for batch, of_batch in zip(step.micro_batches, router.recorded, strict=True)
            ]
            for layout, of_tokens, indices in step.joined(experts, partial(join_scores, of_edges=False)):
                for place, index in enumerate(indices):
                    own[index][router.layer_number - 1] = of_tokens[layout.sample_tokens(place)]
    # Tensor-parallel ranks have the same experts; a pipeline stage has those of its layers.
    parts = on_main_rank_only(own if parallel_state.get_tensor_model_parallel_rank() == 0 else {})
    if parts is None:
        return scores, []
    recorded = []
    for index, sample in enumerate(step.samples):
        routes = np.tile(np.arange(config.moe_router_topk), (len(sample), config.num_layers, 1))
        for part in parts:
            for layer, experts in part.get(index, {}).items():
                routes[:, layer] = experts
        recorded.append(check_routed_experts(routes, len(sample), sample.source))
    return scores, recorded


def _whole(experts: torch.Tensor, size: int) -> torch.Tensor:
    """Return the experts of all tokens, ``[P, top-k]``, of ``[L, top-k]``: sequence parallelism divides them."""
    if len(experts) == size:
        return experts
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(experts) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, experts.contiguous(), group=group)
    return torch.cat(parts)
