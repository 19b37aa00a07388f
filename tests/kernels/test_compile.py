"""Compiling every kernel of the table ahead of time, for chips that are not there: no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from compilation import HEAD_DIMS, KERNELS, OPTIONS, SHARED_MEMORY, case_of, reports

OFTEN = [(90, dims) for dims in HEAD_DIMS] + [(80, (128, 128)), (100, (128, 128))]
SELDOM = [(architecture, dims) for architecture in SHARED_MEMORY for dims in HEAD_DIMS]


def assert_fit(architecture, dims, options):
    """Tensor-core instructions in each kernel (an empty one once compiled), room for it, and nothing spilled."""
    found = []
    for which in KERNELS:
        case = case_of(architecture, *dims, deterministic=which != "fast", options=OPTIONS[options])
        found += reports(architecture, which, case)
    assert {report.kernel for report in found} == {"forward_kernel", "key_value_kernel", "query_kernel"}
    for report in found:
        assert report.matrix_instructions > 0, report
        assert report.shared <= SHARED_MEMORY[architecture], report
        assert report.spilled == 0, report


@pytest.mark.parametrize(("architecture", "dims"), OFTEN)
def test_default_configurations(architecture, dims):
    assert_fit(architecture, dims, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("options", ["window", "capped", "all"])
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_options_on_hopper(dims, options):
    assert_fit(90, dims, options)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dims"), [one for one in SELDOM if one not in OFTEN])
def test_other_chips(architecture, dims):
    assert_fit(architecture, dims, "plain")


def test_float32_fits():
    """Without tensor cores, and slow; but it has to fit the smallest chip."""
    for dims in HEAD_DIMS:
        for which in ("forward", "key_value", "query"):
            for report in reports(86, which, case_of(86, *dims, dtype=torch.float32)):
                assert report.shared <= SHARED_MEMORY[86], report
