"""Low-rank adapters on the layers of a Hugging Face folder, by Megatron-Bridge's ``CanonicalLoRA``.

It wraps the linear layers of a model. Queries, keys and values, and the two halves of a gated MLP, each have separate
adapters, as in PEFT. This file limits them to the chosen layers, and reads them from PEFT's format.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from mcore_prefix_tree.mcore.models.bridge import load_bridge, load_folder
from mcore_prefix_tree.settings import LoraConfig, ModelConfig
from mcore_prefix_tree.settings.adapter_folder import PREFIX, WEIGHTS, AdapterFolder

# Megatron-Bridge's names of PEFT's targets.
_TARGETS = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
    "down_proj": "linear_fc2",
}


def with_lora(chunk: Any, lora: LoraConfig) -> Any:
    """Freeze a ``GPTModel`` chunk in place, and give its linear layers adapters that change nothing yet."""
    adapted = bridge_lora(lora)(chunk)
    if chunk.pre_process:
        # Recomputation gives no gradients to parameters behind inputs that have none.
        chunk.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_(torch.is_grad_enabled()))
    return adapted


def bridge_lora(lora: LoraConfig) -> Any:
    """Return Megatron-Bridge's transformation; a matrix A is drawn as PEFT draws it."""
    return _lora_class()(
        target_modules=[_TARGETS[target] for target in lora.target_modules],
        dim=lora.r,
        alpha=lora.lora_alpha,
        lora_A_init_method="kaiming",
    )


@cache
def _lora_class() -> Any:
    from megatron.bridge.peft import canonical_lora
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    class Split(AdapterWrapper):  # type: ignore[misc]
        """A linear layer that computes several projections at once, of which some have an adapter."""

        def __init__(self, given: Any) -> None:
            present = {key: one for key, one in given.adapter.items() if one is not None}
            super().__init__(given.to_wrap, canonical_lora.ModuleDict(present))

        def shapes(self, columns: int) -> dict[str, tuple[int, int]]:
            """Return each projection's groups and columns of a group, in the order of this rank's columns."""
            raise NotImplementedError

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            """Return the output ``[s, b, out]`` for ``x`` ``[s, b, in]``, with the adapters' part, and the bias."""
            output, bias, normed = self.base_linear_forward(x, *args, **kwargs)
            normed = normed.contiguous()
            added = []
            for name, shape in self.shapes(output.shape[-1]).items():
                key = f"adapter_{name}"
                absent = output.new_zeros(1).expand(*output.shape[:-1], *shape)
                added.append(self.adapter[key](normed).unflatten(-1, shape) if key in self.adapter else absent)
            return output + torch.cat(added, dim=-1).flatten(-2), bias

    class SplitQKV(Split):
        """Rows of the weight are groups: the queries of one, its key and its value."""

        def shapes(self, columns: int) -> dict[str, tuple[int, int]]:
            config = self.to_wrap.config
            size, heads = config.kv_channels, config.num_attention_heads // config.num_query_groups
            groups = columns // size // (heads + 2)
            return {"q": (groups, heads * size), "k": (groups, size), "v": (groups, size)}

    class SplitGateUp(Split):
        """The first half of a rank's rows is the gate."""

        def shapes(self, columns: int) -> dict[str, tuple[int, int]]:
            return dict.fromkeys(("gate", "up"), (1, columns // 2))

    of_kind = {canonical_lora.LoRALinearSplitQKV: SplitQKV, canonical_lora.LoRALinearSplitFC1UpGate: SplitGateUp}

    class PeftLora(canonical_lora.CanonicalLoRA):  # type: ignore[misc]
        """Adapters that are PEFT's, tensor by tensor."""

        def transform(self, m: Any, name: str | None = None, prefix: str | None = None) -> Any:
            if isinstance(m, AdapterWrapper):
                return m
            made = super().transform(m, name, prefix)
            if type(made) in of_kind:
                made = of_kind[type(made)](made)
            if isinstance(made, AdapterWrapper):
                # It names the wrapped layer's parameters as if it were not wrapped when it gives its state.
                made.register_load_state_dict_pre_hook(_to_wrapped)
            return made

    return PeftLora


def _to_wrapped(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        rest = name.removeprefix(prefix)
        if not rest.startswith(("adapter.", "to_wrap.")):
            state[f"{prefix}to_wrap.{rest}"] = state.pop(name)


def load_start(model: ModelConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill a model with its folder's weights and its adapter's, if it names one; all ranks, as :func:`load_folder`."""
    assert model.hf is not None
    load_folder(model.hf, chunks)
    if model.adapter is not None:
        _load_adapter(model.adapter, model.hf, chunks)


def load_frozen(model: ModelConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill a model with the weights that its adapter's checkpoint lacks; all ranks together, as :func:`load_folder`."""
    if model.lora is not None:
        assert model.hf is not None, "the recipe checks it"
        load_folder(model.hf, chunks)


def _load_adapter(path: str, hf: str, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill this rank's parts of an adapter, which has PEFT's names."""
    from safetensors import safe_open

    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    tasks = load_bridge(hf)._model_bridge.build_adapter_conversion_tasks(unwrap_model(list(chunks)))
    matrices = [one for task in chain(*tasks.values()) for one in (task.linear_in_task, task.linear_out_task)]
    with safe_open(AdapterFolder.read(path).path / WEIGHTS, "pt") as opened, torch.no_grad():
        for one in matrices:
            weight = one.param_weight
            if weight is not None:
                named = opened.get_tensor(PREFIX + one.mapping.hf_param)
                weight.copy_(named.chunk(size, dim=weight.partition_dim)[rank])
