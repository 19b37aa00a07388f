"""A scalar at every token in place of its logits: the output layer of critics and reward models.

``GPTModel`` returns its output layer's output unchanged, so a module with the same call can take its place, as in other
critics on Megatron-Core, for example ``LinearForLastLayer`` of mbridge and verl. Every tensor-parallel rank
holds the full weight: it is as small as a norm's, and its gradient is summed like a norm's.

Legend: P padded tokens, h hidden size.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

# In a checkpoint. The vocabulary's weight is output_layer.weight, and Megatron lets that one's shape differ: under the
# same name a critic would start from the first row of a vocabulary without a word.
CHECKPOINT_KEY = "scalar_head.weight"
_ATTRIBUTE = "output_layer."

Model = TypeVar("Model", bound=torch.nn.Module)


class ScalarHead(torch.nn.Module):
    """``hidden @ weight.T`` with a single row, and no bias, as the ``score`` layer of Hugging Face's reward models.

    The weight starts from a normal distribution of variance 1 / (h + 1) (Stiennon et al., 2020, arXiv:2009.01325).
    """

    def __init__(self, config: Any, *, device: torch.device, tp_group: Any) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device))
        # By the generator of torch, which the ranks of a tensor-parallel group have seeded alike.
        torch.nn.init.normal_(self.weight, std=1 / math.sqrt(config.hidden_size + 1))
        # Megatron's marks: its gradient is that of this rank's tokens; the optimizer's groups look at the second.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self._starts_new = False
        self.register_load_state_dict_post_hook(_has_started)  # type: ignore[no-untyped-call]

    def start_new(self) -> None:
        """Keep the weight as it is when the next checkpoint is read into the model, which holds no scalar head."""
        self._starts_new = True

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return the scalars ``[P, 1, 1]`` in fp32 or better, the same on all ranks of the group, and no bias.

        ``input_`` is ``[P, 1, h]``, or ``[P / tp, 1, h]`` under sequence parallelism; the others are those of
        ``ColumnParallelLinear``, unused.
        """
        assert weight is None, "a scalar head has no weight that the embedding shares"
        dtype = torch.promote_types(input_.dtype, torch.float32)
        scalars = F.linear(input_.to(dtype), self.weight.to(dtype))
        if self.sequence_parallel:
            # All ranks compute the same loss: each takes its own tokens' gradient from it, and nothing is summed.
            scalars = gather_from_sequence_parallel_region(
                scalars, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return scalars, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's description of the weight for a checkpoint, under :data:`CHECKPOINT_KEY`."""
        if self._starts_new:
            return {f"{prefix}weight": LocalNonpersistentObject(self.weight.data)}
        assert metadata is not None, "GPTModel gives the groups"
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        named = prefix.removesuffix(_ATTRIBUTE) + CHECKPOINT_KEY.removesuffix("weight")
        replace_prefix_for_sharding(state, prefix, named)
        return state


def _has_started(head: ScalarHead, _: Any) -> None:
    head._starts_new = False


def start_new_head(model: torch.nn.Module) -> None:
    """Call :meth:`ScalarHead.start_new` of a model, or of a pipeline stage, which may have no head."""
    head = getattr(model, "output_layer", None)
    if isinstance(head, ScalarHead):
        head.start_new()


def with_scalar_head(model: Model) -> Model:
    """Replace a model's output layer by a :class:`ScalarHead`; in ``state_dict()`` it is ``output_layer.weight``.

    Args:
        model: a bare ``GPTModel`` or any of its pipeline stages, before DDP. It is changed in place.

    Returns:
        The same model.

    Raises:
        NotImplementedError: the model was built to share the output layer's weight with its embedding, or to predict
            several tokens.
    """
    depths = getattr(getattr(model, "config", None), "mtp_num_layers", None)
    if depths:
        raise NotImplementedError(
            f"mtp_num_layers={depths}: a scalar head predicts no tokens; build the model with mtp_num_layers=None"
        )
    if getattr(model, "share_embeddings_and_output_weights", False):
        raise NotImplementedError(
            "a scalar head has no weight to share with the embedding; build the model with "
            "share_embeddings_and_output_weights=False (its embedding is read from a tied checkpoint all the same)"
        )
    layer: Any = getattr(model, "output_layer", None)
    if layer is not None and not isinstance(layer, ScalarHead):
        stage: Any = model
        stage.output_layer = ScalarHead(stage.config, device=layer.weight.device, tp_group=layer.tp_group)
    return model
