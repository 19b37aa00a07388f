"""A model that takes packed rows, computes every unique token once, and answers row for row.

Folding happens in torch's own forward hooks of a ``GPTModel`` or ``HybridModel``: the first replaces the arguments of a
call by those of the folded micro-batch, the second turns the output into the rows'. The data of a micro-batch travel
with it in ``packed_seq_params``. The model keeps its class, parameters and state-dict keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear

from mcore_prefix_tree.attention.api import AUTO, check_case, check_setting
from mcore_prefix_tree.attention.auto import TreeShape, choose
from mcore_prefix_tree.mcore.engine.backend import attention_case
from mcore_prefix_tree.mcore.packed.answers import (
    RowLogprobs,
    expand,
    expand_hidden,
    for_rows,
    loss_of_logits,
    without_padding,
)
from mcore_prefix_tree.mcore.packed.bridge_pictures import is_with_tower, number_pictures, take_deepstack, with_own
from mcore_prefix_tree.mcore.packed.call_checks import call_arguments, check_call, check_foldable, packs_exactly
from mcore_prefix_tree.mcore.packed.decoder_in_parts import cut_decoder, most_of_experts, run_in_parts
from mcore_prefix_tree.mcore.packed.fold_check import Arguments, check_comparable, compare
from mcore_prefix_tree.mcore.packed.packed_rows import (
    FoldedRows,
    FoldReport,
    PackedRows,
    count_model_flops,
    read_rows,
    take_tokens,
    with_spatial,
)
from mcore_prefix_tree.mcore.packed.row_depths import with_depths
from mcore_prefix_tree.mcore.seam.all_tokens import padding_multiple
from mcore_prefix_tree.mcore.seam.multi_token import with_multi_token
from mcore_prefix_tree.mcore.seam.output_layer import EdgeHeadMixin, request_arguments, with_edge_head, with_vocab_size
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams
from mcore_prefix_tree.mcore.seam.routes import check_routes
from mcore_prefix_tree.mcore.seam.tree_layers import check_follows, follow_trees
from mcore_prefix_tree.mcore.seam.validation import check_draws, check_positions
from mcore_prefix_tree.utils.errors import spelled
from mcore_prefix_tree.utils.upload import moved, upload

logger = logging.getLogger(__name__)

# ``auto`` chooses a back-end for this, so that every rank chooses the same: eight answers to each of four prompts.
_TYPICAL = TreeShape(tokens=4 * (2048 + 8 * 1024), segments=36, pairs=4 * (2048**2 // 2 + 8 * 1024 * 2560), depth=1)
# Arguments of the packed micro-batch that the folded one has no counterpart of.
_OF_ROWS = {"labels", "loss_mask", "padding_mask", "output_processor", "output_processor_context"}
Target = TypeVar("Target")


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Settings and counters of a model that folds inside.

    Attributes:
        attention_backend: a name of :data:`mcore_prefix_tree.attention.BACKENDS`; ``auto`` chooses for the device of
            the first micro-batch.
        fused_head: whether to score ``labels`` of rows that share tokens a chunk of logits at a time; False makes the
            logits of all unique tokens.
        least_fold_ratio: fold ratio up to which micro-batches go through the stock model as they are, if it computes
            packed rows exactly; see :func:`packs_exactly`. A common first token is no gain.
        max_tokens: most unique tokens whose activations exist at a time. A larger micro-batch runs in parts, and all
            but the last of them again in backward, without the model's own recomputation; None runs all at once.
        check_first: whether to compare the first micro-batch that folds, and the first that does not, with its rows by
            themselves, in training mode and in evaluation mode; see :func:`compare`.
        vocab_size: number of tokens of the vocabulary; the columns of the output layer from this id on are padding, and
            get no probability. None takes the ``vocab_size`` of a model's Megatron-Bridge provider, and otherwise no
            padding.
        log_every: number of micro-batches after which the first rank logs the savings, at level INFO; 0 logs nothing.

    Raises:
        ValueError: the back-end does not exist, ``max_tokens`` is below 1, or ``log_every`` is negative; raised on
            construction.
    """

    attention_backend: str = AUTO
    fused_head: bool = True
    least_fold_ratio: float = 1.02
    max_tokens: int | None = None
    check_first: bool = False
    vocab_size: int | None = None
    log_every: int = 100

    def __post_init__(self) -> None:
        check_setting(self.attention_backend)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} is below 1; set the tokens of a part, or None for no parts")
        if self.log_every < 0:
            raise ValueError(f"log_every={self.log_every} is negative; set a number of micro-batches, or 0 for no log")

    def check_depths(self, depths: int | None) -> None:
        """Reject settings that a model with depths of multi-token prediction does not support."""
        is_set = {"fused_head": not self.fused_head, "max_tokens": self.max_tokens, "check_first": self.check_first}
        name = next((name for name in is_set if is_set[name]), None)
        if depths and name is not None:
            raise NotImplementedError(
                f"{name}={getattr(self, name)} with mtp_num_layers={depths}: folding inside the model predicts several "
                f"tokens only with the default of {name}; leave it, or set mtp_num_layers=None"
            )


