"""The other side of the comparison: ``train_rl.py`` of the checkout with its own forward steps, and made rollouts.

Each trajectory is separate, in its padding or its place in a bin: Megatron's local layers get an attention for
packed rows, which they lack. In fp32 the loop gives a model an argument that only its half-precision wrapper takes.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch
from rl_rollouts import exchange_rollouts

sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])

from mcore_prefix_tree.cpu.emulation import enable_training

if not torch.cuda.is_available():  # as in the tests, before Megatron-LM is imported
    exchange_rollouts()
    enable_training()

import train_rl
from megatron.core.enums import ModelType
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.inference.utils import add_inference_args
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from mcore_prefix_tree.cpu.specs import PackedAttention, exchanged
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import build_model


def without_output_dtype(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kwargs.pop("fp32_output", None)
    return args, kwargs


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    args = get_args()
    model = build_model(
        args,
        config or core_transformer_config_from_args(args),
        partial(exchanged, classes={DotProductAttention: PackedAttention}),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    model.register_forward_pre_hook(without_output_dtype, with_kwargs=True)
    return model


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_inference_args, args_defaults={})
    container = pretrain_cfg_container_from_args(args)
    pretrain(container, None, ModelType.encoder_or_decoder, train_rl.forward_step, model_provider)
