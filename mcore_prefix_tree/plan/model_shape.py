"""Settings of a model that its FLOPs depend on, by Megatron's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

# Kinds of computation, for counting FLOPs.
Part: TypeAlias = Literal["attention", "sparse attention", "mlp", "experts", "delta net", "mamba"]

# Letters of Megatron's hybrid layer patterns; ``mcore/seam/hybrid_layers.py`` knows which of them follow a tree.
PATTERN_PARTS: dict[str, Part] = {
    "*": "attention",
    "+": "attention",
    "D": "sparse attention",
    "-": "mlp",
    "E": "experts",
    "G": "delta net",
    "M": "mamba",
}
PIPE, MTP = "|", "/"
SPARSE = "dsa"  # value of a GPT's experimental_attention_variant
CHUNK = 64  # tokens that a delta rule computes at once: upstream's in torch, and FLA's


def layer_letters(pattern: str) -> str:
    """Return the letters of a pattern's layers, without boundaries of pipeline stages and multi-token prediction."""
    return pattern.partition(MTP)[0].replace(PIPE, "")


def depth_letters(pattern: str) -> list[str]:
    """Return the letters of the layers of each depth of multi-token prediction in a pattern."""
    return [letters for letters in pattern.split(MTP)[1:] if letters]


def layer_parts(pattern: str | None) -> list[Part] | None:
    """Return the kind of computation of each layer of a pattern and its depths; None, for a GPT, stays None."""
    letters = "" if pattern is None else layer_letters(pattern) + "".join(depth_letters(pattern))
    return None if pattern is None else [PATTERN_PARTS[letter] for letter in letters]


def has_experts(pattern: str) -> bool:
    """Return whether a pattern has a layer of experts."""
    return "experts" in (layer_parts(pattern) or ())


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of a forward and of its backward pass."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __mul__(self, count: int) -> Flops:
        return Flops(forward=self.forward * count, backward=self.backward * count)

    def __add__(self, other: Flops) -> Flops:
        return Flops(forward=self.forward + other.forward, backward=self.backward + other.backward)


