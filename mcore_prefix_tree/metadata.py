"""TreeMetadata: a folded micro-batch's shape for attention and RoPE: P padded size, N nodes, G segments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.layout.forest import starts_of_chains
from mcore_prefix_tree.utils.upload import moved, upload

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """The maximal chains of nodes without branching, in depth-first pre-order, padding last as one-token segments."""

    cu_lens: Int32Array  # int32 [G + 1], segment g holds the flat tokens cu_lens[g]:cu_lens[g + 1]
    parent: Int32Array  # int32 [G], -1 for a root
    depth: Int32Array  # int32 [G], position of the segment's first token


@dataclass(frozen=True, kw_only=True, eq=False)
class Handover:
    """Tokens at which the states of recurrent layers pass between the micro-batches of one tree."""

    heads: Int64Array  # int64 NumPy [r], first tokens of the segments that begin with a state of another micro-batch
    given: Int64Array  # int64 NumPy [r], which of the num_given states each begins with
    num_given: int  # number of states that the micro-batch reads
    ends: Int64Array  # int64 NumPy [n], tokens whose states other micro-batches read, ascending; a segment ends at each

    def of_depth(self, depth: int, position: Int32Array) -> Handover:
        """Return the same for paths that begin ``depth`` tokens later; ``position`` is int32 ``[P]``."""
        follows = position[self.heads] > depth
        return replace(self, heads=self.heads[follows], given=self.given[follows])


NO_HANDOVER = Handover(heads=np.arange(0), given=np.arange(0), num_given=0, ends=np.arange(0))


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeMetadata:
    """The shape of one folded micro-batch. Node arrays stay on the host; token arrays move to the device once.

    Query i sees key j exactly if ``j <= i < subtree_end[j]``: the attention mask is one int32 per token.

    Attributes:
        cu_node_lens: int32 NumPy ``[N + 1]``, flat borders of the nodes, in depth-first pre-order.
        node_parent: int32 NumPy ``[N]``, -1 for a root. A parent comes before its children.
        node_depth: int32 NumPy ``[N]``, position of each node's first token on its path.
        padded_size: P, number of tokens in the micro-batch; those past ``cu_node_lens[-1]`` are padding.
        tree_position_ids: int32 tensor ``[P]``, depth of each token on its own path; 0 for padding.
        subtree_end: int32 tensor ``[P]``, exclusive flat end of the subtree under the token's node.
        host_position_ids, host_subtree_end: NumPy arrays of the same two, so that plans are made without asking the
            device.
        max_path_len: length of the longest path; the rotary table has to reach it.
        sample_node: int32 NumPy ``[S]``, the node in which each sample ends; in a part of a tree its last one, or -1.
            None if only the nodes are known.
        routes: integer tensor ``[P, layers, top-k]``, the experts of each token, -1 where the model routes; None if no
            sample has routes.
        unread: leading tokens of which nobody reads the attention's output: a back-end may leave it undefined.
        handover: states that pass between the micro-batches of one tree.
        cache: plans derived by attention back-ends, shared by all layers, recompute and every forward of a step. Their
            tensors are on the device of the token tensors.

    Build it with :meth:`from_layout` or :meth:`from_nodes`; both validate on the host.
    """

    cu_node_lens: Int32Array
    node_parent: Int32Array
    node_depth: Int32Array
    padded_size: int
    tree_position_ids: torch.Tensor
    subtree_end: torch.Tensor
    host_position_ids: Int32Array
    host_subtree_end: Int32Array
    max_path_len: int
    sample_node: Int32Array | None = None
    routes: torch.Tensor | None = None
    unread: int = 0
    handover: Handover = NO_HANDOVER
    cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_layout(cls, layout: FlatLayout, *, device: torch.device | str = "cpu") -> TreeMetadata:
        """Return the metadata of a layout made by :func:`mcore_prefix_tree.fold`.

        Raises:
            TypeError: ``layout`` is something else.
        """
        if not isinstance(layout, FlatLayout):
            raise TypeError(f"the layout is a {type(layout).__name__}; give the result of mcore_prefix_tree.fold")
        return cls(
            cu_node_lens=layout.cu_node_lens,
            node_parent=layout.node_parent,
            node_depth=layout.node_depth,
            padded_size=layout.padded_size,
            tree_position_ids=upload(layout.position_ids, device),
            subtree_end=upload(layout.subtree_end, device),
            host_position_ids=layout.position_ids,
            host_subtree_end=layout.subtree_end,
            max_path_len=layout.max_path_len,
            sample_node=layout.sample_node,
            routes=None if layout.routes is None else upload(layout.routes, device),
        )

    @classmethod
    def from_nodes(
        cls,
        cu_node_lens: npt.ArrayLike,
        node_parent: npt.ArrayLike,
        *,
        padded_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> TreeMetadata:
        """Return the metadata of a forest that another system already laid out in depth-first pre-order.

        Args:
            cu_node_lens: ``[N + 1]`` flat borders of the nodes, from 0, never decreasing (a node may be empty).
            node_parent: ``[N]`` parent of each node, -1 for a root.
            padded_size: size with padding; the nodes' end by default.
            device: device of the token tensors.

        Raises:
            ValueError: the arrays do not describe a forest in depth-first pre-order; names the array and the node.
        """
        borders = _integers(cu_node_lens, "cu_node_lens")
        parent = _integers(node_parent, "node_parent")
        depth, subtree_end = _check_forest(borders, parent)
        tokens = int(borders[-1])
        size = tokens if padded_size is None else padded_size
        if size < max(tokens, 1):
            raise ValueError(f"padded_size={size} cannot hold the {tokens} tokens of cu_node_lens")
        lens = np.diff(borders)
        index = np.arange(size, dtype=np.int64)
        position_ids = np.zeros(size, dtype=np.int32)
        position_ids[:tokens] = index[:tokens] - np.repeat(borders[:-1] - depth, lens)
        token_end = (index + 1).astype(np.int32)
        token_end[:tokens] = np.repeat(subtree_end, lens)
        return cls(
            cu_node_lens=borders.astype(np.int32),
            node_parent=parent.astype(np.int32),
            node_depth=depth.astype(np.int32),
            padded_size=size,
            tree_position_ids=upload(position_ids, device),
            subtree_end=upload(token_end, device),
            host_position_ids=position_ids,
            host_subtree_end=token_end,
            max_path_len=int(position_ids.max()) + 1,
        )

    def without_first(self, depth: int) -> TreeMetadata:
        """Return the metadata of the same tokens on paths that begin ``depth`` tokens later, as roots.

        The tokens before see only themselves. The metadata has no routes. Roots can be deep, as in a chunk of a tree.
        """
        parent, lens = self.node_parent.astype(np.int64), np.diff(self.cu_node_lens).astype(np.int64)
        cut = np.clip(depth - self.node_depth, 0, lens)  # tokens of each node that become roots of one token
        stays = (self.node_depth >= depth) | (lens > cut)
        pieces = cut + stays
        rest = np.cumsum(pieces) - 1  # the last piece of each node
        new_lens, new_parent = np.ones(pieces.sum(), dtype=np.int64), np.full(pieces.sum(), -1)
        new_lens[rest[stays]] = (lens - cut)[stays]
        is_child = stays & (cut == 0) & (parent >= 0)
        is_child[is_child] = stays[parent[is_child]]
        new_parent[rest[is_child]] = rest[parent[is_child]]
        device, position = self.subtree_end.device, np.maximum(self.host_position_ids - np.int32(depth), 0)
        cut_forest = TreeMetadata.from_nodes(
            np.append(0, np.cumsum(new_lens)), new_parent, padded_size=self.padded_size, device=device
        )
        cut_forest = replace(
            cut_forest,
            node_depth=np.append(position, 0)[cut_forest.cu_node_lens[:-1]],
            tree_position_ids=upload(position, device),
            host_position_ids=position,
            max_path_len=int(position.max(initial=0)) + 1,
            unread=self.unread,
            handover=self.handover.of_depth(depth, self.host_position_ids),
        )
        if self.sample_node is None:
            return cut_forest
        node = self.sample_node.astype(np.int64)
        while (gone := pieces[node] == 0).any():  # an empty node, whose last token is its parent's
            node[gone] = parent[node[gone]]
        return replace(cut_forest, sample_node=rest[node].astype(np.int32))

    @property
    def num_nodes(self) -> int:
        return len(self.node_parent)

    @property
    def num_tokens(self) -> int:
        """Physical tokens, before padding."""
        return int(self.cu_node_lens[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without plans: they are derived again, and some cannot be pickled."""
        return vars(self) | {"cache": {}}

    def with_plans_on(self, device: torch.device | str) -> TreeMetadata:
        """Return a copy on the device with the plans derived so far; later plans of the copy stay with it.

        Plans must hold their tensors in containers that :func:`~mcore_prefix_tree.utils.upload.moved` searches.
        """
        return replace(
            self,
            tree_position_ids=upload(self.tree_position_ids, device),
            subtree_end=upload(self.subtree_end, device),
            routes=None if self.routes is None else upload(self.routes, device),
            cache={name: moved(plan, device) for name, plan in self.cache.items()},
        )

    def derived(self, name: str, build: Callable[[TreeMetadata], T]) -> T:
        """The plan called ``name``, built on first use and kept in :attr:`cache`."""
        if name not in self.cache:
            # Plans are made on the host, by NumPy, which torch.compile would trace as if it were torch, even if only an
            # outer frame is compiled. Nothing is compiled if the compiler is not loaded.
            made = torch.compiler.disable(build) if "torch._dynamo" in sys.modules else build
            self.cache[name] = made(self)
        plan: T = self.cache[name]
        return plan

    @cached_property
    def segments(self) -> Segments:
        """The forest without the node borders that do not branch: the input of attention."""
        parent, head = self.node_parent.astype(np.int64), starts_of_chains(self.node_parent)
        segment_of_node = np.cumsum(head) - 1
        heads = np.flatnonzero(head)
        segment_parent = np.where(parent[heads] >= 0, segment_of_node[parent[heads]], -1)

        padding = np.arange(self.num_tokens, self.padded_size + 1)
        return Segments(
            cu_lens=np.concatenate([self.cu_node_lens[:-1][heads], padding]).astype(np.int32),
            parent=np.concatenate([segment_parent, np.full(len(padding) - 1, -1)]).astype(np.int32),
            depth=np.concatenate([self.node_depth[heads], np.zeros(len(padding) - 1)]).astype(np.int32),
        )


