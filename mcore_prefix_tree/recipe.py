"""A recipe: everything a training job is told, from a YAML file and ``key=value`` overrides.

Field names are Megatron's where Megatron has one. Unknown keys, wrong types and values out of range are refused by the
name of the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter
from pydantic import ValidationError as PydanticError
from pydantic.dataclasses import dataclass
from yaml import YAMLError

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


class RecipeError(ValueError):
    """A recipe that cannot be used. The message names the file and the key."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """What to train on.

    Attributes:
        path: a JSONL file, a glob, ``-`` for standard input, or a list of these.
        tokenizer: a tokenizer that mistral-common carries, or the path of a Hugging Face tokenizer folder; for chat
            messages. None if all lines have ``tokens``.
        expand_turns: one sample per assistant turn, with its whole history as prefix.
        shuffle: draw lines in a new order each epoch; the turns of a line stay together.
    """

    path: str | list[str]
    tokenizer: str | None = None
    expand_turns: bool = False
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """A GPT, as megatron-core builds it.

    Attributes:
        vocab_size: before padding to a multiple of the tensor-parallel size; None takes the tokenizer's.
        dtype: of parameters and activations.
        transformer_impl: megatron-core's own layers or TransformerEngine's.
        transformer: further fields of ``megatron.core.transformer.TransformerConfig``.
    """

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt | None = None
    ffn_hidden_size: PositiveInt | None = None
    kv_channels: PositiveInt | None = None
    vocab_size: PositiveInt | None = None
    max_position_embeddings: PositiveInt = 4096
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    rotary_base: PositiveInt = 10000
    rotary_percent: PositiveFloat = 1.0
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    swiglu: bool = True
    add_bias_linear: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = True
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    transformer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ParallelConfig:
    """How the model is cut; what is left of the ranks is data parallel."""

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False

    @property
    def sequence_multiple(self) -> int:
        """What sequence lengths are a multiple of: sequence parallelism cuts them over the tensor-parallel ranks."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    @property
    def micro_batch_multiple(self) -> int:
        """What a rank's micro-batches come in multiples of: interleaved stages take them in groups of the pipeline."""
        return 1 if self.virtual_pipeline_model_parallel_size is None else self.pipeline_model_parallel_size


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class BatchConfig:
    """How much a step takes.

    Attributes:
        global_batch_size: logical samples per step, over all ranks.
        max_tokens: physical tokens that a micro-batch may hold.
    """

    global_batch_size: PositiveInt
    max_tokens: PositiveInt


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class OptimizerConfig:
    """AdamW and its schedule; warm-up and decay count steps."""

    lr: PositiveFloat = 1e-3
    min_lr: NonNegativeFloat = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    lr_warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.01
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    clip_grad: NonNegativeFloat = 1.0
    use_distributed_optimizer: bool = False


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class CheckpointConfig:
    """Where and how often to save.

    Attributes:
        save: folder; None saves nothing.
        save_interval: steps between checkpoints; the last step always saves.
    """

    save: str | None = None
    save_interval: PositiveInt = 100


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class VerifyConfig:
    """Folded against unfolded on the first batch.

    Attributes:
        enabled: before ``train``.
        tolerance: largest relative error that passes; None takes 1e-12 for float64 and 1e-5 for float32 (and for
            models with parts that upstream computes in float32, such as the MoE router). bfloat16 is
            judged against a float32 run of the same weights instead: within 3 times the unfolded run's own error.
    """

    enabled: bool = True
    tolerance: PositiveFloat | None = None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Recipe:
    """A whole job.

    Attributes:
        train_iters: steps.
        seed: of weights and shuffling.
        attention_backend: a name of ``mcore_prefix_tree.attention.BACKENDS``.
        device: ``auto`` takes the GPU where there is one; ``cpu`` runs megatron-core under emulation.
        compare: end with the table of folded against unfolded.
    """

    data: DataConfig
    model: ModelConfig
    batch: BatchConfig
    train_iters: PositiveInt
    seed: NonNegativeInt = 1234
    attention_backend: str = "path"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compare: bool = True
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: of a YAML file. ``data.path`` in the file is relative to the working directory, like an override.
        overrides: ``key=value``, with dots for nesting (``data.path=rollouts.jsonl``); values are YAML.

    Raises:
        RecipeError: names the file and the key.
    """
    try:
        merged = OmegaConf.load(path)
        if not isinstance(merged, DictConfig):
            raise RecipeError(f"recipe {path} is a list; it must map keys to values")
        for override in overrides:
            merged = _with_override(merged, override)
        content = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except FileNotFoundError:
        raise RecipeError(f"recipe {path} does not exist") from None
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"recipe {path} cannot be read: {_one_line(error)}") from error
    try:
        return TypeAdapter(Recipe).validate_python(content)
    except PydanticError as error:
        faults = []
        for fault in error.errors():
            key = ".".join(str(part) for part in fault["loc"] if part not in ("str", "list[str]")) or "the recipe"
            given = "" if fault["type"] == "missing" else f" (given {fault['input']!r})"
            reason = "there is no such key" if fault["type"] == "unexpected_keyword_argument" else fault["msg"]
            faults.append(f"{key}: {reason[0].lower()}{reason[1:]}{given}")
        raise RecipeError(f"recipe {path}: " + "; ".join(faults)) from None


def _with_override(recipe: Any, override: str) -> Any:
    if "=" not in override:
        raise RecipeError(f"{override!r} is not an override; write key=value, for example train_iters=10")
    if override.endswith("=-"):
        override = override[:-1] + "'-'"  # standard input; YAML reads a lone dash as a list of nothing
    try:
        return OmegaConf.merge(recipe, OmegaConf.from_dotlist([override]))
    except (OmegaConfBaseException, YAMLError, TypeError) as error:  # TypeError: a list where the recipe has a mapping
        raise RecipeError(f"override {override!r}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
