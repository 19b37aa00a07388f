"""Every back-end that this GPU takes, in 16 bits: as near to the truth as FlashAttention on the unfolded batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_cases import random_inputs, results
from gpu_check_parts.using import gpu_case
from harness.oracles import forest_samples, metadata_of, random_forest, worst
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcore_prefix_tree import TreeMetadata, fold
from mcore_prefix_tree.attention import reference
from mcore_prefix_tree.attention.api import BACKENDS, load_backend
from mcore_prefix_tree.attention.auto import TreeShape, choose
from mcore_prefix_tree.attention.parity import Question, error_limit, worst_rows

# heads, key heads, D, W
DIMS = [
    (1, 1, 32, 32),
    (8, 8, 64, 64),
    (8, 1, 64, 64),
    (8, 2, 128, 128),
    (4, 4, 192, 128),
    (6, 2, 96, 96),
    (4, 2, 256, 256),
]
METHODS = [name for name in BACKENDS if name not in ("cascade", "reference")]
# Both sides round at other places, so their errors are two draws of one size.
FACTOR = 1.2


def method(name, case):
    """The attention function of a back-end; skips unless it accepts the case."""
    backend = load_backend(name)
    refusal = backend.refusal(case)
    if refusal is not None:
        pytest.skip(f"{name} does not support {refusal}")
    return backend.attention


def on_gpu(metadata, case, seed=0):
    """Inputs and a gradient of the result, on the GPU, the same bits as on a CPU."""
    inputs, grad_out = random_inputs(
        metadata.padded_size,
        heads=case.heads,
        key_heads=case.kv_heads,
        dim=case.head_dim,
        value_dim=case.value_dim,
        dtype=case.dtype,
        seed=seed,
    )
    return [one.detach().cuda().requires_grad_() for one in inputs], grad_out.cuda()


def unfolded_flash(layout, inputs, grad_out, truth, scale):
    """Unfolded samples through FlashAttention; gradients of a token are summed over its samples in fp64."""
    found = [torch.zeros_like(one) for one in truth]
    seen = torch.zeros(layout.padded_size, dtype=torch.bool, device="cuda")
    for index in range(layout.num_samples):
        tokens = torch.from_numpy(layout.sample_tokens(index)).long().cuda()
        own = [one.detach()[tokens].requires_grad_() for one in inputs]
        heads = [one.transpose(0, 1).unsqueeze(0) for one in own]
        # One width for all: FlashAttention-2 has equal dims, and zeros change nothing.
        width = max(heads[0].shape[-1], heads[2].shape[-1])
        padded = [F.pad(one, (0, width - one.shape[-1])) for one in heads]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale, enable_gqa=True)
        out = out[0, ..., : heads[2].shape[-1]].transpose(0, 1)
        own_grad = grad_out[tokens].masked_fill(seen[tokens][:, None, None], 0)
        seen[tokens] = True
        found[0][tokens] = out.detach().double()
        for total, grad in zip(found[1:], torch.autograd.grad(out, own, own_grad), strict=True):
            total.index_add_(0, tokens, grad.double())
    assert seen.all()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_no_further_from_the_truth_than_unfolded(name, dims, dtype, deterministic):
    case = gpu_case(dims, dtype, deterministic=deterministic)
    attention = method(name, case)
    lens, parents = random_forest(3, nodes=40, node_lens=(1, 16, 57, 64, 65, 127, 130, 300), root_rate=0.05)
    layout = fold(forest_samples(lens, parents, inner=False))
    metadata = TreeMetadata.from_layout(layout, device="cuda")
    inputs, grad_out = on_gpu(metadata, case)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    truth = results(reference.attention, exact, grad_out.double(), metadata, case.options)
    folded = results(attention, inputs, grad_out, metadata, case.options)
    unfolded = unfolded_flash(layout, inputs, grad_out, truth, case.options.softmax_scale)
    for what, ours, theirs, wanted in zip(("out", "dq", "dk", "dv"), folded, unfolded, truth, strict=True):
        limit = FACTOR * worst(theirs.to(dtype), wanted)
        assert worst(ours, wanted) <= limit, (what, worst(ours, wanted), limit)


@pytest.mark.parametrize("options", [{}, {"window": 70}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("dims", [(8, 2, 64, 64), (8, 2, 128, 128)], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_every_row_and_every_option(name, dims, options):
    options = {"deterministic": False} | options
    if options.pop("sinks", False):
        options["sinks"] = torch.zeros(dims[0], device="cuda")
    case = gpu_case(dims, torch.bfloat16, **options)
    attention = method(name, case)
    for what, error in worst_rows(attention, Question.of(case)).items():
        assert error <= error_limit(what, case.dtype), what


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("name", METHODS)
def test_short_batches(name, tokens):
    """One token; less than a tile; ragged ends; a root and a leaf of nothing."""
    case = gpu_case((4, 2, 64, 64), torch.bfloat16, deterministic=False)
    attention = method(name, case)
    trunk = max(1, tokens // 2)
    metadata = metadata_of([trunk, tokens - trunk, 0], [-1, 0, 0], padding=3).with_plans_on("cuda")
    inputs, grad_out = on_gpu(metadata, case)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    truth = results(reference.attention, exact, grad_out.double(), metadata, case.options)
    for ours, wanted in zip(results(attention, inputs, grad_out, metadata, case.options), truth, strict=True):
        assert worst(ours, wanted) < 1e-2


@pytest.mark.parametrize("name", METHODS)
def test_the_same_bits_twice(name):
    case = gpu_case((8, 2, 128, 128), torch.bfloat16, deterministic=True)
    attention = method(name, case)
    metadata = metadata_of(*random_forest(1, nodes=60, node_lens=(3, 64, 200)), padding=2).with_plans_on("cuda")
    inputs, grad_out = on_gpu(metadata, case)
    first = results(attention, inputs, grad_out, metadata, case.options)
    for _ in range(5):
        again = results(attention, inputs, grad_out, metadata, case.options)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_call_does_not_wait_for_the_device(name):
    """After a first call has planned and compiled, forward and backward only enqueue work."""
    case = gpu_case((8, 2, 128, 128), torch.bfloat16, deterministic=False)
    attention = method(name, case)
    if name == "path":
        pytest.skip("path is for a CPU")
    metadata = metadata_of(*random_forest(1, nodes=60, node_lens=(3, 64, 200)), padding=2).with_plans_on("cuda")
    inputs, grad_out = on_gpu(metadata, case)
    results(attention, inputs, grad_out, metadata, case.options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(attention, inputs, grad_out, metadata, case.options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_auto_takes_one_that_runs():
    case = gpu_case((8, 2, 128, 128), torch.bfloat16)
    metadata = metadata_of([300, 40, 50], [-1, 0, 0]).with_plans_on("cuda")
    choice = choose(case, TreeShape.of([metadata]), device_name=torch.cuda.get_device_name())
    attention = method(choice.backend, replace(case, needs_grad=True))
    inputs, grad_out = on_gpu(metadata, case)
    assert all(one.isfinite().all() for one in results(attention, inputs, grad_out, metadata, case.options))
