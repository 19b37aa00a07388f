"""Cases that the ``triton`` back-end rejects, and its comparison before the first call."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_prefix_tree import TreeMetadata
from mcore_prefix_tree.attention import AttentionOptions, Case, parity, reference, triton_tree
from mcore_prefix_tree.attention.triton_tree.block_order import ROUND
from mcore_prefix_tree.attention.triton_tree.config import Configs, configs_for
from mcore_prefix_tree.utils.triton_here import ParityError

HOPPER = Case(
    device=torch.device("cuda"),
    capability=(9, 0),
    dtype=torch.bfloat16,
    heads=8,
    kv_heads=2,
    head_dim=128,
    value_dim=128,
    needs_grad=True,
    options=AttentionOptions(softmax_scale=0.1),
)


def test_supported_and_rejected_cases():
    everything = AttentionOptions(softmax_scale=0.1, window=5, sinks=torch.zeros(8), deterministic=False)
    for changes in (
        {},
        {"options": everything},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"capability": (8, 0)},
        {"capability": (12, 0)},
        {"head_dim": 192},
        {"head_dim": 80, "value_dim": 40},
        {"head_dim": 256, "value_dim": 256},
    ):
        assert triton_tree.refusal(replace(HOPPER, **changes)) is None, changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": torch.device("cpu"), "capability": None}, "device cpu (its kernels are compiled for NVIDIA GPUs)"),
        ({"device": torch.device("xpu"), "capability": None}, "device xpu (its kernels are compiled for NVIDIA GPUs)"),
        ({"capability": (7, 5)}, "compute capability 7.5 (it needs 8.0 or newer)"),
        ({"dtype": torch.float64}, "dtype torch.float64 (it takes torch.float32, torch.float16, torch.bfloat16)"),
        ({"head_dim": 20}, "head_dim=20 (it takes multiples of 8 up to 256)"),
        ({"head_dim": 264}, "head_dim=264 (it takes multiples of 8 up to 256)"),
        ({"value_dim": 4}, "value head_dim=4 (it takes multiples of 8 up to 256)"),
        ({"options": AttentionOptions(softmax_scale=-1.0)}, "softmax_scale=-1.0 (it takes positive ones)"),
    ],
)
def test_refusals(changes, says):
    assert triton_tree.refusal(replace(HOPPER, **changes)) == says


def test_refused_without_triton(monkeypatch):
    monkeypatch.setattr(triton_tree, "has_triton", lambda: False)
    assert triton_tree.refusal(HOPPER) == "device cuda (it needs the package triton, 3.4 or newer)"


@pytest.mark.parametrize("module", ["forward", "backward", "tiles"])
def test_kernels_are_in_the_language_of_the_oldest_triton(module):
    """3.4 has no comprehensions; the kernels compile with the rest of its language, as was tried."""
    source = Path(triton_tree.__file__).with_name(f"{module}.py").read_text()
    newer = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)
    assert not [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, newer)]


# The comparison before the first call, as on a GPU: CPU code computes the kernels' results.


@pytest.fixture
def kernels(monkeypatch):
    """Calls count as calls on a Hopper. Returns the list of kernel calls; ``wrong`` makes their results wrong."""
    of, calls = Case.of.__func__, []
    monkeypatch.setattr(
        Case, "of", classmethod(lambda cls, *arguments: replace(of(cls, *arguments), capability=(9, 0)))
    )

    def attend(query, key, value, metadata, options, configs, operator):
        assert operator is None
        calls.append((metadata.num_tokens, (query.requires_grad, configs.divides)))
        out = reference.attention(query, key, value, metadata, options)
        return 1.1 * out if calls[0] == "wrong" else out

    monkeypatch.setattr(triton_tree, "attend", attend)
    parity._check.cache_clear()
    yield calls
    parity._check.cache_clear()


def call(dtype=torch.bfloat16, *, needs_grad=True, head_dim=16, heads=2, **options):
    """One call on three tokens, which the comparison does not have."""
    metadata = TreeMetadata.from_nodes([0, 3], [-1])
    tensors = [torch.ones(3, count, head_dim, dtype=dtype, requires_grad=needs_grad) for count in (heads, 1, 1)]
    return triton_tree.attention(*tensors, metadata, AttentionOptions(softmax_scale=1.0, **options))


def compared(calls):
    """For each comparison whether it asked for gradients and divided groups of heads; forgets about all calls."""
    asked = [asked for tokens, asked in calls if tokens > 3]
    calls.clear()
    return asked


# With gradients, small forests divide the heads of a group among programs, and long ones do not.
BOTH = [(True, True), (True, False)]


def test_kernels_are_compared_once_for_each_configuration(kernels):
    call()
    assert compared(kernels) == BOTH
    call()
    assert compared(kernels) == []
    for changes in ({"head_dim": 32}, {"window": 2}, {"dtype": torch.float16}):
        call(**changes)
        assert compared(kernels) == BOTH, changes
    call(needs_grad=False)
    assert compared(kernels) == [(False, True)]
    call(heads=1)
    assert compared(kernels) == [(True, True)]


def test_a_wrong_kernel_stops_the_run(kernels):
    kernels.append("wrong")
    for _ in range(2):
        with pytest.raises(ParityError, match=r"'triton' is wrong on this machine: out is off by .* backend 'flex'"):
            call()


def test_comparisons_wait_until_numbers_can_be_read_back(kernels, monkeypatch):
    """Not inside a torch.compile trace or a CUDA graph; the next call catches up."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        call()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        call()
    assert compared(kernels) == []
    call()
    assert compared(kernels) == BOTH


def test_only_16_bit_kernels_of_a_gpu_are_compared(kernels, monkeypatch):
    """The limits are those of their rounding; and in the interpreter there is no compiler to mistrust."""
    call(torch.float32)
    assert compared(kernels) == []
    of = Case.of
    monkeypatch.setattr(Case, "of", lambda *arguments: replace(of(*arguments), capability=None))
    call(torch.float16)
    assert compared(kernels) == []


def test_every_row_of_the_table():
    """Per-token arrays are rounded up to full blocks of any size, and operators get the same launches back."""
    for capability, dims, dtype in itertools.product(
        [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)],
        [(16, 16), (64, 64), (128, 64), (192, 128), (128, 192), (256, 128), (256, 256)],
        [torch.bfloat16, torch.float32],
    ):
        case = replace(HOPPER, capability=capability, head_dim=dims[0], value_dim=dims[1], dtype=dtype)
        configs = configs_for(case)
        assert Configs.unpack(configs.packed) == configs
        for launch in (configs.forward, configs.key_value, configs.query):
            # A matrix product takes 16 rows or more.
            assert all(block >= 16 and ROUND % block == 0 for block in launch[:2])
