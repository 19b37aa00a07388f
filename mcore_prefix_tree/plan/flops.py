"""The FLOPs of a step by parts, folded and unfolded, and the expected speed-up by folding.

Each part grows with another count, and folding shares each to another degree:

- the *body*, all matrices of the layers, with tokens, and delta rules with the chunks of each segment;
- *attention* with visible (query, key) pairs; sparse attention with chosen ones, and its indexer with all visible;
- the *head*, the output layer, with the positions that it projects: all tokens, or if it is fused only those that
  predict a scored token. A sample per turn scores only its last turn, so folded turns rarely share such a position.

Every FLOP count of a model in this package is made here. A multiplication counts two, as in Narayanan et al. (SC 2021,
appendix); norms, activations, softmax and rotary embeddings count nothing, nor does the embedding, which is a look-up.
Recomputed activations and padding are ignored. The expected speed-up assumes that every FLOP takes the same time. It is
an estimate for planning, and no bound: if a FLOP of the body takes longer than one of the head, a measurement exceeds
it. The bound, see :mod:`mcore_prefix_tree.plan.flops`, is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import and_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.layout.forest import Forest, starts_of_chains
from mcore_prefix_tree.plan.model_shape import (
    NO_FLOPS,
    RECURRENT,
    Experts,
    Flops,
    LatentAttention,
    SparseAttention,
    count_unused,
    layers_with_window,
    list_layers,
    trained_depths,
)

# Sizes of a model that Megatron-LM's arguments, its configurations and recipes have under the same names.
DIMENSIONS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels")


class Counts(NamedTuple):
    """Tokens, pairs and predictors that a run computes, without padding."""

    tokens: int  # number of tokens that pass through the layers
    pairs: int  # visible (query, key) pairs of a layer without a sliding window
    window_pairs: int  # visible pairs of a layer with one; 0 if the model has none
    predictors: int  # positions that predict a scored token, which the fused head projects
    unused: int = 0  # places in chunks of 64 tokens that no token of their segment fills
    chosen_pairs: int = 0  # pairs of a query and a key that sparse attention chooses; 0 if the model has none

    @classmethod
    def folded(cls, layouts: Iterable[Forest], window: int | None = None, topk: int | None = None) -> Counts:
        """Count micro-batches of folded samples; ``window`` and ``topk`` are the most keys of a query, see above."""
        return cls._sum(
            cls(
                tokens=layout.physical_tokens,
                pairs=layout.visible_pairs,
                window_pairs=layout.count_pairs(window or 0),
                chosen_pairs=layout.count_pairs(topk or 0),
                predictors=layout.num_predictors,
                unused=count_unused(np.diff(_segment_borders(layout))),
            )
            for layout in layouts
        )

    @classmethod
    def unfolded(cls, layouts: Iterable[Forest], window: int | None = None, topk: int | None = None) -> Counts:
        """Count the same samples, each by itself."""
        return cls._sum(
            cls.of_lengths(np.diff(layout.cu_sample_lens), window, topk)._replace(predictors=layout.num_supervised)
            for layout in layouts
        )

    @classmethod
    def of_lengths(cls, lengths: npt.NDArray[np.int64], window: int | None = None, topk: int | None = None) -> Counts:
        """Count samples of so many tokens, int64 ``[S]``, each by itself, with a head for every token."""
        inside = np.minimum(lengths, np.array([[window or 0], [topk or 0]]))
        window_pairs, chosen_pairs = (inside * (inside + 1) // 2 + (lengths - inside) * inside).sum(axis=1).tolist()
        return cls(
            tokens=int(lengths.sum()),
            pairs=int((lengths * (lengths + 1) // 2).sum()),
            window_pairs=window_pairs,
            chosen_pairs=chosen_pairs,
            predictors=int(lengths.sum()),
            unused=count_unused(lengths),
        )

    @classmethod
    def _sum(cls, counts: Iterable[Counts]) -> Counts:
        return cls(*(sum(column) for column in zip(cls(0, 0, 0, 0), *counts, strict=True)))


def _segment_borders(layout: Forest) -> npt.NDArray[np.int64]:
    """``[G + 1]``: first token of each segment, and the end of the last."""
    borders = layout.cu_node_lens.astype(np.int64)
    return np.append(borders[:-1][starts_of_chains(layout.node_parent)], borders[-1])


class Work(NamedTuple):
    """FLOPs of a run by parts."""

    body: Flops
    attention: Flops
    head: Flops

    @property
    def whole(self) -> Flops:
        return self.body + self.attention + self.head


def pair_flops(heads: int, query: int, value: int) -> Flops:
    """Return the FLOPs of a visible pair in one layer, by the head sizes of queries and keys and of values.

    Two products forward and five backward: 2.5 times as many if sizes are equal (Dao, FlashAttention-2, section 4.1).
    """
    return Flops(forward=2.0 * heads * (query + value), backward=2.0 * heads * (3 * query + 2 * value))


@dataclass(frozen=True, kw_only=True)
class ExpectedSpeedup:
    """Expected speed-up by folding: FLOPs unfolded over FLOPs folded, both with the same, perhaps fused, head."""

    folded: Work
    unfolded: Work

    @property
    def ratio(self) -> float:
        """Estimate of forward and backward; 1 for no work at all."""
        return _ratio(self.unfolded.whole.total, self.folded.whole.total)

    @property
    def forward_ratio(self) -> float:
        """Estimate of a forward pass without a backward, for example of scoring."""
        return _ratio(self.unfolded.whole.forward, self.folded.whole.forward)

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Ratio and share of the folded FLOPs of body, attention and head; the products sum to the estimate."""
        whole = self.folded.whole.total
        return {
            name: (_ratio(unfolded.total, folded.total), folded.total / whole if whole else 0.0)
            for name, folded, unfolded in zip(Work._fields, self.folded, self.unfolded, strict=True)
        }

    @property
    def of_parts(self) -> str:
        """Text of the parts: ``body 6.40x of 40% of the folded FLOPs, attention 5.32x of 4%, head 1.02x of 56%``."""
        body, *others = (f"{name} {ratio:.2f}x of {share:.0%}" for name, (ratio, share) in self.parts.items())
        return ", ".join([f"{body} of the folded FLOPs", *others])

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x ({self.of_parts})"

    def to_json(self) -> dict[str, Any]:
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
    """FLOPs of a GPT per token, per visible pair and per position that its head projects."""

    token: float  # FLOPs of a token in the matrices of all layers, forward; each of its two gradients takes as many
    pair: Flops  # FLOPs of a visible pair in one layer; see pair_flops
    layers: int  # number of layers that attend to all visible keys
    window_layers: int = 0  # number of layers with one
    window: int | None = None  # keys that a query of these sees at most, itself included; None without windows
    sparse_layers: int = 0  # number of layers of sparse attention
    topk: int | None = None  # keys that a query of these attends to at most; None without them
    # FLOPs of a token in the projections of all indexers, which pass no gradient to their inputs.
    indexer_token: Flops = NO_FLOPS
    # FLOPs of a visible pair in all indexers. Their loss adds attention's scores, and both gradients.
    indexer_pair: Flops = NO_FLOPS
    # FLOPs of projecting a position to the vocabulary, at each depth, forward; its two gradients are counted as
    # backward, though the fused head forms them in its forward.
    position: float
    fused_head: bool  # whether the head projects only positions that predict a scored token
    unused: float = 0.0  # FLOPs of a place in a chunk that no token fills, forward; 0 if no layer computes in chunks
    state_layers: int = 0  # number of layers that keep a state at branch points
    state_bytes: int = 0  # size of a branch point's states in all of these layers
    state_tokens: int = 0  # number of tokens whose activations take the memory of two such states, at least

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
        pattern: str | None = None,
    ) -> ModelWork:
        """Count a GPT's weights, each of which a token multiplies once; names are those of Megatron's arguments.

        Args:
            vocab_size: columns of the output layer.
            num_query_groups: key and value heads; as many as query heads by default.
            kv_channels: head size; ``hidden_size / num_attention_heads`` by default.
            settings: further settings by the names of Megatron's ``TransformerConfig``; multi-latent and sparse
                attention, Gated DeltaNet, Mamba, experts, ``attention_output_gate``, sliding windows and the depths of
                multi-token prediction count; these as if their paths began where the model's do.
            pattern: letters of the layers of a hybrid model, counted instead of ``num_layers``; by default a layer has
                attention or Gated DeltaNet, and an MLP or experts.
        """
        settings = settings or {}
        latent, experts = LatentAttention.from_settings(settings), Experts.from_settings(settings)
        if latent is None:
            query = value = kv_channels or hidden_size // num_attention_heads
            groups = num_query_groups or num_attention_heads
            attention = 2 * hidden_size * value * (num_attention_heads + groups)  # q and out; k and v
            if settings.get("attention_output_gate"):
                attention += hidden_size * value * num_attention_heads
            attention_kept = 3 * value * (num_attention_heads + groups)
        else:
            query, value = latent.qk_head_dim + latent.qk_pos_emb_head_dim, latent.v_head_dim
            attention = latent.weights(hidden_size, num_attention_heads)
            attention_kept = 2 * num_attention_heads * (query + value)
        matrices = 3 if swiglu else 2
        layers = list_layers(num_layers, settings, pattern)
        mixers, dense, sparse = layers.mixers, layers.mlps, layers.expert_layers
        attends, chooses = [one == "attention" for one in mixers], [one == "sparse attention" for one in mixers]
        weights = sum(attends + chooses) * attention + dense * matrices * hidden_size * ffn_hidden_size
        depths = trained_depths(settings)
        weights += depths * 2 * hidden_size**2  # a projection of two rows
        # Entries that a token leaves for the backward pass (https://arxiv.org/abs/2205.05198, section 4.1).
        kept = sum(attends + chooses) * attention_kept + dense * matrices * ffn_hidden_size
        kept += 2 * hidden_size * len(mixers) * (2 if pattern is None else 1)
        places = states_size = 0
        for name, kind_of_state in RECURRENT.items():
            if count := mixers.count(name):
                sizes = kind_of_state.from_settings({**settings, "hidden_size": hidden_size})
                weights += count * sizes.weights(hidden_size)
                places += count * sizes.place
                kept += count * sizes.kept
                states_size += count * sizes.state
        if sparse:
            assert experts is not None, "Megatron asks for their number"
            weights += sparse * experts.weights(hidden_size, ffn_hidden_size, matrices)
            kept += sparse * experts.kept(hidden_size, ffn_hidden_size, matrices)
        has_window = [one for size in layers.stacks for one in layers_with_window(size, settings)]  # each counts from 1
        windowed = sum(map(and_, attends, has_window))
        of_indexer: dict[str, Any] = {}
        if any(chooses):
            indexer = SparseAttention.from_settings(settings)
            count = sum(chosen and indexer.chooses(layer) for layer, chosen in enumerate(chooses, 1))
            of_token, of_pair = indexer.flops(hidden_size, num_attention_heads, query, latent)
            of_indexer = {"indexer_token": of_token * count, "indexer_pair": of_pair * count}
            of_indexer |= {"sparse_layers": sum(chooses), "topk": indexer.dsa_indexer_topk}
        return cls(
            token=2.0 * weights,
            pair=pair_flops(num_attention_heads, query, value),
            layers=sum(attends) - windowed,
            window_layers=windowed,
            window=settings["window_size"][0] + 1 if windowed else None,  # upstream does not count the query itself
            **of_indexer,
            position=2.0 * hidden_size * vocab_size * (1 + depths),
            fused_head=fused_head,
            unused=2.0 * places,
            state_layers=sum(map(mixers.count, RECURRENT)),
            state_bytes=4 * states_size,
            state_tokens=-(-2 * 4 * states_size // (2 * kept)),  # fp32 over bf16
        )

    @classmethod
    def from_model(
        cls, model: Any, *, vocab_size: int | None = None, fused_head: bool = False, scalar_head: bool = False
    ) -> ModelWork:
        """Count a recipe's ``ModelConfig``; raise ValueError without a vocabulary size.

        ``vocab_size`` is needed if the recipe takes it from the tokenizer. With ``scalar_head`` the model has the head
        of a critic or reward model instead of the vocabulary's: one column, for all tokens.
        """
        columns = 1 if scalar_head else model.vocab_size or vocab_size
        if columns is None:
            raise ValueError("the cost of the output layer needs model.vocab_size; give it in the recipe")
        sizes = {name: getattr(model, name) for name in DIMENSIONS}
        return cls.from_dimensions(
            **sizes | {"ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size},
            vocab_size=columns,
            num_query_groups=model.num_query_groups,
            swiglu=model.swiglu,
            fused_head=fused_head and not scalar_head,
            settings=model.transformer,
            pattern=model.hybrid_layer_pattern,
        )

    def of(self, counts: Counts) -> Work:
        pairs = self.layers * counts.pairs + self.window_layers * counts.window_pairs
        pairs += self.sparse_layers * counts.chosen_pairs
        head = self.position * (counts.predictors if self.fused_head else counts.tokens)
        body = self.token * counts.tokens + self.unused * counts.unused
        return Work(
            body=Flops(forward=body, backward=2 * body) + self.indexer_token * counts.tokens,
            attention=self.pair * pairs + self.indexer_pair * counts.pairs,
            head=Flops(forward=head, backward=2 * head),
        )

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The window and the top-k that :class:`Counts` needs."""
        return self.window, self.topk

    def expected_speedup(self, layouts: Sequence[Forest]) -> ExpectedSpeedup:
        """Return the speed-up to expect of a step in these micro-batches, those of all ranks."""
        return ExpectedSpeedup(
            folded=self.of(Counts.folded(layouts, *self.limits)),
            unfolded=self.of(Counts.unfolded(layouts, *self.limits)),
        )


class Parts(NamedTuple):
    """A number for each part of a step: its seconds, or a ratio."""

    body: float
    attention: float
    head: float
    rest: float


def work_ratios(work: ModelWork, folded: Counts, unfolded: Counts) -> Parts:
    """Return the largest factor by which each part's seconds of a model can shrink.

    The body follows tokens, or with a delta rule the larger ratio of tokens and of places in chunks, among which is the
    padding of the unfolded samples. Attention computes visible pairs, and reads and writes tokens; one measurement does
    not tell the two apart, so the larger ratio counts. The head follows the positions that it projects; if it projects
    all, its loss still reads only scored ones, and the larger of both ratios counts.
    """
    expected = ExpectedSpeedup(folded=work.of(folded), unfolded=work.of(unfolded))
    body, attention, head = (ratio for ratio, _ in expected.parts.values())
    tokens = unfolded.tokens / folded.tokens if folded.tokens else 1.0
    if work.unused and folded.tokens:
        body = max(tokens, (unfolded.tokens + unfolded.unused) / (folded.tokens + folded.unused))
    scored = unfolded.predictors / folded.predictors if folded.predictors else 1.0
    head = head if work.fused_head else max(head, scored)
    return Parts(body=body, attention=max(attention, tokens), head=head, rest=1.0)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bound of the speed-up by folding on the machine that ran the unfolded step.

    No part of the folded step runs faster than at the best rate that the part had in any unfolded way, so the folded
    step takes at least ``body / r_body + attention / r_attention + head / r_head + rest`` seconds, by the least that
    each part took unfolded and the ratios r of :func:`work_ratios`. The *body* is everything until the last backward
    ends that is not attention or head; the *rest*, which finishes the gradients after it, does not shrink.
    """

    unfolded_seconds: float
    least: Parts
    ratios: Parts

    @classmethod
    def from_ways(cls, unfolded_seconds: float, ways: Sequence[Parts], ratios: Parts) -> Bound:
        """Make a bound from the seconds of the parts in several unfolded ways, of which each part's least counts."""
        return cls(unfolded_seconds=unfolded_seconds, least=Parts(*map(min, zip(*ways, strict=True))), ratios=ratios)

    @property
    def folded_parts(self) -> Parts:
        """Seconds that each part takes folded at least."""
        return Parts(*(seconds / ratio for seconds, ratio in zip(self.least, self.ratios, strict=True)))

    @property
    def ratio(self) -> float:
        """The bound: the unfolded step's seconds over the folded step's least."""
        return self.unfolded_seconds / sum(self.folded_parts)

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Ratio of each part, and its share of the folded step's least seconds."""
        whole = sum(self.folded_parts)
        return {
            name: (ratio, seconds / whole)
            for name, ratio, seconds in zip(Parts._fields, self.ratios, self.folded_parts, strict=True)
        }
