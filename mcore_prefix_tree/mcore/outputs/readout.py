"""Base of all readouts: a request to the output layer of the last pipeline stage, and how its answer is read.

Legend: P padded tokens, M kept edges, R rows (predictors with an edge, or with a row of a teacher's), D distributions
over kept sets, N, C sizes that a readout packs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state

from mcore_prefix_tree.logprob import Head
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.output_layer import EdgeHeadMixin, HeadRequest, request_arguments
from mcore_prefix_tree.mcore.seam.scalar_output_layer import ScalarHead
from mcore_prefix_tree.sample import Sample

FloatArray = npt.NDArray[np.floating]
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleScores(ABC):
    """Scores of one sample; entry t scores ``tokens[t]``, as in ``loss_mask``; ``scored`` is a mask, bool ``[n]``."""

    scored: npt.NDArray[np.bool_]

    @abstractmethod
    def fault(self, sample: Sample) -> str | None:
        """Return a message about a bad score, or None."""

    @abstractmethod
    def columns(self, column: str) -> dict[str, Any]:
        """Return the columns that a file of samples gains, the main one under this name."""

    def _not_finite(self, name: str, values: FloatArray, sample: Sample) -> str | None:
        bad = self.scored & ~np.isfinite(values)
        if not bad.any():
            return None
        at = int(np.argmax(bad))
        return f"{sample.source}: the {name} of token {at} is {values[at]}; the model's weights are bad"


class Readout(Protocol[T_co]):
    """One kind of output of the last pipeline stage; stateless, the same for all micro-batches."""

    def arguments(self, layer: Any, batch: MicroBatch) -> dict[str, Any]:
        """Return the keywords of the model's forward that request it.

        Raises:
            ValueError: the output layer cannot answer.
        """

    def read(self, output: torch.Tensor, batch: MicroBatch) -> T_co:
        """Read the stage's output for a micro-batch, ``[1, P, ...]`` or a packed ``[1, N, C]``."""


@dataclass(frozen=True, kw_only=True)
class VocabularyReadout(Readout[T_co]):
    """A readout of a vocabulary's head, fused or from logits; subclasses have one of the two or both."""

    # Whether the head answers from hidden states, a chunk of logits at a time, which needs a model with with_edge_head.
    # False reads the logits of all tokens.
    fused: bool = True

    def arguments(self, layer: Any, batch: MicroBatch) -> dict[str, Any]:
        name = type(self).__name__
        if isinstance(layer, ScalarHead):
            raise ValueError(f"{name} reads a vocabulary, but the model ends in a scalar head; ask it for Values")
        if not self.fused:
            return {"runtime_gather_output": False}  # GPTModel(parallel_output=False) would gather them
        if not isinstance(layer, EdgeHeadMixin):
            raise ValueError(
                f"{name} asks the fused head, but the model's output layer only has logits; pass the model through "
                "with_edge_head, or set fused=False"
            )
        carry = batch.packed_seq_params.carry
        return request_arguments(
            HeadRequest(
                edges=batch.edges,
                temperature=batch.temperature,
                head_chunk_rows=batch.head_chunk_rows,
                answer=partial(self._pack, batch),
                carry=None if carry is None or carry.head is None else replace(carry, states=carry.head),
            )
        )

    def read(self, output: torch.Tensor, batch: MicroBatch) -> T_co:
        """Read logits ``[1, P, V / tp]``, or the packed answer ``[1, N, C]``."""
        found = output.squeeze(0)
        return self._unpack(found, batch) if self.fused else self._read_logits(found, batch)

    def _pack(self, batch: MicroBatch, hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
        """Return the answer ``[N, C]`` from the predictors' hidden states ``[R + D, h]`` and the output weight."""
        raise NotImplementedError(f"{type(self).__name__} has no fused head; set fused=False")

    def _unpack(self, packed: torch.Tensor, batch: MicroBatch) -> T_co:
        """Read the answer ``[N, C]`` of :meth:`_pack`."""
        raise NotImplementedError

    def _read_logits(self, logits: torch.Tensor, batch: MicroBatch) -> T_co:
        """Read the local logits of all tokens, ``[P, V / tp]``."""
        raise NotImplementedError(f"{type(self).__name__} needs the fused head; set fused=True")


@dataclass(frozen=True, kw_only=True)
class Logits(VocabularyReadout[torch.Tensor]):
    """The local logits of all tokens, ``[P, V / tp]``."""

    fused: bool = False

    def _read_logits(self, logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the local logits ``[P, V / tp]``."""
        return logits


def split_logits(logits: torch.Tensor, batch: MicroBatch) -> dict[str, Any]:
    """Return the other arguments of functions of local logits ``[P, V / tp]``."""
    parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    return {
        "temperature": batch.temperature,
        "vocab_start": parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1],
        "group": parallel_state.get_tensor_model_parallel_group() if parallel else None,
    }


def with_gradient(gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    """Pack a scalar that has the gradient before values, of which only kept edges' have one: ``[N, 1]``."""
    return torch.cat([gradient[None], *values])[:, None]


def gradient_and_values(packed: torch.Tensor, *, has_kept: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the result of :func:`with_gradient`, ``[N, 1]``: a scalar and ``[N - 1]``."""
    scalar, values = packed.flatten().tensor_split((1,))
    return scalar.squeeze(0), values if has_kept else values.detach()
