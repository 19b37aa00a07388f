"""From logits to the log-probability of every edge, and back to the samples."""

from mcore_prefix_tree.logprob.block_losses import BlockLoss, head_block_losses
from mcore_prefix_tree.logprob.edges import Edges, edge_logprobs
from mcore_prefix_tree.logprob.head import head_logprobs, split_kept
from mcore_prefix_tree.logprob.head_chunks import Chunks, Head
from mcore_prefix_tree.logprob.head_losses import (
    EdgeLoss,
    LogitLoss,
    head_edge_loss,
    head_logit_losses,
    head_weighted_hits,
    head_weighted_sum,
)
from mcore_prefix_tree.logprob.restore import restore
from mcore_prefix_tree.logprob.top_k import top_logprobs
