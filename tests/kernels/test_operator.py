"""The kernels as an operator of PyTorch: schema, fake results, tracing, recompute."""

from __future__ import annotations

import pytest
import torch
from harness.oracles import metadata_of, random_forest
from kernel_cases import DEVICE, make_inputs, options_of, run, small_configs
from torch.utils.checkpoint import checkpoint

from mcore_prefix_tree.attention import tree_attention
from mcore_prefix_tree.attention.triton_tree import attend, ops
from mcore_prefix_tree.attention.triton_tree.block_order import DevicePlan


def forest():
    return metadata_of(*random_forest(3, nodes=5, node_lens=(3, 20)), padding=2).with_plans_on(DEVICE)


@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck(sinks):
    metadata, configs = forest(), small_configs()
    (query, key, value, *rest), _ = make_inputs(metadata, dim=16, sinks=sinks)
    plan = DevicePlan.of(metadata, configs, None)
    arguments = (query, key, value, rest[0] if sinks else None, plan.end, plan.position, list(plan.schedules))
    # Results of backward are checked against the fake results too: "test_aot_dispatch_dynamic" traces it.
    torch.library.opcheck(ops.tree_attention, (*arguments, configs.packed, 0.25, None))


def test_compiled_as_one_graph():
    metadata = forest()
    inputs, grad_out = make_inputs(metadata, dim=16, heads=4, key_heads=2, sinks=True)

    def attention(query, key, value, sinks):
        return 2 * tree_attention(
            query, key, value, metadata, softmax_scale=0.25, backend="triton", window=9, sinks=sinks
        )

    def outcome(function):
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]

    expected = outcome(attention)
    compiled = outcome(torch.compile(attention, fullgraph=True, backend="aot_eager"))
    for actual, wanted in zip(compiled, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def test_recomputed_activations():
    metadata = forest()
    inputs, grad_out = make_inputs(metadata, dim=16)
    options, configs = options_of(inputs), small_configs()

    def recomputed(*arguments):
        return checkpoint(attend, *arguments, use_reentrant=False)

    expected = run(attend, inputs, grad_out, metadata, options, configs)
    plans = dict(metadata.cache)
    for actual, wanted in zip(run(recomputed, inputs, grad_out, metadata, options, configs), expected, strict=True):
        assert torch.equal(actual, wanted)
    assert metadata.cache == plans


def test_saved_for_backward():
    """Query, key, value, out and one number for each row and head; the tree is shared by all layers."""
    metadata = forest()
    inputs, _ = make_inputs(metadata, dim=16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = attend(*inputs, metadata, options_of(inputs), small_configs())
    plan = next(plan for plan in metadata.cache.values() if isinstance(plan, DevicePlan))
    of_the_tree = {tensor.data_ptr() for tensor in (plan.end, plan.position, *plan.schedules)}
    rows = -(-metadata.padded_size // 128) * 128
    own = sum(tensor.nbytes for tensor in saved if tensor.data_ptr() not in of_the_tree)
    assert own == sum(tensor.nbytes for tensor in (*inputs, out)) + 4 * rows * inputs[0].shape[1]


def test_no_gradient_is_asked_for():
    metadata = forest()
    inputs, _ = make_inputs(metadata, dim=16)
    with torch.no_grad():
        out = attend(*inputs, metadata, options_of(inputs), small_configs())
    assert not out.requires_grad
