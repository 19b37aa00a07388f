"""A decoder that runs a folded micro-batch in parts, so that activations of one part exist at a time.

The forward runs the chunks of the tree one after another, all but the last without a graph; each layer keeps the keys,
values and states that later chunks read. The backward runs them again, the last one first, as recomputation does. See
:mod:`mcore_prefix_tree.layout.tree_chunks`.

Legend: P tokens of the folded micro-batch, with its padding; h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch.distributed.tensor import DTensor

from mcore_prefix_tree.layout import FlatLayout, fold
from mcore_prefix_tree.mcore.engine.backend import list_windows
from mcore_prefix_tree.mcore.engine.random_draws import Setting, temporary_settings
from mcore_prefix_tree.mcore.packed.bridge_pictures import takes_deepstack
from mcore_prefix_tree.mcore.seam.all_tokens import gather_tokens, padding_multiple, split_tokens
from mcore_prefix_tree.mcore.seam.carried_keys import Carry
from mcore_prefix_tree.mcore.seam.core_attention import change_class
from mcore_prefix_tree.mcore.seam.experts import compares_samples
from mcore_prefix_tree.mcore.seam.layout_in_parts import LayoutInParts
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.plan.carry import cut_tree

# Settings of recomputation that are read when a layer runs.
_OF_BLOCK, _OF_ATTENTION = "recompute_granularity", ("checkpoint_core_attention", "offload_core_attention")


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderPart:
    """The tokens ``start:end`` of a folded micro-batch, padded to ``size``, and the parameters of their layers."""

    start: int
    end: int
    size: int
    params: TreePackedSeqParams


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientsApart:
    """Gradients of parts, by parameter, that a step does not read; all depend on the leaf ``needed``."""

    needed: torch.Tensor
    sums: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Add the gradient of one part."""
        if gradient is not None:
            self.sums[parameter] = self.sums[parameter] + gradient if parameter in self.sums else gradient


def cut_decoder(
    model: Any, layout: FlatLayout, params: TreePackedSeqParams, max_tokens: int, *, state_tokens: int
) -> list[DecoderPart]:
    """Return the parts, of at most ``max_tokens`` tokens, of a micro-batch with these parameters; none if it is one.

    Ranks that share experts run as many parts; where one has fewer, it runs parts of padding. For ``state_tokens`` see
    :class:`~mcore_prefix_tree.plan.cost.CostModel`.
    """
    tokens, multiple, parts = layout.physical_tokens, padding_multiple(model), []
    chunks = cut_tree(layout.position_ids[:tokens].astype(np.int64), max_tokens, state_tokens=state_tokens)
    count = most_of_experts(model, len(chunks))
    if count <= 1:
        return []
    windows = list_windows(model.config)
    tree = LayoutInParts.of(layout, chunks, trains=True, loss_tokens=layout.logical_tokens, windows=windows)
    for chunk in chunks:
        size = chunk.tokens + -chunk.tokens % multiple
        part = tree.lay_out(chunk, size)
        own = part.set_in(_params_of(part.layout, params))
        own = replace(own, carry=part.carry.on(_device(params)))
        parts.append(DecoderPart(start=chunk.start, end=chunk.end, size=size, params=own))
    padding = fold([], pad_to_multiple_of=multiple)
    idle = DecoderPart(start=0, end=0, size=padding.padded_size, params=_params_of(padding, params))
    return parts + [idle] * (count - len(parts))


def most_of_experts(model: Any, count: int) -> int:
    """Return the largest count in the expert-parallel group, whose ranks exchange tokens in every forward."""
    if model.config.expert_model_parallel_size == 1:
        return count
    most = torch.tensor(count, device=next(model.parameters()).device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=parallel_state.get_expert_model_parallel_group())
    return int(most)


def _params_of(layout: FlatLayout, params: TreePackedSeqParams) -> TreePackedSeqParams:
    """Return the parameters of a part's layout, with the settings of the micro-batch's."""
    own = TreePackedSeqParams.from_metadata(
        TreeMetadata.from_layout(layout, device=_device(params)),
        attention_backend=params.attention_backend,
        deterministic_attention=params.deterministic_attention,
    )
    return replace(own, rotary_by_token=params.rotary_by_token)


