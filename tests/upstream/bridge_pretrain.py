"""``mcore_prefix_tree.pretrain_gpt``, with Megatron-Bridge imported together with a stand-in for TransformerEngine."""

from __future__ import annotations

import sys
from pathlib import Path

import prepared_door


def import_bridge() -> None:
    sys.path.append(str(Path(__file__).parents[1] / "peers"))
    from bridge_models import auto_bridge

    auto_bridge()


if __name__ == "__main__":  # saving starts processes that import this again
    prepared_door.main(import_bridge)
