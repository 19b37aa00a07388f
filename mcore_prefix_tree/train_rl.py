"""Megatron-LM's ``train_rl.py`` with one more flag: ``python -m mcore_prefix_tree.train_rl --help``.

Under ``torchrun``, Slurm or ``mpirun``, with every argument of ``train_rl.py``. Without ``--prefix-tree`` that script
itself is run.
"""

from mcore_prefix_tree.pretrain_gpt import RL, main

if __name__ == "__main__":
    main(script=RL, starter="mcore_prefix_tree.mcore.megatron_lm.rl.rl_forward_step")
