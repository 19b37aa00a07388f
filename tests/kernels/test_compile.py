"""Compiling every kernel of the table ahead of time, for chips that are not there: no GPU is needed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import compilation
import pytest
import torch
import triton
from compilation import HEAD_DIMS, KERNELS, OPTIONS, SHARED_MEMORY, Report, case_of, reports

from mcore_prefix_tree.attention.triton_tree import backward, forward
from mcore_prefix_tree.attention.triton_tree.config import configs_for

OFTEN = [(90, dims) for dims in HEAD_DIMS] + [(80, (128, 128)), (100, (128, 128))]
SELDOM = [(architecture, dims) for architecture in SHARED_MEMORY for dims in HEAD_DIMS]

# The table is made for one version of Triton, in which nothing may spill. Others, such as the one that came with a
# machine's torch, allocate registers a little differently.
PINNED = re.search(r"^triton==(\S+)", (Path(__file__).parents[2] / "requirements-torch.txt").read_text(), re.M)[1]
MOST_SPILLED_BY_OTHERS = 16


def assert_keeps_to_registers(report, version=triton.__version__):
    """Nothing spilled by the pinned Triton; by another one at most 16 bytes, and it is said which one that was."""
    if version.partition("+")[0] == PINNED:
        assert report.spilled == 0, report
    elif report.spilled:
        said = f"triton {version}, not the pinned {PINNED}, spills {report.spilled} bytes: {report}"
        assert report.spilled <= MOST_SPILLED_BY_OTHERS, said
        warnings.warn(said, stacklevel=2)


def assert_fit(architecture, dims, options):
    """Tensor-core instructions in each kernel (an empty one once compiled), side by side, room, nothing spilled."""
    found = []
    for which in KERNELS:
        case = case_of(architecture, *dims, deterministic=which != "fast", options=OPTIONS[options])
        found += reports(architecture, which, case)
    kernels = {"forward_kernel", "delta_kernel", "key_value_kernel", "query_kernel"}
    assert {report.kernel for report in found} == kernels
    for report in found:
        assert report.matrix_instructions > 0 or not report.multiplies, report
        assert not report.serialized, report
        # Else the names of instructions have changed, and nothing was counted.
        assert architecture != 90 or (report.warpgroup_products > 0 and report.warpgroup_waits > 0) == report.multiplies
        assert report.shared <= SHARED_MEMORY[architecture], report
        assert_keeps_to_registers(report)


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


# Loops over tiles, and products over and into head_dim and value head_dim.
@pytest.mark.parametrize(
    ("which", "loops", "of_head", "of_value"), [("forward", 3, 1, 1), ("key_value", 2, 2, 2), ("query", 3, 2, 1)]
)
@pytest.mark.parametrize(("architecture", "dims"), [(90, (192, 128)), (80, (128, 128))])
def test_nothing_is_multiplied_in_vain(architecture, dims, which, loops, of_head, of_value):
    """A head_dim of 192 that is padded to 256 would be a third more; so would rows that several warps have."""
    case = case_of(architecture, *dims)
    (found,) = reports(architecture, which, case)
    launch = getattr(configs_for(case), which)
    tile = launch.query_block * launch.key_block
    assert found.multiplied == loops * tile * (dims[0] * of_head + dims[1] * of_value)


@pytest.mark.parametrize(("which", "module"), [("forward", forward), ("query", backward)])
def test_a_stepped_pointer_serializes_a_kernel(monkeypatch, which, module):
    """Why places in a schedule are sums of 32 bits; and the assertion above can fail."""
    name, place = f"{which}_kernel", "schedule + (blocks + place + 1)"
    stepped = triton.JITFunction(getattr(module, name).fn)
    assert stepped.src.count(place) == 1
    stepped._unsafe_update_src(stepped.src.replace(place, "(schedule + blocks) + place + 1"))
    monkeypatch.setattr(compilation, name, stepped)
    (found,) = reports(90, which, case_of(90, 128, 128))
    assert found.serialized


def test_float32_fits():
    """Without tensor cores, and slow; but it has to fit the smallest chip."""
    for dims in HEAD_DIMS:
        for which in ("forward", "row_sums", "key_value", "query"):
            for report in reports(86, which, case_of(86, *dims, dtype=torch.float32)):
                assert report.shared <= SHARED_MEMORY[86], report


def test_only_the_pinned_triton_is_held_to_no_spill_at_all():
    def spilling(size):
        return Report(kernel="key_value_kernel", registers=255, spilled=size, shared=0, matrix_instructions=1)

    assert_keeps_to_registers(spilling(0), PINNED)
    with pytest.raises(AssertionError, match="spilled=8"):
        assert_keeps_to_registers(spilling(8), PINNED)
    with pytest.warns(UserWarning, match=rf"triton 3\.6\.0, not the pinned {re.escape(PINNED)}, spills 16 bytes"):
        assert_keeps_to_registers(spilling(16), "3.6.0")
    with pytest.raises(AssertionError, match=r"triton 3\.6\.0, .* spills 24 bytes"):
        assert_keeps_to_registers(spilling(24), "3.6.0")
