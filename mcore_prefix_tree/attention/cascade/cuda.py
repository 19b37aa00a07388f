"""Unmodified varlen FlashAttention kernels of a GPU, called below their autograd functions for log-sum-exp."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
from mcore_prefix_tree.attention.cascade.kernels import QKV, Result
from mcore_prefix_tree.attention.cascade.sequences import Sequences
from mcore_prefix_tree.attention.imports import import_fault

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD_DIM = 256


@cache
def _is_missing(package: str, major: int, minor: int) -> str | None:
    """Return why a package cannot be used, if it is missing or older than a version."""
    try:
        installed = version(package)
    except PackageNotFoundError:
        return f"device=cuda without {package}, which is not installed"
    if tuple(int(part) for part in installed.split(".")[:2]) < (major, minor):
        return f"device=cuda with {package} {installed} (needs {major}.{minor} or newer)"
    return None


@cache
def _flash_attn_interface_is_missing() -> bool:
    return find_spec("flash_attn_interface") is None


def _does_not_import(module: str) -> str | None:
    """Return why a package that is installed cannot be used; asked last, because an import takes seconds."""
    fault = import_fault(module)
    return None if fault is None else f"device=cuda with a {module.partition('.')[0]} that does not import ({fault})"


def _common_refusal(case: Case, oldest: tuple[int, int], newest: tuple[int, int]) -> str | None:
    """Name a case that no kernel supports: another GPU generation or dtype, a head above 256; None if supported."""
    if case.capability is None:
        return f"device={case.device.type} (it is a CUDA kernel)"
    if not oldest <= case.capability <= newest:
        return f"a GPU of compute capability {case.capability[0]}.{case.capability[1]}"
    if case.dtype not in _DTYPES:
        return f"dtype={case.dtype} (it takes bfloat16 and float16)"
    if max(case.head_dim, case.value_dim) > _LARGEST_HEAD_DIM:
        return f"head_dim={max(case.head_dim, case.value_dim)} (at most {_LARGEST_HEAD_DIM})"
    return None


class TorchFlash:
    """FlashAttention-2 inside torch."""

    name: str = "torch"
    head_dim_multiple: int | None = 8

    def refusal(self, case: Case) -> str | None:
        """Refuse determinism unless torch's own switch is on: without it, dQ is added up in any order."""
        if case.needs_grad and case.options.deterministic and not _torch_is_deterministic():
            return "deterministic=True (needs torch.use_deterministic_algorithms(True))"
        return _common_refusal(case, (8, 0), (99, 0))

    def forward(self, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
        """See :class:`VarlenKernel`; ``[Q, H, D], [N, K, D], [N, K, W]``."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *qkv, *sequences.lengths, 0.0, sequences.causal, False, scale=options.softmax_scale
        )
        return Result(out, lse)

    def backward(
        self, grad_out: torch.Tensor, qkv: QKV, result: Result, sequences: Sequences, options: AttentionOptions
    ) -> QKV:
        """See :class:`VarlenKernel`; ``grad_out`` is ``[Q, H, W]``."""
        grads = torch.ops.aten._flash_attention_backward(
            grad_out,
            *qkv,
            *result,
            *sequences.lengths,
            0.0,
            sequences.causal,
            torch.zeros(2, dtype=torch.uint64, device=grad_out.device),  # of dropout, like the next
            torch.empty(0, device=grad_out.device),
            scale=options.softmax_scale,
        )
        return QKV(*grads)


def _torch_is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


class FlashAttention2:
    """The package ``flash-attn`` 2."""

    name: str = "flash-attn 2"
    head_dim_multiple: int | None = 8

    def refusal(self, case: Case) -> str | None:
        """Refuse versions before 2.7, the first whose statistics have one number per query and head."""
        reason = _is_missing("flash-attn", 2, 7) or _common_refusal(case, (8, 0), (99, 0))
        return reason or _does_not_import("flash_attn.flash_attn_interface")

    def forward(self, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
        """See :class:`VarlenKernel`; ``[Q, H, D], [N, K, D], [N, K, W]``."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, *_ = _flash_attn_varlen_forward(
            *qkv, *sequences.lengths, 0.0, options.softmax_scale, causal=sequences.causal
        )
        return Result(out, lse)

    def backward(
        self, grad_out: torch.Tensor, qkv: QKV, result: Result, sequences: Sequences, options: AttentionOptions
    ) -> QKV:
        """See :class:`VarlenKernel`; ``grad_out`` is ``[Q, H, W]``."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        grads = QKV(*map(torch.empty_like, qkv))
        _flash_attn_varlen_backward(
            grad_out,
            *qkv,
            *result,
            *grads,
            *sequences.lengths,
            0.0,
            options.softmax_scale,
            sequences.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=options.deterministic,
        )
        return grads


class FlashAttention3:
    """The ``flash_attn_interface`` that FlashAttention's ``hopper`` folder installs."""

    name: str = "FlashAttention-3"
    head_dim_multiple: int | None = 8

    def refusal(self, case: Case) -> str | None:
        """Refuse all GPUs but Hopper, and determinism for the largest heads, which have no such backward."""
        if _flash_attn_interface_is_missing():
            return "device=cuda without flash_attn_interface, which is not installed"
        if case.needs_grad and case.options.deterministic and max(case.head_dim, case.value_dim) > 192:
            return "deterministic=True with a head_dim above 192"
        return _common_refusal(case, (9, 0), (9, 0)) or _does_not_import("flash_attn_interface")

    def forward(self, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
        """See :class:`VarlenKernel`; ``[Q, H, D], [N, K, D], [N, K, W]``."""
        from flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(
            *qkv,
            cu_seqlens_q=sequences.cu_q,
            cu_seqlens_k=sequences.cu_k,
            max_seqlen_q=sequences.max_q,
            max_seqlen_k=sequences.max_k,
            softmax_scale=options.softmax_scale,
            causal=sequences.causal,
        )
        return Result(out, lse)

    def backward(
        self, grad_out: torch.Tensor, qkv: QKV, result: Result, sequences: Sequences, options: AttentionOptions
    ) -> QKV:
        """See :class:`VarlenKernel`; ``grad_out`` is ``[Q, H, W]``."""
        from flash_attn_interface import _flash_attn_backward

        grads = QKV(*map(torch.empty_like, qkv))
        _flash_attn_backward(
            grad_out,
            *qkv,
            *result,
            sequences.cu_q,
            sequences.cu_k,
            None,
            None,
            sequences.max_q,
            sequences.max_k,
            *grads,
            options.softmax_scale,
            sequences.causal,  # by place: its name changed between releases
            deterministic=options.deterministic,
        )
        return grads


class FlashAttention4:
    """The varlen kernels of ``flash-attn-4``, from PyPI; unlike its block-sparse ones, deterministic on Hopper too."""

    name: str = "FlashAttention-4"
    head_dim_multiple: int | None = 8

    def refusal(self, case: Case) -> str | None:
        """Refuse all GPUs but Hopper and Blackwell, and on Blackwell heads above 128."""
        reason = _is_missing("flash-attn-4", 4, 0) or _common_refusal(case, (9, 0), (10, 9))
        if reason is None and case.capability >= (10, 0) and max(case.head_dim, case.value_dim) > 128:  # type: ignore[operator]
            return f"head_dim={max(case.head_dim, case.value_dim)} (at most 128 on Blackwell)"
        return reason or _does_not_import("flash_attn.cute.interface")

    def forward(self, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
        """See :class:`VarlenKernel`; ``[Q, H, D], [N, K, D], [N, K, W]``."""
        from flash_attn.cute.interface import _flash_attn_fwd

        # It launches in the stream of the current device.
        with torch.cuda.device_of(qkv.query):
            out, lse, *_ = _flash_attn_fwd(*qkv, **_named(sequences, options), return_lse=True)
        return Result(out, lse)

    def backward(
        self, grad_out: torch.Tensor, qkv: QKV, result: Result, sequences: Sequences, options: AttentionOptions
    ) -> QKV:
        """See :class:`VarlenKernel`; ``grad_out`` is ``[Q, H, W]``."""
        from flash_attn.cute.interface import _flash_attn_bwd

        with torch.cuda.device_of(grad_out):
            grads = _flash_attn_bwd(
                *qkv,
                result.out,
                grad_out,
                result.lse,
                **_named(sequences, options),
                deterministic=options.deterministic,
            )
        return QKV(*grads)


def _named(sequences: Sequences, options: AttentionOptions) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    lengths = dict(zip(names, sequences.lengths, strict=True))
    return lengths | {"softmax_scale": options.softmax_scale, "causal": sequences.causal}


class TransformerEngine:
    """The fused attention (cuDNN's) that TransformerEngine's ``DotProductAttention`` runs, without that module.

    The module neither returns a log-sum-exp nor takes one in its backward. ``fused_attn_fwd`` and ``fused_attn_bwd``,
    which it calls, do both, and TransformerEngine's context parallelism gives them merged ones, as the cascade does.
    """

    name: str = "TransformerEngine"
    head_dim_multiple: int | None = 8

    def refusal(self, case: Case) -> str | None:
        """Reject large heads, and determinism on Hopper: memory would grow with the square of the lengths."""
        reason = _is_missing("transformer_engine", 2, 17) or _common_refusal(case, (9, 0), (11, 0))
        if reason is None and max(case.head_dim, case.value_dim) > 128:
            return f"head_dim={max(case.head_dim, case.value_dim)} (at most 128)"
        if reason is None and case.needs_grad and case.options.deterministic and case.capability == (9, 0):
            # Observed by TransformerEngine, which switches it off then: attention/dot_product_attention/utils.py.
            return "deterministic=True (its memory would grow with the square of the sequences' lengths)"
        return reason or _does_not_import("transformer_engine.pytorch.cpp_extensions")

    def forward(self, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> Result:
        """See :class:`VarlenKernel`, ``[Q, H, D]``; raise RuntimeError if statistics are not log-sum-exps."""
        from transformer_engine.pytorch.cpp_extensions import fused_attn

        out, (lse, *_) = fused_attn.fused_attn_fwd(
            is_training=True,  # else there are no statistics
            **self._common(fused_attn, qkv, sequences, options),
        )
        if lse.ndim != 3:
            raise RuntimeError(
                f"cascade needs statistics [tokens, heads, 1] of TransformerEngine, not {tuple(lse.shape)}: update "
                "cuDNN, or name another attention backend"
            )
        return Result(out, lse[..., 0].T.contiguous())

    def backward(
        self, grad_out: torch.Tensor, qkv: QKV, result: Result, sequences: Sequences, options: AttentionOptions
    ) -> QKV:
        """See :class:`VarlenKernel`; ``grad_out`` is ``[Q, H, W]``."""
        from transformer_engine.pytorch.cpp_extensions import fused_attn

        random_state = torch.zeros(2, dtype=torch.int64, device=grad_out.device)  # of dropout
        grads = fused_attn.fused_attn_bwd(
            o=result.out.contiguous(),
            d_o=grad_out.contiguous(),
            aux_ctx_tensors=[result.lse.T.contiguous().unsqueeze(-1), random_state],
            do_format="thd",
            dqkv_layout="thd_thd_thd",
            deterministic=options.deterministic,
            **self._common(fused_attn, qkv, sequences, options),
        )
        return QKV(*grads[:3])

    def _common(self, fused_attn: Any, qkv: QKV, sequences: Sequences, options: AttentionOptions) -> dict[str, Any]:
        """Return arguments of both passes: sequences packed one after the other, a causal mask or none, no dropout."""
        query, key, value = (one.contiguous() for one in qkv)
        return {
            "q": query,
            "k": key,
            "v": value,
            "fake_dtype": query.dtype,
            # cuDNN plans anew for another length: powers of two are few.
            "max_seqlen_q": _next_power_of_two(sequences.max_q),
            "max_seqlen_kv": _next_power_of_two(sequences.max_k),
            "cu_seqlens_q": sequences.cu_q,
            "cu_seqlens_kv": sequences.cu_k,
            "cu_seqlens_q_padded": sequences.cu_q,
            "cu_seqlens_kv_padded": sequences.cu_k,
            "fused_attention_backend": fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": options.softmax_scale,
            "qkv_layout": "thd_thd_thd",
            "o_format": "thd",
            "attn_mask_type": "padding_causal" if sequences.causal else "padding",
            "window_size": (-1, 0) if sequences.causal else (-1, -1),
        }


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
