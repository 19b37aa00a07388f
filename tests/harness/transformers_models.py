"""Tiny models of transformers that follow trees, in double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from harness.kept_sets import within_sets
from mcore_prefix_tree import Sample

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "attn_implementation": "prefix_tree",
}
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", {"layer_types": LAYERS, "sliding_window": 5}),
    "gpt_oss": ("GptOss", dict(layer_types=LAYERS, sliding_window=5, **EXPERTS)),
}


class InDouble(TorchFunctionMode):
    """Norms, softmax and routers of Transformers compute in float32 for any model dtype: make that float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(one: Any) -> Any:
            return torch.float64 if one is torch.float32 else one

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


class Noisy(torch.nn.Module):
    """A layer with dropout that no attribute shows."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.inner(hidden), 0.1, self.training)


def tiny(name: str, **settings: Any) -> Any:
    import transformers

    family, own = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config" if family != "Gemma3" else "Gemma3TextConfig")
    model = getattr(transformers, f"{family}ForCausalLM")
    return model._from_config(config(**SMALL | own | settings), attn_implementation="prefix_tree").double()


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def unfolded_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    """Log-probabilities by Transformers' own attention, without a batch."""
    tokens = torch.tensor(sample.tokens[None], dtype=torch.long)
    logits = within_sets(model(input_ids=tokens).logits[0], sample)[:-1] / sample.temperature
    row = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return torch.cat([row.new_zeros(1), row])
