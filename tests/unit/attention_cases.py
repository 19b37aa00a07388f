"""Inputs of attention back-ends and their comparison with the reference, for the tests of each."""

from __future__ import annotations

import torch
from harness.oracles import worst

from mcore_prefix_tree.attention import AttentionOptions, Case, reference


def case_of(
    *,
    device="cpu",
    capability=None,
    dtype=torch.float64,
    heads=4,
    kv_heads=2,
    head_dim=64,
    value_dim=None,
    needs_grad=True,
    **options,
):
    """A case, by default a plain one of fp64 on the CPU that trains."""
    return Case(
        device=torch.device(device),
        capability=capability,
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        needs_grad=needs_grad,
        options=AttentionOptions(softmax_scale=0.3, **options),
    )


def random_inputs(size, *, heads=4, key_heads=2, dim=8, value_dim=None, dtype=torch.float64, seed=0):
    """query, key, value and a gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = dim if value_dim is None else value_dim

    def draw(count, width):
        return torch.randn(size, count, width, generator=generator, dtype=torch.float64).to(dtype)

    inputs = [draw(heads, dim).requires_grad_(), draw(key_heads, dim).requires_grad_()]
    return [*inputs, draw(key_heads, value_dim).requires_grad_()], draw(heads, value_dim)


def results(attention, inputs, grad_out, metadata, options):
    """out, dq, dk, dv, and the gradient of the sinks if there are any."""
    out = attention(*inputs, metadata, options)
    wanted = inputs if options.sinks is None else [*inputs, options.sinks]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad_out)]


def assert_close_to_reference(attention, metadata, *, limit, sinks=False, window=None, heads=4, **shape):
    """Relative errors in the norm of out, dQ, dK, dV (and d sinks) against the reference in fp64 of the same inputs."""
    inputs, grad_out = random_inputs(metadata.padded_size, heads=heads, **shape)
    logits = torch.linspace(-1, 1, heads, dtype=torch.float64).requires_grad_() if sinks else None
    options = AttentionOptions(softmax_scale=0.3, window=window, sinks=logits)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = results(reference.attention, exact, grad_out.double(), metadata, options)
    actual = results(attention, inputs, grad_out, metadata, options)
    assert len(actual) == len(expected)
    for name, one, other in zip(("out", "dq", "dk", "dv", "d sinks"), actual, expected, strict=False):
        assert one.dtype == (torch.float64 if name == "d sinks" else grad_out.dtype)
        error = worst(one, other)
        assert error < limit, f"{name} is off by {error:.2e}"
