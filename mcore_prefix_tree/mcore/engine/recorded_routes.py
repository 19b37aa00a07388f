"""Experts that a model chooses while it scores: recorded in its routers, gathered by sample.

Legend: P tokens of a micro-batch, L of them on this rank, n tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_prefix_tree.layout.tree_chunks import join_scores
from mcore_prefix_tree.mcore.engine.scoring import S, Scorer, ScoringStep, on_main_rank_only
from mcore_prefix_tree.mcore.seam.experts import recording
from mcore_prefix_tree.settings import RecipeError
from mcore_prefix_tree.signals.routed_experts import RoutedExperts, check_routed_experts


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
