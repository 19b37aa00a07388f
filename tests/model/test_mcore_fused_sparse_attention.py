"""Upstream's kernels of sparse attention take the keys of a tree: upstream's own calls, with kernels in torch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from harness.marks import mostly_in_ci
from harness.seam_models import deep_samples, tiny_config, twins
from harness.seam_runs import SPARSE

from mcore_prefix_tree import fold
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.release import HAS_SPARSE_ATTENTION
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch

if not HAS_SPARSE_ATTENTION:
    pytest.skip("sparse attention follows a tree since megatron-core 0.19", allow_module_level=True)

from megatron.core.transformer.experimental_attention_variant import dsa_cudnn_kernels, dsa_tilelang_kernels
from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]

# The only sizes that the kernels have: those of DeepSeek-V3.2 and GLM-5.
SIZES = SPARSE | {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "dsa_indexer_head_dim": 128, "num_layers": 1}
BACKENDS = ("tilelang", "cudnn")


def attend(query: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Compute as both kernels do: out ``[P, H, 512]`` and log-sum-exps of ``[P, H, 576]``, ``[P, 576]``, ``[P, T]``."""
    gathered = latents.float()[keys.clamp(min=0).long()]
    scores = torch.einsum("phd,ptd->pht", query.float(), gathered) * scale
    scores = scores.masked_fill((keys < 0)[:, None], -torch.inf)
    out = torch.einsum("pht,ptv->phv", scores.softmax(-1), gathered[..., :512])
    return out.to(query.dtype), scores.logsumexp(-1)


def check(query: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor) -> None:
    """Check what both kernels read without looking."""
    assert query.dtype == latents.dtype == torch.bfloat16
    assert keys.dtype == torch.int32
    assert all(one.is_contiguous() for one in (query, latents, keys))
    assert query.shape[-1] == latents.shape[-1] == 576
    assert -1 <= int(keys.min()) <= int(keys.max()) < len(latents)
    rows = [row[row >= 0].tolist() for row in keys]
    assert all(row and len(row) == len(set(row)) for row in rows)


class Kernels:
    """Both back-ends' kernels, in torch, which check their inputs and count their calls."""

    calls = 0

    def apply(self, query: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor, scale: float) -> Any:
        """``SparseMLA.apply`` of TileLang's: 64 keys at a time, -1 anywhere, heads a power of two above 15."""
        assert query.ndim == latents.ndim == keys.ndim == 4
        assert len(query) == latents.shape[2] == keys.shape[2] == 1
        assert keys.shape[3] % 64 == 0
        assert query.shape[2] == 16
        check(query[0], latents[0, :, 0], keys[0, :, 0])
        self.calls += 1
        return tuple(one[None] for one in attend(query[0], latents[0, :, 0], keys[0, :, 0], scale))

    def flash_mla_sparse_fwd(self, query: Any, latents: Any, keys: Any, scale: float, **others: Any) -> Any:
        """FlashMLA's: 512 keys at a time, ascending, the first ``topk_length`` of a row."""
        check(query, latents[:, 0], keys[:, 0])
        assert keys.shape[2] % 512 == 0
        count, place = others["topk_length"], torch.arange(keys.shape[2])
        assert torch.equal(keys[:, 0] >= 0, place < count[:, None])
        assert all(row[:end].tolist() == sorted(row[:end].tolist()) for row, end in zip(keys[:, 0], count, strict=True))
        assert bool((others["attn_sink"] == -torch.inf).all())
        self.calls += 1
        out, lse = attend(query, latents[:, 0], keys[:, 0], scale)
        return out, None, lse

    def sparse_attention_backward_wrapper(self, *given: Any, softmax_scale: float, topk_length: Any) -> Any:
        """cuDNN's gradients; keys past ``topk_length`` are any."""
        query, latents, _, grad, _, _, keys = given
        assert keys.min() >= 0
        keys = keys.masked_fill(torch.arange(keys.shape[1]) >= topk_length[:, None], -1)
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in (query, latents)]
            out, _ = attend(*leaves, keys, softmax_scale)
            found = torch.autograd.grad(out, leaves, grad)
        return dict(zip(("dq", "dkv"), found, strict=True))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(tilelang_dsa, "SparseMLA", found)
    monkeypatch.setattr(dsa_cudnn_kernels, "_flash_mla_sparse_fwd", found.flash_mla_sparse_fwd)
    monkeypatch.setattr(dsa_cudnn_kernels, "_cudnn_dsa", found)
    monkeypatch.setattr(dsa_cudnn_kernels, "_device_sm", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: contextlib.nullcontext())
    return found


def run(model: Any, **options: Any) -> list[torch.Tensor]:
    layout = fold(deep_samples(3))
    model.zero_grad()
    out = tree_forward(model, MicroBatch.from_layout(layout, **options))
    out.float().square().mean().backward()
    return [out.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("topk", mostly_in_ci(130, of=[12, 130, 2048]), ids=lambda topk: f"{topk} keys")
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_take_the_chosen_keys(kernels: Kernels, backend: str, topk: int) -> None:
    _, tree = twins(tiny_config(torch.bfloat16, bf16=True, **SIZES | {"dsa_indexer_topk": topk}))
    wanted = run(tree)
    assert kernels.calls == 0
    tree.config.dsa_kernel_backend = backend
    found = run(tree)
    assert kernels.calls == 1
    assert len(found) == len(wanted) > 10
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_need_torch(kernels: Kernels, backend: str) -> None:
    """Kernels that add gradients up in any order do not run where the same bits are asked for."""
    _, tree = twins(tiny_config(torch.bfloat16, bf16=True, **SIZES))
    wanted = run(tree)
    tree.config.dsa_kernel_backend = backend
    assert all(map(torch.equal, run(tree, deterministic_attention=True), wanted))
    assert kernels.calls == 0


def test_kernels_decline_other_sizes(kernels: Kernels) -> None:
    _, tree = twins(tiny_config(torch.bfloat16, bf16=True, **SPARSE | {"num_layers": 1}))
    wanted = run(tree)
    tree.config.dsa_kernel_backend = "tilelang"
    assert all(map(torch.equal, run(tree), wanted))
    assert kernels.calls == 0


def test_names_of_upstreams_back_ends() -> None:
    assert all(hasattr(one, "run_fused_absorbed_sparse_attention") for one in (dsa_cudnn_kernels, dsa_tilelang_kernels))
