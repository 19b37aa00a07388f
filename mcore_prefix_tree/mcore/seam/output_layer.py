"""Output layer that answers readouts from hidden states, on request, instead of returning logits.

``GPTModel`` and ``HybridModel`` build their ``ColumnParallelLinear`` themselves, so :func:`with_edge_head` turns the
instance into one of a subclass, as ``torch.nn.utils.parametrize`` and ``fully_shard`` do: parameters, hooks and
state-dict keys stay. The request reaches it as data through ``runtime_gather_output``, which the forward of both models
passes to the output layer and to nothing else. (``output_processor`` is newer, and only ``GPTModel`` has it.) Going
through the layer's ``__call__`` matters: DDP waits for gathered parameters in its forward pre-hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from mcore_prefix_tree.logprob import Edges, Head
from mcore_prefix_tree.logprob.edges import mask_padding_
from mcore_prefix_tree.mcore.seam.carried_keys import Carry
from mcore_prefix_tree.mcore.seam.core_attention import change_class

Model = TypeVar("Model", bound=torch.nn.Module)

_UNPADDED = "unpadded_vocab_size"  # attribute of an output layer with columns of padding


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadRequest:
    """Request to the output layer in place of logits."""

    edges: Edges  # edges whose predictors' hidden states are read
    temperature: torch.Tensor | None  # [P], divisor of the logits; None is 1
    head_chunk_rows: int | None  # most predictors whose logits the head holds at a time; None leaves it to the head
    # Function of these hidden states [R, h], or with D distributions over kept sets [R + D, h], the weight [Vl, h] and
    # the head that returns [N, C].
    answer: Callable[[torch.Tensor, torch.Tensor, Head], torch.Tensor]
    # The hidden states of other chunks of a tree, in place of other states: m that are read come behind those of the
    # edges, and some are left. None for neither.
    carry: Carry | None = None

    def __bool__(self) -> bool:
        """Refuse to be taken for ``runtime_gather_output=True``."""
        raise TypeError("a HeadRequest reached a layer that cannot answer it")


def with_edge_head(model: Model) -> Model:
    """Let a model's output layer score edges on request; otherwise it stays the same.

    Args:
        model: a bare ``GPTModel`` or ``HybridModel`` or any of its pipeline stages, before DDP; changed in place.

    Returns:
        The same model.

    Raises:
        NotImplementedError: the output layer computes its logits in a way other than ``hidden @ weight.T``.
    """
    layer = getattr(model, "output_layer", None)
    if layer is None or isinstance(layer, EdgeHeadMixin):
        return model
    reason = _why_not(layer)
    if reason is not None:
        raise NotImplementedError(f"the fused head does not support {reason}; turn it off with fused_head=false")
    change_class(layer, EdgeHeadMixin)
    return model


def _why_not(layer: Any) -> str | None:
    kind = type(layer)
    cap = getattr(layer.config, "final_logit_softcapping", None)
    if cap:  # Megatron-Bridge's Gemma
        return f"final_logit_softcapping={cap}, a function of the logits"
    if not isinstance(layer, ColumnParallelLinear) or kind.forward is not ColumnParallelLinear.forward:
        return f"output_layer of class {kind.__name__}, which computes its logits in its own way"
    if layer.bias is not None:
        return "an output layer with a bias"
    # Since core_v0.20, Megatron-LM's --output-logit-dtype.
    if getattr(layer, "output_dtype", None) not in (None, layer.config.params_dtype):
        return f"an output layer with output_dtype={layer.output_dtype}, another than that of the weights"
    if layer.config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute=True, for which stock Megatron keeps the gradient of the logits"
    return None


class EdgeHeadMixin:
    """Output layer that answers a :class:`HeadRequest` a chunk of logits at a time; without one, the base class."""

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the base class's output; or for a request its answer ``[N, 1, C]``, and no bias."""
        if not isinstance(runtime_gather_output, HeadRequest):
            out: tuple[torch.Tensor, torch.Tensor | None] = super().forward(  # type: ignore[misc]
                input_, weight=weight, runtime_gather_output=runtime_gather_output
            )
            return out
        return _answer(self, input_, weight, runtime_gather_output), None


def _answer(layer: Any, hidden: torch.Tensor, weight: torch.Tensor | None, request: HeadRequest) -> torch.Tensor:
    """Return the answer ``[N, 1, C]`` to a request for hidden states ``[P, 1, h]`` and a weight ``[V / tp, h]``."""
    if weight is None:
        weight = layer.weight
    assert weight is not None, "the model gives the weight that it shares with the embedding"
    edges = request.edges
    if layer.sequence_parallel:
        # As in ColumnParallelLinear: each rank's gradient is of its columns only, so backward reduces and scatters.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=layer.tp_group)
    rows = _take_rows(layer, hidden.squeeze(1), request)
    if layer.tp_group.size() > 1 and not layer.sequence_parallel:
        rows = copy_to_tensor_model_parallel_region(rows, group=layer.tp_group)
    head = _head(layer, weight, edges, request.temperature, head_chunk_rows=request.head_chunk_rows)
    answer = request.answer(rows, weight, head)[:, None]
    if head.multiplier != 1:
        # The model multiplies the output layer's result by this, and the head has done so with the logits.
        answer = answer.to(torch.promote_types(answer.dtype, torch.float32)) / head.multiplier
    return answer


