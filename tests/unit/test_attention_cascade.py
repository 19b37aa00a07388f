"""The cascade equals the reference, and torch's kernel for CPUs keeps to the contract that the cascade needs."""

from __future__ import annotations

import re

import pytest
import torch
from attention_cases import assert_close_to_reference, case_of, random_inputs, results
from harness.oracles import metadata_of, random_forest, worst

from mcore_prefix_tree.attention import AttentionOptions, cascade, reference
from mcore_prefix_tree.attention.cascade import QKV, Result, Sequences, _backward, _forward, build_plan

# The contract of a kernel, spelled out: the statistics of a sum over more keys than it is shown.


@pytest.mark.parametrize("causal", [True, False])
def test_backward_from_the_statistics_of_more_keys(causal):
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
        sequences = Sequences.of(torch.tensor([7]).numpy(), torch.tensor([len(keys)]).numpy(), causal=is_causal)
        qkv = QKV(query.detach(), keys.detach(), values.detach())
        grads = _backward(grad, qkv, Result(out.detach(), lse), sequences, options)
        total += grads[0]
        assert worst(grads[1], wanted[0]) < 1e-13
        assert worst(grads[2], wanted[1]) < 1e-13
    assert worst(total, expected[0]) < 1e-13


def test_statistics_of_a_forward():
    query, key, value = (tensor.detach() for tensor in random_inputs(12, heads=4, key_heads=2)[0])
    lens = torch.tensor([5, 7]).numpy()
    sequences = Sequences.of(lens, lens, causal=True)
    _, lse = _forward(QKV(query, key, value), sequences, AttentionOptions(softmax_scale=0.3))
    assert lse.shape == (4, 12)
    for head in range(4):
        for row in range(12):
            first = 0 if row < 5 else 5
            seen = 0.3 * key[first : row + 1, head // 2] @ query[row, head]
            assert abs(lse[head, row] - seen.logsumexp(0)) < 1e-13


# Forests.


def test_a_comb_of_depth_300_is_as_many_calls():
    nodes = 600
    parents = [-1] + [node - 1 if node % 2 else node - 2 for node in range(1, nodes)]
    metadata = metadata_of([1 + node % 2 for node in range(nodes)], parents)
    assert len(build_plan(metadata).levels) > 290


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_one_softmax(dtype):
    """Merging rounds a part once more than a single kernel does; gradients come from the merged statistics."""
    metadata = metadata_of(*random_forest(3, nodes=24, node_lens=(4, 16, 40, 80), root_rate=0.05))
    limit = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    assert_close_to_reference(cascade.attention, metadata, dim=32, dtype=dtype, limit=limit)


def test_cascade_without_sharing_is_one_causal_call():
    """Only chains: the plan has no full call, and the result is the kernel's own, bit for bit."""
    metadata = metadata_of([5, 6, 7, 2], [-1, 0, -1, -1])
    plan = build_plan(metadata)
    assert not plan.levels
    inputs, _ = random_inputs(metadata.padded_size, dtype=torch.bfloat16)
    query, key, value = (tensor.detach() for tensor in inputs)
    options = AttentionOptions(softmax_scale=0.3)
    out, _ = _forward(QKV(query, key, value), plan.runs, options)
    assert torch.equal(cascade.attention(query, key, value, metadata, options), out)


def test_padding_is_no_sequence():
    """As many sequences as without padding, for any bucket; sinks as in the reference."""
    lens, parents = random_forest(2, nodes=20, node_lens=(1, 5, 30))
    metadata = metadata_of(lens, parents, padding=1000)
    assert len(build_plan(metadata).runs.cu_q) == len(build_plan(metadata_of(lens, parents)).runs.cu_q)
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


@pytest.mark.parametrize(("changes", "says"), [({"window": 5}, "^window=5"), ({"device": "cuda"}, "^device=cuda")])
def test_refusals_name_the_argument(changes, says):
    assert re.search(says, cascade.refusal(case_of(**changes)))
