"""Fold rows inside the backbone of a Transformers model, for trainers that call it with rows, for example TRL's.

``fold_backbone(model)`` registers two of torch's forward hooks on the backbone, ``model.base_model``. The first
replaces the rows of a call by their tree, the second copies the hidden states of unique tokens back to the rows. So
heads, losses and the trainer see the same rows as before. The tree is passed in the arguments of the call.

Legend: B, T shape of ``input_ids``; P unique tokens; E experts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface, TrainerCallback

from mcore_prefix_tree.attention.api import AUTO, check_setting
from mcore_prefix_tree.integrations.picture_rows import Pictures, check_tower, has_tower, text_positions
from mcore_prefix_tree.integrations.transformers import NAME, attend, check_model
from mcore_prefix_tree.layout.trainer_rows import HostRows, Int64Array
from mcore_prefix_tree.logprob.restore import expand
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.randomness import Draws, drew, random_part
from mcore_prefix_tree.utils.upload import upload

Model = TypeVar("Model")

_EITHER = f"{NAME}_or_sdpa"
_SDPA: Any = AttentionInterface()["sdpa"]
# Arguments that describe rows, which the tree replaces. Labels pass through a backbone, but only heads read them.
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_LONGEST = ("max_length_q", "max_length_k")
_OF_ROWS = {*_BORDERS, *_LONGEST, "cache_position", "labels", "shift_labels", "mm_token_type_ids"}
_CACHES = ("past_key_values", "cache")
_REFUSED = {
    "inputs_embeds": "rows are folded by their token ids; pass input_ids (PEFT's prompt tuning passes embeddings)",
    "output_attentions": "a tree has no attention weights of rows; set output_attentions=False",
    "pixel_values_videos": "videos are not compared; pass rows with pictures and text only",
    "video_grid_thw": "videos are not compared; pass rows with pictures and text only",
    "mm_encoder_outputs": "pictures are compared by their pixels; pass pixel_values",
}


@dataclass
class FoldCounts:
    """Sums over the calls of a backbone that neither read nor make a cache; tokens without padding.

    ``left_alone`` counts calls that the stock model computed, because their rows share too little.
    """

    calls: int = 0
    left_alone: int = 0
    rows: int = 0
    logical_tokens: int = 0
    unique_tokens: int = 0

    @property
    def fold_ratio(self) -> float:
        """Return the ratio of logical to unique tokens; 1 for no tokens."""
        return self.logical_tokens / self.unique_tokens if self.unique_tokens else 1.0

    def add(self, rows: HostRows, *, folded: bool) -> None:
        self.calls += 1
        self.left_alone += not folded
        self.rows += len(rows.row)
        self.logical_tokens += rows.logical_tokens
        self.unique_tokens += rows.unique_tokens if folded else rows.logical_tokens

    def to_log(self) -> dict[str, float]:
        """Return the numbers by name, as loggers take them."""
        return {f"fold/{name}": value for name, value in vars(self).items()} | {"fold/fold_ratio": self.fold_ratio}


@dataclass(frozen=True, eq=False)
class _Tree:
    """Data of a folded call for the second hook: ``place`` ``[B, T]``, the token that answers, P for padding."""

    place: torch.Tensor
    draws: Draws


@dataclass(eq=False)
class Folding:
    """Folding of the calls of a backbone, see :func:`fold_backbone`; the model keeps it as ``model.folding``."""

    backend: str
    least_fold_ratio: float
    shifts: bool  # whether only distances of positions count, as with rotary embeddings
    _counts: dict[bool, FoldCounts] = field(default_factory=dict)

    def report(self, *, with_grad: bool) -> FoldCounts:
        """Return the counts of the calls with gradients, or of those without, since the last such report."""
        return self._counts.pop(with_grad, FoldCounts())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(
        self, backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        """Replace the arguments of a call, as torch's forward pre-hook; raises ValueError for an unsupported one."""
        call = dict(zip(_parameters(backbone.__class__), args, strict=False)) | kwargs
        if _has_cache(backbone, call) or all(call.get(name) is None for name in ("input_ids", "inputs_embeds")):
            return None
        _check_call(backbone, call)
        ids, positions = call["input_ids"], text_positions(backbone, call.get("position_ids"))
        borders = {name: call[name] for name in (*_BORDERS, *_LONGEST) if call.get(name) is not None}
        rows = read_rows(ids, call.get("attention_mask"), positions, borders, shifts=self.shifts)
        if not borders.keys().isdisjoint(_BORDERS) and positions is None and call.get("attention_mask") is None:
            if any(call.get(name) is not None for name in ("position_ids", "image_grid_thw")):
                raise ValueError(
                    f"fold_backbone does not support {', '.join(borders)} with pictures: pass position_ids [4, B, T]"
                )
            # For SDPA, which does not read borders.
            positions = rows.from_first(np.arange(rows.size)[None]).reshape(ids.shape)
            call["position_ids"] = upload(positions, ids.device)
        pictures = Pictures.read(backbone, call, rows) if has_tower(backbone) else None
        rows = pictures.number_tokens(rows) if pictures else rows
        folded = rows.fold_ratio > self.least_fold_ratio or bool(pictures and pictures.repeated)
        self._counts.setdefault(torch.is_grad_enabled(), FoldCounts()).add(rows, folded=folded)
        call["use_cache"] = False  # with a cache, SDPA does not read positions that begin again
        if not folded:
            return (), call
        layout = rows.make_layout()
        source = rows.sources_in(layout)
        tree, draws = TreeMetadata.from_layout(layout, device=ids.device), Draws(ids.device)
        # Transformers takes four dimensions for a mask that is made, and no attention can read this one.
        no_mask = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=ids.device)
        of_pictures = pictures.inputs(backbone, call, source) if pictures else {}
        call |= {
            "input_ids": ids.flatten()[upload(source, ids.device)][None],
            "position_ids": tree.tree_position_ids.long()[None],
            "attention_mask": no_mask,
            "prefix_tree": tree,
            "prefix_tree_backend": self.backend,
            "prefix_tree_rows": _Tree(upload(rows.places_in(layout).reshape(ids.shape), ids.device), draws),
        } | of_pictures
        return (), {name: value for name, value in call.items() if name not in _OF_ROWS}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output of the rows, as torch's forward hook; raises ValueError after random draws."""
        tree: _Tree | None = kwargs.get("prefix_tree_rows")
        if tree is None:
            return None
        if tree.draws.any(coins=backbone.config.get_text_config().num_hidden_layers):
            raise ValueError(f"{type(backbone).__name__} does not support {drew(backbone, 'in its forward pass')}")
        return _expand(output, tree.place, kwargs["input_ids"].shape[1])


