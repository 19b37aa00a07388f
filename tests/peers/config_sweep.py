"""Change each setting of families' configurations by itself, and compare the answers with transformers'.

Settings are the fields of transformers' configuration class, and keys that it does not declare but Megatron-Bridge
reads of any configuration. A case takes half a second.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from harness.commands import run_command
from hf_folders import FAMILIES, rows
from hf_jobs import REFERENCE, nll, worst_score, write_job

# Weights that make attention and routing sharp enough for a wrong setting to show.
SHARP = {"initializer_range": 0.1}
LIMIT = 1e-5
# Of a family's smallest model, so that a group of experts has enough of them; and so that its recurrence does not
# amplify the rounding of fp32, which it does in transformers too.
BASE = {
    "Qwen3.5": {"initializer_range": 0.05},
    "Qwen3.5-MoE": {"initializer_range": 0.05},
    "DeepSeek-V3": {"n_routed_experts": 8},
    "GLM-5": {"n_routed_experts": 8},
    "GLM-4.7-Flash": {"n_routed_experts": 8},
    "GLM-4.5": {"n_routed_experts": 8, "num_experts": 8, "n_group": 2, "topk_group": 1},
}
# Fields that transformers' function of a token sequence does not read: ids of control tokens, caching, initial weights,
# outputs and losses besides the logits.
NOT_SWEPT = {
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "mamba_ssm_cache_dtype",
    "output_router_logits",
    "pad_token_id",
    "use_cache",
}
THETA = {"rope_theta": 10000.0}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = THETA | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500.0},
    THETA | {"rope_type": "default", "partial_rotary_factor": 0.5},
    THETA | {"rope_type": "linear", "factor": 2.0},
    THETA | {"rope_type": "dynamic", "factor": 2.0},
    THETA | {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    LLAMA3 | {"original_max_position_embeddings": 8192},
    LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 2.0},
    LLAMA3 | {"original_max_position_embeddings": 16},
    YARN,
    *(
        YARN | {name: value for name, value in (("mscale", one), ("mscale_all_dim", other)) if value is not None}
        for one, other in ((0.7, 0.0), (0.7, 0.7), (1.0, 0.5), (1.0, None), (None, 1.0), (0.0, 1.0))
    ),
    *(YARN | one for one in ({"attention_factor": 1.5}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False})),
]
ACTIVATIONS = ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu"]
VALUES: dict[str, list[Any]] = {
    "attn_logit_softcapping": [2.0],
    "clip_qkv": [0.5],
    "final_logit_softcapping": [2.0],
    "global_head_dim": [16],
    "head_dim": [8, 32],
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "layers_block_type": [["moe", "full_attention", "mlp", "linear_attention"], ["full_attention", "mlp"]],
    "indexer_types": [["full", "full", "shared", "shared"], ["full", "shared", "full", "full"]],
    "mamba_hidden_act": ["gelu"],
    "mlp_hidden_act": ["silu"],
    "mtp_layers_block_type": [["full_attention"]],
    "time_step_limit": [[0.01, 0.5]],
    "mlp_only_layers": [[0], [1]],
    "n_group": [1, 2],
    "num_experts_per_tok": [1, 3],
    "num_global_key_value_heads": [1, None],
    "position_embedding_type": ["rope", "nope", None],
    "q_lora_rank": [None, 16],
    "rope_parameters": ROPES,
    "rope_scaling": [{**one, "type": one["rope_type"]} for one in ROPES],
    "sliding_window": [None, 4],
    "top_k_experts": [1, 3],
    "topk_group": [1, 2],
    # Not declared by every class; Megatron-Bridge reads them of all.
    "attention_bias": [True],
    "hidden_dropout": [0.5],
    "mlp_bias": [True],
    "moe_layer_freq": [2],
    "norm_topk_prob": [True, False],
    "num_nextn_predict_layers": [1],
    "partial_rotary_factor": [0.5],
    "rope_local_base_freq": [500.0],
    "rope_theta": [500.0],
    "routed_scaling_factor": [0.5, 2.0],
    "scoring_func": ["sigmoid", "softmax"],
    "tie_word_embeddings": [True, False],
    "use_qk_norm": [True, False],
}
KINDS_OF_LAYERS = {"layer_types": ("full_attention", "sliding_attention"), "mlp_layer_types": ("dense", "sparse")}


def fields_of(family: str) -> list[str]:
    """The fields that transformers' configuration class of a family declares."""
    base = transformers.PreTrainedConfig
    classes = [one for one in config_class(family).__mro__ if issubclass(one, base) and one is not base]
    return [name for one in classes for name in vars(one).get("__annotations__", {}) if name not in NOT_SWEPT]


def config_class(family: str) -> Any:
    kind = FAMILIES[family]
    return getattr(transformers, f"{kind.config or kind.name}Config")


def cases_of(family: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of each case."""
    settings = FAMILIES[family].settings | BASE.get(family, {})
    config = config_class(family)(**copy.deepcopy(settings))
    layers, config.allow_global_per_layer_attribute_access = config.num_hidden_layers, True
    for name in dict.fromkeys([*fields_of(family), *VALUES]):
        present = getattr(config, name, None)
        if name in KINDS_OF_LAYERS:
            one, other = (
                ("linear_attention", "full_attention")
                if "linear_attention" in (present or ())
                else KINDS_OF_LAYERS[name]
            )
            values: list[Any] = [[one] * layers, [other] * layers]
            values += [[one, other] * layers, [other, one] * layers]
            values = [value[:layers] for value in values]
        elif name == "rope_parameters" and any(isinstance(one, dict) for one in (present or {}).values()):
            values = [{**present, layer: THETA | rope} for layer in present for rope in ROPES]
        elif name in VALUES:
            values = VALUES[name]
        elif isinstance(present, bool | None):
            values = [not present]
        elif isinstance(present, int):
            values = [max(present // 2, 1), present + 1, 2 * present]
        else:
            assert isinstance(present, float), f"{family}: which values has {name}?"
            values = [present + 0.25, 2 * present]
        yield from ({name: value} for value in values if value != present)


def outcome(family: str, change: dict[str, Any], *options: str) -> str | float:
    """The error of a token's log-probability, or who refuses the model; ``crashed`` for any other end."""
    settings = SHARP | BASE.get(family, {}) | change
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ):
        try:
            recipe, source, model = write_job(Path(name), family, settings)
            with torch.no_grad():
                nll(model, rows()[0])
        except Exception as error:
            return f"transformers refuses it: {type(error).__name__}"
        scores = Path(name) / "scores.jsonl"
        done = run_command("score", recipe, "--hf", str(source), "--output", str(scores), REFERENCE, *options)
        if done.exit_code == 2:
            return f"refused: {' '.join(done.output.split()).replace(f'{name}/', '')}"
        return f"crashed: {done.exception!r}" if done.exit_code else worst_score(scores, model)


def write_outcomes(layers: str, output: str, *families: str) -> None:
    """Write the outcomes of all cases of some families in JSON, beginning with their models as they are."""
    found = [
        {"family": family, "change": change, "outcome": outcome(family, change, f"model.transformer_impl={layers}")}
        for family in families
        for change in ({}, *cases_of(family))
    ]
    Path(output).write_text(json.dumps(found, indent=1))