class Folding:
    """Folding of a model chunk's micro-batches, with reports; the model keeps it as ``model.folding``.

    Attributes:
        last: report of the last micro-batch; None before the first.
    """

    def __init__(self, model: Any, settings: Inside) -> None:
        self.last: FoldReport | None = None
        self._since: dict[bool, FoldReport] = {}  # of passes with gradients, and of those without
        self._unlogged: FoldReport | None = None
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._log_every = settings.log_every if is_first and not model.vp_stage else 0
        self._settings = settings
        self._backend: str | None = None
        self._checked: set[tuple[bool, bool]] = set()  # whether it trained, and folded
        self._work = count_model_flops(model)
        self._packs_exactly = packs_exactly(model, has_states=self._work.state_layers > 0)

    def report(self, *, training_only: bool = False) -> FoldReport | None:
        """Return the report of the micro-batches since the last call, None without any. Call it once per step.

        Args:
            training_only: whether to skip forward passes without gradients, for example for old log-probabilities.
        """
        since, self._since = self._since, {}
        reports = [report for trains, report in since.items() if trains or not training_only]
        return sum(reports[1:], reports[0]) if reports else None

    def before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        """Replace the arguments of a call, as torch's forward pre-hook.

        Raises:
            FoldCheckError: see :func:`compare`.
            NotImplementedError: folding does not support an argument, or a module that draws random numbers; names it.
            ValueError: the arguments do not describe packed rows.
        """
        call = dict(zip(call_arguments(model.__class__), args, strict=False)) | kwargs
        if isinstance(call.get("packed_seq_params"), TreePackedSeqParams):
            return None  # the caller folded it
        check_call(model, call)
        learned = model.position_embedding_type == "learned_absolute"
        rows = read_rows(
            call["input_ids"],
            call["packed_seq_params"],
            device=next(model.parameters(), call["input_ids"]).device,
            position_ids=call.get("position_ids") if learned else None,
        )
        if model.position_embedding_type == "mrope":
            rows = with_spatial(rows, call.get("position_ids"), call["packed_seq_params"])
        check_positions(model, int(rows.length.max(initial=1)))
        # Stock layers fail on no tokens; the folded micro-batch of no rows has one of padding.
        cuts = self._may_cut(model, rows)
        folds = bool(
            not self._packs_exactly
            or rows.routes is not None  # stock layers would not take them
            or rows.tail
            or not rows.logical_tokens
            or cuts
            or rows.fold_ratio > self._settings.least_fold_ratio
        )
        arguments: Arguments = partial(self._left_alone, model, rows)
        if folds:
            check_follows(model)
            check_draws(model)
            rows = folded = rows.fold(pad_to_multiple_of=padding_multiple(model))
            arguments = partial(self._in_parts if cuts else self._folded, model, folded)
        if self._settings.check_first:
            self._check(model, rows, call, arguments)
        return (), arguments(call)

    def _check(self, model: Any, rows: PackedRows, call: dict[str, Any], arguments: Arguments) -> None:
        """Compare the first micro-batch of each mode that goes this way; ranks that share experts compare together."""
        way = model.training, isinstance(rows, FoldedRows)
        if most_of_experts(model, int(way not in self._checked)):
            compare(model, rows, call, arguments)
            # Without rows nothing was compared; but other ranks need not wait for some.
            if rows.logical_tokens or model.config.expert_model_parallel_size > 1:
                self._checked.add(way)

    def after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the answer for the rows, as torch's forward hook."""
        params: Any = kwargs.get("packed_seq_params")
        if getattr(params, "report", None) is None:
            return None
        answer = params.finish(output)
        copied = 0 if answer is output else max(0, answer.nbytes - output.nbytes)
        self._record(replace(params.report, expanded_bytes=copied))
        return answer

    def _record(self, report: FoldReport) -> None:
        self.last = report
        trains = torch.is_grad_enabled()
        self._since[trains] = self._since[trains] + report if trains in self._since else report
        if self._log_every:
            self._unlogged = report if self._unlogged is None else self._unlogged + report
            if self._unlogged.micro_batches >= self._log_every:
                logger.info("%s", self._unlogged)
                self._unlogged = None

    def _folded(self, model: Any, rows: FoldedRows, call: dict[str, Any]) -> dict[str, Any]:
        if rows.layout.routes is not None:
            check_routes(model.config, rows.layout.routes)
        asked, finish, head_rows = _asked(model, rows, call)
        folded = rows.make_call(
            self._resolved(model, rows.device),
            finish=finish,
            report=FoldReport.of(rows.layout, self._work, head_rows=head_rows),
            rotary_by_token=rows.spatial is not None,
        )
        folded["packed_seq_params"] = with_depths(model, rows, folded["packed_seq_params"], call)
        kept = {name: value for name, value in call.items() if name not in _OF_ROWS}
        return kept | folded | take_tokens(model, rows, call) | take_deepstack(model, rows, call) | asked

    def _left_alone(self, model: Any, rows: PackedRows, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the stock call, on the device, with those that only upstream reads."""
        names = ("input_ids", "position_ids", "labels", "packed_seq_params")
        call = call | {name: moved(call[name], rows.device) for name in names if name in call}
        params, longest = call["packed_seq_params"], int(np.diff(rows.start, append=rows.size).max())
        needed = {"cu_seqlens_kv": params.cu_seqlens_q, "cu_seqlens_kv_padded": params.cu_seqlens_q_padded}
        needed |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        missing = {name: value for name, value in needed.items() if getattr(params, name) is None}
        if call.get("position_ids") is None and model.position_embedding_type == "learned_absolute":
            within = np.zeros(rows.size, dtype=np.int64)
            within[rows.position] = rows.position - np.repeat(rows.start, rows.length)
            call["position_ids"] = upload(within, rows.device).unsqueeze(0)
        finish: Callable[[Any], Any] = _same
        if isinstance(call.get("output_processor"), RowLogprobs):
            logprobs = call.pop("output_processor")
            call |= {"labels": None} | _requested(model, logprobs, rows) if model.post_process else {}
        elif _answers(model) and call.get("output_processor") is None:
            finish = partial(without_padding, rows=rows, labels=call.get("labels"), model=model)
        report = FoldReport.of_stock(rows.length, self._work)
        return call | {"packed_seq_params": with_own(params, finish=finish, report=report, **missing)}

    def _may_cut(self, model: Any, rows: PackedRows) -> bool:
        """Return whether this rank, or one that shares experts with it, may run the rows in parts."""
        most = self._settings.max_tokens
        return most is not None and (rows.unique_tokens > most or model.config.expert_model_parallel_size > 1)

    def _in_parts(self, model: Any, rows: FoldedRows, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a folded micro-batch with the parts that the decoder runs."""
        arguments = self._folded(model, rows, call)
        params, most = arguments["packed_seq_params"], self._settings.max_tokens
        assert most is not None, "otherwise nothing is cut"
        parts = cut_decoder(model, rows.layout, params, most, state_tokens=self._work.state_tokens)
        again = sum(part.end - part.start for part in parts[:-1]) if torch.is_grad_enabled() else 0
        report = replace(params.report, recomputed_tokens=again)
        return arguments | {"packed_seq_params": replace(params, parts=parts, report=report)}

    def _resolved(self, model: Any, device: torch.device) -> str:
        if self._backend is None:
            name, config = self._settings.attention_backend, model.config
            case = attention_case(config, device=device)
            if name == AUTO:
                gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
                name = choose(case, _TYPICAL, device_name=gpu).backend
            with spelled({"deterministic_attention=false": "deterministic_mode=False"}):
                check_case(name, case)
            self._backend = name
        return self._backend


def _asked(
    model: Any, rows: FoldedRows, call: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[Any], Any], int | None]:
    """Return the last stage's arguments, the function of its output, and the number of positions its head computes."""
    if not model.post_process:
        return {}, partial(expand_hidden, rows=rows, model=model) if _answers(model) else _same, None
    processor, labels = call.get("output_processor"), call.get("labels")
    if isinstance(processor, RowLogprobs):
        return _requested(model, processor, rows), _same, None
    if processor is not None:
        return {"output_processor": for_rows(processor, call, rows, model)}, _same, rows.layout.logical_tokens
    if labels is None:
        return {}, partial(expand, rows=rows, dim=1), None
    # The fused head forms logits twice, which sharing pays for.
    if isinstance(model.output_layer, EdgeHeadMixin) and rows.layout.fold_ratio > 1:
        return _requested(model, RowLogprobs(labels=labels), rows), lambda logprobs: -logprobs.squeeze(-1), None
    finish = partial(loss_of_logits, labels=labels, rows=rows, model=model)
    return {"runtime_gather_output": False}, finish, None


