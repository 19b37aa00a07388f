"""The vocabulary of a ``--prefix-tree`` job, without the padding that Megatron-LM adds."""

from __future__ import annotations

import argparse

from megatron.training import get_tokenizer


def vocab_size_without_padding(args: argparse.Namespace) -> int | None:
    """Return the number of tokens of the model's vocabulary; rows of the embedding from this id on are padding.

    Megatron-LM's tokenizer knows it: ``--vocab-size`` may lack the end-of-document token, and most tokenizers ignore
    it. A dry run builds no tokenizer; if its arguments do not set the size, this is ``--padded-vocab-size``.
    """
    padded: int | None = args.padded_vocab_size
    known: int | None = getattr(args, "prefix_tree_vocab_size", None)
    if known is None and not getattr(args, "prefix_tree_dry_run", False):
        known = max(args.vocab_size or 0, get_tokenizer().vocab_size)
    return padded if known is None or padded is None else min(known, padded)