def _device(params: TreePackedSeqParams) -> torch.device:
    assert params.tree_metadata is not None, "a folded micro-batch has it"
    return params.tree_metadata.subtree_end.device


def _check(model: Any) -> None:
    """Raise NotImplementedError for a model whose decoder cannot run in parts."""
    setting = recomputed_modules(model.config)
    if compares_samples(model.config):
        setting = "global_aux_loss: it compares the samples of all parts"
    elif takes_deepstack(model):
        setting = f"a {type(model).__name__}: its first layers add features of pictures"
    elif "forward" in vars(model.decoder):
        setting = "a decoder whose forward Megatron-Bridge has replaced, as for Gemma 4 without experts"
    if setting is not None:
        raise NotImplementedError(f"max_tokens of folding inside the model does not support {setting}; change one")


def recomputed_modules(config: Any) -> str | None:
    """Return the setting of modules that recompute their outputs by themselves, and the reason to refuse it."""
    recomputed = set(config.recompute_modules or ()) - {"core_attn"}
    if config.recompute_granularity != "selective" or not recomputed:
        return None
    return f"recompute_modules={sorted(recomputed)}: torch.autograd.grad does not go through them"


def run_in_parts(model: Any) -> None:
    """Let the decoder of a bare model chunk run micro-batches that :func:`cut_decoder` cut.

    Raises:
        NotImplementedError: a setting does not support it; names it.
    """
    _check(model)
    change_class(model.decoder, PartedDecoderMixin)


