"""Losses of chunks between a student and a teacher with different vocabularies, vocabulary-parallel on both sides."""

from mcore_prefix_tree.xtoken.losses.chunk_loss import (
    ChunkLoss,
    ChunkTerms,
    KnownRows,
    Vocabularies,
    block_loss,
    largest_logits,
    teacher_logits,
)
from mcore_prefix_tree.xtoken.losses.common_columns import Part
from mcore_prefix_tree.xtoken.losses.make_loss import make_loss
from mcore_prefix_tree.xtoken.losses.p_kl import top_columns
from mcore_prefix_tree.xtoken.losses.row_blocks import Block, cut_blocks, ordered, take_ending
from mcore_prefix_tree.xtoken.modes import LossSettings