def fold_backbone(model: Model, *, backend: str = AUTO, least_fold_ratio: float = 1.02) -> Model:
    """Let a Transformers model compute each token that rows of a call share once; losses and gradients stay the same.

    Args:
        model: causal LM or sequence classifier of Transformers with rotary or learned positions, or a model of
            pictures and text, also in a PEFT model; changed in place and returned. ``model.folding`` counts its calls.
        backend: key of :data:`~mcore_prefix_tree.attention.BACKENDS`, or ``"auto"``, for calls that are folded. Others
            run with ``"sdpa"``.
        least_fold_ratio: fold ratio up to which a call runs through the stock model as it is.

    Raises:
        ValueError: the model cannot be folded, or folds already; names the part or the setting.
    """
    check_setting(backend)
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone = inner.base_model
    if getattr(inner, "folding", None) is not None:
        raise ValueError(f"this {type(inner).__name__} folds already")
    check_model(backbone)
    shifts = _check_backbone(backbone)
    inner.set_attn_implementation({"text_config": _EITHER} if has_tower(backbone) else _EITHER)
    inner.folding = folding = Folding(backend, least_fold_ratio, shifts)
    backbone.register_forward_pre_hook(folding.before, with_kwargs=True)
    backbone.register_forward_hook(folding.after, with_kwargs=True)
    return model


