"""``python -m mcore_prefix_tree``, for ``torchrun -m mcore_prefix_tree``: the same as ``mcore-prefix-tree``."""

from mcore_prefix_tree.cli.main import app

# Megatron's checkpoint writer spawns a process, which imports this file again.
if __name__ == "__main__":
    app(prog_name="mcore-prefix-tree")
