"""Arguments of ``--prefix-tree``, and every check of them that needs neither Megatron-LM nor torch.

:mod:`.flags` defines and reads them, :mod:`.refusals` rejects those that cannot be used together, and :mod:`.early`
applies these rules to a command line before Megatron-LM is imported. ``mcore/megatron_lm/`` applies the same rules to
the arguments that Megatron-LM has parsed; that check decides.
"""
