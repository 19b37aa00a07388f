"""Mamba-2 along a tree; ``test_folded_is_unfolded.py`` holds it to the stock layer on each sample by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.in_double import kept_double
from harness.oracles import worst
from harness.seam_models import MAMBA, deep_samples, hybrid, hybrid_twins, tiny_config, with_long_memory
from harness.seam_runs import assert_folded_is_unfolded, batch_of

from mcore_prefix_tree import fold
from mcore_prefix_tree.cpu import state_space
from mcore_prefix_tree.mcore import with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam import mamba
from mcore_prefix_tree.mcore.seam.levels import BranchPoints, Levels
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.tree_layers import follow_trees

if not HAS_HYBRID_MODEL:
    pytest.skip("this megatron-core has no HybridModel", allow_module_level=True)

from megatron.core.ssm import mamba_mixer

from mcore_prefix_tree.cpu.hybrid import hybrid_stack

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    with kept_double():
        yield


def make_twins(pattern: str, **settings: Any) -> tuple[Any, Any]:
    return with_long_memory(hybrid_twins(tiny_config(**MAMBA | settings | {"num_layers": len(pattern)}), pattern))


def mixers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, mamba_mixer.MambaMixer)]


def with_mixer(**changes: Any) -> Any:
    """The layers for a CPU with another mixer in the Mamba layer."""
    layer = hybrid_stack.submodules.mamba_layer
    mixer = dataclasses.replace(layer.submodules.mixer, **changes)
    layer = dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mixer=mixer))
    return dataclasses.replace(hybrid_stack, submodules=dataclasses.replace(hybrid_stack.submodules, mamba_layer=layer))


def test_mixers_without_a_norm_and_with_a_weight_of_every_channel() -> None:
    spec = with_mixer(params={"rmsnorm": False, "D_has_hdim": True})
    stock, tree = (
        hybrid(tiny_config(**MAMBA | {"num_layers": 2}), "MM", one) for one in (spec, with_prefix_tree(spec))
    )
    tree.load_state_dict(stock.state_dict())
    assert_folded_is_unfolded(stock, tree, deep_samples(13))


def test_other_mixers_are_refused() -> None:
    stock, _ = make_twins("M")
    stock.decoder.layers[0].mixer = torch.nn.Linear(1, 1)
    with pytest.raises(NotImplementedError, match=r"support Linear as the mixer of a Mamba layer, in layer 1"):
        follow_trees(stock)


def test_runs_of_branch_points() -> None:
    """Every token of a segment with children, and every token below one, is in the run of its branch point."""
    metadata = batch_of(deep_samples()).packed_seq_params.tree_metadata
    levels, points = Levels.of(metadata), BranchPoints.of(metadata)
    ends = levels.host_order[points.last.numpy()]
    assert len(ends) == sum(level.kept for level in levels.levels) >= 10
    for runs in (points.own, points.below):
        lens = [n for batch in runs.batches for n in batch.is_token.sum(1).tolist()]
        assert sorted(lens, reverse=True) == lens
        assert all(batch.is_token.numel() < 2 * batch.is_token.sum() for batch in runs.batches)
    below = torch.cat([batch.tokens for batch in points.below.batches])[points.slot].numpy()
    assert np.array_equal(below, np.arange(levels.levels[0].end, metadata.padded_size))
    rows = [(batch, *row) for batch, point in per_batch(points.below) for row in enumerate(point.tolist())]
    for batch, row, point in rows:
        own = batch.tokens.view(batch.is_token.shape)[row][batch.is_token[row]].numpy()
        starts = np.intersect1d(own, levels.first)
        assert len(starts) >= 2 or len(ends) > 1
        assert (levels.host_order[levels.above[starts]] == ends[point]).all()


def per_batch(runs: Any) -> Any:
    return zip(runs.batches, runs.points, strict=True)


def test_kernels_get_all_segments_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One convolution and one scan of a row, with the segment of each token, in the types of mamba-ssm."""
    _, tree = make_twins("M")
    batch, calls = batch_of(deep_samples()), []
    scan, convolve = mamba_mixer.mamba_chunk_scan_combined, mamba_mixer.causal_conv1d_fn
    monkeypatch.setattr(
        mamba_mixer,
        "mamba_chunk_scan_combined",
        lambda *given, **named: calls.append((given, named)) or scan(*given, **named),
    )
    rows: list[Any] = []
    monkeypatch.setattr(
        mamba_mixer, "causal_conv1d_fn", lambda *given, **named: rows.append(given) or convolve(*given, **named)
    )
    tree_forward(tree, batch)
    ((given, named),) = calls
    size, metadata = batch.layout.padded_size, batch.packed_seq_params.tree_metadata
    assert [tuple(one.shape) for one in given[:5]] == [
        (1, size, 4, 8),
        (1, size, 4),
        (4,),
        (1, size, 2, 6),
        (1, size, 2, 6),
    ]
    assert named["seq_idx"].dtype is torch.int32
    lens = np.concatenate([level.lens for level in Levels.of(metadata).levels])
    assert named["seq_idx"][0].bincount().tolist() == lens.tolist()
    ((row, weight, _),) = rows
    assert tuple(row.shape) == (1, len(weight), size + 3 * len(lens))
    assert row.stride(1) == 1


