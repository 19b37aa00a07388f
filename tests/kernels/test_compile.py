"""Compiling every kernel of the table ahead of time, for any chip: no GPU is needed."""

from __future__ import annotations

import itertools
import re
import warnings
from pathlib import Path

import compilation
import pytest
import torch
import triton
from compilation import (
    HEAD_DIMS,
    KERNELS,
    OPTIONS,
    SHARED_MEMORY,
    Report,
    case_of,
    index_report,
    reports,
    softmax_report,
)

from mcore_prefix_tree.attention.triton_tree import backward, config, forward
from mcore_prefix_tree.attention.triton_tree.config import UP_TO, Launch
from mcore_prefix_tree.logprob.softmax_kernels import gradient_kernel, sums_kernel

OFTEN = [(90, dims) for dims in UP_TO] + [(80, (128, 128)), (100, (128, 128))]
SELDOM = [(architecture, dims) for architecture in SHARED_MEMORY for dims in HEAD_DIMS]

ROOT = Path(__file__).parents[2]
# The table is made for the version of Triton that torch brings, the one before and a newer one: in none of them may
# anything spill. Others allocate registers a little differently.
PINNED = re.search(r"^triton==(\S+)", (ROOT / "requirements/torch.txt").read_text(), re.M)[1]
HELD = ("3.6.0", "3.7.1", "3.9.0")
MOST_SPILLED_BY_OTHERS = 16


def assert_keeps_to_registers(report, version=triton.__version__):
    """Nothing spilled by the versions that the table is for; at most 16 bytes by another one, with a warning."""
    if version.partition("+")[0] in HELD:
        assert report.spilled == 0, report
    elif report.spilled:
        said = f"triton {version}, not one of {', '.join(HELD)}, spills {report.spilled} bytes: {report}"
        assert report.spilled <= MOST_SPILLED_BY_OTHERS, said
        warnings.warn(said, stacklevel=2)


def assert_fit(architecture, dims, options):
    """Tensor-core instructions in each kernel (an empty one once compiled), side by side, room, nothing spilled."""
    kernels = set()
    for which in KERNELS:
        case = case_of(architecture, *dims, options=OPTIONS[options])
        for report in reports(architecture, which, case):
            kernels.add(report.kernel)
            assert report.matrix_instructions > 0 or not report.multiplies, report
            assert not report.serialized, report
            # Else the names of instructions have changed, and nothing was counted.
            counted = report.warpgroup_products > 0 and report.warpgroup_waits > 0
            assert architecture != 90 or counted == report.multiplies
            if dims in UP_TO and architecture != 100:
                # A width that is padded to 256 would multiply a third more, and so would rows that several warps have.
                # The instructions of a large Blackwell have no shape in their name.
                assert report.multiplied == report.needed, report
            assert report.shared <= SHARED_MEMORY[architecture], report
            assert_keeps_to_registers(report)
    assert kernels == {"forward_kernel", "delta_kernel", "key_value_kernel", "query_kernel"}


