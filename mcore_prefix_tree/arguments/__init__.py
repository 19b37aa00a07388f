"""Arguments of ``--prefix-tree``, and every check of them that needs neither Megatron-LM nor torch.

:mod:`.flags` defines and reads them, and :mod:`.refusals` rejects those that cannot be used together.
``mcore/megatron_lm/`` applies the rules to the arguments that Megatron-LM has parsed.
"""
