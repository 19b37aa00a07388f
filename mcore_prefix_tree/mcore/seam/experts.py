"""Experts under a tree: a router that balances by samples and takes their routes, and the layer that shows it the tree.

Every term of a stock router's balancing is a sum over tokens. A folded micro-batch has a token of m samples once, so
its terms are weighed by m, and sums over a sample are sums over the nodes of its path. Of a tree in chunks, losses and
counts of tokens are sums over its chunks; what a sample's loss reads of other chunks is in their store.

Legend: P tokens of a micro-batch, L of them on this rank, N nodes, S samples, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter

from mcore_prefix_tree.mcore.seam.carried_keys import Carry, SampleCounts
from mcore_prefix_tree.mcore.seam.packed_seq_params import get_tree_params
from mcore_prefix_tree.mcore.seam.routes import GivenRoutes, row_of_layer
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import upload


@dataclass(frozen=True, kw_only=True, eq=False)
class Multiplicity:
    """Counts of the samples through each token of a micro-batch, which may be a part of a tree.

    Rows of nodes end with one of padding and one of zeros. A sum over a path takes one jump for each power of two of
    nodes, O(N log depth), where a sum of tokens would cancel in fp32 and a matrix has ``S * N`` entries.
    """

    of_token: torch.Tensor  # fp32 [P], number of samples through each token; 0 for padding
    node: torch.Tensor  # int64 [P], the node of each token; N for padding
    jumps: torch.Tensor  # int64 [J, N + 2], the ancestor 1, 2, 4, ... nodes above each node; N + 1 above a root.
    last: torch.Tensor  # int64 [S], the last node of each sample; N + 1 for a sample that is not here
    lengths: torch.Tensor  # fp32 [S], tokens of each sample here, at least 1
    logical_tokens: int  # tokens of all samples here

    @classmethod
    def of(cls, metadata: TreeMetadata) -> Multiplicity:
        """Return the counts of a micro-batch; raise ValueError if its metadata does not name samples."""
        if metadata.sample_node is None:
            raise ValueError("balancing of experts needs the samples of a tree: make it with TreeMetadata.from_layout")
        nodes, device = metadata.num_nodes, metadata.subtree_end.device
        none = nodes + 1
        jump = np.append(metadata.node_parent.astype(np.int64), [-1, -1])
        jump[jump < 0] = none
        jumps = []
        while (jump != none).any():
            jumps.append(jump)
            jump = jump[jump]
        last = np.where(metadata.sample_node < 0, none, metadata.sample_node).astype(np.int64)
        lens = np.append(np.diff(metadata.cu_node_lens, append=metadata.padded_size), 0)
        node_of_token, lengths = np.repeat(np.arange(none + 1), lens), lens
        through = np.bincount(last, minlength=none + 1)
        for jump in jumps:
            lengths = lengths + lengths[jump]
        for jump in reversed(jumps):
            through = through + np.bincount(jump, weights=through, minlength=none + 1).astype(np.int64)
        of_samples = lengths[last]
        return cls(
            of_token=upload(through[node_of_token].astype(np.float32), device),
            node=upload(node_of_token, device),
            jumps=upload(np.reshape(jumps, (-1, none + 1)).astype(np.int64), device),
            last=upload(last, device),
            lengths=upload(np.maximum(of_samples, 1).astype(np.float32), device),
            logical_tokens=int(of_samples.sum()),
        )

    def sum_by_sample(self, node: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add up values of tokens, ``[L, E]``, whose nodes are int64 ``[L]``, to ``[S, E]``."""
        sums = values.new_zeros((self.jumps.shape[1], values.shape[1])).index_add(0, node, values)
        for jump in self.jumps:
            sums = sums + sums.index_select(0, jump)
        return sums.index_select(0, self.last)