@pytest.mark.parametrize(("architecture", "dims"), OFTEN)
def test_default_configurations(architecture, dims):
    assert_fit(architecture, dims, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("options", ["window", "all"])
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_options_on_hopper(dims, options):
    assert_fit(90, dims, options)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dims"), [one for one in SELDOM if one not in OFTEN])
def test_other_chips(architecture, dims):
    assert_fit(architecture, dims, "plain")


def test_work_that_is_done_twice_is_counted(monkeypatch):
    """The assertion on the multiplied operands can fail: here both warpgroups have the same rows of keys."""
    doubled = Launch(64, 64, 8, 2)
    monkeypatch.setattr(config, "_HOPPER", [row._replace(key_value=doubled) for row in config._HOPPER])
    (found,) = reports(90, "key_value", case_of(90, 128, 128))
    assert found.multiplied > found.needed


@pytest.mark.parametrize(("which", "module", "dim"), [("forward", forward, 192), ("query", backward, 128)])
def test_a_stepped_pointer_serializes_a_kernel(monkeypatch, which, module, dim):
    """Why places in a schedule are sums of 32 bits; and the assertion above can fail."""
    name, place = f"{which}_kernel", "schedule + (blocks + place + 1)"
    stepped = triton.JITFunction(getattr(module, name).fn)
    assert stepped.src.count(place) == 1
    stepped._unsafe_update_src(stepped.src.replace(place, "(schedule + blocks) + place + 1"))
    monkeypatch.setattr(compilation, name, stepped)
    (found,) = reports(90, which, case_of(90, dim, 128))
    assert found.serialized


@pytest.mark.slow
def test_float32_fits():
    """Without tensor cores, and slow; but it has to fit the smallest chip."""
    for dims in HEAD_DIMS:
        for which in ("forward", "row_sums", "key_value", "query"):
            for report in reports(86, which, case_of(86, *dims, dtype=torch.float32)):
                assert report.shared <= SHARED_MEMORY[86], report


EDGES = ("first", "edge_column", "edge_logit", "edge_grad")
# Logits and gradient: with fp32 products, as older versions of torch have them, and of an fp32 model.
SOFTMAX_DTYPES = [("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")]
SOFTMAX_ABSENT = [(), ("scale", "moment", "grad_entropy"), ("grad_row", *EDGES)]


def assert_softmax_fits(architecture, logits, out, absent):
    """Nothing is spilled, and each loop moves 16 bytes at a time: it reads a logit once and writes a gradient once."""
    # Of a thread, in each round: 8 of COLUMNS. Edges are moved one by one.
    reads, writes = (8 // {"fp32": 4, "bf16": 8}[dtype] for dtype in (logits, out))
    for kernel in (sums_kernel, gradient_kernel):
        own = [name for name in absent if name in kernel.arg_names]
        found, code = softmax_report(kernel, logits, out, architecture, absent=own)
        assert_keeps_to_registers(found)
        assert found.registers <= 64, "no 1,024 threads on a processor"
        assert len(re.findall(r"LDG\.E[.\w]*128", code)) == reads
        assert len(re.findall(r"STG\.E[.\w]*128", code)) == writes * (kernel is gradient_kernel)
    return code


@pytest.mark.parametrize("architecture", [90, 100])
def test_softmax_of_the_head(architecture):
    assert_softmax_fits(architecture, "fp32", "bf16", ())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_every_softmax_of_the_head(architecture):
    for (logits, out), absent in itertools.product(SOFTMAX_DTYPES, SOFTMAX_ABSENT):
        assert_softmax_fits(architecture, logits, out, absent)


def assert_index_fits(architecture, **case):
    """Tensor-core instructions, side by side on Hopper, room, nothing spilled."""
    found = index_report(torch.bfloat16, architecture=architecture, **case)
    assert found.matrix_instructions > 0
    assert not found.serialized, found
    assert (found.warpgroup_products > 0 and found.warpgroup_waits > 0) == (architecture == 90)
    assert found.shared <= SHARED_MEMORY[architecture], found
    assert_keeps_to_registers(found)


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_scores_of_an_indexer(architecture):
    assert_index_fits(architecture, dim=128)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
@pytest.mark.parametrize("case", [{"relu": False, "dim": 128, "heads": 32}, {"dim": 64}, {"dim": 40}], ids=str)
def test_scores_of_other_indexers(architecture, case):
    assert_index_fits(architecture, **case)


@pytest.mark.slow
def test_scores_of_an_indexer_in_float32_fit():
    for dim in (64, 128):
        found = index_report(torch.float32, dim, 86)
        assert found.shared <= SHARED_MEMORY[86], found


def test_only_the_tritons_of_the_table_may_spill_nothing():
    def spilling(size):
        return Report(kernel="key_value_kernel", registers=255, spilled=size, shared=0, matrix_instructions=1)

    for version in HELD:
        assert_keeps_to_registers(spilling(0), version)
        with pytest.raises(AssertionError, match="spilled=8"):
            assert_keeps_to_registers(spilling(8), version)
    assert PINNED in HELD
    with pytest.warns(UserWarning, match=r"triton 3\.5\.1, not one of 3\.6\.0, 3\.7\.1, 3\.9\.0, spills 16 bytes"):
        assert_keeps_to_registers(spilling(16), "3.5.1")
    with pytest.raises(AssertionError, match=r"triton 3\.5\.1, .* spills 24 bytes"):
        assert_keeps_to_registers(spilling(24), "3.5.1")
