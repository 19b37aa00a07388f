"""TransformerEngine's ``fused_attn`` as its documentation has it, on a CPU, to run the cascade's kernel."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import torch
from plain_kernel import Plain

from mcore_prefix_tree.attention import AttentionOptions
from mcore_prefix_tree.attention.cascade.kernels import QKV, Result
from mcore_prefix_tree.attention.cascade.sequences import Sequences


class FusedAttention:
    """Both passes, from cumulative lengths only; rejects inputs that a kernel of packed sequences cannot read.

    Attributes:
        signatures: of the released functions, which calls then have to fit; empty to take any.
        calls: how often each pass ran.
    """

    FusedAttnBackend = {"F16_arbitrary_seqlen": 1}  # noqa: RUF012

    def __init__(self, signatures: dict[str, inspect.Signature] | None = None) -> None:
        self.signatures = signatures or {}
        self.calls = {"fused_attn_fwd": 0, "fused_attn_bwd": 0}

    def fused_attn_fwd(self, **given):
        given = self._checked("fused_attn_fwd", given)
        assert given.is_training, "without it there are no statistics"
        out, lse = Plain().forward(QKV(given.q, given.k, given.v), _sequences(given), _options(given))
        return out, [lse.T.contiguous().unsqueeze(-1), torch.zeros(2, dtype=torch.int64)]

    def fused_attn_bwd(self, **given):
        given = self._checked("fused_attn_bwd", given)
        assert given.dqkv_layout == "thd_thd_thd"
        assert given.do_format == "thd"
        lse, random_state = given.aux_ctx_tensors
        assert lse.shape == (*given.q.shape[:2], 1)
        assert lse.is_contiguous()
        assert (random_state.shape, random_state.dtype) == ((2,), torch.int64)
        tensors = (given.d_o, given.q, given.k, given.v, given.o, lse[..., 0].T)
        assert all(tensor.is_contiguous() for tensor in tensors[:-1])
        grad_out, query, key, value, *result = tensors
        grads = Plain().backward(grad_out, QKV(query, key, value), Result(*result), _sequences(given), _options(given))
        return *grads, None, None

    def _checked(self, name, given):
        self.calls[name] += 1
        if name in self.signatures:
            self.signatures[name].bind(**given)
        given = SimpleNamespace(**given)
        assert given.qkv_layout == "thd_thd_thd"
        assert given.o_format == "thd"
        assert given.fused_attention_backend == 1
        assert given.fake_dtype == given.q.dtype
        for tensor in (given.q, given.k, given.v):
            assert tensor.ndim == 3
            assert tensor.is_contiguous()
        for side, tensor in (("q", given.q), ("kv", given.k)):
            cumulative = getattr(given, f"cu_seqlens_{side}")
            assert cumulative.dtype == torch.int32
            assert torch.equal(cumulative, getattr(given, f"cu_seqlens_{side}_padded"))
            assert cumulative[-1] == len(tensor)
            assert cumulative.diff().max() <= getattr(given, f"max_seqlen_{side}")
        return given


def _sequences(given):
    causal = {"padding_causal": True, "padding": False}[given.attn_mask_type]
    assert given.window_size == ((-1, 0) if causal else (-1, -1))
    lens = (given.cu_seqlens_q.diff(), given.cu_seqlens_kv.diff())
    return Sequences.of(*(one.long().numpy() for one in lens), causal=causal, device=given.q.device)


def _options(given):
    return AttentionOptions(softmax_scale=given.attn_scale)


def install(monkeypatch, fused_attention):
    """In the place of the module that TransformerEngine's Python files have it in."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.cpp_extensions")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "fused_attn", fused_attention, raising=False)