class LogFolding(TrainerCallback):  # type: ignore[misc]
    """Adds ``fold/fold_ratio`` and the other counts of all ranks' training calls to each log of a trainer's steps.

    They reach ``trainer.state.log_history`` and the callbacks after this one, for example the one that prints.
    """

    def __init__(self) -> None:
        self._counts: FoldCounts | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Collect the counts when the trainer is about to log: here all ranks meet."""
        if not control.should_log:
            return
        folding = next(
            (part.folding for part in model.modules() if isinstance(getattr(part, "folding", None), Folding)), None
        )
        if folding is None:
            raise ValueError("LogFolding did not get a model that folds: call fold_backbone(model) before training")
        self._counts = folding.report(with_grad=True)
        if dist.is_initialized() and dist.get_world_size() > 1:
            total = torch.tensor(list(vars(self._counts).values()), device=args.device)
            dist.all_reduce(total)
            self._counts = FoldCounts(*total.tolist())

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self._counts is not None and logs is not None:
            numbers, self._counts = self._counts.to_log(), None
            logs |= numbers
            state.log_history[-1] |= numbers


def read_rows(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    borders: Mapping[str, Any] | None = None,
    *,
    shifts: bool = True,
) -> HostRows:
    """Read the rows of a call on the host, as Transformers interprets them.

    With a mask, each row of ``input_ids`` is a row without its padding. Without one, rows also end where positions do
    not increase by 1, as in padding-free batches, and without positions at the borders.

    Args:
        input_ids: ``[B, T]``.
        attention_mask: ``[B, T]``, 0 for padding, or None.
        position_ids: ``[B, T]`` or ``[1, T]``, or None for columns.
        borders: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``[rows + 1]``, ``seq_idx`` as ``position_ids``, and numbers
            ``max_length_q`` and ``max_length_k``; none is required.
        shifts: whether rows may begin at any position, because only distances count.

    Raises:
        ValueError: an argument has another shape or contradicts the others, or a row has gaps or begins at a position
            that counts.
    """
    size, width = input_ids.shape
    marks = {name: value for name, value in (borders or {}).items() if name in _BORDERS}
    for name, value, sizes in (
        ("attention_mask", attention_mask, {size}),
        ("position_ids", position_ids, {1, size}),
        ("seq_idx", marks.get("seq_idx"), {1, size}),
    ):
        if value is not None and (value.ndim != 2 or value.shape[1] != width or len(value) not in sizes):
            raise ValueError(f"{name} of shape {list(value.shape)} does not give the rows of input_ids {[size, width]}")
    ids, mask, positions, *values = _on_host(input_ids, attention_mask, position_ids, *marks.values())
    at = np.arange(size * width) if mask is None else np.flatnonzero(mask)
    batch_row, column = np.divmod(at, width)
    new = np.diff(batch_row, prepend=-1) != 0

    def at_tokens(value: Int64Array) -> Int64Array:
        return value[at if len(value) == size * width else column]

    starts = {
        name: new | (np.diff(at_tokens(value), prepend=0) != 0) if name == "seq_idx" else _starts(name, value, len(at))
        for name, value in zip(marks, values, strict=True)
    }
    position = column if positions is None else at_tokens(positions)
    if positions is None and mask is None and starts:
        begin = new | next(iter(starts.values()))
        position = at - np.maximum.accumulate(np.where(begin, at, 0))
    jumps = (np.diff(position, prepend=0) != 1) | (np.diff(at, prepend=0) != 1)
    if mask is None:
        new |= jumps
    elif (gaps := jumps & ~new).any():
        raise ValueError(
            f"row {batch_row[gaps][0]} has gaps in its attention_mask or position_ids, so a tree would position its "
            "tokens differently: pad rows at their ends only"
        )
    for name, begin in starts.items():
        if (differs := begin != new).any():
            raise ValueError(
                f"{name} contradicts the other arguments of the call: only one of them begins a row at token "
                f"{np.argmax(differs)}; give the same rows in all of them"
            )
    if not shifts and (late := new & (position != 0)).any():
        raise ValueError(
            f"row {batch_row[late][0]} begins at position {position[late][0]}, and the model's positions are not "
            "rotary: pad on the right, or pass position_ids that begin at 0"
        )
    first = np.flatnonzero(new)
    length = np.diff(first, append=len(at))
    for name in _LONGEST:
        if (bound := (borders or {}).get(name)) is not None and bound < (longest := length.max(initial=0)):
            raise ValueError(f"{name}={int(bound)} contradicts the other arguments: a row has {longest} tokens")
    return HostRows(ids=ids, row=batch_row[first], start=at[first], length=length)


def _starts(name: str, borders: Int64Array, tokens: int) -> Any:
    """Return whether a row begins at each token, bool ``[tokens]``, for borders ``[rows + 1]``."""
    if not len(borders) or borders[0] != 0 or borders[-1] != tokens or (np.diff(borders) < 0).any():
        raise ValueError(f"{name} must rise from 0 to the number of tokens without padding, {tokens}, not {borders}")
    starts = np.zeros(tokens + 1, bool)
    starts[borders] = True
    return starts[:-1]


def _on_host(*tensors: Any) -> list[Any]:
    """Return flat int64 arrays of tensors of any shape, which arrive from a device in one transfer."""
    parts = [None if tensor is None else torch.as_tensor(tensor).reshape(-1).long() for tensor in tensors]
    far = [part for part in parts if part is not None and not part.is_cpu]
    near = iter(torch.cat(far).cpu().split([len(part) for part in far]) if far else ())
    return [None if part is None else (part if part.is_cpu else next(near)).numpy() for part in parts]


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _has_cache(backbone: Any, call: dict[str, Any]) -> bool:
    """Return whether a call reads or makes a cache. If it does not say, it makes one only without gradients."""
    asked = call.get("use_cache")
    makes = backbone.config.get_text_config().use_cache and not torch.is_grad_enabled() if asked is None else asked
    return bool(makes) or any(call.get(name) is not None for name in _CACHES)


def _check_call(backbone: Any, call: dict[str, Any]) -> None:
    """Reject a call that folding does not support, by the name of the argument or of the module."""
    for name, reason in _REFUSED.items():
        if call.get(name) is not None and call[name] is not False:
            raise ValueError(f"fold_backbone does not support {name}: {reason}")
    if (has := backbone.config.get_text_config()._attn_implementation) != _EITHER:
        raise ValueError(
            f"attn_implementation={has!r} follows no tree: call model.set_attn_implementation({_EITHER!r})"
        )
    shape = call["input_ids"].shape
    known = {"input_ids", "attention_mask", "position_ids", *_OF_ROWS}
    for name, value in call.items():
        if name not in known and isinstance(value, torch.Tensor) and value.shape[:2] == shape:
            raise ValueError(f"fold_backbone does not support {name}: rows that share a token may differ in it")
    if part := random_part(backbone):
        raise ValueError(f"fold_backbone does not support dropout: {part}")
    _check_parallelism()


def _check_parallelism() -> None:
    """Reject calls whose rows Accelerate splits over ranks."""
    state: Any = sys.modules.get("accelerate.state")
    ready = state is not None and state.is_initialized()
    config = getattr(state.AcceleratorState(), "parallelism_config", None) if ready else None
    for name in ("cp_size", "sp_size"):
        if (size := getattr(config, name, None) or 1) > 1:
            raise ValueError(f"fold_backbone does not support {name}={size}: a tree is not split over ranks; set 1")


def _check_backbone(backbone: Any) -> bool:
    """Reject a backbone that cannot be folded, by name; return whether only distances of positions count."""
    name, config = type(backbone).__name__, backbone.config
    parameters = inspect.signature(type(backbone).forward).parameters
    if "position_ids" not in parameters or all(one.kind != one.VAR_KEYWORD for one in parameters.values()):
        raise ValueError(
            f"{name} does not take position_ids and keyword arguments for its layers, so it cannot be folded"
        )
    if has_tower(backbone):
        check_tower(backbone)
        config, backbone = config.get_text_config(), backbone.language_model
    if getattr(config, "alibi", False):
        raise ValueError(
            f"{name} has alibi=True, which positions tokens by the columns of a batch; folding needs position_ids"
        )
    if (has := config._attn_implementation) not in ("sdpa", NAME, _EITHER):
        raise ValueError(
            f"{name} has attn_implementation={has!r}, but calls that share nothing would run with 'sdpa': call "
            "model.set_attn_implementation('sdpa') first"
        )
    return any("rotary" in type(part).__name__.lower() for part in backbone.modules())


def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Attend along a tree, or without one as SDPA does; recomputed layers get the tree of their call again."""
    if kwargs.get("prefix_tree") is not None:
        return attend(module, query, key, value, None, **kwargs)
    if attention_mask is not None and not attention_mask.numel():
        raise ValueError(
            f"{type(module).__name__} did not receive prefix_tree: its model does not pass arguments to its layers"
        )
    return _SDPA(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(_EITHER, _attend)
AttentionMaskInterface.register(_EITHER, AttentionMaskInterface()["sdpa"])


def _expand(value: Any, place: torch.Tensor, tokens: int) -> Any:
    """Copy tensors of unique tokens, ``[1, P, ...]`` or routers' ``[P, E]``, to rows; padding gets zeros."""
    if isinstance(value, torch.Tensor):
        flat = place.flatten().to(value.device)
        if value.ndim > 2 and value.shape[:2] == (1, tokens):
            return expand(value[0], flat).unflatten(0, place.shape)
        return expand(value, flat) if value.ndim == 2 and len(value) == tokens else value
    if isinstance(value, dict):  # Transformers' outputs
        for name in list(value):
            value[name] = _expand(value[name], place, tokens)
        return value
    return tuple(_expand(part, place, tokens) for part in value) if isinstance(value, tuple) else value
