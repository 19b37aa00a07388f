"""Tree attention: one definition of correctness, several back-ends."""

from mcore_prefix_tree.attention.api import BACKENDS, check_backend, tree_attention
from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case
