"""The vocabulary of a model whose output layer has columns of padding.

Megatron-Core's softmax counts these columns as tokens. Here the output layer gives them no probability: its logits,
for every reader, and the answers of the fused head are those of a vocabulary without padding.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from mcore_prefix_tree.logprob.edges import mask_padding_

Model = TypeVar("Model", bound=torch.nn.Module)

_ATTRIBUTE = "unpadded_vocab_size"


def with_vocab_size(model: Model, vocab_size: int | None) -> Model:
    """Let a model's output layer give no probability to columns of padding.

    A model without padding stays the same, and so does one whose output layer has no column for each token, as a
    critic's.

    Args:
        model: a bare ``GPTModel`` or ``HybridModel`` or any of its pipeline stages; changed in place. State-dict keys
            stay.
        vocab_size: number of tokens of the vocabulary; columns from this id on are padding. None means no padding.

    Returns:
        The same model.
    """
    layer: Any = getattr(model, "output_layer", None)
    columns: int | None = getattr(layer, "output_size", None)
    if vocab_size is None or columns is None or columns != model.vocab_size or vocab_size >= columns:
        return model
    if not hasattr(layer, _ATTRIBUTE):
        layer.register_forward_hook(_mask, with_kwargs=True)
    setattr(layer, _ATTRIBUTE, vocab_size)
    return model


def unpadded_vocab_size(model: Any) -> int:
    """Return the number of tokens of a bare model's vocabulary, without padding."""
    size: int = getattr(getattr(model, "output_layer", None), _ATTRIBUTE, model.vocab_size)
    return size


def vocab_size_of_layer(layer: Any) -> int | None:
    """Return the number of tokens that an output layer's columns stand for; None if all do."""
    size: int | None = getattr(layer, _ATTRIBUTE, None)
    return size


def _mask(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Mask logits, as torch's forward hook; a request's answer has no padding."""
    if not isinstance(kwargs.get("runtime_gather_output"), bool | None):
        return output
    logits = output[0]
    if logits.requires_grad and logits._is_view():
        # A single rank gathers a view, which torch does not allow to be written to.
        logits = logits.clone()
    is_whole = logits.shape[-1] > layer.output_size_per_partition
    start = 0 if is_whole else layer.tp_group.rank() * layer.output_size_per_partition
    return mask_padding_(logits, getattr(layer, _ATTRIBUTE), start), *output[1:]
