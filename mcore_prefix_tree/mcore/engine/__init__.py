"""Everything between samples and losses, for any loop: fold, schedule, account, evaluate, score, verify, compare."""

from mcore_prefix_tree.mcore import compat

compat.check(compat.ENGINE)
