"""The FLOPs of a step by parts, folded and unfolded, and from them the bound: the most that folding can speed it up.

Each part grows with something else, and folding shares each to another degree:

- the *body*, all matrices of the layers, with tokens;
- *attention* with visible (query, key) pairs;
- the *head*, the output layer, with the positions that it projects: all tokens, or where it is fused only those that
  predict a scored token. A sample per turn scores its own turn alone: where turns are folded, hardly two samples share
  such a position.

Every FLOP count of a model in this package is made here. A multiplication counts two, as in Narayanan et al. (SC 2021,
appendix); norms, activations, softmax and rotary embeddings count nothing, nor does the embedding, which is a look-up.
Recomputed activations and padding are left aside. The bound is of work alone: it is reached where a FLOP takes as long
folded as unfolded and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from mcore_prefix_tree.layout import FlatLayout


class ModelShape(Protocol):
    """Fields of a model configuration that its FLOPs depend on; ``mcore_prefix_tree.recipe.ModelConfig`` has them."""

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
        """Read a recipe's ``model.transformer`` or Megatron-LM's arguments; None if they do not ask for it."""
        if not settings.get("multi_latent_attention"):
            return None
        return cls(**{field.name: settings[field.name] for field in fields(cls) if field.name in settings})

    def weights(self, hidden_size: int, heads: int) -> int:
        """Number of weights of a layer's projections."""
        query = self.qk_head_dim + self.qk_pos_emb_head_dim
        if self.q_lora_rank is None:
            queries = hidden_size * heads * query
        else:
            queries = self.q_lora_rank * (hidden_size + heads * query)
        keys_values = hidden_size * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
        keys_values += self.kv_lora_rank * heads * (self.qk_head_dim + self.v_head_dim)
        return queries + keys_values + heads * self.v_head_dim * hidden_size


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts, with the names and defaults of Megatron's ``TransformerConfig``.

    Attributes:
        num_moe_experts: of a layer; the router scores each for every token.
        moe_router_topk: experts that a token passes through.
        moe_ffn_hidden_size: width of an expert; None is the dense layer's.
        moe_shared_expert_intermediate_size: width of the expert that all tokens pass through; None is no such expert.
        moe_latent_size: width of what the experts, but not the shared one, compute on; None is the hidden size.
        moe_layer_freq: see :func:`layers_with_experts`.
    """

    num_moe_experts: int
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_latent_size: int | None = None
    moe_layer_freq: int | Sequence[int] = 1

    def weights(self, hidden_size: int, ffn_hidden_size: int, matrices: int) -> int:
        """Number of weights that a token multiplies in a layer, where an MLP has so many matrices."""
        width, latent = self.moe_ffn_hidden_size or ffn_hidden_size, self.moe_latent_size
        routed = matrices * (latent or hidden_size) * width * self.moe_router_topk
        routed += 2 * hidden_size * latent if latent else 0
        shared = matrices * hidden_size * (self.moe_shared_expert_intermediate_size or 0)
        return hidden_size * self.num_moe_experts + routed + shared

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Experts | None:
        """Read a recipe's ``model.transformer`` or Megatron-LM's arguments; None if they ask for no experts."""
        count = settings.get("num_moe_experts") or settings.get("num_experts")
        if not count:
            return None
        given = {field.name: settings[field.name] for field in fields(cls) if settings.get(field.name) is not None}
        return cls(**given | {"num_moe_experts": count})


def layers_with_experts(num_layers: int, moe_layer_freq: int | Sequence[int]) -> list[bool]:
    """For each layer, whether it has experts: every ``moe_layer_freq``-th from the first, or as a list says."""
    if isinstance(moe_layer_freq, int):
        return [layer % moe_layer_freq == 0 for layer in range(num_layers)]
    return [bool(has_experts) for has_experts in moe_layer_freq]


def layers_with_window(num_layers: int, settings: Mapping[str, Any]) -> list[bool]:
    """For each layer, whether its attention has a sliding window, as ``is_layer_window_attention`` of Megatron says."""
    skip = settings.get("window_attn_skip_freq")
    if not settings.get("window_size"):
        return [False] * num_layers
    if skip is None:
        return [True] * num_layers
    return [bool(skip[layer - 1] if not isinstance(skip, int) else layer % skip) for layer in range(1, num_layers + 1)]


class Counts(NamedTuple):
    """What a run of some samples computes, padding aside.

    Attributes:
        tokens: that pass through the layers.
        pairs: visible (query, key) pairs of a layer.
        window_pairs: those of a layer with a sliding window; 0 where the model has none.
        predictors: positions that predict a scored token: what the fused head projects.
    """

    tokens: int
    pairs: int
    window_pairs: int
    predictors: int

    @classmethod
    def folded(cls, layouts: Iterable[FlatLayout], window: int | None = None) -> Counts:
        """Count micro-batches of folded samples; each query of a layer with a window sees ``window`` keys at most."""
        return cls._sum(
            cls(
                tokens=layout.physical_tokens,
                pairs=layout.visible_pairs,
                # A token sees the keys before it on its path, and itself.
                window_pairs=0
                if window is None
                else int(np.minimum(layout.position_ids[: layout.physical_tokens].astype(np.int64) + 1, window).sum()),
                predictors=layout.num_predictors,
            )
            for layout in layouts
        )

    @classmethod
    def unfolded(cls, layouts: Iterable[FlatLayout], window: int | None = None) -> Counts:
        """Count the same samples, each by itself."""
        counts = []
        for layout in layouts:
            lengths = np.diff(layout.cu_sample_lens)
            inside = np.minimum(lengths, window or 0)
            counts.append(
                cls(
                    tokens=layout.logical_tokens,
                    pairs=layout.unfolded_pairs,
                    window_pairs=int((inside * (inside + 1) // 2 + (lengths - inside) * inside).sum()),
                    predictors=layout.num_supervised,
                )
            )
        return cls._sum(counts)

    @classmethod
    def _sum(cls, counts: Iterable[Counts]) -> Counts:
        return cls(*(sum(column) for column in zip(cls(0, 0, 0, 0), *counts, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of a forward and of its backward pass."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        """Sum of both passes, each by itself."""
        return Flops(forward=self.forward + other.forward, backward=self.backward + other.backward)


class Work(NamedTuple):
    """FLOPs of a run by parts."""

    body: Flops
    attention: Flops
    head: Flops

    @property
    def whole(self) -> Flops:
        """Sum of the parts."""
        return self.body + self.attention + self.head


def pair_flops(heads: int, query: int, value: int) -> Flops:
    """Return the FLOPs of a visible pair in one layer, by the head sizes of queries and keys and of values.

    Two products forward, and five backward, the scores once more among them: 2.5 times as many where sizes are equal
    (Dao, FlashAttention-2, section 4.1).
    """
    return Flops(forward=2.0 * heads * (query + value), backward=2.0 * heads * (3 * query + 2 * value))


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The most that folding can speed up a step: FLOPs unfolded over FLOPs folded.

    Both sides have the same head: where it is fused, neither projects a position whose prediction is not scored.

    Attributes:
        folded: work of the step as it is folded.
        unfolded: work of its samples, each by itself.
    """

    folded: Work
    unfolded: Work

    @property
    def ratio(self) -> float:
        """The bound of forward and backward; 1 for no work at all."""
        return _ratio(self.unfolded.whole.total, self.folded.whole.total)

    @property
    def forward_ratio(self) -> float:
        """The bound of a forward pass without a backward, such as scoring."""
        return _ratio(self.unfolded.whole.forward, self.folded.whole.forward)

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """For body, attention and head its own bound and its share of the folded FLOPs.

        The products sum to the bound. Forward and backward of a part have one: each is a multiple of the same counts.
        """
        whole = self.folded.whole.total
        return {
            name: (_ratio(unfolded.total, folded.total), folded.total / whole if whole else 0.0)
            for name, folded, unfolded in zip(Work._fields, self.folded, self.unfolded, strict=True)
        }

    @property
    def of_parts(self) -> str:
        """The parts as text: ``body 6.40x of 40% of the folded FLOPs, attention 5.32x of 4%, head 1.02x of 56%``."""
        body, *others = (f"{name} {ratio:.2f}x of {share:.0%}" for name, (ratio, share) in self.parts.items())
        return ", ".join([f"{body} of the folded FLOPs", *others])

    def __str__(self) -> str:
        """Return the ratio and, in brackets, the parts."""
        return f"{self.ratio:.2f}x ({self.of_parts})"

    def to_json(self) -> dict[str, Any]:
        """Return ratios, shares and FLOPs for ``json.dump``."""
        return {
            "ratio": self.ratio,
            "forward_ratio": self.forward_ratio,
            **{
                name: {"ratio": ratio, "share": share, "folded": vars(folded), "unfolded": vars(unfolded)}
                for (name, (ratio, share)), folded, unfolded in zip(
                    self.parts.items(), self.folded, self.unfolded, strict=True
                )
            },
        }