def _requested(model: Any, logprobs: RowLogprobs, rows: PackedRows) -> dict[str, Any]:
    if not isinstance(model.output_layer, EdgeHeadMixin):
        raise ValueError("RowLogprobs needs a vocabulary's fused head: set fused_head=True in fold_inside")
    return request_arguments(logprobs.request(rows))


def _same(output: Any) -> Any:
    return output


def _answers(model: Any) -> bool:
    """Return whether no other pipeline stage reads the output of this chunk."""
    last_chunk = model.vp_stage is None or model.vp_stage == model.vp_size - 1
    return bool(last_chunk and model.pp_group.rank() == model.pp_group.size() - 1)


def fold_inside(target: Target, **settings: Any) -> Target:
    """Let a model fold the packed rows of its calls.

    Args:
        target: a ``GPTModel`` or ``HybridModel`` built from any layer spec, or one of its pipeline chunks, bare; or
            Megatron-Bridge's Qwen3-VL or Qwen3.5-VL; or a Megatron-Bridge provider of one of these, whose models are
            changed when it provides them. Changed in place: its layers follow trees; see :func:`follow_trees`.
        settings: fields of :class:`Inside`.

    Returns:
        The same object.

    Raises:
        NotImplementedError: the model has a setting that folding does not support; names it.
        TypeError: ``target`` is another object, or a setting is no field of :class:`Inside`.
        ValueError: the model folds already, or the back-end does not exist.
    """
    inside = Inside(**settings)
    model: Any = target
    if hasattr(model, "register_pre_wrap_hook"):
        model.register_pre_wrap_hook(lambda chunks: [fold_inside(chunk, **settings) for chunk in chunks])
        return target
    if is_with_tower(model):
        fold_inside(model.language_model, **settings)
        number_pictures(model)
        model.folding = model.language_model.folding
        return target
    check_foldable(model)
    inside.check_depths(model.config.mtp_num_layers)
    follow_trees(model)
    if inside.check_first:
        check_comparable(model)
    if hasattr(model, "folding"):
        raise ValueError("this model folds inside already")
    if inside.max_tokens is not None:
        run_in_parts(model)
    with_vocab_size(model, inside.vocab_size or getattr(model.config, "vocab_size", None))
    if inside.fused_head and model.post_process and isinstance(model.output_layer, ColumnParallelLinear):
        with_edge_head(model)
    with_multi_token(model)
    model.folding = Folding(model, inside)
    model.register_forward_pre_hook(model.folding.before, with_kwargs=True)
    model.register_forward_hook(model.folding.after, with_kwargs=True)
    return target


def folding_model(base: type[Any], **settings: Any) -> type[Any]:
    """Return a subclass of a class of models that folds inside; see :func:`fold_inside`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        fold_inside(self, **settings)

    return type(f"Folding{base.__name__}", (base,), {"__init__": __init__, "__module__": __name__})
