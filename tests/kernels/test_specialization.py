"""Any number of tokens without compiling again: Triton's keys of compiled kernels, recorded without a GPU.

A launch is compiled anew when its key is new. With constants and types the key has, of every integer that a kernel
does not exempt, whether it is 1 and whether 16 divides it, and of every pointer whether it is aligned.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from unittest import mock

import pytest
import torch
from harness.oracles import metadata_of, random_forest
from kernel_cases import options_of
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from mcore_prefix_tree import TreeMetadata
from mcore_prefix_tree.attention import Case, chosen_keys
from mcore_prefix_tree.attention.chosen_keys import index_scores
from mcore_prefix_tree.attention.triton_tree import attend, backward, forward, kernel_calls
from mcore_prefix_tree.attention.triton_tree.config import configs_for

KERNELS = {
    "forward_kernel": forward.forward_kernel,
    "delta_kernel": backward.delta_kernel,
    "key_value_kernel": backward.key_value_kernel,
    "query_kernel": backward.query_kernel,
}
# One token; powers of two, their neighbours and odd numbers; one block, several, and so many that no group is split.
SIZES = (1, 2, 15, 16, 17, 127, 128, 129, 240, 255, 1000, 1024, 1601, 4096, 5000, 20_000)
PROCESSORS = 16


def forests():
    """Forests of one node and of many, with empty ones, by their number of tokens."""
    for size in SIZES:
        yield metadata_of([size], [-1])
    for seed in range(8):
        yield metadata_of(
            *random_forest(seed, nodes=4 + 5 * seed, node_lens=(0, 1, 57, 64, 130, 300)), padding=seed + 1
        )
    yield TreeMetadata.from_nodes([0], [], padded_size=37)


class Recorder:
    """Replaces a kernel: records the keys of its launches and runs nothing."""

    def __init__(self, kernel, architecture):
        backend = make_backend(GPUTarget("cuda", architecture, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.keys = defaultdict(list)

    def __getitem__(self, grid):
        assert min(grid) > 0

        def run(*arguments, **options):
            assert "enable_fp_fusion" in options, "Triton 3.9 warns of a launch that does not say it"
            _, specialization, options = self.bind(*arguments, **options)
            self.keys[str(specialization), str(options)].append(grid)

        return run


def keys_of_launches(architecture, metadatas, *, heads, key_heads, dim, value_dim=None, sinks=False, **settings):
    """For each kernel the keys of a forward and a backward of each forest, each with its grids; and the configs."""
    recorders = {name: Recorder(kernel, architecture) for name, kernel in KERNELS.items()}
    with mock.patch.multiple(kernel_calls, processors=lambda device: PROCESSORS, **recorders):
        for metadata in metadatas:
            inputs = [
                torch.zeros(metadata.padded_size, count, width, dtype=torch.bfloat16, requires_grad=True)
                for count, width in ((heads, dim), (key_heads, dim), (key_heads, value_dim or dim))
            ]
            if sinks:
                inputs.append(torch.zeros(heads))
            options = options_of(inputs, **settings)
            configs = configs_for(replace(Case.of(*inputs[:3], options), capability=divmod(architecture, 10)))
            attend(*inputs[:3], metadata, options, configs).sum().backward()
    return {name: recorder.keys for name, recorder in recorders.items()}, configs


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 8, "key_heads": 1, "dim": 64},
        {"heads": 3, "key_heads": 1, "dim": 40},  # strides that 16 does not divide
        {"heads": 2, "key_heads": 2, "dim": 128},
        {"heads": 4, "key_heads": 2, "dim": 192, "value_dim": 128},
        {"heads": 8, "key_heads": 1, "dim": 64, "window": 50, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_one_key_for_all_numbers_of_tokens_nodes_and_blocks(architecture, shape):
    found, configs = keys_of_launches(architecture, forests(), **shape)
    launches = dict.fromkeys(KERNELS, 1)
    launches["key_value_kernel"] += configs.apart
    assert {name: len(keys) for name, keys in found.items()} == launches
    for keys in found.values():
        for grids in keys.values():
            assert len(grids) == len(list(forests()))
            assert len(set(grids)) > 5


def test_a_group_is_split_and_not_split_by_the_same_kernel():
    """With few tokens, a group's heads are divided to fill the device: another grid and other sums, not another key."""
    shape = {"heads": 8, "key_heads": 1, "dim": 64}
    few, many = metadata_of([300], [-1]), metadata_of([40_000], [-1])
    found, _ = keys_of_launches(90, [few, many], **shape)
    (grids,) = found["key_value_kernel"].values()
    blocks = [-(-forest.padded_size // 128) for forest in (few, many)]
    assert grids == [(blocks[0] * 8,), (blocks[1],)]


def test_one_key_for_the_scores_of_an_indexer():
    recorder = Recorder(index_scores.index_kernel, 90)
    with (
        mock.patch.object(index_scores, "index_kernel", recorder),
        mock.patch.object(chosen_keys, "kernels_run_on", return_value=True),
    ):
        for metadata in forests():
            size = metadata.padded_size
            query, key, weight = (torch.zeros(size, *rest, dtype=torch.bfloat16) for rest in ((4, 24), (24,), (4,)))
            score = chosen_keys.score_by_kernel(query, key, weight, metadata, relu=True)
            chosen_keys.choose_keys(score, metadata, 50, 1)
    (grids,) = recorder.keys.values()
    assert len(set(grids)) > 5