def _ratio(unfolded: float, folded: float) -> float:
    return unfolded / folded if folded else 1.0


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """What a GPT spends on a token, a visible pair and a projected position, in FLOPs.

    Attributes:
        token: of a token in the matrices of all layers, forward; backward makes two gradients of as many.
        pair: of a visible pair in one layer; see :func:`pair_flops`.
        layers: without a sliding window.
        window_layers: with one.
        window: keys that a query of these sees at most, itself included; None if there are none.
        position: of projecting a position to the vocabulary, forward; backward makes two gradients of as many, which
            the fused head mostly forms in its forward.
        fused_head: the head projects positions that predict a scored token, rather than all.
    """

    token: float
    pair: Flops
    layers: int
    window_layers: int = 0
    window: int | None = None
    position: float
    fused_head: bool

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
        swiglu: bool = True,
        fused_head: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> ModelWork:
        """Count a GPT's weights, each of which a token multiplies once.

        Args:
            num_layers: transformer layers.
            hidden_size: of the residual stream.
            ffn_hidden_size: width of a dense layer's MLP.
            num_attention_heads: query heads.
            vocab_size: columns of the output layer.
            num_query_groups: key and value heads; as many as query heads by default.
            kv_channels: head size; ``hidden_size / num_attention_heads`` by default.
            swiglu: the MLPs have a gate.
            fused_head: see above.
            settings: further ones by the names of Megatron's ``TransformerConfig``, of which multi-latent attention,
                experts, ``attention_output_gate`` and sliding windows count.
        """
        settings = settings or {}
        latent, experts = LatentAttention.from_settings(settings), Experts.from_settings(settings)
        if latent is None:
            query = value = kv_channels or hidden_size // num_attention_heads
            groups = num_query_groups or num_attention_heads
            attention = 2 * hidden_size * value * (num_attention_heads + groups)  # q and out; k and v
            if settings.get("attention_output_gate"):
                attention += hidden_size * value * num_attention_heads
        else:
            query, value = latent.qk_head_dim + latent.qk_pos_emb_head_dim, latent.v_head_dim
            attention = latent.weights(hidden_size, num_attention_heads)
        matrices = 3 if swiglu else 2
        weights, dense = num_layers * attention, num_layers
        if experts is not None:
            sparse = sum(layers_with_experts(num_layers, experts.moe_layer_freq))
            weights += sparse * experts.weights(hidden_size, ffn_hidden_size, matrices)
            dense -= sparse
        weights += dense * matrices * hidden_size * ffn_hidden_size
        windowed = sum(layers_with_window(num_layers, settings))
        return cls(
            token=2.0 * weights,
            pair=pair_flops(num_attention_heads, query, value),
            layers=num_layers - windowed,
            window_layers=windowed,
            window=settings["window_size"][0] + 1 if windowed else None,  # upstream does not count the query itself
            position=2.0 * hidden_size * vocab_size,
            fused_head=fused_head,
        )

    @classmethod
    def from_model(
        cls, model: ModelShape, *, vocab_size: int | None = None, fused_head: bool = False, scalar_head: bool = False
    ) -> ModelWork:
        """Count a recipe's model.

        Args:
            model: ``recipe.model``.
            vocab_size: where the recipe leaves it to the tokenizer.
            fused_head: ``recipe.fused_head``.
            scalar_head: of a critic or reward model, instead of the vocabulary's; it has one column, for all tokens.

        Raises:
            ValueError: if neither gives a vocabulary size.
        """
        columns = 1 if scalar_head else model.vocab_size or vocab_size
        if columns is None:
            raise ValueError("the cost of the output layer needs model.vocab_size; give it in the recipe")
        return cls.from_dimensions(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.ffn_hidden_size or 4 * model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            vocab_size=columns,
            num_query_groups=model.num_query_groups,
            kv_channels=model.kv_channels,
            swiglu=model.swiglu,
            fused_head=fused_head and not scalar_head,
            settings=model.transformer,
        )

    def of(self, counts: Counts) -> Work:
        """Return the FLOPs of a run."""
        pairs = self.layers * counts.pairs + self.window_layers * counts.window_pairs
        head = self.position * (counts.predictors if self.fused_head else counts.tokens)
        return Work(
            body=Flops(forward=self.token * counts.tokens, backward=2 * self.token * counts.tokens),
            attention=Flops(forward=self.pair.forward * pairs, backward=self.pair.backward * pairs),
            head=Flops(forward=head, backward=2 * head),
        )

    def bound(self, layouts: Sequence[FlatLayout]) -> Bound:
        """Return the bound of a step in these micro-batches, those of all ranks."""
        return Bound(
            folded=self.of(Counts.folded(layouts, self.window)), unfolded=self.of(Counts.unfolded(layouts, self.window))
        )