class TreeRouterMixin(TopKRouter):  # type: ignore[misc]
    """A stock router that weighs tokens by samples, and takes their routes, of the tree that its layer shows it.

    Without a tree it is the stock router. It is a subclass, because a built router, an abstract class's, cannot take a
    class whose first base is no router.
    """

    tree: TreeMetadata | None = None
    carry: Carry | None = None  # of a part of a tree
    given_routes: torch.Tensor | None = None  # as a tree's, of a batch without one
    recorded: list[torch.Tensor] | None = None  # int64 [L, top-k] of each forward, while experts are recorded
    is_depth: bool = False  # of multi-token prediction, of which an engine sends no routes
    by_sample: bool = False  # whether losses that compare samples are left out
    # Of the stock router.
    config: Any
    topk: int
    layer_number: int
    router_replay: Any
    training: bool
    tp_cp_group: Any
    tp_dp_cp_group: Any
    calculate_per_token_loss: bool
    score_function: str
    enable_expert_bias: bool
    local_tokens_per_expert: torch.Tensor
    global_tokens_per_expert: torch.Tensor
    ga_steps: torch.Tensor
    get_aux_loss_coeff: Callable[[str], float]
    attach_and_log_load_balancing_loss: Callable[..., torch.Tensor]

    @property
    def _counts(self) -> Multiplicity:
        assert self.tree is not None, "asked only with a tree"
        return self.tree.derived("multiplicity", Multiplicity.of)

    @property
    def _part(self) -> SampleCounts | None:
        """The tokens that count, of a part of a tree."""
        return None if self.carry is None else self.carry.counts

    @property
    def _loss_tokens(self) -> int:
        """The tokens over which balancing losses are means."""
        given = None if self._part is None else self._part.loss_tokens
        return max(self._counts.logical_tokens if given is None else given, 1)

    def _local(self, per_token: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the part ``[L]`` of ``[P]`` whose tokens this rank routes under sequence parallelism."""
        start = self.tp_cp_group.rank() * len(like) if len(like) < len(per_token) else 0
        return per_token[start : start + len(like)]

    def routing(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Choose the experts for logits ``[L, 1, E]``: those of the samples' routes, where there are any."""
        stock: Callable[..., Any] = super().routing  # type: ignore[misc]
        routes = self.given_routes if self.tree is None else self.tree.routes
        if self.is_depth:
            routes = None
        probs, routing_map = (
            stock(logits, *args, **kwargs) if routes is None else self._routed(routes, stock, logits, *args, **kwargs)
        )
        if self._part is not None and self.carry is not None and self.carry.keeps:
            self._count_ahead(logits.flatten(0, 1))
        if self.recorded is not None:
            self.recorded.append(torch.topk(routing_map.int(), self.topk, dim=1).indices)
        return probs, routing_map

    def _routed(
        self, routes: torch.Tensor, stock: Callable[..., Any], logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``stock`` with the experts of this layer, of ``[P, layers, top-k]``."""
        of_layer = routes[:, row_of_layer(self.config, routes.shape[1], self.layer_number)]
        upstream, self.router_replay = self.router_replay, GivenRoutes(self._local(of_layer, logits).long())
        try:
            return stock(logits, *args, **kwargs)
        finally:
            self.router_replay = upstream

    def _apply_aux_loss(self, *given: Any, **settings: Any) -> torch.Tensor:
        """Balance each sample: the micro-batch that it would be when trained alone."""
        if self.tree is None:
            return cast(torch.Tensor, super()._apply_aux_loss(*given, **settings))  # type: ignore[misc]
        return self._balanced("aux_loss", "load_balancing_loss", *given[:3])

    def _apply_seq_aux_loss(self, *given: Any, **settings: Any) -> torch.Tensor:
        """Balance each sample."""
        if self.tree is None:
            return cast(torch.Tensor, super()._apply_seq_aux_loss(*given, **settings))  # type: ignore[misc]
        return self._balanced("seq_aux_loss", "seq_load_balancing_loss", *given[:3])

    def _balanced(
        self, kind: str, name: str, probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor
    ) -> torch.Tensor:
        """Return ``probs`` ``[L, E]`` with the gradient of a balancing loss: the samples' mean, weighed by lengths."""
        # Of one sample it is upstream's switch_load_balancing_loss_func (https://arxiv.org/abs/2101.03961, eq. 4).
        coeff = self.get_aux_loss_coeff(kind)
        if coeff == 0:
            return probs
        lengths = self._counts.lengths if self._part is None else self._part.lengths
        of_samples = (self._sum_by_sample(scores) * self._count_by_sample(routing_map)).sum(1) / lengths
        experts_per_choice = self.config.num_moe_experts / self.topk
        loss = coeff * experts_per_choice * of_samples.sum() / self._loss_tokens
        return self._attach(probs, coeff, loss, name, self.tp_cp_group)

    def _sum_by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Add up values of tokens, ``[L, E]``, to ``[S, E]``."""
        return self._counts.sum_by_sample(self._local(self._counts.node, values), values)

    def _count_by_sample(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Return how often the tokens of each sample, also those of other chunks, chose each expert: ``[S, E]``."""
        values, part = routing_map.to(torch.float32), self._part
        if part is not None:
            values = values * self._local(part.is_counted, values)[:, None]
        routed = self._sum_by_sample(values)
        if self.tp_cp_group.size() > 1:
            torch.distributed.all_reduce(routed, group=self.tp_cp_group)
        if part is None or self.carry is None:
            return routed
        return self.carry.store.add_counts(self, part, routed)

    def _count_ahead(self, logits: torch.Tensor) -> None:
        """Count the experts of a first pass, by logits ``[L, E]``; upstream computes its losses only to train."""
        if any(self.get_aux_loss_coeff(kind) for kind in ("aux_loss", "seq_aux_loss")):
            fused = self.config.moe_router_fusion
            routed, _ = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function, fused=fused)
            self._count_by_sample(routed)

    def _apply_global_aux_loss(self, *given: Any, **settings: Any) -> torch.Tensor:
        """Balance the samples of a step: a micro-batch's scores against the mean counts so far, on all ranks."""
        # It is upstream's loss (https://arxiv.org/abs/2501.11873) of the same samples in the same micro-batches.
        probs, scores, routing_map = given[:3]
        coeff = self.get_aux_loss_coeff("global_aux_loss")
        if self.by_sample or coeff == 0:
            return cast(torch.Tensor, probs)
        if self.tree is None:
            return cast(torch.Tensor, super()._apply_global_aux_loss(*given, **settings))  # type: ignore[misc]
        weight, group = self._local(self._counts.of_token, scores), self.tp_dp_cp_group
        routed = weight @ routing_map.to(weight.dtype)
        if group.size() > 1:
            torch.distributed.all_reduce(routed, group=group)
        tokens = routed.sum() / self.topk
        self.global_tokens_per_expert += routed
        self.ga_steps += tokens > 0  # not for a micro-batch of padding on all ranks
        mean = self.global_tokens_per_expert / self.ga_steps.clamp_min(1)
        experts_per_choice = self.config.num_moe_experts / self.topk
        loss = ((weight.to(scores.dtype) @ scores) * mean).sum() * experts_per_choice / tokens.clamp_min(1).square()
        return self._attach(probs, coeff, coeff * loss, "global_load_balancing_loss", group)

    def _attach(self, values: torch.Tensor, coeff: float, loss: torch.Tensor, name: str, group: Any) -> torch.Tensor:
        """Log ``loss`` over ``coeff``, a part of each rank of a group, and add its gradient to that of ``values``."""
        # For the log alone: before megatron-core 0.19 what it attaches is too small by the ranks of a sequence.
        self.attach_and_log_load_balancing_loss(values, coeff, loss.detach(), name, group)
        if self.calculate_per_token_loss:  # divided by the tokens of a step at its end
            loss = loss * self._loss_tokens
        return cast(torch.Tensor, MoEAuxLossAutoScaler.apply(values, loss))

    def apply_z_loss(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep logits ``[L, E]`` small, each by the number of its samples (https://arxiv.org/abs/2202.08906, eq. 5)."""
        coeff = self.config.moe_z_loss_coeff
        is_off = not coeff or not (self.training and torch.is_grad_enabled())
        if self.tree is None or is_off:
            return cast(torch.Tensor, super().apply_z_loss(logits, *args, **kwargs))  # type: ignore[misc]
        counts = self._counts
        weight = self._local(counts.of_token, logits).to(logits.dtype)
        loss = coeff * (weight @ torch.logsumexp(logits, dim=-1).square()) / self._loss_tokens
        return self._attach(logits, coeff, loss, "z_loss", self.tp_cp_group)

    def _apply_expert_bias(self, routing_map: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Count tokens by expert, ``[L, E]``, for the update of the experts' biases."""
        if self.tree is None:
            super()._apply_expert_bias(routing_map, *args, **kwargs)  # type: ignore[misc]
        elif self.enable_expert_bias and torch.is_grad_enabled():
            weight = self._local(self._counts.of_token, routing_map)
            with torch.no_grad():
                self.local_tokens_per_expert += weight @ routing_map.to(weight)


@contextmanager
def recording(chunks: Sequence[torch.nn.Module]) -> Iterator[list[Any]]:
    """Yield the routers of a rank's model chunks, which record the experts of each forward meanwhile."""
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TreeRouterMixin)]
    for router in routers:
        router.recorded = []
    try:
        yield routers
    finally:
        for router in routers:
            router.recorded = None


def compares_samples(config: Any) -> bool:
    """Return whether the experts of a ``TransformerConfig`` have the balancing loss that compares samples."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    of_kind = dict(zip(kinds, coefficients, strict=True)) if isinstance(kinds, list) else {kinds: coefficients}
    return config.num_moe_experts is not None and bool(of_kind.get("global_aux_loss"))


@contextmanager
def balancing_by_sample(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Leave out, meanwhile, the balancing loss that compares samples: a sample by itself has another one."""
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TreeRouterMixin)]
    for router in routers:
        router.by_sample = True
    try:
        yield
    finally:
        for router in routers:
            router.by_sample = False


