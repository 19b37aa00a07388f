"""Megatron-LM's ``pretrain_hybrid.py`` with one more flag: ``python -m mcore_prefix_tree.pretrain_hybrid --help``.

With every argument of ``pretrain_hybrid.py``, of core_v0.18 and later. Without ``--prefix-tree`` that script itself is
run.
"""

from __future__ import annotations

from mcore_prefix_tree.pretrain_gpt import HYBRID, main

if __name__ == "__main__":
    main(HYBRID)
