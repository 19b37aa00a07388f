"""Losses that layers add, by the formulas of their papers, from what a stock model computes of one sample.

Nothing here is upstream's or ours: only the logits of routers, and the queries and keys of attention and its indexers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Coefficients of the config that turn the stock model's own losses off.
OFF = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None, "dsa_indexer_loss_coeff": 0.0}


def without_losses(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config, with the coefficients among them at 0."""
    return {name: OFF.get(name, value) for name, value in settings.items()}


def balancing(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """https://arxiv.org/abs/2101.03961, eq. 4, for ``topk`` experts a token that are chosen by a sigmoid."""
    tokens, experts = logits.shape
    scores = torch.sigmoid(logits) / torch.sigmoid(logits).sum(1, keepdim=True)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(topk, dim=1).indices, 1.0)
    return experts * (chosen.sum(0) / (tokens * topk) * scores.mean(0)).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """https://arxiv.org/abs/2202.08906, eq. 5."""
    return logits.exp().sum(1).log().square().mean()


def indexer_kl(indexed: Any, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """https://arxiv.org/abs/2512.02556, section 2.1, eq. 3, as the mean over tokens."""
    index_query, index_key, weight = (one.double().squeeze(1) for one in indexed)
    later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    index = torch.einsum("tie,se,ti->ts", index_query, index_key, weight).masked_fill(later, -torch.inf)
    heads = torch.einsum("thd,shd->hts", query, key.expand(-1, query.shape[1], -1)) * scale
    target = torch.softmax(heads.masked_fill(later, -torch.inf), dim=2).mean(0).detach()
    divergence = target * (target.clamp_min(1e-300).log() - torch.log_softmax(index, 1).masked_fill(later, 0))
    return divergence.sum() / len(query)


class AddedLosses:
    """Collects the losses of a stock model's layers, each times its coefficient, whenever it runs a sample."""

    def __init__(self, model: torch.nn.Module, settings: Mapping[str, Any]) -> None:
        self._settings, self._found = settings, list[torch.Tensor]()
        for module in model.modules():
            if hasattr(module, "gating"):
                self._watch(module, "gating", self._of_logits)
            if getattr(module, "indexer", None) is not None:
                self._watch_attention(module)

    def take(self) -> torch.Tensor:
        """The sum over the layers since the last call."""
        total, self._found = torch.stack(self._found).sum(), []
        return total

    def _watch(self, module: Any, name: str, note: Any) -> None:
        stock = getattr(module, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():
                out = stock(*args, **kwargs)
                note(out)
            return out

        setattr(module, name, noting)

    def _of_logits(self, logits: torch.Tensor) -> None:
        rows, settings = logits.flatten(0, -2), self._settings
        if settings.get("moe_aux_loss_coeff"):
            self._found.append(settings["moe_aux_loss_coeff"] * balancing(rows, settings["moe_router_topk"]))
        if settings.get("moe_z_loss_coeff"):
            self._found.append(settings["moe_z_loss_coeff"] * z_loss(rows))

    def _watch_attention(self, attention: Any) -> None:
        attends: list[torch.Tensor] = []
        attention.register_forward_pre_hook(lambda _, args: attends.__setitem__(slice(None), args[:2]))

        def note(indexed: Any) -> None:
            query, key = (one.detach().double().squeeze(1) for one in attends)
            loss = indexer_kl(indexed, query, key, attention.softmax_scale)
            self._found.append(self._settings["dsa_indexer_loss_coeff"] * loss)

        self._watch(attention.indexer, "forward_before_topk", note)
