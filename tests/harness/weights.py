"""The same weights in every layout, and tensors put back together from every layout.

Megatron itself defines the part of a parameter that a rank holds: ``sharded_state_dict()`` is the base of its
checkpoints, and it knows about pipeline stages and virtual chunks, the vocabulary, query groups, the
``[gate; up]`` halves of a gated MLP (each cut over the tensor-parallel ranks by itself), experts and tied embeddings.
On top of that an entry's value depends on nothing but the parameter's global name and the entry's global index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.utils import unwrap_model

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a parameter-shaped tensor: its place in the full tensor, and its values.

    ``name`` is the parameter's key in a checkpoint: layers are counted over the full model, and norms may be named as
    TransformerEngine's fused layers name them (``linear_qkv.layer_norm_weight``).
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor


def _owner(view: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> torch.nn.Parameter | None:
    """Return the parameter that a tensor is a view of; several may share one storage, for example in DDP's buffers."""
    for parameter in parameters:
        start = view.storage_offset() - parameter.storage_offset()
        same = view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if same and 0 <= start < parameter.numel():
            assert parameter.is_contiguous()
            return parameter
    return None


def _owned_pieces(chunks: Sequence[torch.nn.Module]) -> list[tuple[Piece, torch.nn.Parameter]]:
    from megatron.core import parallel_state

    metadata = {
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    found = []
    for chunk in chunks:
        parameters = list(chunk.parameters())
        state: dict[str, Any] = unwrap_model(chunk).sharded_state_dict(metadata=metadata)
        apply_factories(state)
        for value in nested_values(state):
            if not isinstance(value, ShardedTensor):
                continue  # for example the empty `_extra_state` of a layer
            assert value.data is not None, value
            owner = _owner(value.data, parameters)
            if owner is None:
                continue  # not everything in a state is a parameter: a router may keep a bias trained by other means
            # The experts of a layer are one tensor to a checkpoint, with an axis in front that the parameter lacks.
            data = value.data.detach()[(None,) * value.prepend_axis_num]
            piece = Piece(name=value.key, shape=value.global_shape, offset=value.global_offset, data=data)
            found.append((piece, owner))
    return found


def pieces(chunks: Sequence[torch.nn.Module]) -> list[Piece]:
    """Return the parameters of this rank's model chunks; each ``data`` is a view of the parameter."""
    return [piece for piece, _ in _owned_pieces(chunks)]


def _mix(x: U64) -> U64:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits in which every input bit counts.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def uniform(name: str, shape: Sequence[int], offset: Sequence[int], *, seed: int) -> torch.Tensor:
    """Return float64 in [-1, 1) that depends on the seed, the name and each entry's global index only."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    state: U64 = np.full((1,) * len(shape), int.from_bytes(digest[:8], "little"), dtype=np.uint64)
    golden = np.uint64(0x9E3779B97F4A7C15)
    for axis, (length, start) in enumerate(zip(shape, offset, strict=True)):
        index: U64 = np.arange(start + 1, start + 1 + length, dtype=np.uint64)
        index = index.reshape([-1 if a == axis else 1 for a in range(len(shape))])
        state = _mix(state + golden * index)
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0)


def fill(chunks: Sequence[torch.nn.Module], *, seed: int = 0, std: float = 0.05) -> None:
    """Give this rank's chunks their part of the one set of weights that belongs to ``seed``.

    Call it before an optimizer is made: an optimizer with an fp32 master copy takes that copy when it is built.
    Weights get standard deviation ``std``; biases and the weights of norms get 0.1, around zero and one, so that no
    gradient is trivially right.
    """
    with torch.no_grad():
        for piece in pieces(chunks):
            values = uniform(piece.name, piece.data.shape, piece.offset, seed=seed) * 3**0.5
            is_norm = piece.name.endswith(("norm.weight", "norm_weight"))
            values *= 0.1 if is_norm or piece.name.endswith("bias") else std
            values += float(is_norm)
            piece.data.copy_(values)


def local_parts(chunks: Sequence[torch.nn.Module], values_of: Callable[[Any], torch.Tensor]) -> list[Piece]:
    """Return this rank's parts of a parameter-shaped quantity, for example gradients, ready to send and assemble."""
    parts = []
    for piece, owner in _owned_pieces(chunks):
        values = values_of(owner).detach()
        assert values.shape == owner.shape
        assert values.is_contiguous()
        start = values.storage_offset() + piece.data.storage_offset() - owner.storage_offset()
        part = values.as_strided(piece.data.shape, piece.data.stride(), start)
        parts.append(replace(piece, data=part.clone()))
    return parts


def assemble(parts: Iterable[Piece]) -> dict[str, torch.Tensor]:
    """Put the parts of all ranks together, by parameter name. Replicas must agree to the bit; the last one is kept.

    Raises:
        ValueError: some entries of a tensor are covered by no part, or replicas differ.
    """
    whole: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for part in parts:
        tensor = whole.setdefault(part.name, torch.zeros(part.shape, dtype=part.data.dtype))
        seen = covered.setdefault(part.name, torch.zeros(part.shape, dtype=torch.bool))
        index = tuple(slice(o, o + n) for o, n in zip(part.offset, part.data.shape, strict=True))
        if not torch.equal(tensor[index][seen[index]], part.data[seen[index]]):
            raise ValueError(f"replicas of {part.name} differ by {(tensor[index] - part.data).abs().max().item():.3e}")
        tensor[index] = part.data
        seen[index] = True
    for name, seen in covered.items():
        if not seen.all():
            raise ValueError(f"{int((~seen).sum())} entries of {name} are held by no rank that was given")
    return whole