@contextmanager
def replaying(model: torch.nn.Module, routes: torch.Tensor | None) -> Iterator[None]:
    """Route the tokens of a batch without a tree, ``[n, layers, top-k]``, during a forward.

    :func:`replay_again` does so in backward.
    """
    _give(model, routes)
    try:
        yield
    finally:
        _give(model, None)


def replay_again(model: torch.nn.Module, routes: torch.Tensor, output: torch.Tensor) -> None:
    """Route alike in the backward of a forward's output, of any shape, which recomputes layers."""

    def give(_: torch.Tensor) -> None:
        _give(model, routes)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(_give, model, None))  # at the end of this backward

    if output.requires_grad:
        output.register_hook(give)


def _give(model: torch.nn.Module, routes: torch.Tensor | None) -> None:
    for module in model.modules():
        if isinstance(module, TreeRouterMixin):
            module.given_routes = routes


class TreeExpertsMixin:
    """Experts whose router sees the tree, also if the module is recomputed by itself."""

    tree: TreeMetadata | None = None
    carry: Carry | None = None
    router: Any
    training: bool
    moe_layer_recompute: bool

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the base class's forward on ``[L, 1, hidden]``."""
        return self._with_tree(super().forward, [hidden_states], *args, **kwargs)  # type: ignore[misc]

    def forward_with_separate_inputs(self, *inputs: torch.Tensor, **kwargs: Any) -> Any:
        """Run the forward of Gemma 4's experts in Megatron-Bridge, on three inputs ``[L, 1, hidden]``."""
        return self._with_tree(super().forward_with_separate_inputs, inputs, **kwargs)  # type: ignore[misc]

    def _with_tree(self, stock: Callable[..., Any], inputs: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        tree, carry, again = self.tree, self.carry, self.moe_layer_recompute

        def with_tree(*inputs: torch.Tensor) -> Any:
            self.router.tree, self.router.carry, self.moe_layer_recompute = tree, carry, False
            try:
                return stock(*inputs, *args, **kwargs)
            finally:
                self.router.tree, self.router.carry, self.moe_layer_recompute = None, None, again

        if tree is None:
            return stock(*inputs, *args, **kwargs)
        # Upstream's own recomputation runs in backward, which has no tree to show.
        if not (again and self.training):
            return with_tree(*inputs)
        if self.router.config.fp8:  # which the other would not have in backward
            from megatron.core.extensions.transformer_engine import te_checkpoint

            group = parallel_state.get_tensor_model_parallel_group()
            return te_checkpoint(with_tree, False, get_cuda_rng_tracker, group, *inputs)
        return checkpoint(with_tree, False, *inputs)


class TreeExpertLayerMixin:
    """A layer that shows its experts the tree of a micro-batch during a forward."""

    mlp: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base class's forward."""
        tree = get_tree_params(kwargs.get("packed_seq_params"))
        self.mlp.tree, self.mlp.carry = (None, None) if tree is None else (tree.tree_metadata, tree.carry)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.mlp.tree = self.mlp.carry = None
