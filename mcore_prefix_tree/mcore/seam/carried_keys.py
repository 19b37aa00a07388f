"""Keys and values that one micro-batch leaves for others of its step, and their gradients on the way back.

The first pass of a step keeps the keys and values of carried tokens. A chunk reads those of its stack and adds their
gradient to the store, and a chunk's own carried tokens take what their descendants have left: these ran before, because
Megatron's schedules run forwards in one order on every stage, and backwards in the same. Recomputation runs the same
functions again, before the backward that forgets what nobody else reads.

Losses that balance experts read how many tokens of a sample chose each expert. When a chunk runs, all tokens of its
samples have run: those before it in the first pass, those after it in later chunks.

Legend: P tokens of a micro-batch, S tokens of its stack, K key heads, D head_dim; N samples of the tree, E experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import moved

# Names what is kept: the module that attends, and whether it is its keys.
Tensors = tuple[object, str]


class CarryStore:
    """Keys and values of a tree's carried tokens, by shelf: those of a chunk that one micro-batch keeps.

    Also the experts that its tokens chose, counted by router, micro-batch and sample.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Tensors, int], torch.Tensor] = {}
        self._gradients: dict[tuple[Tensors, int], torch.Tensor] = {}
        self._counts: dict[object, dict[Hashable, tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys, values and gradients that are held now."""
        return sum(held.nbytes for held in (*self._kept.values(), *self._gradients.values()))

    def keep(self, which: Tensors, shelf: int, values: torch.Tensor) -> None:
        """Keep ``values`` ``[n, K, D]`` of a shelf."""
        self._kept[which, shelf] = values

    def add_counts(self, router: object, counts: SampleCounts, routed: torch.Tensor) -> torch.Tensor:
        """Keep a micro-batch's counts ``[N, E]``, once however often it runs; return those of all, ``[N, E]``."""
        kept = self._counts.setdefault(router, {})
        kept[counts.part] = counts.samples, routed[counts.samples]
        samples, of_parts = zip(*kept.values(), strict=True)
        return torch.zeros_like(routed).index_add_(0, torch.cat(samples), torch.cat(of_parts))

    def read(self, which: Tensors, shelf: int) -> torch.Tensor:
        """Return the values of a shelf, ``[n, K, D]``."""
        return self._kept[which, shelf]

    def add_gradient(self, which: Tensors, shelf: int, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add ``gradient`` ``[m, K, D]`` to that of ``rows``, int64 ``[m]``, of a shelf, in fp32 or better."""
        if (which, shelf) not in self._gradients:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._gradients[which, shelf] = torch.zeros_like(self._kept[which, shelf], dtype=wide)
        total = self._gradients[which, shelf]
        total.index_add_(0, rows, gradient.to(total.dtype))

    def forget(self, which: Tensors, shelf: int) -> None:
        """Forget the values of a shelf, which nobody reads any more; their gradient stays."""
        self._kept.pop((which, shelf), None)

    def take_gradient(self, which: Tensors, shelf: int) -> torch.Tensor | None:
        """Return a shelf's gradient ``[n, K, D]``, if anything read it, and forget the shelf."""
        self.forget(which, shelf)
        return self._gradients.pop((which, shelf), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleCounts:
    """The tokens of a micro-batch that count for the samples of its tree.

    Attributes:
        part: name of the micro-batch in its tree.
        is_counted: fp32 ``[P]``, 0 for a chunk's carried tokens, which the first pass has counted.
        samples: int64 ``[n]``, the samples of the tokens that are.
        lengths: fp32 ``[N]``, tokens of each sample.
    """

    part: Hashable
    is_counted: torch.Tensor
    samples: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Carry:
    """Keys and values that a micro-batch of one chunk reads from others, and those that it leaves to them.

    Attributes:
        keys: the tree of stack and chunk, ``[S + P]``, which attention follows.
        stack: shelf, and in it the rows int64 ``[n]``, of the stack's tokens, in order; S together.
        own: shelf, and the places int64 ``[n]`` in this micro-batch, of the tokens that others read.
        last: shelves that nobody reads after this micro-batch.
        last_scored: shelves that nobody reads after it if the chunks run from the first to the last.
        store: the store of the tree.
        keeps: whether it runs forward only and fills the store: in a first pass, or where nothing trains.
        counts: its tokens that count for the samples of the tree; None where nothing trains.
    """

    keys: TreeMetadata
    stack: tuple[tuple[int, torch.Tensor], ...]
    own: tuple[tuple[int, torch.Tensor], ...]
    last: tuple[int, ...]
    last_scored: tuple[int, ...]
    store: CarryStore
    keeps: bool
    counts: SampleCounts | None = None

    @property
    def size(self) -> int:
        """S."""
        return sum(len(rows) for _, rows in self.stack)

    def for_scoring(self) -> Carry:
        """Return what a chunk reads and leaves when all chunks run forward only, from the first to the last."""
        return replace(self, last=self.last_scored, keeps=True, counts=None)

    def on(self, device: torch.device | str) -> Carry:
        """Return a copy on the device, with the same store."""
        on_device = {name: moved(getattr(self, name), device) for name in ("stack", "own", "counts")}
        return replace(self, keys=self.keys.with_plans_on(device), **on_device)

    def with_stack(self, which: Tensors, values: torch.Tensor) -> torch.Tensor:
        """Return ``[S + P, K, D]``: keys, or values, of the stack, then a micro-batch's own ``[P, K, D]``."""
        if self.keeps:
            for shelf, places in self.own:
                self.store.keep(which, shelf, values.detach()[places])
        if not self.stack and not self.own:
            return values
        out: torch.Tensor = _WithStack.apply(values, self, which)  # type: ignore[no-untyped-call]
        return out

    def forget(self, which: Tensors) -> None:
        """Forget what nobody reads after this micro-batch."""
        for shelf in self.last:
            self.store.forget(which, shelf)

    def parts(self) -> Iterator[tuple[int, torch.Tensor, slice]]:
        """Yield shelf and rows of each part of the stack, and its place among the S."""
        start = 0
        for shelf, rows in self.stack:
            yield shelf, rows, slice(start, start + len(rows))
            start += len(rows)


class _WithStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, carry: Carry, which: Tensors) -> torch.Tensor:
        """Return ``[S + P, K, D]`` for ``values`` ``[P, K, D]``."""
        ctx.carry, ctx.which = carry, which
        stack = [carry.store.read(which, shelf)[rows] for shelf, rows in carry.stack]
        if carry.keeps:
            carry.forget(which)
        return torch.cat([*stack, values])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = grad_outputs
        carry: Carry = ctx.carry
        for shelf, rows, part in carry.parts():
            carry.store.add_gradient(ctx.which, shelf, rows, gradient[part])
        carry.forget(ctx.which)
        own = gradient[carry.size :]
        for shelf, places in carry.own:
            left = carry.store.take_gradient(ctx.which, shelf)
            if left is not None:
                own = own.index_put((places,), (own[places] + left).to(own.dtype))
        return own, None, None
