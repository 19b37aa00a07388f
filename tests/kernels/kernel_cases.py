"""A call of the kernels, and the same call of the fp64 reference."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from mcore_prefix_tree.attention import AttentionOptions, Case, reference
from mcore_prefix_tree.attention.triton_tree import attend
from mcore_prefix_tree.attention.triton_tree.config import Configs, Launch, configs_for

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NAMES = ("out", "dq", "dk", "dv", "dsinks")
# Measured in the interpreter: 4e-7 with sums of a few hundred terms, 3e-4 with operands of 11 bits.
LIMITS = {torch.float32: 1e-6, torch.float16: 4e-4}
# Where tokens see little but themselves, dQ and dK are differences of equal numbers: next to nothing, with an error as
# large as that of anything else. They are measured against no less than this share of dV.
FLOOR = 0.25
# Smaller than any of the table: more tiles from fewer tokens.
SMALL = (Launch(32, 16, 4, 1), Launch(16, 32, 4, 1), Launch(32, 32, 4, 1))


def small_configs(*, apart=False, engine=False):
    forward, key_value, query = SMALL
    return Configs(forward=forward, key_value=key_value, query=query, apart=apart, engine=engine)


def make_inputs(metadata, *, heads=2, key_heads=1, dim=32, value_dim=None, dtype=torch.float32, sinks=False, seed=0):
    """query, key, value and perhaps sinks, which all need gradients, and a gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    size, value_dim = metadata.padded_size, dim if value_dim is None else value_dim

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    inputs = [draw(size, heads, dim), draw(size, key_heads, dim), draw(size, key_heads, value_dim)]
    if sinks:
        inputs.append(draw(heads).float())
    return [tensor.requires_grad_() for tensor in inputs], draw(size, heads, value_dim)


def options_of(inputs, **settings):
    sinks = inputs[3] if len(inputs) > 3 else None
    return AttentionOptions(**{"softmax_scale": inputs[0].shape[2] ** -0.5, "sinks": sinks, **settings})


def run(attention, inputs, grad_out, metadata, options, *configs):
    out = attention(*inputs[:3], metadata, options, *configs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def truth(inputs, grad_out, metadata, **settings):
    """The reference in fp64, from the same rounded numbers."""
    doubled = [tensor.detach().double().requires_grad_() for tensor in inputs]
    return run(reference.attention, doubled, grad_out.double(), metadata, options_of(doubled, **settings))


def assert_is_reference(metadata, *, configs=None, limit=None, settings=None, **shape):
    """All results of the kernels against :func:`truth`; returns them."""
    metadata = metadata.with_plans_on(DEVICE)
    settings = settings or {}
    inputs, grad_out = make_inputs(metadata, **shape)
    options = options_of(inputs, **settings)
    configs = configs or configs_for(Case.of(*inputs[:3], options))
    results = run(attend, inputs, grad_out, metadata, options, configs)
    terms = norm_of_sink_terms(inputs, grad_out, metadata, **settings) if len(inputs) > 3 else 0.0
    assert_are(results, truth(inputs, grad_out, metadata, **settings), inputs, limit=limit, sink_terms=terms)
    return results


def norm_of_sink_terms(inputs, grad_out, metadata, **settings):
    """Return the norm over rows of the terms of a sink's gradient, which may be a small difference of them."""
    *others, sinks = [tensor.detach().double() for tensor in inputs]

    def attend_with(sinks):
        return reference.attention(*others, metadata, options_of([*others, sinks], **settings))

    _, change = torch.func.jvp(attend_with, (sinks,), (torch.ones_like(sinks),))
    return (grad_out.double() * change).sum(dim=-1).norm().item()


def assert_are(results, expected, inputs, *, limit=None, sink_terms=0.0):
    """Results of a call with these inputs against the :func:`truth`."""
    limit = limit or LIMITS[inputs[0].dtype]
    assert len(results) == len(expected) == 1 + len(inputs)
    floors = dict.fromkeys(("dq", "dk"), FLOOR * expected[3].norm().item()) | {"dsinks": sink_terms}
    for name, actual, wanted, given in zip(NAMES, results, expected, [inputs[0], *inputs], strict=False):
        error = relative_error(actual, wanted, floor=floors.get(name, 0.0))
        assert actual.dtype == given.dtype, name
        # A sink's gradient is one sum over all rows, so it has more terms than any other.
        assert error < limit * (4 if name == "dsinks" else 1), f"{name} is off by {error:.2e}"


def relative_error(actual, expected, *, floor=0.0):
    """In the norm, as ``harness.oracles.worst``, of at least ``floor``."""
    assert actual.shape == expected.shape
    return (actual.double() - expected).norm().item() / max(expected.norm().item(), floor, 1e-300)


def with_engine(configs):
    """The same launches through tensor descriptors, as on Hopper; the interpreter has them too."""
    return replace(configs, engine=True)
