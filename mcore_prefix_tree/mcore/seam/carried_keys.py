"""Keys, values and states that one micro-batch leaves for others of its step, and their gradients on the way back.

The first pass of a step keeps the keys and values of carried tokens, and the states of recurrent layers after some of
them. A chunk reads those of its stack and adds their gradient to the store, and a chunk's own carried tokens take what
their descendants have left: these ran before, because Megatron's schedules run forwards in one order on every stage,
and backwards in the same. Recomputation runs the same functions again, before the backward that forgets what nobody
else reads.

Losses that balance experts read how many tokens of a sample chose each expert. When a chunk runs, all tokens of its
samples have run: those before it in the first pass, those after it in later chunks.

Legend: P tokens of a micro-batch, S tokens of its stack, K key heads, D head_dim, m states that it reads; N samples of
the tree, E experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import moved, upload

# Names what is kept: the module that attends or keeps a state, and for example "key".
Tensors = tuple[object, str]


class CarryStore:
    """Keys, values and states of a tree's carried tokens, by shelf: those of a chunk that one micro-batch keeps.

    Also the experts that its tokens chose, counted by router, micro-batch and sample.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Tensors, int], torch.Tensor] = {}
        self._gradients: dict[tuple[Tensors, int], torch.Tensor] = {}
        self._counts: dict[object, dict[Hashable, tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys, values, states and gradients that are held now."""
        return sum(held.nbytes for held in (*self._kept.values(), *self._gradients.values()))

    def keep(self, which: Tensors, shelf: int, values: torch.Tensor) -> None:
        """Keep ``values`` ``[n, ...]`` of a shelf, for example keys ``[n, K, D]``."""
        self._kept[which, shelf] = values

    def add_counts(self, router: object, counts: SampleCounts, routed: torch.Tensor) -> torch.Tensor:
        """Keep a micro-batch's counts ``[N, E]``, once however often it runs; return those of all, ``[N, E]``."""
        kept = self._counts.setdefault(router, {})
        kept[counts.part] = counts.samples, routed[counts.samples]
        samples, of_parts = zip(*kept.values(), strict=True)
        return torch.zeros_like(routed).index_add_(0, torch.cat(samples), torch.cat(of_parts))

    def read(self, which: Tensors, shelf: int) -> torch.Tensor:
        """Return the values of a shelf, ``[n, ...]``."""
        return self._kept[which, shelf]

    def add_gradient(self, which: Tensors, shelf: int, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add ``gradient`` ``[r, ...]`` to that of ``rows``, int64 ``[r]``, of a shelf, in fp32 or better."""
        if (which, shelf) not in self._gradients:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._gradients[which, shelf] = torch.zeros_like(self._kept[which, shelf], dtype=wide)
        total = self._gradients[which, shelf]
        total.index_add_(0, rows, gradient.to(total.dtype))

    def forget(self, which: Tensors, shelf: int) -> None:
        """Forget the values of a shelf, which nobody reads any more; their gradient stays."""
        self._kept.pop((which, shelf), None)

    def take_gradient(self, which: Tensors, shelf: int) -> torch.Tensor | None:
        """Return a shelf's gradient ``[n, ...]``, if anything read it, and forget the shelf."""
        self.forget(which, shelf)
        return self._gradients.pop((which, shelf), None)


class Passage(NamedTuple):
    """Rows of the store that a micro-batch reads, and those that it fills for others."""

    read: tuple[tuple[int, torch.Tensor], ...]  # shelf, and in it the rows int64 [n], in order
    left: tuple[tuple[int, torch.Tensor], ...]  # shelf, and the place int64 [n] in this micro-batch, of each row

    @property
    def size(self) -> int:
        """Number of rows that are read."""
        return sum(len(rows) for _, rows in self.read)

    def parts(self) -> Iterator[tuple[int, torch.Tensor, slice]]:
        """Yield shelf and rows of each part that is read, and its place among all."""
        start = 0
        for shelf, rows in self.read:
            yield shelf, rows, slice(start, start + len(rows))
            start += len(rows)

    def reading(self, chosen: npt.NDArray[np.int64]) -> Passage:
        """Return the same on the host, but with only some of the rows that are read, int64 ``[m]``, ascending."""
        borders = [(np.searchsorted(chosen, (part.start, part.stop)), part.start) for *_, part in self.parts()]
        own = [upload(chosen[slice(*ends)] - start, "cpu") for ends, start in borders]
        read = zip(self.read, own, strict=True)
        return self._replace(read=tuple((shelf, rows[some]) for (shelf, rows), some in read if len(some)))


class Stack(NamedTuple):
    """Tokens before a micro-batch that its attention reads: all of them, or those in a window."""

    keys: TreeMetadata  # the tree of stack and micro-batch, [S + P], which attention follows
    tokens: Passage  # the S tokens of the stack, whose keys and values are read, and the tokens that others read

    def on(self, device: torch.device | str) -> Stack:
        """Return a copy on the device."""
        return Stack(self.keys.with_plans_on(device), moved(self.tokens, device))


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleCounts:
    """The tokens of a micro-batch that count for the samples of its tree."""

    part: Hashable  # name of the micro-batch in its tree
    is_counted: torch.Tensor  # fp32 [P], 0 for a chunk's carried tokens, which the first pass has counted
    samples: torch.Tensor  # int64 [n], the samples of the tokens that are
    lengths: torch.Tensor  # fp32 [N], tokens of each sample
    loss_tokens: int | None = None  # tokens over which losses are means; None for those of the micro-batch


@dataclass(frozen=True, kw_only=True, eq=False)
class Carry:
    """Keys, values and states that a micro-batch of one chunk reads from others, and those that it leaves to them."""

    # keys, tokens: fields of the Stack of all tokens.
    keys: TreeMetadata
    tokens: Passage
    states: Passage  # the m states that are read, and those that others read, see Handover
    last: tuple[int, ...]  # shelves that nobody reads after this micro-batch
    last_scored: tuple[int, ...]  # shelves that nobody reads after it if the chunks run from the first to the last
    store: CarryStore  # the store of the tree
    keeps: bool  # whether it runs forward only and fills the store: in a first pass, or where nothing trains
    forgets: bool = False  # whether what it reads last is forgotten at once, because no backward pass does that
    counts: SampleCounts | None = None  # its tokens that count for the samples of the tree; None where nothing trains
    # Last hidden states that the output layer reads, and those that others read; None if the loss reads none.
    head: Passage | None = None
    # The stacks of layers with a window, by its size; see within.
    windows: Mapping[int, Stack] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """S."""
        return self.tokens.size

    @property
    def runs_ahead(self) -> bool:
        """Return whether it is a first pass, of a step that trains."""
        return self.keeps and self.counts is not None

    def within(self, window: int | None) -> Carry:
        """Return what a layer with this window reads and leaves; None sees all."""
        stack = None if window is None else self.windows.get(window)
        return self if stack is None else replace(self, keys=stack.keys, tokens=stack.tokens)

    def for_scoring(self) -> Carry:
        """Return what a chunk reads and leaves when all chunks run forward only, from the first to the last."""
        return replace(self, last=self.last_scored, keeps=True, forgets=True, counts=None)

    def without_backward(self) -> Carry:
        """Return what a micro-batch reads and leaves when those of a step run forward only, in the step's order."""
        return replace(self, forgets=True, counts=None)

    def for_passing(self) -> Carry:
        """Return what a chunk reads and leaves when all chunks of a step run forward only before they train."""
        return replace(self, keeps=True)

    def on(self, device: torch.device | str) -> Carry:
        """Return a copy on the device, with the same store."""
        on_device = {name: moved(getattr(self, name), device) for name in ("tokens", "states", "counts", "head")}
        windows = {window: stack.on(device) for window, stack in self.windows.items()}
        return replace(self, keys=self.keys.with_plans_on(device), windows=windows, **on_device)

    def with_stack(self, which: Tensors, values: torch.Tensor, *, along: Tensors | None = None) -> torch.Tensor:
        """Return ``[S + P, K, D]``: keys, or values, of the stack, then a micro-batch's own ``[P, K, D]``.

        ``along`` names others of the same tokens that have no gradient; they are forgotten with these.
        """
        self._keep(self.tokens, which, values)
        if not self.tokens.read and not self.tokens.left:
            return values
        out: torch.Tensor = _WithStack.apply(values, self, which, along)  # type: ignore[no-untyped-call]
        return out

    def read_states(self, which: Tensors, *inputs: torch.Tensor) -> torch.Tensor | None:
        """Return the states ``[m, ...]`` that the micro-batch reads; None if it reads none.

        They have a gradient if one of ``inputs`` has, the tensors that the layer makes states of.
        """
        if not self.states.read:
            if self.forgets:
                self.forget(which)
            return None
        states: torch.Tensor = _ReadStates.apply(self, which, *inputs)  # type: ignore[no-untyped-call]
        return states

    def leave_states(self, which: Tensors, out: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Leave the states ``[n, ...]`` to others; return ``out``, whose backward pass gives states their gradient."""
        if not self.states.left:
            return out
        self._keep(self.states, which, states)
        left: torch.Tensor = _LeaveStates.apply(out, states, self, which)  # type: ignore[no-untyped-call]
        return left

    def _keep(self, passage: Passage, which: Tensors, values: torch.Tensor) -> None:
        """Keep what others read of ``values``, if the micro-batch fills the store."""
        if self.keeps:
            for shelf, places in passage.left:
                self.store.keep(which, shelf, values.detach()[places])

    def read(self, passage: Passage, which: Tensors) -> list[torch.Tensor]:
        """Return the values of each part that is read, ``[n, ...]``."""
        values = [self.store.read(which, shelf)[rows] for shelf, rows in passage.read]
        if self.forgets:
            self.forget(which)
        return values

    def add_gradient(self, passage: Passage, which: Tensors, gradient: torch.Tensor) -> None:
        """Give the values that were read their gradient, and forget what nobody reads after this micro-batch."""
        for shelf, rows, part in passage.parts():
            self.store.add_gradient(which, shelf, rows, gradient[part])
        self.forget(which)

    def forget(self, which: Tensors) -> None:
        """Forget what nobody reads after this micro-batch."""
        for shelf in self.last:
            self.store.forget(which, shelf)


class _WithStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, carry: Carry, which: Tensors, along: Tensors | None) -> torch.Tensor:
        """Return ``[S + P, K, D]`` for ``values`` ``[P, K, D]``."""
        ctx.carry, ctx.which, ctx.along = carry, which, along
        return torch.cat([*carry.read(carry.tokens, which), values])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), carry = grad_outputs, ctx.carry
        carry.add_gradient(carry.tokens, ctx.which, gradient)
        if ctx.along is not None:
            carry.forget(ctx.along)
        own = gradient[carry.size :]
        for shelf, places in carry.tokens.left:
            if ctx.along is not None:
                carry.store.forget(ctx.along, shelf)
            left = carry.store.take_gradient(ctx.which, shelf)
            if left is not None:
                own = own.index_put((places,), (own[places] + left).to(own.dtype))
        return own, None, None, None


class _ReadStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carry: Carry, which: Tensors, *inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[m, ...]``."""
        ctx.carry, ctx.which, ctx.inputs = carry, which, len(inputs)
        return torch.cat(carry.read(carry.states, which))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.carry.add_gradient(ctx.carry.states, ctx.which, grad_outputs[0])
        return (None, None, *[None] * ctx.inputs)


class _LeaveStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, states: torch.Tensor, carry: Carry, which: Tensors) -> torch.Tensor:
        """Return ``out``."""
        ctx.carry, ctx.which, ctx.states = carry, which, (states.shape, states.dtype)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), carry, (shape, dtype) = grad_outputs, ctx.carry, ctx.states
        of_states = gradient.new_zeros(shape, dtype=dtype)
        for shelf, places in carry.states.left:
            left = carry.store.take_gradient(ctx.which, shelf)
            if left is not None:
                of_states[places] = left.to(dtype)
        return gradient, of_states, None, None
