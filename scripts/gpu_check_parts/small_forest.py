"""Run forward and backward on a forest of 300 tokens, as a program for tools that inspect kernels."""

from __future__ import annotations

import sys

import torch

from gpu_check_parts.using import unchecked
from mcore_prefix_tree import TreeMetadata
from mcore_prefix_tree.attention import AttentionOptions

# Nodes that end on, before and after tile borders, an empty node, and a second root.
LENS, PARENTS = (127, 1, 65, 0, 62, 44, 1), (-1, 0, 1, 1, 0, -1, 5)


def main(method: str, mode: str) -> None:
    """Run a method in a mode, ``deterministic`` or ``any``."""
    borders = [0]
    for length in LENS:
        borders.append(borders[-1] + length)
    size = borders[-1] + 3
    tree = TreeMetadata.from_nodes(borders, PARENTS, padded_size=size, device=torch.device("cuda"))
    options = AttentionOptions(softmax_scale=128**-0.5, deterministic=mode == "deterministic")
    query, key, value = (
        torch.randn(size, heads, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)
    )
    out = unchecked(method)(query, key, value, tree, options)
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
