"""The cascade equals the reference through every kernel of the CPU, and a kernel keeps to its contract."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from attention_cases import assert_close_to_reference, case_of, random_inputs, results
from fused_attention import FusedAttention, install
from harness.oracles import metadata_of, random_forest, sample_lists, worst
from hypothesis import given
from hypothesis import strategies as st
from plain_kernel import KERNELS, Plain

from mcore_prefix_tree import TreeMetadata, fold
from mcore_prefix_tree.attention import AttentionOptions, reference
from mcore_prefix_tree.attention.cascade import (
    CPU_KERNELS,
    CUDA_KERNELS,
    attention_through,
    cascade,
    choose_kernel,
    cuda,
)
from mcore_prefix_tree.attention.cascade.cuda import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    TransformerEngine,
)
from mcore_prefix_tree.attention.cascade.kernels import QKV, Result
from mcore_prefix_tree.attention.cascade.sequences import Sequences, build_plan

NAMES = [kernel.name for kernel in KERNELS]


def through(kernel):
    return lambda *arguments: attention_through(kernel, *arguments)


@pytest.fixture(params=KERNELS, ids=NAMES)
def kernel(request):
    return request.param


# The contract of a kernel, spelled out: the statistics of a sum over more keys than it is shown.


@pytest.mark.parametrize("causal", [True, False])
def test_backward_from_the_statistics_of_more_keys(kernel, causal):
    """One query run sees two key runs. Its exact gradients are those of both together; each call gives its part."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(7, heads, 6, generator=generator).double() for heads in (4, 2, 2, 4))
    other_key, other_value = (torch.randn(5, 2, 6, generator=generator).double() for _ in range(2))
    options = AttentionOptions(softmax_scale=0.4)
    inputs = [one.requires_grad_() for one in (query, key, value, other_key, other_value)]

    def scores(keys):
        return 0.4 * torch.einsum("ihd,jhd->hij", query, keys.repeat_interleave(2, dim=1))

    both = torch.cat([scores(key), scores(other_key)], dim=-1)
    if causal:
        both = both.masked_fill(torch.ones(7, 12, dtype=torch.bool).triu(1) & (torch.arange(12) < 7), float("-inf"))
    values = torch.cat([value, other_value]).repeat_interleave(2, dim=1)
    out = torch.einsum("hij,jhw->ihw", both.softmax(-1), values)
    expected = torch.autograd.grad(out, inputs, grad)
    lse = both.logsumexp(-1).detach()

    total = torch.zeros_like(query)
    for keys, values, is_causal, wanted in (
        (key, value, causal, expected[1:3]),
        (other_key, other_value, False, expected[3:]),
    ):
        sequences = Sequences.of(
            torch.tensor([7]).numpy(), torch.tensor([len(keys)]).numpy(), causal=is_causal, device=query.device
        )
        qkv = QKV(query.detach(), keys.detach(), values.detach())
        grads = kernel.backward(grad, qkv, Result(out.detach(), lse), sequences, options)
        total += grads[0]
        assert worst(grads[1], wanted[0]) < 1e-13
        assert worst(grads[2], wanted[1]) < 1e-13
    assert worst(total, expected[0]) < 1e-13


