"""Imports of the servers that fork ranks: Megatron's as a command on a CPU has them, without torch's compiler."""

from importlib import import_module

from mcore_prefix_tree.cpu.emulation import eager_functions

with eager_functions():
    import_module("mcore_prefix_tree.mcore.loop.jobs")
for module in ("mcore_prefix_tree.cli.main", "torch._dynamo"):  # torch's optimizers import the latter in each rank
    import_module(module)
