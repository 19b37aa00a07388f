"""A model that takes packed rows, computes every unique token once, and answers row for row.

Folding happens in torch's own forward hooks of the ``GPTModel``: the first exchanges the call's arguments for those of
the folded micro-batch, the second turns the output into the rows'. What belongs to a micro-batch travels with it in
``packed_seq_params``. The model's class, parameters and state-dict keys stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import unwrap_model

from mcore_prefix_tree.attention.api import check_case
from mcore_prefix_tree.attention.auto import AUTO, TreeShape, check_setting, choose
from mcore_prefix_tree.mcore.engine.backend import case_of
from mcore_prefix_tree.mcore.inside.answers import RowLogprobs, expand, expand_hidden, for_rows, loss_of_logits
from mcore_prefix_tree.mcore.inside.check import check_comparable, compare
from mcore_prefix_tree.mcore.inside.report import FoldReport, work_of
from mcore_prefix_tree.mcore.inside.rows import FoldedRows, RowsPackedSeqParams, on_device, read_rows
from mcore_prefix_tree.mcore.seam.attention import TreeCoreAttentionMixin, TreeSelfAttentionMixin
from mcore_prefix_tree.mcore.seam.latent_attention import TreeLatentAttentionMixin
from mcore_prefix_tree.mcore.seam.layer_specs import with_prefix_tree
from mcore_prefix_tree.mcore.seam.output_layer import EdgeHeadMixin, request_arguments, with_edge_head
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams
from mcore_prefix_tree.mcore.seam.validation import check_model, check_positions
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.upload import upload

# ``auto`` chooses a back-end for this, so that every rank chooses the same: eight answers to each of four prompts.
_TYPICAL = TreeShape(tokens=4 * (2048 + 8 * 1024), segments=36, pairs=4 * (2048**2 // 2 + 8 * 1024 * 2560), depth=1)
# Arguments of a call that are of the packed micro-batch and have no counterpart in the folded one.
_OF_ROWS = ("labels", "loss_mask", "padding_mask", "output_processor", "output_processor_context")

Target = TypeVar("Target")


@dataclass(frozen=True, kw_only=True)
class Inside:
    """How a model folds.

    Attributes:
        attention_backend: a name of :data:`mcore_prefix_tree.attention.BACKENDS`; ``auto`` chooses for the device of
            the first micro-batch.
        fused_head: score ``labels`` a chunk of logits at a time. False expands the logits for them.
        least_fold_ratio: micro-batches that fold no more than this go through the stock model as they are, if its
            attention takes packed rows; a common first token is no gain.
        check_first: compare the first micro-batch with the stock model; see :func:`compare`.
        tolerance: relative error that this comparison allows; None is that of the model's dtype.

    Raises:
        ValueError: on construction, if there is no such back-end.
    """

    attention_backend: str = AUTO
    fused_head: bool = True
    least_fold_ratio: float = 1.02
    check_first: bool = False
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_setting(self.attention_backend)


class Folding:
    """Folds the micro-batches of one model chunk and reports them; a model keeps it as ``model.folding``.

    Attributes:
        settings: how it folds.
        last: report of the last micro-batch; None before the first.
    """

    def __init__(self, model: Any, settings: Inside) -> None:
        self.settings = settings
        self.last: FoldReport | None = None
        self._since: FoldReport | None = None
        self._backend: str | None = None
        self._checked = not settings.check_first
        self._work = work_of(model)
        cores = [module for module in model.modules() if isinstance(module, TreeCoreAttentionMixin)]
        # Megatron's local attention takes no packed_seq_params.
        self._stock_takes_rows = not any(isinstance(core, DotProductAttention) for core in cores)

    def report(self) -> FoldReport | None:
        """Return the sum over the micro-batches since the last call, or None; a trainer calls it once a step."""
        since, self._since = self._since, None
        return since

    def before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        """Fold a call; torch's forward pre-hook.

        Raises:
            NotImplementedError: the call asks for something that folding cannot do; names it.
            ValueError: the call does not describe packed rows.
        """
        call = dict(zip(_positional(type(model)), args, strict=False)) | kwargs
        if isinstance(call.get("packed_seq_params"), TreePackedSeqParams):
            return None  # the caller folded it
        _check_call(call)
        learned = model.position_embedding_type == "learned_absolute"
        rows = read_rows(
            call["input_ids"],
            call["packed_seq_params"],
            device=next(model.parameters()).device,
            pad_to_multiple_of=model.tp_group.size() if model.config.sequence_parallel else 1,
            position_ids=call.get("position_ids") if learned else None,
        )
        check_positions(model, rows.layout.max_path_len)
        if not self._checked:
            compare(model, rows, call, partial(self._folded, model, rows), tolerance=self.settings.tolerance)
            self._checked = True
        if not self._stock_takes_rows or rows.layout.fold_ratio > self.settings.least_fold_ratio:
            return (), self._folded(model, rows, call)
        self._record(FoldReport.of(rows.layout, self._work, left_alone=True))
        return (), _left_alone(model, rows, call)

    def after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the rows' answers; torch's forward hook."""
        params = kwargs.get("packed_seq_params")
        if not isinstance(params, RowsPackedSeqParams):
            return None
        answer = params.finish(output)
        copied = answer.nbytes - output.nbytes if isinstance(output, torch.Tensor) else 0
        self._record(replace(params.report, expanded_bytes=max(0, copied)))
        return answer

    def _record(self, report: FoldReport) -> None:
        self.last = report
        self._since = report if self._since is None else self._since + report

    def _folded(self, model: Any, rows: FoldedRows, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the folded call."""
        metadata = TreeMetadata.from_layout(rows.layout, device=rows.device)
        params = cast(
            "RowsPackedSeqParams",
            RowsPackedSeqParams.from_metadata(
                metadata,
                attention_backend=self._resolved(model, rows.device),
                deterministic_attention=model.config.deterministic_mode,
            ),
        )
        arguments, params.finish, head_rows = _answers(model, rows, call)
        params.report = FoldReport.of(rows.layout, self._work, head_rows=head_rows)
        kept = {name: value for name, value in call.items() if name not in _OF_ROWS}
        return {
            **kept,
            **arguments,
            "input_ids": upload(rows.layout.input_ids, rows.device).long().unsqueeze(0),
            "position_ids": metadata.tree_position_ids.long().unsqueeze(0),
            "packed_seq_params": params,
        }

    def _resolved(self, model: Any, device: torch.device) -> str:
        if self._backend is None:
            name = self.settings.attention_backend
            case = case_of(model.config, device=device, deterministic=model.config.deterministic_mode)
            if name == AUTO:
                on_gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
                name = choose(case, _TYPICAL, device_name=on_gpu).backend
            check_case(name, case, any_order="deterministic_mode=False")
            self._backend = name
        return self._backend


def _answers(
    model: Any, rows: FoldedRows, call: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[Any], Any], int | None]:
    """Return what to ask of the last stage, how to read its output, and the positions that its head computes."""
    processor, labels = call.get("output_processor"), call.get("labels")
    if not model.post_process:
        return {}, (partial(expand_hidden, rows=rows, model=model) if _is_last(model) else _same), None
    if processor is not None and not isinstance(processor, RowLogprobs):
        return {"output_processor": for_rows(processor, call, rows, model)}, _same, rows.layout.logical_tokens
    fused = isinstance(model.output_layer, EdgeHeadMixin)
    if processor is not None:
        if not fused:
            raise ValueError("RowLogprobs needs the fused head: use fold_inside(..., fused_head=True)")
        return request_arguments(processor.request(rows, folded=True)), _same, None
    if labels is not None and fused:
        return request_arguments(RowLogprobs(labels=labels).request(rows, folded=True)), _loss, None
    if labels is not None:
        return {}, lambda logits: loss_of_logits(model, labels, expand(logits, rows, dim=1), rows), None
    return {}, partial(expand, rows=rows, dim=1), None


def _same(output: Any) -> Any:
    return output


def _loss(logprobs: torch.Tensor) -> torch.Tensor:
    return -logprobs.squeeze(-1)


def _left_alone(model: Any, rows: FoldedRows, call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the stock call, on the device."""
    call = call | {
        "input_ids": upload(call["input_ids"], rows.device),
        "packed_seq_params": on_device(call["packed_seq_params"], rows.device),
    }
    processor = call.get("output_processor")
    if isinstance(processor, RowLogprobs):
        del call["output_processor"]
        if model.post_process:
            call |= request_arguments(processor.request(rows, folded=False))
    return call


def _is_last(model: Any) -> bool:
    """Whether no pipeline stage reads what this chunk answers."""
    last_chunk = model.vp_stage is None or model.vp_stage == model.config.virtual_pipeline_model_parallel_size - 1
    return last_chunk and model.pp_group.rank() == model.pp_group.size() - 1


@cache
def _positional(kind: type) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)[1:]  # type: ignore[attr-defined]


