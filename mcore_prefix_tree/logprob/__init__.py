"""From logits to the log-probability of every edge, and back to the samples."""

from mcore_prefix_tree.logprob.edges import Edges, edge_logprobs, edge_logprobs_and_entropy
from mcore_prefix_tree.logprob.restore import restore

__all__ = ["Edges", "edge_logprobs", "edge_logprobs_and_entropy", "restore"]
