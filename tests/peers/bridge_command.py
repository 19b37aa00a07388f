"""``mcore-prefix-tree``, after Megatron-Bridge was imported with a stand-in for TransformerEngine."""

from bridge_models import auto_bridge

from mcore_prefix_tree.__main__ import main

auto_bridge()
main()
