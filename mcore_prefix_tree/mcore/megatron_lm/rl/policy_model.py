"""The model of a folded ``train_rl.py``: tree-capable, and it folds the rows whose log-probabilities the loop asks for.

Legend: b rows of a call, s tokens of each with its padding; R rows without padding; T = b * s; P folded tokens.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.training import get_args, get_tokenizer, print_rank_0

from mcore_prefix_tree.arguments.flags import readable_arguments
from mcore_prefix_tree.arguments.refusals import check_rl_arguments
from mcore_prefix_tree.mcore.megatron_lm.argument_checks import config_for_folding
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import resolve_backend_from_args
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import check_layers
from mcore_prefix_tree.mcore.megatron_lm.providers import tree_model
from mcore_prefix_tree.mcore.packed.answers import RowLogprobs, loss_of_logits
from mcore_prefix_tree.mcore.packed.packed_rows import FoldedRows, PackedRows, RowsPackedSeqParams
from mcore_prefix_tree.mcore.seam.all_tokens import padding_multiple
from mcore_prefix_tree.mcore.seam.output_layer import request_arguments
from mcore_prefix_tree.mcore.seam.packed_seq_params import TreePackedSeqParams
from mcore_prefix_tree.mcore.seam.tree_layers import check_follows
from mcore_prefix_tree.mcore.seam.validation import check_draws, check_positions
from mcore_prefix_tree.sample import Sample

Int64Array = npt.NDArray[np.int64]


@readable_arguments()
def rl_model_provider(*ends: bool, config: Any = None, **stage: Any) -> Any:
    """Return the model of the arguments, as :func:`~mcore_prefix_tree.mcore.megatron_lm.providers.tree_model`."""
    args = get_args()
    check_rl_arguments(args)
    check_layers(args)
    # The size of the loop's micro-batches without folding. So a step always fits, and needs no more memory.
    args.prefix_tree_max_tokens = args.micro_batch_size * args.seq_length
    checked = config_for_folding(args)
    backend = resolve_backend_from_args(args, checked, partial(_typical_group, args), say=print_rank_0)
    args.prefix_tree_attention_backend, deterministic = backend, args.prefix_tree_deterministic_attention
    model = tree_model(args, config or checked, *ends, **stage)
    fold_call = partial(_fold_call, backend=backend, deterministic=deterministic)
    model.register_forward_pre_hook(fold_call, with_kwargs=True)
    model.register_forward_hook(_finish_call, with_kwargs=True)
    return model


def _typical_group(args: argparse.Namespace) -> list[Sample]:
    """Return a made-up group whose prompt is half of each trajectory, for a back-end to be chosen by."""
    # There are no rollouts yet, and stages of a pipeline cannot agree on anything inside a step.
    half = max(1, args.seq_length // 2)
    return [
        Sample(tokens=[0] * half + [member + 1] * half, source="a typical trajectory")
        for member in range(args.grpo_group_size)
    ]


class LabelLogprobs:
    """Logits ``[..., s, V]`` that hold only the normalised entry of each position's label.

    ``get_logprobs`` gathers the labels' logits and takes off the logarithm of their normaliser. For normalised
    logits that is 0, so nothing of size V is needed. Any other operation on them raises an error.
    """

    def __init__(self, logprobs: torch.Tensor, labels: torch.Tensor) -> None:
        """Take the log-probabilities of labels, and the labels, int64; ``[..., s]`` each."""
        self._logprobs, self._labels = logprobs, labels

    @property
    def dtype(self) -> torch.dtype:
        return self._logprobs.dtype

    def __getitem__(self, key: Any) -> LabelLogprobs:
        """Cut the rows and positions; the vocabulary is taken in full."""
        if not isinstance(key, tuple) or len(key) != self._logprobs.ndim + 1 or key[-1] != slice(None):
            raise _unknown("indexing")
        return LabelLogprobs(self._logprobs[key[:-1]], self._labels[key[:-1]])

    def __iter__(self) -> Iterator[LabelLogprobs]:
        return map(LabelLogprobs, self._logprobs, self._labels)

    def float(self) -> LabelLogprobs:
        return LabelLogprobs(self._logprobs.float(), self._labels)

    def gather(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Return ``[..., s, 1]``; NaN for a token that is not the label."""
        if dim != -1:
            raise _unknown(f"gather(dim={dim})")
        found = torch.where(index.squeeze(-1) == self._labels, self._logprobs, float("nan"))
        return found.unsqueeze(-1)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer torch's functions that ``selective_log_softmax`` calls."""
        logits, *rest = args
        if function is torch.gather:
            return logits.gather(*rest, **(kwargs or {}))
        if function is torch.logsumexp:
            return torch.zeros_like(logits._logprobs)
        if function is torch.nn.functional.log_softmax:
            return logits
        raise _unknown(getattr(function, "__name__", str(function)))


