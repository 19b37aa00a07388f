"""Compile FlashAttention-4's kernels with our mask and our lists, on a machine without a GPU: see test_attention_fa4.

    fa4_compile_gate.py HEADS,KEY_HEADS,D,W [OPTION,...]

Options are window, sinks, ordered, wrong-tiles, and forward: as for a backward of Triton, through the package's public
function. For the chip that ``FLASH_ATTENTION_ARCH`` names. Prints a word for each pass that compiled. Its tensors are
fake ones on a GPU that is not there; torch has no autograd for these in a build for the CPU, so the two passes are
called as the package's own autograd function calls them.
"""

from __future__ import annotations

import os
import sys
from unittest import mock

import cutlass
import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from harness.oracles import metadata_of, random_forest
from torch._subclasses.fake_tensor import FakeTensorMode

from mcore_prefix_tree.attention import AttentionOptions, fa4


class Processors:
    """The driver's answers about the GPU's size, which Blackwell kernels ask for during compilation."""

    count = int(os.environ["FLASH_ATTENTION_NUM_SMS"])

    def get_device_multiprocessor_count(self) -> int:
        return self.count


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


def fake_lists(lists):
    return type(lists)(*(fake(field) if isinstance(field, torch.Tensor) else field for field in lists))


def main() -> None:
    heads, key_heads, head_dim, value_dim = (int(number) for number in sys.argv[1].split(","))
    options = set(sys.argv[2].split(",")) if len(sys.argv) > 2 else set()
    window = 70 if "window" in options else None
    metadata = metadata_of(*random_forest(1, nodes=14, node_lens=(1, 60, 130, 200)), padding=3)
    capability = divmod(int(os.environ["FLASH_ATTENTION_ARCH"].removeprefix("sm_")), 10)
    tiles = fa4.choose_tiles(capability, head_dim, value_dim)
    if "forward" in options:
        tiles = tiles._replace(backward=None)
    if "wrong-tiles" in options:
        tiles = fa4.TilePair(fa4.Block(96, 48), fa4.Block(96, 48))
    mask = fa4.build_mask(metadata, tiles, window, ordered="ordered" in options)
    with FakeTensorMode(), mock.patch.object(cutlass.utils, "HardwareInfo", Processors):
        given = AttentionOptions(
            softmax_scale=head_dim**-0.5,
            window=window,
            sinks=torch.empty(heads, device="cuda") if "sinks" in options else None,
        )
        mask = fa4.Mask(
            forward=fake_lists(mask.forward),
            backward=None if mask.backward is None else fake_lists(mask.backward),
            tensors=tuple(fake(tensor) for tensor in mask.tensors),
            ordered=mask.ordered,
        )

        def rows(count: int, width: int) -> torch.Tensor:
            return torch.empty(1, metadata.padded_size, count, width, dtype=torch.bfloat16, device="cuda")

        query, key, value = rows(heads, head_dim), rows(key_heads, head_dim), rows(key_heads, value_dim)
        if mask.backward is None:
            with torch.no_grad(), mock.patch.object(torch.cuda, "device_of"):  # which asks the driver
                out, lse = fa4.run_kernels(query[0], key[0], value[0], mask, given, return_lse=True)
            assert (out.shape, out.dtype) == ((metadata.padded_size, heads, value_dim), query.dtype)
            assert (lse.shape, lse.dtype) == ((heads, metadata.padded_size), torch.float32)
            print("forward")
            return
        arguments = fa4.arguments(mask, given)
        out, lse, *_ = _flash_attn_fwd(
            query, key, value, return_lse=True, block_sparse_tensors=mask.forward, **arguments
        )
        print("forward")
        grads = _flash_attn_bwd(
            *(query, key, value, out, torch.empty_like(out), lse),
            block_sparse_tensors=mask.backward,
            deterministic=mask.ordered,
            **arguments,
        )
        assert [one.shape for one in grads[:3]] == [query.shape, key.shape, value.shape]
        print("backward")


if __name__ == "__main__":
    main()