NO_FLOPS = Flops(forward=0.0, backward=0.0)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

    Names, meanings and defaults are those of Megatron's ``MLATransformerConfig``.
    """

    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> LatentAttention | None:
        """Read a recipe's ``model.transformer`` or Megatron-LM's arguments; None if they do not set it."""
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
class SparseAttention:
    """The choice of keys by an indexer (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1).

    Names and meanings are those of Megatron's ``TransformerConfig``.
    """

    dsa_indexer_n_heads: int
    dsa_indexer_head_dim: int
    dsa_indexer_topk: int
    dsa_indexer_topk_freq: int = 1
    dsa_indexer_skip_topk_offset: int = 0
    dsa_indexer_loss_coeff: float = 0.0

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> SparseAttention:
        """Read a recipe's ``model.transformer`` or Megatron-LM's arguments; raise ValueError if a size is missing."""
        given = {field.name: settings[field.name] for field in fields(cls) if settings.get(field.name) is not None}
        for field in fields(cls):
            if field.default is MISSING and field.name not in given:
                raise ValueError(f"{field.name} is not set; layers of sparse attention need it, so set it")
        return cls(**given)

    def chooses(self, layer: int) -> bool:
        """Return whether a layer, counted from 1, has an indexer, as Megatron's ``is_dsa_skip_topk_layer``."""
        return max(layer - max(self.dsa_indexer_skip_topk_offset, 1), 0) % self.dsa_indexer_topk_freq == 0

    def flops(self, hidden_size: int, heads: int, query: int, latent: LatentAttention | None) -> tuple[Flops, Flops]:
        """Return an indexer's FLOPs of a token and of a visible pair.

        It projects queries, one key, and a weight for each of its heads. Only its loss has gradients, none of them of
        the layer's input; its target are the scores of attention, ``heads`` of ``query`` entries, for all visible keys.
        """
        size, learns = self.dsa_indexer_n_heads * self.dsa_indexer_head_dim, bool(self.dsa_indexer_loss_coeff)
        own = ((latent.q_lora_rank if latent else None) or hidden_size) * size
        own += hidden_size * (self.dsa_indexer_head_dim + self.dsa_indexer_n_heads)
        return (
            Flops(forward=2.0 * own, backward=2.0 * own * learns),
            Flops(forward=2.0 * (size + heads * query * learns), backward=4.0 * size * learns),
        )


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts; names, meanings and defaults are those of Megatron's ``TransformerConfig``."""

    num_moe_experts: int
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_latent_size: int | None = None
    moe_layer_freq: int | Sequence[int] = 1

    def weights(self, hidden_size: int, ffn_hidden_size: int, matrices: int) -> int:
        """Return the number of weights that a token multiplies in a layer whose MLP has ``matrices`` matrices."""
        width, latent = self.moe_ffn_hidden_size or ffn_hidden_size, self.moe_latent_size
        routed = matrices * (latent or hidden_size) * width * self.moe_router_topk
        routed += 2 * hidden_size * latent if latent else 0
        shared = matrices * hidden_size * (self.moe_shared_expert_intermediate_size or 0)
        return hidden_size * self.num_moe_experts + routed + shared

    def kept(self, hidden_size: int, ffn_hidden_size: int, matrices: int) -> int:
        """Return the number of entries that a layer keeps of a token for its backward pass."""
        each = (self.moe_latent_size or hidden_size) + matrices * (self.moe_ffn_hidden_size or ffn_hidden_size)
        return self.moe_router_topk * each + matrices * (self.moe_shared_expert_intermediate_size or 0)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Experts | None:
        """Read a recipe's ``model.transformer`` or Megatron-LM's arguments; None if they ask for no experts."""
        count = settings.get("num_moe_experts") or settings.get("num_experts")
        if not count:
            return None
        given = {field.name: settings[field.name] for field in fields(cls) if settings.get(field.name) is not None}
        return cls(**given | {"num_moe_experts": count})


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Sizes of Gated DeltaNet (https://arxiv.org/abs/2412.06464).

    Names, meanings and defaults are those of Megatron's ``TransformerConfig``.
    """

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> DeltaNet:
        """Read a recipe's ``model.transformer`` or Megatron-LM's arguments."""
        return cls(**{field.name: settings[field.name] for field in fields(cls) if settings.get(field.name)})

    def weights(self, hidden_size: int) -> int:
        """Return the number of weights that a token multiplies in a layer, and of entries of states, four times."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = self.linear_num_value_heads * self.linear_value_head_dim
        projected = hidden_size * (2 * keys + 2 * values + 2 * self.linear_num_value_heads) + values * hidden_size
        return projected + self.linear_conv_kernel_dim * (2 * keys + values) + self.place

    @property
    def place(self) -> int:
        """Number of products of a place in a chunk, whether a token fills it or not."""
        return 4 * self.state

    @property
    def state(self) -> int:
        """Number of entries of a layer's state."""
        return self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim

    @property
    def kept(self) -> int:
        """Number of entries that a layer keeps of a token for its backward pass.

        The projection, what enters and leaves the convolution, queries and keys of the heads of values, and of values'
        size the values, the gate, the rule's output, and what the norm makes of it.
        """
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = self.linear_num_value_heads * self.linear_value_head_dim
        return 6 * keys + 8 * values + 2 * self.linear_num_value_heads * self.linear_key_head_dim


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Sizes of Mamba-2 (https://arxiv.org/abs/2405.21060).

    Names, meanings and defaults are those of Megatron's ``TransformerConfig``, which also has ``hidden_size``.
    """

    hidden_size: int
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None

    place = 0  # one scan has all segments, without chunks of their own

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Mamba:
        """Read Megatron-LM's arguments or a model's configuration."""
        return cls(**{field.name: settings[field.name] for field in fields(cls) if settings.get(field.name)})

    def weights(self, hidden_size: int) -> int:
        """Return the number of weights that a token multiplies in a layer, and of entries of states, three times."""
        keys, channels = self.mamba_num_groups * self.mamba_state_dim, self.state // self.mamba_state_dim
        projected = hidden_size * (2 * channels + 2 * keys + channels // self.mamba_head_dim) + channels * hidden_size
        return projected + 4 * (channels + 2 * keys) + 3 * self.state  # the convolution has upstream's width of 4

    @property
    def state(self) -> int:
        """Number of entries of a layer's state."""
        heads = self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim
        return heads * self.mamba_head_dim * self.mamba_state_dim

    @property
    def kept(self) -> int:
        """Number of entries that a layer keeps of a token for its backward pass, those of fp32 twice.

        The projection, what enters and leaves the convolution, in fp32 the output of the scan, what is read of states,
        and both factors of the gate's product, and that product.
        """
        channels = self.state // self.mamba_state_dim
        return 13 * channels + 6 * self.mamba_num_groups * self.mamba_state_dim


# Layers that keep a state, by their part of a hybrid model.
RECURRENT: dict[Part, type[DeltaNet] | type[Mamba]] = {"delta net": DeltaNet, "mamba": Mamba}
# Values of a GPT's experimental_attention_variant; megatron-core 0.20 makes the second of the first.
DELTA_NETS = ("gated_delta_net", "gdn")


def layers_with_states(num_layers: int, settings: Mapping[str, Any]) -> list[bool]:
    """Return for each layer of a GPT whether it has Gated DeltaNet, as Megatron's ``get_linear_attention_pattern``."""
    if settings.get("experimental_attention_variant") not in DELTA_NETS:
        return [False] * num_layers
    every = settings["linear_attention_freq"]
    return [
        bool(layer % every) if isinstance(every, int) else bool(every[layer - 1]) for layer in range(1, num_layers + 1)
    ]


def layers_with_experts(num_layers: int, moe_layer_freq: int | Sequence[int]) -> list[bool]:
    """Return for each layer whether it has experts: every ``moe_layer_freq``-th from the first, or as a list says."""
    if isinstance(moe_layer_freq, int):
        return [layer % moe_layer_freq == 0 for layer in range(num_layers)]
    return [bool(has_experts) for has_experts in moe_layer_freq]


def trained_depths(settings: Mapping[str, Any]) -> int:
    """Return the number of depths of multi-token prediction that have a loss; upstream's factor is 0.1 by default."""
    return (settings.get("mtp_num_layers") or 0) if settings.get("mtp_loss_scaling_factor", 0.1) else 0


class Layers(NamedTuple):
    """The layers of a model, and those of its depths of multi-token prediction behind them."""

    mixers: list[Part]  # kind of each layer of a pattern; of a GPT, what each layer has beside an MLP or experts
    stacks: list[int]  # number of layers of each run that Megatron numbers from 1: the model's, and those of its depths
    # mlps, expert_layers: number of MLPs, and of layers of experts.
    mlps: int
    expert_layers: int


def list_layers(num_layers: int, settings: Mapping[str, Any], pattern: str | None) -> Layers:
    """Return the layers of a GPT, each of whose depths has a layer like the last, or of a hybrid model's pattern."""
    depths = trained_depths(settings)
    if pattern is not None:
        letters = [layer_letters(pattern), *depth_letters(pattern)[:depths]]
        mixers = [PATTERN_PARTS[letter] for letter in "".join(letters)]
        return Layers(mixers, [len(one) for one in letters], mixers.count("mlp"), mixers.count("experts"))
    attention: Part = "sparse attention" if settings.get("experimental_attention_variant") == SPARSE else "attention"
    mixers = ["delta net" if has_state else attention for has_state in layers_with_states(num_layers, settings)]
    experts = Experts.from_settings(settings)
    has_experts = [False] * num_layers if experts is None else layers_with_experts(num_layers, experts.moe_layer_freq)
    count = sum(has_experts + has_experts[-1:] * depths)
    return Layers(mixers + mixers[-1:] * depths, [num_layers, depths], num_layers + depths - count, count)


def layers_with_window(num_layers: int, settings: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether its attention has a sliding window, as Megatron's ``is_layer_window_attention``."""
    skip = settings.get("window_attn_skip_freq")
    if not settings.get("window_size"):
        return [False] * num_layers
    if skip is None:
        return [True] * num_layers
    return [bool(skip[layer - 1] if not isinstance(skip, int) else layer % skip) for layer in range(1, num_layers + 1)]


def count_unused(lengths: npt.NDArray[np.int64]) -> int:
    """Return the places of the last chunks of sequences, int64 ``[S]`` tokens each, that no token fills."""
    return int((-lengths % CHUNK).sum())


def most_unused(lengths: npt.NDArray[np.int64]) -> int:
    """Return the unused places of sequences, int64 ``[S]`` tokens each, if a rule without packed sequences runs them.

    Those of equally many chunks, but for a factor of two, are at most as long as the longest of them.
    """
    chunks = -(-lengths // CHUNK)
    doublings = np.ceil(np.log2(chunks)).astype(np.int64)
    longest = np.zeros(doublings.max(initial=0) + 1, dtype=np.int64)
    np.maximum.at(longest, doublings, chunks)
    return int(CHUNK * longest[doublings].sum() - lengths.sum())