def _take_rows(layer: Any, hidden: torch.Tensor, request: HeadRequest) -> torch.Tensor:
    """Return the rows of ``hidden`` ``[P, h]`` that a request reads, then those of other chunks, ``[R + m, h]``."""
    rows, carry, which = hidden.index_select(0, request.edges.head_row), request.carry, (layer, "hidden state")
    if carry is None:
        return rows
    if (given := carry.read_states(which, hidden)) is not None:
        rows = torch.cat([rows, given])
    return carry.leave_states(which, rows, hidden) if carry.states.left else rows


def _head(
    layer: Any,
    weight: torch.Tensor,
    edges: Edges,
    temperature: torch.Tensor | None,
    *,
    head_chunk_rows: int | None = None,
) -> Head:
    """Return the other inputs of the logits for ``weight`` ``[V / tp, h]`` and ``temperature`` ``[P]``."""
    return Head(
        edges=edges,
        multiplier=output_multiplier(layer.config),
        temperature=temperature,
        vocab_start=layer.tp_group.rank() * len(weight),
        group=layer.tp_group if layer.tp_group.size() > 1 else None,
        head_chunk_rows=head_chunk_rows,
        weight_grad=_MainGrad(weight) if layer.gradient_accumulation_fusion and hasattr(weight, "main_grad") else None,
        vocab_size=getattr(layer, _UNPADDED, None),
    )


def output_weight_and_head(model: Any, edges: Edges, temperature: torch.Tensor | None) -> tuple[torch.Tensor, Head]:
    """Return the last stage's output weight ``[V / tp, h]`` and the other inputs of its logits.

    ``model`` is bare, with an edge head; ``temperature`` ``[P]`` divides the logits, None is 1.
    """
    weight = output_weight(model)
    return weight, _head(model.output_layer, weight, edges, temperature)


def output_weight(model: Any) -> torch.Tensor:
    """Return the output weight of a bare last stage, ``[V / tp, h]``, which may be the embedding's."""
    tied = model.share_embeddings_and_output_weights
    weight: torch.Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight


def output_multiplier(config: Any) -> float:
    """Return the factor of muP, which came with megatron-core 0.17."""
    return float(config.mup_output_mult) if getattr(config, "use_mup", False) else 1.0


class _MainGrad:
    """Megatron's ``gradient_accumulation_fusion``: the gradient goes straight into DDP's buffer."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight

    def buffer(self) -> torch.Tensor:
        buffer: torch.Tensor = self._weight.main_grad
        return buffer

    def placeholder(self) -> torch.Tensor | None:
        if not hasattr(self._weight, "grad_added_to_main_grad"):
            return None
        # DDP's hook still has to run, so autograd gets a tensor. The hook skips it, or for a weight that is also the
        # embedding's (zero_out_wgrad) adds it to the gradient of the embedding's own backward, so it must be zero then.
        self._weight.grad_added_to_main_grad = True
        is_read = getattr(self._weight, "zero_out_wgrad", False)
        return torch.zeros_like(self._weight) if is_read else torch.empty_like(self._weight)


def request_arguments(request: HeadRequest) -> dict[str, Any]:
    """Return the keywords of the model's forward that carry a request to the output layer."""
    return {"runtime_gather_output": request}


def with_vocab_size(model: Model, vocab_size: int | None) -> Model:
    """Let a model's output layer give no probability to columns of padding.

    Megatron-Core's softmax counts these columns as tokens. A model without padding stays the same, and so does one
    whose output layer has no column for each token, as a critic's.

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
    if not hasattr(layer, _UNPADDED):
        layer.register_forward_hook(_mask_padding, with_kwargs=True)
    setattr(layer, _UNPADDED, vocab_size)
    return model


def unpadded_vocab_size(model: Any) -> int:
    """Return the number of tokens of a bare model's vocabulary, without padding."""
    size: int = getattr(getattr(model, "output_layer", None), _UNPADDED, model.vocab_size)
    return size


def _mask_padding(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Mask logits, as torch's forward hook; a request's answer has no padding."""
    if not isinstance(kwargs.get("runtime_gather_output"), bool | None):
        return output
    logits = output[0]
    if logits.requires_grad and logits._is_view():
        # A single rank gathers a view, which torch does not allow to be written to.
        logits = logits.clone()
    is_whole = logits.shape[-1] > layer.output_size_per_partition
    start = 0 if is_whole else layer.tp_group.rank() * layer.output_size_per_partition
    return mask_padding_(logits, getattr(layer, _UNPADDED), start), *output[1:]
