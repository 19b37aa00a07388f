"""Routes of samples in the routers of a model: the experts that an engine chose, in place of the router's own choice.

A router computes the probabilities of given experts as upstream's ``RouterReplay`` does, whose place
:class:`GivenRoutes` takes for one call. Routes ride on the tree of their micro-batch: recomputation and every pass of a
step find the same ones, and nothing global is set.

Legend: P tokens of a micro-batch, L of them on this rank, E experts, n tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.mcore.seam.validation import graph_modules
from mcore_prefix_tree.plan.model_shape import layer_letters, layers_with_experts
from mcore_prefix_tree.sample import Sample, SampleError

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class GivenRoutes:
    """The experts of a router's tokens, int64 ``[L, top-k]``; -1 lets the router choose those of a token."""

    def __init__(self, experts: torch.Tensor) -> None:
        self.experts = experts

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores ``[L, top-k]`` of the chosen experts, of ``[L, E]``, and their indices."""
        assert default_compute_topk is not None, "upstream passes it"
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = torch.where(self.experts < 0, own, self.experts)
        return scores.gather(1, experts), experts


def row_of_layer(config: Any, rows: int, layer_number: int) -> int:
    """Return which row of a token's routes, for each layer or each with experts, a layer reads; layers begin at 1."""
    if rows == config.num_layers:
        return layer_number - 1
    return sum(layers_with_experts(config.num_layers, config.moe_layer_freq)[: layer_number - 1])


def _rows_read(config: Any, routes: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.intp]]:
    """Return the rows ``[n, layers with experts, top-k]`` of routes ``[n, layers, top-k]``, and their places."""
    rows, pattern = np.arange(routes.shape[1]), getattr(config, "hybrid_layer_pattern", None)
    has_experts = layers_with_experts(config.num_layers, config.moe_layer_freq)
    if pattern is not None:
        has_experts = [letter == "E" for letter in layer_letters(pattern)]
    places = np.flatnonzero(has_experts) if len(rows) == config.num_layers else rows
    return routes if len(places) == len(rows) else routes[:, places], places


def check_routes(config: Any, routes: npt.NDArray[np.integer]) -> None:
    """Reject routes ``[P, layers, top-k]`` that a model with this ``TransformerConfig`` cannot take.

    Raises:
        ValueError: names the setting, or both sizes, and the way out.
    """
    fault = _fault(config, routes)
    if fault:
        raise ValueError(f"field 'routed_experts' {fault}")


def check_sample_routes(config: Any, sample: Sample) -> None:
    """Reject the routes of a sample as :func:`check_routes`, and a token that goes to one expert twice; SampleError."""
    routes = sample.signals.routes
    if routes is None:
        return
    fault = _fault(config, routes.ids) or _repeated(config, routes.ids)
    if fault:
        raise SampleError(f"{sample.source}: field 'routed_experts' {fault}")


def _fault(config: Any, routes: npt.NDArray[np.integer]) -> str | None:
    """Return what is wrong with routes ``[n, layers, top-k]``, or None."""
    if config.num_moe_experts is None:
        return "has routes, but the model has no experts (num_moe_experts); remove the field"
    if "moe_router" in graph_modules(config):
        return "has routes, but CUDA graphs of moe_router would not follow them; leave it out of cuda_graph_modules"
    _, layers, top_k = routes.shape
    sparse = sum(layers_with_experts(config.num_layers, config.moe_layer_freq))
    if layers not in (config.num_layers, sparse):
        return (
            f"has routes of {layers} layers, but the model has {config.num_layers} (num_layers), {sparse} of them with "
            "experts; give a route for each of either"
        )
    if top_k != config.moe_router_topk:
        return (
            f"has {top_k} experts for a token and layer, but the model chooses {config.moe_router_topk} "
            "(moe_router_topk); use the model that made the sample"
        )
    read, _ = _rows_read(config, routes)
    largest = int(read.max(initial=-1))
    if largest >= config.num_moe_experts:
        return (
            f"has expert {largest}, but the model has {config.num_moe_experts} (num_moe_experts), counted from 0; use "
            "the model that made the sample"
        )
    unset: npt.NDArray[np.bool_] = read < 0
    partly = unset.any(axis=(1, 2)) & ~unset.all(axis=(1, 2))
    if partly.any():
        return (
            f"has -1 among the experts at index {int(np.argmax(partly))}; give -1 in all entries of a token without a "
            "route, and experts in all of any other"
        )
    return next((sentence for applies, sentence in _refusals(config) if applies), None)


def _refusals(config: Any) -> list[tuple[bool, str]]:
    """Return (whether it applies, sentence) for every setting of a model that does not go with routes."""
    why = (
        "the last token of a sample has no route and takes that of a sample that continues it, which balancing would "
        "notice"
    )
    rate = config.moe_router_bias_update_rate
    return [
        (
            bool(config.moe_router_fusion),
            "has routes, which the fused kernel of moe_router_fusion=True does not take; set moe_router_fusion=False",
        ),
        *(
            (
                bool(np.any(getattr(config, name) or 0)),
                f"has routes and {name}={getattr(config, name)}: {why}; set it to 0",
            )
            for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")
            if name != "moe_aux_loss_coeff" or config.moe_router_load_balancing_type != "none"
        ),
        (
            bool(config.moe_router_enable_expert_bias and rate),
            f"has routes and moe_router_bias_update_rate={rate}: {why}; set it to 0",
        ),
    ]


def _repeated(config: Any, routes: npt.NDArray[np.integer]) -> str | None:
    """Return a sentence for a token ``[n, layers, top-k]`` that goes to an expert twice; engines fill rows with 0."""
    read, places = _rows_read(config, routes)
    choices = np.ascontiguousarray(np.moveaxis(read, 2, 0))
    twice = np.zeros(choices.shape[1:], dtype=np.bool_)
    for one, other in combinations(choices, 2):
        twice |= (one == other) & (one >= 0)
    if not twice.any():
        return None
    token, layer = np.argwhere(twice)[0]
    return (
        f"sends the token at index {token} to one expert twice, in layer {places[layer]}; give -1 in all entries of a "
        "token that the engine did not run"
    )