def test_statistics_of_a_forward(kernel):
    query, key, value = (tensor.detach() for tensor in random_inputs(12, heads=4, key_heads=2)[0])
    lens = torch.tensor([5, 7]).numpy()
    sequences = Sequences.of(lens, lens, causal=True, device=query.device)
    _, lse = kernel.forward(QKV(query, key, value), sequences, AttentionOptions(softmax_scale=0.3))
    assert lse.shape == (4, 12)
    for head in range(4):
        for row in range(12):
            first = 0 if row < 5 else 5
            seen = 0.3 * key[first : row + 1, head // 2] @ query[row, head]
            assert abs(lse[head, row] - seen.logsumexp(0)) < 1e-13


# Forests.


@given(
    sample_lists(min_samples=1),
    st.sampled_from([(1, 1), (4, 2), (3, 1), (8, 1)]),
    st.sampled_from([8, 5, 11]),
    st.integers(1, 4),
    st.sampled_from(KERNELS),
)
def test_hypothesis_forests(samples, heads, value_dim, multiple, kernel):
    metadata = TreeMetadata.from_layout(fold(samples, pad_to_multiple_of=multiple))
    assert_close_to_reference(
        through(kernel), metadata, heads=heads[0], key_heads=heads[1], value_dim=value_dim, limit=1e-12
    )


@given(st.integers(0, 10_000), st.integers(0, 14), st.integers(1, 3), st.booleans())
def test_empty_nodes_many_roots_and_sinks(seed, nodes, padding, has_sinks):
    metadata = metadata_of(*random_forest(seed, nodes=nodes, node_lens=(0, 1, 2, 5), root_rate=0.2), padding=padding)
    assert_close_to_reference(cascade.attention, metadata, sinks=has_sinks, seed=seed, limit=1e-12)


def test_a_comb_of_depth_300_is_as_many_calls():
    nodes = 600
    parents = [-1] + [node - 1 if node % 2 else node - 2 for node in range(1, nodes)]
    metadata = metadata_of([1 + node % 2 for node in range(nodes)], parents)
    assert len(build_plan(metadata).levels) > 290


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_one_softmax(kernel, dtype):
    """Merging rounds a part once more than a single kernel does; gradients come from the merged statistics."""
    metadata = metadata_of(*random_forest(3, nodes=24, node_lens=(4, 16, 40, 80), root_rate=0.05))
    limit = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    assert_close_to_reference(through(kernel), metadata, dim=32, dtype=dtype, limit=limit)


def test_cascade_without_sharing_is_one_causal_call():
    """Only chains: the plan has no full call, and the result is the kernel's own, bit for bit."""
    metadata = metadata_of([5, 6, 7, 2], [-1, 0, -1, -1])
    plan = build_plan(metadata)
    assert not plan.levels
    kernel = CPU_KERNELS[0]
    inputs, _ = random_inputs(metadata.padded_size, dtype=torch.bfloat16)
    query, key, value = (tensor.detach() for tensor in inputs)
    options = AttentionOptions(softmax_scale=0.3)
    out, _ = kernel.forward(QKV(query, key, value), plan.runs, options)
    assert torch.equal(cascade.attention(query, key, value, metadata, options), out)


# TransformerEngine's kernels, as far as a machine without them can go: see tests/upstream for their signatures.


@given(sample_lists(min_samples=1), st.sampled_from([(1, 1), (4, 2), (8, 1)]), st.sampled_from([8, 5]), st.booleans())
def test_transformer_engines_arguments_and_statistics(samples, heads, value_dim, has_sinks):
    metadata = TreeMetadata.from_layout(fold(samples, pad_to_multiple_of=3))
    fused_attention = FusedAttention()
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, fused_attention)
        assert_close_to_reference(
            through(TransformerEngine()),
            metadata,
            heads=heads[0],
            key_heads=heads[1],
            value_dim=value_dim,
            sinks=has_sinks,
            limit=1e-12,
        )
    calls = 1 + len(build_plan(metadata).levels)
    assert fused_attention.calls == {"fused_attn_fwd": calls, "fused_attn_bwd": calls}


def test_transformer_engine_gets_rows_that_lie_one_after_the_other(monkeypatch):
    """Megatron hands over slices of one projection; a packed layout of three tensors is read as if they were dense."""
    install(monkeypatch, FusedAttention())
    metadata = metadata_of([4, 3, 5], [-1, 0, 0], padding=1)
    mixed = torch.randn(metadata.padded_size, 2, 24, dtype=torch.float64)
    views = [part.requires_grad_() for part in mixed.split(8, dim=2)]
    grad_out = torch.randn(2, metadata.padded_size, 8, dtype=torch.float64).transpose(0, 1)
    options = AttentionOptions(softmax_scale=0.3)
    expected = results(reference.attention, views, grad_out, metadata, options)
    for one, wanted in zip(
        results(through(TransformerEngine()), views, grad_out, metadata, options), expected, strict=True
    ):
        assert worst(one, wanted) < 1e-12


