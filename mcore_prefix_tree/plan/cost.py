"""What a micro-batch costs: token-wise work, attention by visible pairs, scoring, and a fixed overhead.

A token at depth d sees d + 1 keys, wherever it is laid out. So the cost of a path is a function of its length, and the
cost of a set of samples is the sum over their unique tokens. A vocabulary head that computes scored tokens alone adds a
cost to each of these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

UNITS_PER_TOKEN = 1024

# Forward and backward of a matrix product: the backward makes two gradients, each as expensive as the forward.
_MATMUL_PASSES = 3.0


class ModelShape(Protocol):
    """The fields of a model configuration that a cost depends on; ``mcore_prefix_tree.recipe.ModelConfig`` has them."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_query_groups(self) -> int | None: ...  # noqa: D102
    @property
    def ffn_hidden_size(self) -> int | None: ...  # noqa: D102
    @property
    def kv_channels(self) -> int | None: ...  # noqa: D102
    @property
    def vocab_size(self) -> int | None: ...  # noqa: D102
    @property
    def swiglu(self) -> bool: ...  # noqa: D102
    @property
    def transformer(self) -> dict[str, Any]: ...  # noqa: D102


class Measured(NamedTuple):
    """One timed forward and backward.

    Attributes:
        tokens: physical tokens computed, padding included.
        pairs: visible (query, key) pairs.
        seconds: it took.
        scored: unique tokens that the vocabulary head computed; 0 where it computes all of them.
    """

    tokens: float
    pairs: float
    seconds: float
    scored: float = 0.0


