"""Folded training inside the reinforcement-learning loop that Megatron-LM ships as ``train_rl.py``.

Rollouts, environments, agents, inference, advantages and the loss stay Megatron-LM's. Folding applies to two steps:

- **Training.** ``pretrain`` gets a forward step, which takes all trajectories of a step from Megatron's own data
  iterator, plans them over all data-parallel ranks, and folds them. ``calculate_grpo_loss`` and the script's
  ``loss_func`` compute the loss of each token and the logged values.
- **Log-probabilities.** ``get_logprobs`` calls the model that the model provider built. Torch's forward hooks of that
  model fold the rows of a call, as in :mod:`mcore_prefix_tree.mcore.packed`, and answer with the log-probabilities of
  the labels in place of logits. Megatron's loop hands the model one micro-batch at a time, so rows fold within it.
"""
