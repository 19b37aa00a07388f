"""Families of Hugging Face models whose results were compared with transformers', and the settings they need.

``benchmarks/families.py`` compares the families, and ``tests/peers/test_config_sweep.py`` each setting of a family.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

Allowed = Mapping[str, tuple[Any, ...] | range]
# Megatron-Core does not normalise the score of a single expert.
_ABOVE_ONE = range(2, sys.maxsize)
# Scores of experts are normalised.
_EXPERTS: Allowed = {"norm_topk_prob": (True,), "num_experts_per_tok": _ABOVE_ONE}
# Queries without a latent would get another norm.
_LATENT: Allowed = {**_EXPERTS, "q_lora_rank": range(1, sys.maxsize)}
# Rotary channels are interleaved.
_INTERLEAVED: Allowed = {**_LATENT, "rope_interleave": (True,)}
# By model_type, the settings that the layers do not read as transformers does, with the values that give its results.
COMPARED: dict[str, Allowed] = {
    "deepseek_v3": _INTERLEAVED,
    "deepseek_v32": {**_LATENT, "tie_word_embeddings": (False,)},
    "gemma3_text": {
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False,),
    },
    "gemma4_text": {
        "attention_bias": (False,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_size_per_layer_input": (0,),
        "num_kv_shared_layers": (0,),
        "top_k_experts": _ABOVE_ONE,
        "use_bidirectional_attention": (None, "vision"),
    },
    "glm4_moe": _EXPERTS,
    "glm4_moe_lite": _INTERLEAVED,
    "glm_moe_dsa": {**_LATENT, "rope_type": ("default",), "tie_word_embeddings": (False,)},
    "gpt_oss": {  # constants in Megatron-Bridge's source
        "swiglu_limit": (7.0,),
        "swiglu_alpha": (1.702,),
        "rope_type": ("yarn",),
        "factor": (32.0,),
        "original_max_position_embeddings": (4096,),
        "beta_fast": (32.0,),
        "beta_slow": (1.0,),
        "truncate": (False,),
    },
    "granitemoehybrid": {
        "attention_bias": (False,),
        "hidden_act": ("silu",),
        "mamba_conv_bias": (True,),
        "mamba_d_conv": (4,),
        "mamba_proj_bias": (False,),
        "rms_norm_eps": (1e-5,),  # the norm behind the scan has no other in Megatron-Core
        "rope_type": ("default",),
        "time_step_limit": ((0.0, math.inf), [0.0, math.inf]),
    },
    "hy_v3": {"hidden_act": ("silu",), "num_experts_per_tok": _ABOVE_ONE},
    "llama": {},
    "minimax_m2": {"num_experts_per_tok": _ABOVE_ONE},
    "mistral": {"hidden_act": ("silu",)},
    "nemotron_h": {
        **_EXPERTS,
        "attention_bias": (False,),
        "conv_kernel": (4,),
        "layer_norm_epsilon": (1e-5,),  # the norm behind the scan has no other in Megatron-Core
        "mamba_hidden_act": ("silu",),
        "mlp_bias": (False,),
        "mlp_hidden_act": ("relu2",),
        "residual_in_fp32": (False,),
        "tie_word_embeddings": (False,),
        "time_step_min": (0.001,),  # transformers raises steps to it; Megatron-Core and vLLM do not
        "use_bias": (False,),
        "use_conv_bias": (True,),
    },
    "olmoe": {"norm_topk_prob": (False,), "clip_qkv": (None,)},
    "qwen2": {},
    "qwen3": {},
    "qwen3_5_moe_text": {"hidden_act": ("silu",), "num_experts_per_tok": _ABOVE_ONE},
    "qwen3_5_text": {"hidden_act": ("silu",)},
    "qwen3_moe": {},
    "qwen3_next": {**_EXPERTS, "decoder_sparse_step": (1,), "hidden_act": ("silu",), "mlp_only_layers": ([],)},
}
# Of Gemma 4 without experts, by other layers of Megatron-Bridge: the norm of its values has a constant.
WITHOUT_EXPERTS: Allowed = {
    "attention_bias": (False,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "rms_norm_eps": (1e-6,),
    "use_bidirectional_attention": (None, "vision"),
}
# By model_type, which transformers does not know, the model_type and architecture of the same model in transformers.
RENAMED = {"kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM"), "mimo": ("qwen2", "Qwen2ForCausalLM")}
# Models of pictures and text by model_type: the model_type of their text model, and the model_type and architecture of
# the compared family that it is on text alone. M-RoPE of three equal positions is RoPE.
TEXT_MODELS = {
    "gemma3": ("gemma3_text", "gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4_text", "gemma4_text", "Gemma4ForCausalLM"),
    "kimi_k25": ("deepseek_v3", "deepseek_v3", "DeepseekV3ForCausalLM"),
    "mistral3": ("mistral", "mistral", "MistralForCausalLM"),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2", "Qwen2ForCausalLM"),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen3_vl": ("qwen3_vl_text", "qwen3", "Qwen3ForCausalLM"),
}