def _check_call(call: dict[str, Any]) -> None:
    """Refuse what folding cannot do, by the name of the argument."""
    params = call.get("packed_seq_params")
    reasons = {
        "attention_mask": "the tree is the mask, and it is causal; pass attention_mask=None",
        "decoder_input": "rows are folded by their token ids; pass input_ids",
        "inference_context": "generation reads no packed rows; generate with a model that does not fold inside",
        "inference_params": "generation reads no packed rows; generate with a model that does not fold inside",
    }
    for name, reason in reasons.items():
        if call.get(name) is not None:
            raise NotImplementedError(f"folding inside the model does not support {name}: {reason}")
    if (getattr(params, "local_cp_size", None) or 1) > 1:
        raise NotImplementedError(
            "folding inside the model does not support packed_seq_params.local_cp_size: a tree is not split over "
            "context-parallel ranks"
        )
    if getattr(params, "qkv_format", None) != "thd":
        raise ValueError(
            "folding inside the model takes packed rows: pass packed_seq_params with qkv_format='thd' and cu_seqlens_q "
            f"(found {'no packed_seq_params' if params is None else f'qkv_format={params.qkv_format!r}'})"
        )
    ids = call.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.is_nested or ids.ndim != 2 or ids.shape[0] != 1:
        found = "None" if ids is None else f"{type(ids).__name__} {[] if ids.is_nested else list(ids.shape)}"
        raise ValueError(
            f"folding inside the model takes input_ids [1, T] on every pipeline stage, not {found}: each stage folds "
            "for itself"
        )


