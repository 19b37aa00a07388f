"""The kernels in bfloat16 and float16, launched with the table's settings for Hopper, against the reference in fp64.

Hundreds of tokens in every head dimension of the table; on a GPU, test_triton.py has thousands in some.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from harness.oracles import metadata_of
from interpreted_bf16 import bfloat16, rounded, widened
from kernel_cases import LIMITS, assert_is_reference, make_inputs, options_of, with_engine

from mcore_prefix_tree.attention import Case
from mcore_prefix_tree.attention.triton_tree.config import UP_TO, configs_for

# bfloat16 has 8 bits where float16 has 11.
HALF = {torch.bfloat16: 8 * LIMITS[torch.float16], torch.float16: LIMITS[torch.float16]}
PLAIN, ALL = {}, {"window": 60, "sinks": True}
OPTIONS = {"plain": PLAIN, "window": {"window": 60}, "sinks": {"sinks": True}, "all": ALL}


def cases():
    """bfloat16 with all options in every head dimension; other cases, rarely."""
    found = []
    for dtype, dims, (name, options) in itertools.product(HALF, UP_TO, OPTIONS.items()):
        often = dtype == torch.bfloat16 and (name == "all" or (name == "plain" and dims == (128, 128)))
        found.append(
            pytest.param(
                *(dtype, dims, options),
                marks=() if often else pytest.mark.slow,
                id=f"{str(dtype).removeprefix('torch.')}, {dims[0]}/{dims[1]}, {name}",
            )
        )
    return found


@pytest.mark.parametrize(("dtype", "dims", "options"), cases())
def test_half_precision(dtype, dims, options):
    metadata = metadata_of([64, 30, 1, 40, 7], [-1, 0, 0, 2, -1], padding=3)
    shape = {"heads": 4, "key_heads": 2, "dim": dims[0], "value_dim": dims[1], "dtype": dtype}
    settings = {"window": options.get("window")}
    inputs, _ = make_inputs(metadata, **shape)
    configs = configs_for(Case.of(*inputs, options_of(inputs, **settings)))
    with bfloat16():
        assert_is_reference(
            metadata,
            configs=with_engine(configs),  # through descriptors, as on Hopper
            limit=HALF[dtype],
            settings=settings,
            sinks=options.get("sinks", False),
            **shape,
        )


def test_the_interpreter_rounds_as_torch_does():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(10_000, generator=generator) * torch.logspace(-38, 38, 10_000)
    halves = torch.arange(1, 1 << 15, dtype=torch.int32) << 16 | 0x8000  # between two numbers: to the even one
    values = torch.cat([values, halves.view(torch.float32), torch.tensor([0.0, -0.0, float("inf"), float("nan")])])
    bits = rounded(values.numpy())
    expected = values.bfloat16()
    np.testing.assert_array_equal(widened(bits), expected.float().numpy())
