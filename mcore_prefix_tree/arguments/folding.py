"""Arguments that all entry points of Megatron-LM have: how micro-batches are folded and computed."""

from __future__ import annotations

import argparse
import re

from mcore_prefix_tree.inputs import MOST


def whole_number(text: str) -> int:
    """Read an argument; an ``argparse`` type."""
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or abs(int(text)) > MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of at most {MOST}")
    return int(text)


def add_folding_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments that set how micro-batches are folded and computed, whatever they are made of."""
    group.add_argument(
        "--prefix-tree-share",
        choices=["all", "prompt"],
        default="all",
        help="all: every common prefix. prompt: what samples have in common before their first scored token. Either is "
        "exact. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-min-shared-tokens",
        type=whole_number,
        default=0,
        metavar="N",
        help="Common prefixes of fewer tokens are not shared. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-length-buckets",
        type=whole_number,
        nargs="+",
        metavar="N",
        help="The only sizes that micro-batches are padded to, the largest at least --prefix-tree-max-tokens. Default: "
        "as little padding as the parallel layout allows.",
    )
    group.add_argument(
        "--prefix-tree-attention-backend",
        default="auto",
        metavar="NAME",
        help="Attention along the tree: one of the back-ends, or auto, the fastest measured on a tree like that of the "
        "first step. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-no-deterministic-attention",
        action="store_false",
        dest="prefix_tree_deterministic_attention",
        help="Let back-ends take a faster backward that adds up in any order, and admit those that have no other. "
        "Otherwise attention gives the same bits twice, with --deterministic-mode or without.",
    )
    group.add_argument(
        "--prefix-tree-no-fused-head",
        action="store_false",
        dest="prefix_tree_fused_head",
        help="Keep the logits of all tokens. Otherwise the tokens that are scored are projected a chunk at a time.",
    )