def read_measured(path: str) -> list[Measured]:
    """The measurements in a file that ``mcore-prefix-tree calibrate`` wrote.

    Raises:
        ValueError: the file is not one; names it.
        OSError: it cannot be read.
    """
    with open(path, encoding="utf-8") as stream:
        try:
            return [
                Measured(
                    tokens=float(one["tokens"]),
                    pairs=float(one["pairs"]),
                    seconds=float(one["seconds"]),
                    scored=float(one.get("scored", 0)),
                )
                for one in json.load(stream)["measured"]
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path}: holds no measurements; make it with mcore-prefix-tree calibrate RECIPE --output FILE"
            ) from None


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

    Names and defaults are those of Megatron's ``MLATransformerConfig``.

    Attributes:
        q_lora_rank: of the queries' latent; None projects them from hidden states.
        kv_lora_rank: of the latent of keys and values.
        qk_head_dim: of a head's queries and keys, without the part that has a position.
        qk_pos_emb_head_dim: of that part; of keys, all heads share it.
        v_head_dim: of a head's values.
    """

    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> LatentAttention | None:
        """Of a recipe's ``model.transformer`` or of Megatron-LM's arguments; None if they do not ask for it."""
        if not settings.get("multi_latent_attention"):
            return None
        return cls(**{field.name: settings[field.name] for field in fields(cls) if field.name in settings})

    def weights(self, hidden_size: int, heads: int) -> int:
        """Of a layer's projections."""
        query = self.qk_head_dim + self.qk_pos_emb_head_dim
        if self.q_lora_rank is None:
            queries = hidden_size * heads * query
        else:
            queries = self.q_lora_rank * (hidden_size + heads * query)
        keys_values = hidden_size * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
        keys_values += self.kv_lora_rank * heads * (self.qk_head_dim + self.v_head_dim)
        return queries + keys_values + heads * self.v_head_dim * hidden_size


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a micro-batch: ``token * tokens + pair * visible_pairs + scored * scored_tokens + micro_batch``.

    Attributes:
        token: of one physical token; FLOPs from :meth:`from_dimensions`, seconds once calibrated.
        pair: of one visible (query, key) pair, in the same unit.
        scored: of scoring a unique token, on top of ``token``, in the same unit; 0 where the head computes all tokens.
        micro_batch: of having a micro-batch at all, in the same unit.

    Raises:
        ValueError: on construction, if a cost is negative or not finite, or a token costs nothing.
    """

    token: float = 1.0
    pair: float = 0.0
    scored: float = 0.0
    micro_batch: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"CostModel.{name}={value} must be finite and >= 0")
        if self.token == 0:
            raise ValueError("CostModel.token=0: a token has to cost something")

    @classmethod
    def from_dimensions(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        vocab_size: int,
        num_query_groups: int | None = None,
        kv_channels: int | None = None,
        latent: LatentAttention | None = None,
        swiglu: bool = True,
        fused_head: bool = False,
    ) -> CostModel:
        """Training FLOPs of a GPT: two a weight, token and forward, and three times that with the backward.

        The convention of Narayanan et al. (SC 2021, appendix), with attention by visible pairs:
        ``2 * heads * (Dqk + Dv)`` a pair, layer and forward, where ``Dqk`` is the head size of queries and keys and
        ``Dv`` that of values, and ``2 * heads * (3 * Dqk + 2 * Dv)`` for the backward, which recomputes the scores:
        2.5 times as many where sizes are equal (Dao, FlashAttention-2, section 4.1).

        Args:
            num_layers: transformer layers.
            hidden_size: of the residual stream.
            ffn_hidden_size: width that a token passes through; of a mixture of experts, ``top_k`` times an expert's.
            num_attention_heads: query heads.
            vocab_size: of the output layer. The embedding is a look-up and counts nothing.
            num_query_groups: key and value heads; as many as query heads by default.
            kv_channels: head size; ``hidden_size / num_attention_heads`` by default.
            latent: multi-latent attention, which has neither of the two above.
            swiglu: the feed-forward part has a gate.
            fused_head: the output layer computes scored tokens alone.
        """
        if latent is None:
            query = value = kv_channels or hidden_size // num_attention_heads
            groups = num_query_groups or num_attention_heads
            attention = 2 * hidden_size * value * (num_attention_heads + groups)  # q and out; k and v
        else:
            query, value = latent.qk_head_dim + latent.qk_pos_emb_head_dim, latent.v_head_dim
            attention = latent.weights(hidden_size, num_attention_heads)
        feed_forward = (3 if swiglu else 2) * hidden_size * ffn_hidden_size
        layers, head = num_layers * (attention + feed_forward), hidden_size * vocab_size
        return cls(
            token=_MATMUL_PASSES * 2 * (layers if fused_head else layers + head),
            scored=_MATMUL_PASSES * 2 * head if fused_head else 0.0,
            pair=2.0 * num_layers * num_attention_heads * (4 * query + 3 * value),
        )

    @classmethod
    def from_model(
        cls, model: ModelShape, *, vocab_size: int | None = None, fused_head: bool = False, scalar_head: bool = False
    ) -> CostModel:
        """Training FLOPs of a recipe's model.

        Args:
            model: ``recipe.model``.
            vocab_size: where the recipe leaves it to the tokenizer.
            fused_head: ``recipe.fused_head``.
            scalar_head: of a critic or reward model, instead of the vocabulary's; it costs next to nothing.

        Raises:
            ValueError: if neither gives a vocabulary size.
        """
        vocabulary = 0 if scalar_head else model.vocab_size or vocab_size
        if vocabulary is None:
            raise ValueError("the cost of the output layer needs model.vocab_size; give it in the recipe")
        width = model.ffn_hidden_size or 4 * model.hidden_size
        more = model.transformer
        if more.get("num_moe_experts"):
            # megatron-core's defaults: two experts a token, as wide as the dense layer.
            width = (more.get("moe_ffn_hidden_size") or width) * (more.get("moe_router_topk") or 2)
            width += more.get("moe_shared_expert_intermediate_size") or 0
        return cls.from_dimensions(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            ffn_hidden_size=width,
            num_attention_heads=model.num_attention_heads,
            vocab_size=vocabulary,
            num_query_groups=model.num_query_groups,
            kv_channels=model.kv_channels,
            latent=LatentAttention.from_settings(more),
            swiglu=model.swiglu,
            fused_head=fused_head,
        )

    def calibrated(self, measured: Sequence[Measured]) -> CostModel:
        """This model in seconds, as measured.

        Measurements of as many different shapes as there are costs (four, or three where the head computes all tokens)
        give all of them: the non-negative ones with the smallest squared *relative* error, so that small micro-batches
        count as much as large ones. From fewer, or from shapes that are multiples of each other, the costs keep their
        proportions and are scaled to the measured total. All have six digits: the last ones of a fit are another
        machine's, and ranks on unlike machines have to make the same plan.

        Raises:
            ValueError: without a measurement, or if one is not positive.
        """
        if not measured or any(not (m.tokens > 0 and m.pairs > 0 and m.seconds > 0) for m in measured):
            raise ValueError("calibration needs measurements with positive tokens, pairs and seconds")
        seconds = np.array([one.seconds for one in measured])
        amounts = {
            "token": np.array([one.tokens for one in measured]),
            "pair": np.array([one.pairs for one in measured]),
            "scored": np.array([one.scored for one in measured]),
            "micro_batch": np.ones(len(measured)),
        }
        if not amounts["scored"].any():
            del amounts["scored"]
        design = np.column_stack(list(amounts.values()))
        scaled = design / seconds[:, None]
        norms = np.linalg.norm(scaled, axis=0)
        if np.linalg.matrix_rank(scaled / norms, tol=1e-6) < len(amounts):
            predicted = design @ np.array([getattr(self, name) for name in amounts])
            factor = float(seconds.sum() / predicted.sum())
            return _rounded({name: cost * factor for name, cost in vars(self).items()})
        # So few unknowns have few faces: the constrained optimum is the best feasible optimum of one of them.
        best, best_error = np.zeros(len(amounts)), math.inf
        columns = range(len(amounts))
        for kept in [face for size in columns for face in combinations(columns, size + 1) if 0 in face]:
            found = np.linalg.lstsq(scaled[:, kept] / norms[list(kept)], np.ones(len(measured)), rcond=None)[0]
            costs = np.zeros(len(amounts))
            costs[list(kept)] = found / norms[list(kept)]
            error = float(np.square(scaled @ costs - 1).sum())
            if costs.min() >= 0 and costs[0] > 0 and error < best_error:
                best, best_error = costs, error
        return _rounded(dict(zip(amounts, best.tolist(), strict=True)))

    def of_path(self, length: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """``[...]``: cost of the first ``length`` tokens of a path, for every entry."""
        n = length.astype(np.float64)
        paths: npt.NDArray[np.float64] = self.token * n + self.pair * (n * (n + 1) / 2)
        return paths

    def units_of_path(self, length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """:meth:`of_path` in whole units of ``token / UNITS_PER_TOKEN``, what plans are made with.

        Sums of integers are the same on every machine; sums of floats depend on the processor's vector width, and ranks
        on unlike machines have to make the same plan.
        """
        return np.rint(self.of_path(length) * (UNITS_PER_TOKEN / self.token)).astype(np.int64)

    @property
    def units_of_micro_batch(self) -> int:
        """:attr:`micro_batch` in the units of :meth:`units_of_path`."""
        return round(self.micro_batch * (UNITS_PER_TOKEN / self.token))

    def units_of_scored(self, scored: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of scoring so many tokens, in the units of :meth:`units_of_path`."""
        return np.rint(scored.astype(np.float64) * (self.scored * UNITS_PER_TOKEN / self.token)).astype(np.int64)

    def of_micro_batch(self, tokens: float, pairs: float, scored: float = 0.0) -> float:
        """Cost of a micro-batch of ``tokens`` physical tokens, some of them scored, and ``pairs`` visible pairs."""
        return self.token * tokens + self.pair * pairs + self.scored * scored + self.micro_batch


def _rounded(costs: Mapping[str, float]) -> CostModel:
    return CostModel(**{name: float(f"{cost:.6g}") for name, cost in costs.items()})
