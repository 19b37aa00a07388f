"""``python -m mcore_prefix_tree.train_rl``, with made rollouts."""

import runpy

from rl_rollouts import exchange_rollouts

if __name__ == "__main__":  # saving a checkpoint starts processes that import this file
    exchange_rollouts()
    runpy.run_module("mcore_prefix_tree.train_rl", run_name="__main__")
