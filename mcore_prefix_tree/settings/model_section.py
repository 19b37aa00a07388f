"""The keys of a recipe's ``model``."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from mcore_prefix_tree.plan import LatentAttention
from mcore_prefix_tree.plan.model_shape import PATTERN_PARTS, depth_letters, has_experts, layer_letters
from mcore_prefix_tree.settings.section import (
    STRICT,
    Dtype,
    LocalPath,
    NonNegativeFloat,
    Number,
    PositiveFloat,
    PositiveInt,
    Section,
)

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class YarnConfig(Section):
    """YaRN's rotary embeddings (https://arxiv.org/abs/2309.00071), with Megatron's names for its settings.

    Attributes:
        rotary_scaling_factor: factor by which a path may be longer than in pre-training.
        original_max_position_embeddings: length of the longest path in pre-training.
        beta_fast: rotations within that length above which a frequency is kept.
        beta_slow: rotations below which it is divided by the factor; in between, the two are blended.
        mscale: weight of the logarithm of the factor in the scale of queries and keys.
        mscale_all_dim: weight of the same logarithm in the divisor of that scale; 0 divides by nothing.
        correction_range_round_to_int: whether the range in between begins and ends at a whole frequency.
    """

    rotary_scaling_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: NonNegativeFloat = 1.0
    mscale_all_dim: NonNegativeFloat = 0.0
    correction_range_round_to_int: bool = True


def _no_dropout(rate: float) -> float:
    if rate:
        raise PydanticCustomError(
            "dropout", "samples that share a token would share its mask, which separate samples would not; set 0"
        )
    return rate


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig(Section):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685), with PEFT's names for their settings.

    Attributes:
        r: rank of the two matrices of a layer.
        lora_alpha: factor that their product is multiplied by, times ``r``.
        target_modules: linear layers that get one, by their names in the folder.
        lora_dropout: dropout rate; must be 0.
    """

    r: PositiveInt = 8
    lora_alpha: PositiveInt = 8
    target_modules: Annotated[list[LoraTarget], Field(min_length=1)] = field(
        default_factory=lambda: list(get_args(LoraTarget))
    )
    lora_dropout: Annotated[NonNegativeFloat, AfterValidator(_no_dropout)] = 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig(Section):
    """A GPT or a hybrid model, as megatron-core builds it.

    Attributes:
        hf: folder of a Hugging Face model, which Megatron-Bridge builds; of the keys below, only ``dtype``,
            ``transformer_impl`` and, in ``transformer``, those of the computation can be set with it. Training starts
            from its weights, unless ``checkpoint.pretrained_checkpoint`` is set, and ``data.tokenizer`` is its
            tokenizer by default if that has a chat template. None for a model of the sizes given here.
        lora: adapters on the layers of ``hf``; only they are trained, saved and exported. None trains all weights.
        adapter: folder that PEFT wrote, whose adapters training starts from; it decides ``lora``.
        num_layers: number of layers; those of ``hybrid_layer_pattern``, if that is set.
        hybrid_layer_pattern: kinds of the layers of a ``HybridModel``, one letter for each, for example ``*-G-|*E``, in
            which ``|`` begins a pipeline stage, and ``/`` the layers of a depth of multi-token prediction; None for a
            GPT.
        vocab_size: vocabulary size before padding to a multiple of the tensor-parallel size; None takes the
            tokenizer's.
        rope_scaling: whether to scale the rotary frequencies as Llama 3.1 does, by ``rope_scaling_factor``.
        yarn: settings of ``position_embedding_type: yarn``, which needs them.
        dtype: dtype of parameters and activations.
        transformer_impl: implementation of the layers: megatron-core's own layers or TransformerEngine's.
        transformer: further fields of ``megatron.core.transformer.TransformerConfig``.
    """

    num_layers: Annotated[PositiveInt, Field(le=10_000)]
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    hybrid_layer_pattern: str | None = None
    num_query_groups: PositiveInt | None = None
    ffn_hidden_size: PositiveInt | None = None
    kv_channels: PositiveInt | None = None
    vocab_size: PositiveInt | None = None
    max_position_embeddings: PositiveInt = 4096
    position_embedding_type: Literal["rope", "yarn", "learned_absolute", "none"] = "rope"
    rotary_base: PositiveInt = 10000
    rotary_percent: Annotated[float, Number, Field(gt=0, le=1)] = 1.0
    rope_scaling: bool = False
    rope_scaling_factor: PositiveFloat = 8.0
    yarn: YarnConfig | None = None
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    swiglu: bool = True
    add_bias_linear: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = True
    dtype: Dtype = "float32"
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    transformer: dict[str, Any] = field(default_factory=dict)
    hf: Annotated[str | None, LocalPath] = None
    lora: LoraConfig | None = None
    adapter: Annotated[str | None, LocalPath] = None

    @property
    def _has_latents(self) -> bool:
        return self.hf is None and LatentAttention.from_settings(self.transformer) is not None

    @property
    def _has_plain_heads(self) -> bool:
        return self.hf is None and not self._has_latents

    def _check_groups(self) -> None:
        if self.hf is None and self.num_query_groups and self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"model.num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"model.num_query_groups={self.num_query_groups}"
            )

    @property
    def _has_uneven_heads(self) -> bool:
        return self.kv_channels is None and self.hidden_size % self.num_attention_heads != 0

    def _check_pattern(self) -> None:
        pattern = self.hybrid_layer_pattern
        if pattern is None:
            return
        where = f"model.hybrid_layer_pattern={pattern!r}"
        letters, depths = layer_letters(pattern), depth_letters(pattern)
        if unknown := set(letters).union(*depths) - PATTERN_PARTS.keys():
            raise ValueError(f"{where} has the letter {min(unknown)}; Megatron knows {' '.join(PATTERN_PARTS)}")
        if len(letters) != self.num_layers:
            raise ValueError(
                f"{where} has {len(letters)} layers, not model.num_layers={self.num_layers}; set one to fit"
            )
        if len(depths) != (asked := self.transformer.get("mtp_num_layers") or 0) or len(set(depths)) > 1:
            raise ValueError(
                f"{where} has {len(depths)} depths of multi-token prediction behind /, which have to have the same "
                f"layers, and model.transformer.mtp_num_layers is {asked}; change one of them"
            )
        if self.rope_scaling:
            raise ValueError(f"{where}: a hybrid model has no model.rope_scaling; unset it")
        if has_experts(pattern) and not self.transformer.get("num_moe_experts"):
            raise ValueError(f"{where} has layers of experts, E, but no model.transformer.num_moe_experts; set it")
        if ("+" in letters or "D" in letters) != self._has_latents:
            raise ValueError(
                f"{where}: layers of multi-latent attention, + and D, and model.transformer.multi_latent_attention "
                "come together; change one of them"
            )

    def _check_heads(self) -> None:
        if self._has_plain_heads and self._has_uneven_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}; change one of them, or set model.kv_channels"
            )

    def _check_yarn(self) -> None:
        if self._has_plain_heads and (self.position_embedding_type == "yarn") != (self.yarn is not None):
            raise ValueError(
                "model.position_embedding_type=yarn and model.yarn, which has its settings, come together; set "
                "model.yarn.rotary_scaling_factor and model.yarn.original_max_position_embeddings, or unset both"
            )

    def _check_yarn_channels(self) -> None:
        if self._has_plain_heads and self.yarn is not None and (self.rotary_percent != 1 or self.rope_scaling):
            raise ValueError(
                "model.position_embedding_type=yarn turns all channels of a head and scales them in its own way: unset "
                "model.rotary_percent and model.rope_scaling"
            )

    def _check_rotary(self) -> None:
        if not self._has_plain_heads or self.position_embedding_type not in ("rope", "yarn") or self._has_uneven_heads:
            return
        head = self.kv_channels or self.hidden_size // self.num_attention_heads
        rotated = int(head * self.rotary_percent)
        if rotated == 0 or rotated % 2:
            raise ValueError(
                f"rotary embeddings turn pairs of channels, but of the {head} of each head model.rotary_percent="
                f"{self.rotary_percent:g} takes {rotated}; change it, model.kv_channels or "
                "model.position_embedding_type"
            )

    def _check_heads_of_latents(self) -> None:
        for name in ("num_query_groups", "kv_channels"):
            if self._has_latents and getattr(self, name) is not None:
                raise ValueError(
                    f"model.{name} has no meaning with model.transformer.multi_latent_attention: its heads are "
                    "model.num_attention_heads, of qk_head_dim, qk_pos_emb_head_dim and v_head_dim; unset it"
                )

    def _check_kind_of_latents(self) -> None:
        if not self._has_latents:
            return
        others = (self.position_embedding_type != "rope", self.rope_scaling, self.yarn is not None)
        if any(others) or self.transformer.get("rope_type", "yarn") not in ("rope", "yarn"):
            raise ValueError(
                "model.transformer.multi_latent_attention has separate rotary embeddings: unset model.rope_scaling, "
                "model.yarn and model.position_embedding_type, and set model.transformer.rope_type, to rope or yarn"
            )

    def _check_yarn_of_latents(self) -> None:
        if self._has_latents and self.transformer.get("rope_type", "yarn") == "yarn" and self.rotary_percent != 1:
            raise ValueError(
                "model.rotary_percent: YaRN, the default of model.transformer.rope_type, turns all channels that have "
                "a position; unset it, or set model.transformer.rope_type=rope"
            )

    def _check_rotary_of_latents(self) -> None:
        if not self._has_latents:
            return
        channels = self.transformer.get("qk_pos_emb_head_dim", LatentAttention.qk_pos_emb_head_dim)
        rotated = int(channels * self.rotary_percent) if isinstance(channels, int) else 2  # Megatron knows its types
        if rotated == 0 or rotated % 2:
            raise ValueError(
                "rotary embeddings turn pairs of channels, but model.transformer.qk_pos_emb_head_dim and "
                f"model.rotary_percent leave {rotated}; change one of them"
            )