def _check(model: Any) -> None:
    """Refuse models that cannot fold, before their first forward."""
    if not isinstance(model, GPTModel):
        raise TypeError(f"fold_inside takes a GPTModel or a provider of one, not {type(model).__name__}")
    check_model(model)
    config = model.config
    for name, module in model.named_modules():
        if isinstance(module, Attention) and not (
            isinstance(module, TreeSelfAttentionMixin | TreeLatentAttentionMixin)
            and isinstance(module.core_attention, TreeCoreAttentionMixin)
        ):
            raise NotImplementedError(
                f"{name} is a {type(module).__name__}, which does not follow a tree; build the model from "
                "with_prefix_tree(spec)"
            )
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        raise NotImplementedError(
            "variable_seq_lengths=False: pipeline stages send folded micro-batches, whose sizes differ; set "
            "variable_seq_lengths=True"
        )
    if getattr(config, "moe_enable_routing_replay", False):
        raise NotImplementedError(
            "moe_enable_routing_replay=True: recorded routes are of rows, and folding does not compare them; set "
            "moe_enable_routing_replay=False"
        )


def fold_inside(target: Target, **settings: Any) -> Target:
    """Let a model fold the packed rows it is given.

    Args:
        target: a ``GPTModel`` that was built from a :func:`with_prefix_tree` spec, or one of its pipeline chunks, in
            whatever wrappers; or a provider of Megatron-Bridge, whose layer spec is then made tree-capable too. It is
            changed in place.
        settings: fields of :class:`Inside`.

    Returns:
        The same object. ``model.folding`` has the reports.

    Raises:
        NotImplementedError: the model has a setting that folding does not support; names it.
        TypeError: this is neither a model nor a provider, or no such field.
        ValueError: the model folds already, or no such back-end.
    """
    inside = Inside(**settings)
    if hasattr(target, "register_pre_wrap_hook"):
        _fold_inside_provider(target, settings)
        return target
    model = unwrap_model(target)
    _check(model)
    if inside.check_first:
        check_comparable(model.config)
    if getattr(model, "folding", None) is not None:
        raise ValueError("this model folds inside already")
    if inside.fused_head and model.post_process and isinstance(model.output_layer, ColumnParallelLinear):
        with_edge_head(model)
    model.folding = Folding(model, inside)
    model.register_forward_pre_hook(model.folding.before, with_kwargs=True)
    model.register_forward_hook(model.folding.after, with_kwargs=True)
    return target


def _fold_inside_provider(provider: Any, settings: dict[str, Any]) -> None:
    given = provider.transformer_layer_spec

    def spec(config: Any, vp_stage: int | None = None) -> Any:
        if not callable(given):
            return with_prefix_tree(given)
        takes_stage = "vp_stage" in inspect.signature(given).parameters
        return with_prefix_tree(given(config, vp_stage=vp_stage) if takes_stage else given(config))

    provider.transformer_layer_spec = spec
    provider.register_pre_wrap_hook(lambda models: [fold_inside(model, **settings) for model in models])


def folding_model(base: type[Any], **settings: Any) -> type[Any]:
    """Return a subclass of ``GPTModel``, or of a subclass of it, whose models fold inside; see :func:`fold_inside`."""

    class FoldingModel(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            fold_inside(self, **settings)

    FoldingModel.__name__ = FoldingModel.__qualname__ = f"Folding{base.__name__}"
    FoldingModel.__doc__ = base.__doc__
    return FoldingModel
