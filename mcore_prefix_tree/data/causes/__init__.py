"""Reasons why samples that should begin with the same tokens do not, and the fold ratio after fixing each."""

from mcore_prefix_tree.data.causes.find import Mismatch, find_mismatches
from mcore_prefix_tree.data.causes.mend import Cause, Causes, find_causes
from mcore_prefix_tree.data.causes.words import Decode, Difference

__all__ = ["Cause", "Causes", "Decode", "Difference", "Mismatch", "find_causes", "find_mismatches"]
