"""``mcore_prefix_tree.pretrain_gpt`` for tests that prepare something of Megatron once its checkout is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mcore_prefix_tree import pretrain_gpt


def main(prepare: Callable[[], None]) -> None:
    """Run it, and ``prepare`` as soon as the checkout is on the path: only then is there a megatron.core to import."""
    use_megatron_lm = pretrain_gpt.use_megatron_lm

    def prepared(path: str | None) -> Path:
        root = use_megatron_lm(path)
        prepare()
        return root

    pretrain_gpt.use_megatron_lm = prepared
    pretrain_gpt.main()
