"""Kernels are launched on the device of their tensors, even if the current device of the process is another.

No GPU is needed: tensors report a second one as their device, and Triton has a driver that runs nothing but records
the device of each launch. The kernels are really compiled, for Hopper.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fake_flash_attention import install
from harness.oracles import metadata_of
from kernel_cases import options_of, small_configs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mcore_prefix_tree.attention import fa4
from mcore_prefix_tree.attention.chosen_keys import choose_keys, index_scores, score_by_kernel
from mcore_prefix_tree.attention.triton_tree import attend, backward, forward
from mcore_prefix_tree.logprob import softmax, softmax_kernels
from mcore_prefix_tree.logprob.softmax import LogitGrads, softmax_backward, softmax_sums

HEAD_KERNELS = (softmax_kernels.sums_kernel, softmax_kernels.gradient_kernel)
KERNELS = (forward.forward_kernel, backward.delta_kernel, backward.key_value_kernel, backward.query_kernel)
SECOND = 1


class Driver:
    """The calls of a driver by Triton; ``launches`` are names of kernels, devices and streams."""

    def __init__(self):
        self.current, self.launches = 0, []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10, "warpSize": 32},
            load_binary=lambda name, kernel, shared, device: (device, (name, device), 0, 0, 1024),
        )

    def get_current_device(self):
        return self.current

    def get_current_stream(self, device):
        return 100 + device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata):
        def launch(grid_0, grid_1, grid_2, stream, function, *_):
            name, loaded_on = function
            assert loaded_on == self.current
            self.launches.append((name, self.current, stream))

        return launch

    def exchange(self, device):
        """As ``cudaSetDevice`` of torch: the device before; a negative one changes nothing."""
        before = self.current
        self.current = before if device < 0 else device
        return before


@pytest.fixture
def machine():
    """A process on the first of two GPUs, whose tensors are all on the second."""
    fake = Driver()
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (torch.Tensor, "is_cuda", property(lambda tensor: True)),
            (torch.Tensor, "get_device", lambda tensor: SECOND),
            (torch.cuda, "_exchange_device", fake.exchange),
            (torch.cuda, "_maybe_exchange_device", fake.exchange),
            (driver, "_active", fake),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield fake
    for kernel in (*KERNELS, *HEAD_KERNELS, index_scores.index_kernel):
        for device in (0, SECOND):
            kernel.device_caches.pop(device, None)


def inputs_of(metadata):
    return [torch.randn(metadata.padded_size, heads, 32).bfloat16().requires_grad_() for heads in (2, 1, 1)]


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_every_kernel_of_ours(machine, apart, engine):
    metadata = metadata_of([40, 10, 15], [-1, 0, 0], padding=3)
    inputs = inputs_of(metadata)
    configs = small_configs(apart=apart, engine=engine)
    out = attend(*inputs, metadata, options_of(inputs), configs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    names = [kernel.__name__ for kernel in KERNELS]
    if apart:
        names.insert(2, "key_value_kernel")
    assert machine.launches == [(name, SECOND, 100 + SECOND) for name in names]
    assert machine.current == 0


def test_the_softmax_of_the_head(machine, monkeypatch):
    monkeypatch.setattr(softmax, "_check_kernels", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    logits, ones = torch.zeros(3, 64), torch.ones(3)
    sums = softmax_sums(logits, with_entropy=True)
    softmax_backward(logits, sums, LogitGrads(row=ones, entropy=ones, edges=None), out=logits)
    assert machine.launches == [(kernel.__name__, SECOND, 100 + SECOND) for kernel in HEAD_KERNELS]
    assert machine.current == 0


def test_the_scores_of_an_indexer(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    metadata = metadata_of([40, 10, 15], [-1, 0, 0], padding=3)
    query, key, weight = (torch.zeros(metadata.padded_size, *size).bfloat16() for size in ((4, 16), (16,), (4,)))
    score = score_by_kernel(query, key, weight, metadata, relu=True)
    choose_keys(score, metadata, 8, 1)
    assert machine.launches == [("index_kernel", SECOND, 100 + SECOND)]
    assert machine.current == 0


def test_flash_attention_4(machine, tmp_path, monkeypatch):
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    from flash_attn import cute

    devices = []
    original = cute.flash_attn_func
    monkeypatch.setattr(cute, "flash_attn_func", lambda *q, **k: devices.append(machine.current) or original(*q, **k))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    metadata = metadata_of([40, 10, 15], [-1, 0, 0])
    inputs = inputs_of(metadata)
    fa4.attend(*inputs, metadata, options_of(inputs))
    assert devices == [SECOND]
    fa4._visible.cache_clear()
