"""``mcore_prefix_tree.pretrain_gpt``, with Megatron-Bridge imported beside a stand-in for TransformerEngine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "peers"))
from mcore_prefix_tree import pretrain_gpt

use_megatron_lm = pretrain_gpt.use_megatron_lm


def with_bridge(path: str | None) -> Path:
    """Put the checkout on the path; only then is there a megatron.core to import."""
    root = use_megatron_lm(path)
    from bridge_models import auto_bridge

    auto_bridge()
    return root


if __name__ == "__main__":  # saving starts processes that import this again
    pretrain_gpt.use_megatron_lm = with_bridge
    pretrain_gpt.main()