def _unknown(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"prefix-tree training answers get_logprobs of Megatron-LM with log-probabilities, but {what} asks for logits; "
        "this checkout computes them otherwise than core_v0.19.0"
    )


def _fold_call(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, backend: str, deterministic: bool
) -> tuple[tuple[()], dict[str, Any]] | None:
    """Exchange the arguments of a call of ``get_logprobs`` for those of its folded rows, and of no other call."""
    call = dict(zip(list(inspect.signature(type(model).forward).parameters)[1:], args, strict=False)) | kwargs
    params: Any = call.get("packed_seq_params")
    folded_already = isinstance(params, TreePackedSeqParams)
    if folded_already or call.get("inference_context") is not None or getattr(params, "qkv_format", "") != "thd":
        return None
    ids = call["input_ids"]
    rows = read_rows(ids, params.cu_seqlens_q, pad=get_tokenizer().pad)
    check_positions(model, int(rows.length.max(initial=1)))
    check_follows(model)
    check_draws(model)
    folded = rows.fold(pad_to_multiple_of=padding_multiple(model))
    arguments = folded.make_call(backend, deterministic_attention=deterministic)
    arguments["attention_mask"] = None
    if model.post_process:
        labels = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
        asked, arguments["packed_seq_params"].finish = _asked(model, folded, labels)
        arguments |= asked
    return (), arguments


def _finish_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    params = kwargs.get("packed_seq_params")
    return params.finish(output) if isinstance(params, RowsPackedSeqParams) else None


def _asked(
    model: Any, rows: FoldedRows, labels: torch.Tensor
) -> tuple[dict[str, Any], Callable[[torch.Tensor], LabelLogprobs]]:
    """Return the last stage's arguments for labels int64 ``[b, s]``, and the function that converts its answer."""
    flat, is_fused = labels.reshape(1, -1), get_args().prefix_tree_fused_head

    def answer(output: torch.Tensor) -> LabelLogprobs:
        """Return the answer from log-probabilities ``[1, T]`` of the fused head, or logits ``[1, P, V / tp]``."""
        logprobs = output if is_fused else -loss_of_logits(output, flat, rows, model)
        # In the dtype that the stock model has its logits in: the loop compares them with those of training.
        return LabelLogprobs(logprobs.reshape(labels.shape).to(model.config.params_dtype), labels)

    request = (
        request_arguments(RowLogprobs(labels=flat).request(rows)) if is_fused else {"runtime_gather_output": False}
    )
    return request, answer


def read_rows(ids: torch.Tensor, borders: torch.Tensor, *, pad: int) -> PackedRows:
    """Read the rows of a call on the host; padding at the end of a row is cut to one token, which no loss reads.

    ``ids`` are int64 ``[b, s]``; ``borders``, int32, are the positions at which the sequences of one row begin, and s.
    """
    host = ids.cpu().numpy().astype(np.int64)
    starts, lengths = [], []
    for number, row in enumerate(host):
        for start, end in pairwise(borders.tolist()):
            if end > start:
                tokens = np.flatnonzero(row[start:end] != pad)
                last = int(tokens[-1]) if len(tokens) else -1
                starts.append(number * ids.shape[1] + start)
                lengths.append(min(last + 2, end - start))
    return PackedRows(
        ids=host.reshape(-1),
        row=np.arange(len(starts)),
        start=np.array(starts, dtype=np.int64),
        length=np.array(lengths, dtype=np.int64),
        device=ids.device,
    )
