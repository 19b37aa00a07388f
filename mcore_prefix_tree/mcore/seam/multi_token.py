"""A model whose last stage scores the depths of multi-token prediction on a tree.

Megatron's own losses of depths roll tokens along the flat layout, which would cross branches.

Legend: P padded tokens, L of them on this rank, K depths, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

from mcore_prefix_tree.logprob import Head, head_weighted_hits
from mcore_prefix_tree.mcore.release import HAS_DEPTHS, HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam.core_attention import change_class
from mcore_prefix_tree.mcore.seam.experts import TreeRouterMixin
from mcore_prefix_tree.mcore.seam.output_layer import HeadRequest, output_multiplier, with_edge_head
from mcore_prefix_tree.mcore.seam.packed_seq_params import DepthPackedSeqParams, TreePackedSeqParams, get_tree_params
from mcore_prefix_tree.mcore.seam.tree_layers import follow_trees
from mcore_prefix_tree.plan.model_shape import trained_depths

if HAS_HYBRID_MODEL:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

Model = TypeVar("Model", bound=torch.nn.Module)


class TreeMultiTokenModelMixin:
    """A model whose last stage adds the losses of its depths on a tree; without a tree it is the stock model."""

    config: Any
    mtp: Any
    embedding: Any
    output_layer: Any
    post_process: bool
    training: bool
    pre_process: bool
    mtp_process: bool
    share_embeddings_and_output_weights: bool
    shared_embedding_or_output_weight: Any

    def _postprocess(self, **call: Any) -> Any:
        """Return a ``GPTModel``'s output."""
        # Upstream's own losses of depths roll tokens, so it is given nothing to roll.
        stock: Any = super()
        tree = get_tree_params(call.get("packed_seq_params"))
        if tree is None or not self.post_process:
            return stock._postprocess(**call)
        passed = ("hidden_states", "attention_mask", "padding_mask", "sequence_len_offset")
        rotary = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
        given = {name: call[name] for name in (*passed, *rotary)} | (call["extra_block_kwargs"] or {})
        chunks = self._scored(call, tree, partial(self.mtp, **given, embedding=self.embedding), call["hidden_states"])
        return stock._postprocess(**call | {"hidden_states": chunks, "mtp_in_postprocess": False, "input_ids": None})

    def _scored(
        self, call: Mapping[str, Any], tree: TreePackedSeqParams, run: Callable[..., torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return the states of the model and its depths, ``[(1 + K) L, 1, h]``, with the losses' gradients."""
        # run makes them, of hidden [L, 1, h]; call has arguments of the model's forward.
        if call["labels"] is not None:
            raise ValueError("labels must be None with a folded micro-batch: its edges have them")
        depths, trains = tree.depths, bool(trained_depths(vars(self.config)))
        if not (torch.is_grad_enabled() and trains):
            if trains and tree.carry is not None and tree.carry.runs_ahead:  # chunks read what it leaves
                run(input_ids=call["input_ids"], position_ids=call["position_ids"], packed_seq_params=depths)
            # Depths have no part in the answer, which upstream takes from the first of equal chunks.
            return hidden.repeat(1 + self.config.mtp_num_layers, 1, 1)
        if len(depths) != self.config.mtp_num_layers:
            raise ValueError(
                f"the layout has weights of {len(depths)} depths, but the model trains {self.config.mtp_num_layers} "
                f"(mtp_num_layers): fold with depths={self.config.mtp_num_layers}, or set mtp_loss_scaling_factor=0"
            )
        chunks = run(input_ids=call["input_ids"], position_ids=call["position_ids"], packed_seq_params=depths)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.config.mtp_detach_heads:
            weight = (self.output_layer.weight if weight is None else weight).detach()
        scale = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers
        scored = chunks
        for number, (depth, states) in enumerate(zip(depths, chunks.chunk(1 + len(depths))[1:], strict=True)):
            loss, hits = self._loss(depth, states, weight, call["runtime_gather_output"])
            total = depth.weight.sum()
            if self.training:
                MTPLossLoggingHelper.save_metrics_to_tracker(
                    loss=loss / total.clamp(min=1),
                    correct=hits,
                    total=total,
                    layer_number=number,
                    num_layers=len(depths),
                    avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
                )
            scored = MTPLossAutoScaler.apply(scored, scale * depth.scale * loss)
        return scored

    def _loss(
        self, depth: DepthPackedSeqParams, hidden: torch.Tensor, weight: torch.Tensor | None, asked: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross-entropy ``[]`` of a depth and the weight ``[]`` of its right guesses, from ``[L, 1, h]``."""

        def answer(rows: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
            return torch.stack(head_weighted_hits(rows, weight, head, edge_weight=depth.weight))[:, None]

        chunk_rows = asked.head_chunk_rows if isinstance(asked, HeadRequest) else None
        request = HeadRequest(edges=depth.edges, temperature=None, head_chunk_rows=chunk_rows, answer=answer)
        found, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=request)
        loss, hits = (found.flatten() * output_multiplier(self.config)).unbind()
        return -loss, hits.detach()


class TreeHybridModelMixin(TreeMultiTokenModelMixin):
    """A ``HybridModel`` that scores its depths on a tree; its own forward runs them, not a hook behind it."""

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, *more: Any, **call: Any) -> Any:
        """Run the base class's forward, on a tree without ids to roll; raise ValueError as in a ``GPTModel``."""
        stock: Any = super()
        tree = get_tree_params(call.get("packed_seq_params"))
        if tree is None or not self.mtp_process:
            return stock.forward(input_ids, position_ids, attention_mask, *more, **call)
        ids = {"input_ids": input_ids, "position_ids": position_ids}
        if self.pre_process and call.get("decoder_input") is None:
            call["decoder_input"] = self.embedding(**ids)
        asked = {name: call.get(name) for name in ("labels", "runtime_gather_output")}
        call["packed_seq_params"] = replace(tree, run_depths=partial(self._scored, ids | asked, tree))
        return stock.forward(None, None, attention_mask, *more, **call)


class TreeMultiTokenBlockMixin:
    """Depths of a ``HybridModel``, which leave a tree to their model."""

    def forward(self, *, packed_seq_params: Any = None, **call: Any) -> Any:
        """Return the base class's output ``[(1 + K) L, 1, h]``, or what the model makes of a tree."""
        stock: Any = super()
        if getattr(packed_seq_params, "run_depths", None) is None:
            return stock.forward(packed_seq_params=packed_seq_params, **call)
        given = {name: value for name, value in call.items() if name not in ("input_ids", "position_ids")}
        return packed_seq_params.run_depths(partial(stock.forward, **given), call["hidden_states"])


def with_multi_token(model: Model) -> Model:
    """Let a model score the depths of multi-token prediction of folded micro-batches; without depths it stays the same.

    Args:
        model: a bare ``GPTModel`` or ``HybridModel``, or any of its pipeline stages, before DDP; changed in place, and
            so is its output layer, as by :func:`with_edge_head`. Its layers follow trees afterwards; with
            ``mtp_loss_scaling_factor=0`` depths are frozen.

    Returns:
        The same model, with the same state-dict keys.

    Raises:
        NotImplementedError: see :func:`with_edge_head` and :func:`follow_trees`; or the model is neither, or has tied
            embeddings in several stages.
        ValueError: the last stage has no layers of multi-token prediction.
    """
    bare = cast(Any, model)
    if not bare.config.mtp_num_layers or isinstance(model, TreeMultiTokenModelMixin):
        return model
    is_hybrid = HAS_HYBRID_MODEL and isinstance(model, HybridModel)
    if not (is_hybrid or isinstance(model, GPTModel)):
        raise NotImplementedError(
            f"mtp_num_layers={bare.config.mtp_num_layers} of a {type(model).__name__}: only a GPTModel or HybridModel "
            "predicts several tokens on a tree; set mtp_num_layers=None"
        )
    if bare.post_process and not hasattr(model, "mtp"):
        way = "a / in hybrid_layer_pattern for each" if is_hybrid else "mtp_block_spec=get_gpt_mtp_block_spec(...)"
        raise ValueError(
            f"mtp_num_layers={bare.config.mtp_num_layers}, but the model has no such layers: build it with {way}"
        )
    if bare.share_embeddings_and_output_weights and bare.config.pipeline_model_parallel_size > 1:
        raise NotImplementedError(
            f"mtp_num_layers={bare.config.mtp_num_layers} with tied embeddings and pipeline stages: Megatron-Core "
            "cannot save such a model; set share_embeddings_and_output_weights=False, or use one stage"
        )
    if bare.mtp_process:
        follow_trees(model)
        for module in bare.mtp.modules():
            if isinstance(module, TreeRouterMixin):
                module.is_depth = True
        if is_hybrid:
            change_class(bare.mtp, TreeMultiTokenBlockMixin)
        if not trained_depths(vars(bare.config)):
            bare.mtp.requires_grad_(False)
    change_class(model, TreeHybridModelMixin if is_hybrid else TreeMultiTokenModelMixin)
    return with_edge_head(model)


def take_logged_losses() -> list[float]:
    """Return each depth's mean losses, added over the micro-batches since the last call, from Megatron's log."""
    if not HAS_DEPTHS or "loss_values" not in MTPLossLoggingHelper.tracker:
        return []
    losses: list[float] = MTPLossLoggingHelper.tracker["loss_values"].tolist()
    # Not only to zeros: the log has as many depths as the model that it began with, and another may follow.
    MTPLossLoggingHelper.tracker.clear()
    return losses