def test_statistics_of_an_old_cudnn_are_refused(monkeypatch):
    class Old(FusedAttention):
        def fused_attn_fwd(self, **given):
            out, (lse, *rest) = super().fused_attn_fwd(**given)
            return out, [lse.permute(1, 0, 2)[None], *rest]

    install(monkeypatch, Old())
    metadata = metadata_of([4, 3], [-1, 0])
    inputs, _ = random_inputs(metadata.padded_size)
    with pytest.raises(
        RuntimeError, match=r"needs statistics \[tokens, heads, 1\] .* not \(1, 4, 7, 1\): update cuDNN"
    ):
        attention_through(TransformerEngine(), *inputs, metadata, AttentionOptions(softmax_scale=0.3))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"deterministic": True}, "^deterministic=True .*square of the sequences"),
        ({}, None),
        ({"needs_grad": False}, None),
        ({"capability": (10, 0)}, None),
        ({"capability": (8, 0)}, "^a GPU of compute capability 8.0"),
        ({"capability": (12, 0)}, "^a GPU of compute capability 12.0"),
        ({"head_dim": 192, "value_dim": 128}, r"^head_dim=192 \(at most 128\)"),
        ({"dtype": torch.float32}, "^dtype=torch.float32"),
    ],
)
def test_transformer_engine_supported_cases(changes, says, monkeypatch):
    monkeypatch.setattr(cuda, "_is_missing", lambda *package: None)
    monkeypatch.setattr(cuda, "import_fault", lambda module: None)
    reason = TransformerEngine().refusal(
        case_of(**({"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16} | changes))
    )
    assert reason is None if says is None else re.search(says, reason)


@pytest.mark.parametrize(
    ("kernel", "module"),
    [
        (FlashAttention2(), "flash_attn.flash_attn_interface"),
        (FlashAttention3(), "flash_attn_interface"),
        (FlashAttention4(), "flash_attn.cute.interface"),
        (TransformerEngine(), "transformer_engine.pytorch.cpp_extensions"),
    ],
)
def test_a_package_made_for_another_torch_is_passed_by(kernel, module, monkeypatch):
    """Installed, it raises when it is imported; the next kernel is taken in its place."""
    asked = []
    monkeypatch.setattr(cuda, "_is_missing", lambda *package: None)
    monkeypatch.setattr(cuda, "_flash_attn_interface_is_missing", lambda: False)
    monkeypatch.setattr(cuda, "import_fault", lambda name: asked.append(name) or "ImportError: undefined symbol: _ZN3")
    case = case_of(device="cuda", capability=(9, 0), dtype=torch.bfloat16, deterministic=False)
    assert re.search(r"does not import \(ImportError: undefined symbol: _ZN3\)$", kernel.refusal(case))
    assert asked == [module]
    assert cascade.choose_kernel(case).name == "torch"


# FlashAttention-4's varlen kernels, which no machine without a GPU runs.


def fake_interface(calls):
    """``flash_attn/cute/interface.py`` of 4.0.0b36: the arguments of its two functions that the cascade passes."""

    def sequences(lens, *, causal):
        (cu_q, cu_k), most = lens[:2], lens[2:]
        assert cu_q.dtype == cu_k.dtype == torch.int32
        made = Sequences.of(*(cu.diff().long().numpy() for cu in (cu_q, cu_k)), causal=causal, device=cu_q.device)
        assert most == (made.max_q, made.max_k)
        return made

    def forward(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
        return_lse=False,
    ):
        lens = sequences((cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), causal=causal)
        out, lse = Plain().forward(QKV(q, k, v), lens, AttentionOptions(softmax_scale=softmax_scale))
        calls.append("forward")
        return out, lse if return_lse else None, None, None, None

    def backward(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        deterministic=False,
    ):
        lens = sequences((cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), causal=causal)
        assert lse.shape == (q.shape[1], len(q))
        calls.append(deterministic)
        options = AttentionOptions(softmax_scale=softmax_scale)
        return tuple(Plain().backward(dout, QKV(q, k, v), Result(out, lse), lens, options))

    return SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)


@pytest.mark.parametrize("deterministic", [True, False])
def test_flash_attention_4_gets_its_arguments(monkeypatch, deterministic):
    calls = []
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", fake_interface(calls))
    for seed in range(3):
        metadata = metadata_of(*random_forest(seed, nodes=14, node_lens=(0, 1, 2, 5), root_rate=0.2), padding=seed)
        inputs, grad_out = random_inputs(metadata.padded_size, heads=4, key_heads=2)
        options = AttentionOptions(softmax_scale=0.3, deterministic=deterministic)
        found = results(through(FlashAttention4()), inputs, grad_out, metadata, options)
        wanted = results(reference.attention, inputs, grad_out, metadata, options)
        assert all(worst(one, other) < 1e-12 for one, other in zip(found, wanted, strict=True))
    assert set(calls) == {"forward", deterministic}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"deterministic": True}, None),
        ({"deterministic": True, "capability": (10, 3)}, None),
        ({"head_dim": 256, "value_dim": 256}, None),
        ({"head_dim": 192, "capability": (10, 0)}, r"^head_dim=192 \(at most 128 on Blackwell\)"),
        ({"capability": (8, 0)}, "^a GPU of compute capability 8.0"),
        ({"capability": (12, 0)}, "^a GPU of compute capability 12.0"),
        ({"dtype": torch.float32}, "^dtype=torch.float32"),
    ],
)
def test_flash_attention_4_supported_cases(changes, says, monkeypatch):
    monkeypatch.setattr(cuda, "_is_missing", lambda *package: None)
    monkeypatch.setattr(cuda, "import_fault", lambda module: None)
    case = case_of(**({"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16} | changes))
    reason = FlashAttention4().refusal(case)
    assert reason is None if says is None else re.search(says, reason)


def test_deterministic_cascade_runs_flash_attention_4_on_hopper(monkeypatch):
    """Where nothing else of the cascade is deterministic from packages of PyPI."""
    installed = {"flash-attn-4": None}
    monkeypatch.setattr(cuda, "_is_missing", lambda name, *oldest: installed.get(name, f"without {name}"))
    monkeypatch.setattr(cuda, "import_fault", lambda module: None)
    case = case_of(device="cuda", capability=(9, 0), dtype=torch.bfloat16, deterministic=True)
    assert cascade.choose_kernel(case).name == "FlashAttention-4"
    installed["flash-attn-4"] = "device=cuda without flash-attn-4, which is not installed"
    assert cascade.choose_kernel(case) is None


@pytest.mark.parametrize(
    ("installed", "says"), [("2.16.9", "2.16.9 .needs 2.17 or newer"), ("2.17.1", None), ("3.0.0+cu13", None)]
)
def test_which_transformer_engine(installed, says, monkeypatch):
    monkeypatch.setattr(cuda, "version", lambda name: installed)
    reason = cuda._is_missing.__wrapped__("transformer_engine", 2, 17)
    assert reason is None if says is None else re.search(says, reason)


def test_the_same_bits_twice():
    metadata = metadata_of(*random_forest(1, nodes=30, node_lens=(3, 40)), padding=2)
    inputs, grad_out = random_inputs(metadata.padded_size, dtype=torch.bfloat16)
    options = AttentionOptions(softmax_scale=0.3)
    first, second = (results(cascade.attention, inputs, grad_out, metadata, options) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_gradcheck():
    metadata = metadata_of([2, 1, 2, 1], [-1, 0, 1, 0], padding=1)
    inputs, _ = random_inputs(metadata.padded_size, heads=2, key_heads=1, dim=2)
    sinks = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)

    def attend(query, key, value, sinks):
        return cascade.attention(query, key, value, metadata, AttentionOptions(softmax_scale=0.7, sinks=sinks))

    assert torch.autograd.gradcheck(attend, (*inputs, sinks))


def test_padding_is_no_sequence():
    """As many sequences as without padding, for any bucket; sinks as in the reference."""
    lens, parents = random_forest(2, nodes=20, node_lens=(1, 5, 30))
    metadata = metadata_of(lens, parents, padding=1000)
    assert len(build_plan(metadata).runs.host_cu_q) == len(build_plan(metadata_of(lens, parents)).runs.host_cu_q)
    inputs, grad_out = random_inputs(metadata.padded_size, heads=4, key_heads=2)
    for options in ({}, {"sinks": torch.linspace(-2, 2, 4, dtype=torch.float64).requires_grad_()}):
        asked = AttentionOptions(softmax_scale=0.3, **options)
        found = results(cascade.attention, inputs, grad_out, metadata, asked)
        wanted = results(reference.attention, inputs, grad_out, metadata, asked)
        assert all(worst(one, other) < 1e-12 for one, other in zip(found, wanted, strict=True))


def test_call_saves_one_number_per_query_and_head():
    metadata = metadata_of(*random_forest(2, nodes=40, node_lens=(5, 30)))
    inputs, _ = random_inputs(metadata.padded_size, dtype=torch.float32)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.data_ptr(), tensor.nbytes) and tensor, lambda tensor: tensor
    ):
        out = cascade.attention(*inputs, metadata, AttentionOptions(softmax_scale=0.3))
    statistics = 4 * metadata.padded_size * inputs[0].shape[1]
    assert sum(saved.values()) == sum(one.nbytes for one in inputs) + out.nbytes + statistics


# Which kernel runs.


def test_recompute_runs_the_same_kernel_twice(monkeypatch):
    """A first forward without gradients must not take a kernel that the second one, with gradients, cannot have."""

    class ForwardOnly:
        name = "forward only"
        head_dim_multiple = None

        def refusal(self, case):
            return "needs_grad" if case.needs_grad else None

    monkeypatch.setattr(cascade, "CPU_KERNELS", (ForwardOnly(), *CPU_KERNELS))
    assert choose_kernel(case_of(needs_grad=False)) is choose_kernel(case_of(needs_grad=True)) is CPU_KERNELS[0]
    monkeypatch.setattr(cascade, "CPU_KERNELS", (ForwardOnly(),))
    assert choose_kernel(case_of(needs_grad=False)).name == "forward only"
    assert choose_kernel(case_of(needs_grad=True)) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"window": 5}, "^window=5"),
        ({"device": "cuda", "capability": (7, 5)}, "^a GPU of compute capability 7.5"),
        ({"device": "cuda", "capability": (9, 0), "dtype": torch.float32}, r"^dtype=torch.float32 \(it takes bfloat16"),
        ({"device": "cuda", "capability": (9, 0), "head_dim": 512}, r"^head_dim=512 \(at most 256\)"),
        ({"device": "cuda", "capability": (9, 0), "deterministic": True}, "^deterministic=True .*use_deterministic"),
    ],
)
def test_refusals_name_the_argument(changes, says):
    case = case_of(**({"dtype": torch.bfloat16, "deterministic": False} | changes))
    assert re.search(says, cascade.refusal(case))


def test_torch_kernel_supports_common_cases():
    case = case_of(device="cuda", capability=(8, 0), dtype=torch.bfloat16, deterministic=False)
    torchs = CUDA_KERNELS[-1]
    assert torchs.refusal(case) is None
    assert cascade.refusal(case) is None
