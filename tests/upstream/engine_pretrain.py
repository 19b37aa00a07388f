"""``bridge_pretrain``, with a stand-in for TransformerEngine in place before Megatron-Core looks for it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "peers"), str(TESTS)]  # a rank that is not forked knows only this folder
import_module("te_stand_in")

if __name__ == "__main__":  # saving starts processes that import this again
    door, bridge = import_module("prepared_door"), import_module("bridge_pretrain")
    door.main(bridge.import_bridge)