class PartedDecoderMixin:
    """Decoder that runs a micro-batch with ``parts`` in them; without, the base class.

    Its backward adds the parameters' gradients to ``apart``, or, if that is None, where the backward of a step does.
    """

    pre_process: bool
    input_tensor: torch.Tensor | None
    apart: GradientsApart | None = None

    def forward(self, hidden_states: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Return hidden states ``[P, 1, h]``, or this rank's part of them, of such a tensor."""
        params, stock = kwargs.get("packed_seq_params"), super().forward  # type: ignore[misc]
        parts = getattr(params, "parts", ())
        if not parts:
            return stock(hidden_states, *args, **kwargs)
        sent = hidden_states if self.pre_process else self.input_tensor
        assert sent is not None, "a stage has an input"
        hidden = gather_tokens(sent, self)
        run = partial(self._run, stock, recomputation(self), args, kwargs)
        try:
            if torch.is_grad_enabled():
                # A stage whose input has no gradient has parameters with one.
                apart = self.apart
                needed = torch.zeros((), device=hidden.device, requires_grad=True) if apart is None else apart.needed
                out: torch.Tensor = _InParts.apply(hidden, needed, self, parts, run)  # type: ignore[no-untyped-call]
            else:
                scoring = [replace(part, params=part.params.with_carry(Carry.for_scoring)) for part in parts]
                out = _join([run(part, _take(hidden, part)) for part in scoring], parts, hidden)
        finally:
            self.input_tensor = None if self.pre_process else sent
        return split_tokens(out, self)

    def _run(
        self,
        stock: Callable[..., Any],
        recomputes: Sequence[Setting],
        args: Any,
        kwargs: dict[str, Any],
        part: DecoderPart,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Run the base class on a part's hidden states ``[size, 1, h]``; recomputation is off, as parts are it."""
        own = split_tokens(hidden, self)
        rotary = kwargs.get("rotary_pos_emb")
        if part.params.rotary_by_token and rotary is not None:
            kwargs = kwargs | {"rotary_pos_emb": _take(rotary, part)}
        with temporary_settings(recomputes):
            if not self.pre_process:
                self.input_tensor = own
            out = stock(own if self.pre_process else None, *args, **kwargs | {"packed_seq_params": part.params})
        return gather_tokens(out, self)


def recomputation(model: Any) -> list[Setting]:
    """Return owner, name and off value of each setting of recomputation that layers read in training mode."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    found: list[Setting] = [
        (config, _OF_BLOCK, None) for config in configs.values() if getattr(config, _OF_BLOCK, None)
    ]
    for module in model.modules():
        found += [(module, name, False) for name in _OF_ATTENTION if getattr(module, name, False)]
    return found


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        needed: torch.Tensor,
        decoder: torch.nn.Module,
        parts: Sequence[DecoderPart],
        run: Callable[[DecoderPart, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return ``[P, 1, h]`` of ``hidden`` ``[P, 1, h]``; ``needed`` has a gradient."""
        if any(getattr(one, "__fsdp_param__", False) or isinstance(one, DTensor) for one in decoder.parameters()):
            raise NotImplementedError(
                "max_tokens of folding inside the model does not support parameters that FSDP shards, whose gradients "
                "are reduced after each part; use Megatron's DDP with the distributed optimizer, or set max_tokens=None"
            )
        ctx.save_for_backward(hidden)
        ctx.decoder, ctx.parts, ctx.run = decoder, parts, run
        passing = [replace(part, params=part.params.with_carry(Carry.for_passing)) for part in parts[:-1]]
        outputs = [run(part, _take(hidden, part)) for part in passing]
        # The last one runs first in backward, so it keeps its graph.
        ctx.last = _run_with_graph(run, parts[-1], hidden)
        return _join([*outputs, ctx.last[1].detach()], parts, hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (hidden,) = grad_outputs, ctx.saved_tensors
        of_hidden, last = torch.zeros_like(hidden), ctx.last
        ctx.last, apart = None, ctx.decoder.apart
        add = _accumulate if apart is None else apart.add
        parameters = [parameter for parameter in ctx.decoder.parameters() if parameter.requires_grad]
        for number, part in reversed([*enumerate(ctx.parts)]):
            leaf, out = last or _run_with_graph(ctx.run, part, hidden)
            last = None
            given = _take(gradient, part)
            if number or apart is not None:
                # Hooks of DDP count a parameter's gradients: only those of the last part to run may reach them.
                leaf.grad, *found = torch.autograd.grad(out, [leaf, *parameters], given, allow_unused=True)
                for parameter, grad in zip(parameters, found, strict=True):
                    add(parameter, grad)
            else:
                torch.autograd.backward(out, given)
            if leaf.grad is not None:
                of_hidden[part.start : part.end] = leaf.grad[: part.end - part.start]
        return of_hidden, None, None, None, None


def _run_with_graph(
    run: Callable[[DecoderPart, torch.Tensor], torch.Tensor], part: DecoderPart, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a part's hidden states as a leaf, and its output, ``[size, 1, h]`` each."""
    with torch.enable_grad():
        leaf = _take(hidden, part).detach().requires_grad_()
        return leaf, run(part, leaf)


def _take(values: torch.Tensor, part: DecoderPart) -> torch.Tensor:
    """Return a part's rows of ``[P, ...]``, ``[size, ...]``, with zeros for its padding."""
    rows = values[part.start : part.end]
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, part.size - len(rows)))


def _join(outputs: Sequence[torch.Tensor], parts: Sequence[DecoderPart], hidden: torch.Tensor) -> torch.Tensor:
    """Return the outputs ``[size, 1, h]`` of parts as ``[P, 1, h]``, with zeros for padding."""
    rows = [out[: part.end - part.start] for out, part in zip(outputs, parts, strict=True)]
    joined = torch.cat(rows)
    return F.pad(joined, (0, 0) * (joined.ndim - 1) + (0, len(hidden) - len(joined)))


def _accumulate(parameter: Any, gradient: torch.Tensor | None) -> None:
    """Add a gradient where the backward of a step adds it: to Megatron's buffer, or to ``.grad``."""
    if gradient is None or getattr(parameter, "grad_added_to_main_grad", False):
        return
    total = getattr(parameter, "main_grad", None)
    if total is not None:
        total.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
