"""Arguments of ``--prefix-tree``, and what can be said of them without importing Megatron-LM or torch.

:mod:`.flags` and :mod:`.group` define them, :mod:`.refusals` refuses what cannot be used together, and :mod:`.early`
applies these rules to a command line before Megatron-LM is imported. ``mcore/megatron_lm/`` applies the same rules to
what Megatron-LM has parsed; that check decides.
"""
