"""Layers of multi-token prediction on a tree, which take a row from its parent.

Depth k of upstream pairs the hidden state of a token with the embedding of the token k later, and predicts the next.
Here a row is named by the later of the two, whose path has the other. So one layout serves every depth: row u has the
hidden state of u's parent and the embedding of u; it predicts u's children; its paths begin k tokens later.

Legend: P padded tokens, L of them on this rank, h hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_prefix_tree.mcore.seam.all_tokens import gather_tokens, split_tokens
from mcore_prefix_tree.mcore.seam.packed_seq_params import DepthPackedSeqParams, get_tree_params


class TreeMultiTokenLayerMixin:
    """A layer of multi-token prediction that follows the tree of its depth; without a tree it is the stock layer."""

    config: Any
    layer_number: int
    tp_group: Any

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Run the base class's forward; the model gives a layer the parameters of all depths.

        Raises:
            NotImplementedError: the model is not one of :func:`with_multi_token`.
        """
        if isinstance(packed_seq_params, tuple):
            packed_seq_params = packed_seq_params[self.layer_number - 1]
        elif get_tree_params(packed_seq_params) is not None:
            raise NotImplementedError(
                "multi-token prediction on a tree needs a model that scores its depths: pass the model through "
                "with_multi_token before DDP"
            )
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)  # type: ignore[misc]

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: Any,
        hidden_states: torch.Tensor,
        packed_seq_params: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Any:
        """Return the next depth's arguments, embeddings ``[L, 1, h]``, and the parents' hidden states ``[L, 1, h]``."""
        if not isinstance(packed_seq_params, DepthPackedSeqParams):
            stock: Any = super()
            return stock._get_embeddings(
                input_ids, position_ids, embedding, hidden_states, packed_seq_params, padding_mask
            )
        decoder_input = embedding(input_ids=input_ids, position_ids=position_ids)
        hidden_states = self._take_parents(gather_tokens(hidden_states, self), packed_seq_params)
        hidden_states = split_tokens(hidden_states, self)
        if self.config.mtp_detach_heads:
            decoder_input = decoder_input.detach()
            hidden_states.requires_grad_()  # as upstream: a recomputed layer needs an input with a gradient
        return input_ids, position_ids, padding_mask, decoder_input, hidden_states

    def _take_parents(self, hidden_states: torch.Tensor, depth: DepthPackedSeqParams) -> torch.Tensor:
        """Return the parents' hidden states ``[P, 1, h]``, of which other chunks of a tree may have some."""
        carry, which, rows = depth.carry, (self, "hidden state"), hidden_states
        if carry is not None and (given := carry.read_states(which, hidden_states)) is not None:
            rows = torch.cat([hidden_states, given])
        parents = rows.index_select(0, depth.parent)
        return parents if carry is None else carry.leave_states(which, parents, hidden_states[depth.left])
