"""Choice of the back-end that a job's micro-batches name: once, before the first of them is folded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mcore_prefix_tree.attention import AttentionOptions, Case
from mcore_prefix_tree.attention.api import AUTO, check_case
from mcore_prefix_tree.attention.auto import Choice, TreeShape, choose
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.mcore.ranks import all_ranks
from mcore_prefix_tree.mcore.seam.core_attention import is_deterministic, layer_window
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.sample import Sample

logger = logging.getLogger(__name__)


def attention_case(config: Any, *, device: torch.device, deterministic: bool = False) -> Case:
    """Return the attention calls of a model's layers on one tensor-parallel rank, from a ``TransformerConfig``.

    They are deterministic if the caller, the config or TransformerEngine's variable asks for it.
    """
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    latent = config.multi_latent_attention  # each head has its own keys and values
    groups = config.num_attention_heads if latent else config.num_query_groups or config.num_attention_heads
    # The largest if layers differ: those of Gemma 4 without a window, in Megatron-Bridge's providers.
    others = (getattr(config, name, 0) for name in ("global_head_dim", "global_kv_channels"))
    head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim if latent else max(config.kv_channels, *others)
    return Case(
        device=device,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=config.params_dtype,
        heads=heads,
        kv_heads=max(1, groups // config.tensor_model_parallel_size),
        head_dim=head_dim,
        value_dim=config.v_head_dim if latent else head_dim,
        needs_grad=True,
        options=AttentionOptions(
            softmax_scale=config.softmax_scale or head_dim**-0.5,
            # Of the layers that have a window; the others have less to be refused.
            window=next((window for window in list_windows(config) if window is not None), None),
            sinks=None if config.softmax_type == "vanilla" else torch.empty(heads, device="meta"),
            deterministic=deterministic or is_deterministic(config),
        ),
    )


def attention_cases_of_model(config: Any, *, device: torch.device, deterministic: bool) -> tuple[Case, ...]:
    """Return the different attention calls of a model's layers (:func:`attention_case`): with and without a window."""
    case = attention_case(config, device=device, deterministic=deterministic)
    return tuple(replace(case, options=replace(case.options, window=window)) for window in list_windows(config))


def list_windows(config: Any) -> list[int | None]:
    """Return the different windows of a model's layers; None stands for a layer without one."""
    return list(dict.fromkeys(layer_window(config, layer) for layer in range(1, config.num_layers + 1)))


def resolve_backend(
    setting: str,
    config: Any,
    first_step: Callable[[], Sequence[Sample]],
    *,
    device: torch.device,
    deterministic: bool = False,
    say: Callable[[str], None] = logger.info,
) -> str:
    """Return the back-end of a job.

    Args:
        setting: name of a back-end, or ``auto``.
        first_step: function that returns the samples of the first step, the same on every rank and after a resume;
            ``auto`` calls it.
        say: callback that receives a line with the choice of ``auto``, its reason, and whether it is deterministic.

    Raises:
        ValueError: the back-end does not exist or does not support the job; the message names those that do.
    """
    case = attention_case(config, device=device, deterministic=deterministic)
    if setting != AUTO:
        check_case(setting, case)
        return setting
    # One forest for all samples of the step: its shape does not depend on how the step is dealt to ranks.
    shape = TreeShape.of([TreeMetadata.from_layout(fold(first_step()))])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    # If a kernel is wrong on one machine only, its ranks stop at their first call of it: no two choose differently.
    choice: Choice = all_ranks().gather(choose(case, shape, device_name=name))[0]
    of_gpu = "; deterministic" if case.options.deterministic else "; its gradients may add up in any order"
    say(f"attention backend {choice.backend}: {choice.reason}{'' if device.type == 'cpu' else of_gpu}")
    return choice.backend