def _integers(values: npt.ArrayLike, name: str) -> npt.NDArray[np.int64]:
    """Return integers ``[n]``; also integral floating numbers, because NumPy makes them of an empty list."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} has dtype {array.dtype}; expected integers")
    if array.dtype.kind == "f" and (wrong := np.argwhere((array != np.trunc(array)) | np.isinf(array))).size:
        at = tuple(wrong[0].tolist())
        raise ValueError(f"{name}{list(at)} = {array[at]} is not an integer")
    return array.astype(np.int64, copy=False)


def _check_forest(
    borders: npt.NDArray[np.int64], parent: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each node's depth and subtree end, int64 ``[N]``, or raise ValueError for borders that are no forest."""
    if borders.ndim != 1 or parent.ndim != 1 or len(borders) != len(parent) + 1:
        raise ValueError(
            f"cu_node_lens {borders.shape} must be one-dimensional and one longer than node_parent {parent.shape}"
        )
    if borders[0] != 0 or (np.diff(borders) < 0).any():
        raise ValueError("cu_node_lens must begin at 0 and never decrease")
    if (parent < -1).any():
        node = int(np.argmax(parent < -1))
        raise ValueError(f"node_parent[{node}] = {parent[node]} is neither a node nor -1, the mark of a root")
    depth = np.zeros(len(parent), dtype=np.int64)
    end = np.empty(len(parent), dtype=np.int64)
    stack: list[int] = []
    for node, above in enumerate(parent.tolist()):
        while stack and stack[-1] != above:
            end[stack.pop()] = borders[node]
        if above >= 0:
            if not stack:
                raise ValueError(
                    f"node_parent[{node}] = {above} is not on the path to node {node}; "
                    "nodes must be in depth-first pre-order"
                )
            depth[node] = depth[above] + borders[above + 1] - borders[above]
        stack.append(node)
    end[stack] = borders[-1]
    return depth, end