def test_states_of_branch_points_are_fp32_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tree = make_twins("M", params_dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "to", torch._C.TensorBase.to)  # not kept_double's
    seen, original = [], mamba._states
    monkeypatch.setattr(mamba, "_states", lambda *given: seen.append(original(*given)) or seen[0])
    out = tree_forward(tree, batch_of(deep_samples()))
    assert (seen[0][0].dtype, out.dtype) == (torch.float32, torch.bfloat16)


def recurrence(x: Any, dt: Any, decay: Any, b: Any, c: Any, skip: Any, sequence: Any) -> torch.Tensor:
    """The definition of the state space model, token by token."""
    heads = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(heads, 2), c.repeat_interleave(heads, 2)
    out, state = [], torch.zeros(*x.shape[0:1], *x.shape[2:], b.shape[3], dtype=x.dtype)
    for t in range(x.shape[1]):
        if t and sequence[0, t] != sequence[0, t - 1]:
            state = torch.zeros_like(state)
        written = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(2)
        state = state * (dt[:, t] * decay).exp()[..., None, None] + written
        out.append((state * c[:, t].unsqueeze(2)).sum(-1) + skip[:, None] * x[:, t])
    return torch.stack(out, 1)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_scan_of_a_cpu_is_the_recurrence(chunk: int) -> None:
    generator = torch.Generator().manual_seed(chunk)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, raw, log, b, c, skip = draw(1, 41, 4, 3), draw(1, 41, 4), draw(4), draw(1, 41, 2, 5), draw(1, 41, 2, 5), draw(4)
    sequence = torch.tensor([[0] * 5 + [1] + [2] * 20 + [3] * 15], dtype=torch.int32)
    given = (x, raw, log, b, c, skip)
    weight = draw(1, 41, 4, 3).detach()
    wanted = recurrence(x, F.softplus(raw), -log.exp(), b, c, skip, sequence)
    found = state_space._scan(x, F.softplus(raw), -log.exp(), b, c, chunk, D=skip, seq_idx=sequence)
    assert worst(found.detach(), wanted.detach()) < 1e-13
    for ours, own in zip(*(torch.autograd.grad((out * weight).sum(), given) for out in (found, wanted)), strict=True):
        assert worst(ours, own) < 1e-12


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_mixer, "causal_conv1d_fn", None)
    with pytest.raises(ImportError, match=r"^Mamba layers need causal-conv1d; pip install causal-conv1d"):
        make_twins("-M")
    monkeypatch.setattr(mamba_mixer, "HAVE_MAMBA_SSM", False)
    with pytest.raises(ImportError, match=r"need mamba-ssm and causal-conv1d; pip install mamba-ssm causal-conv1d"):
        hybrid(tiny_config(**MAMBA | {"num_layers": 1}), "M", with_prefix_tree(hybrid_stack))


def test_einops_is_not_needed_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_mixer, "HAVE_EINOPS", False)
    stand_ins = {name: value for _, name, value in state_space.stand_ins()}
    monkeypatch.undo()
    assert stand_ins["HAVE_EINOPS"] is True
    stock, _ = make_twins("M")
    ids = torch.arange(20).unsqueeze(0)
    wanted = stock(ids, ids, None)
    monkeypatch.setattr(mamba_mixer, "rearrange", stand_ins["rearrange"])
    assert torch.equal(stock(ids, ids, None), wanted)
    with pytest.raises(NotImplementedError, match="needs einops; pip install einops"):
        stand_ins["rearrange"](ids, "a b -> b a")


def test_kernels_of_a_gpu_are_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tree = make_twins("M")
    batch = MicroBatch.from_layout(fold(deep_samples()), deterministic_attention=True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(
        NotImplementedError, match=r"^layer 1 is Mamba, whose kernels add gradients up in any order; set"
    ):
        mixers(tree)[0]._ssm_training(torch.zeros(batch.layout.padded_size, 1, 4), batch.packed_seq_params)


def test_other_path_of_upstream_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"use_mamba_mem_eff_path=False: upstream's layer 1 takes no packed"):
        make_twins("M", use_mamba_mem_eff_path=False)


def test_more_than_one_row_is_refused() -> None:
    _, tree = make_twins("M")
    batch = batch_of(deep_samples())
    rows = torch.zeros(batch.layout.padded_size, 2, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="a folded micro-batch has batch size 1, not 2"):
        mixers(tree)[0](rows, packed_seq_params=batch.packed_seq_params)
