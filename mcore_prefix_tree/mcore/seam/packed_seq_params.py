"""TreeMetadata's seat in Megatron-Core: a PackedSeqParams that reaches every layer of every pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams

from mcore_prefix_tree.attention import check_backend
from mcore_prefix_tree.metadata import TreeMetadata


@dataclass
class TreePackedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Says that a micro-batch is folded, how, and which back-end attends to it.

    A subclass, because ``TEDotProductAttention`` hands every field of the base class to TransformerEngine as a keyword.
    ``qkv_format`` stays ``'sbhd'``: a ``'thd'`` one would restart rotary positions at each sequence. From
    ``max_seqlen_*``, the longest path rounded up to a power of two, the model sizes its rotary table; upstream keeps
    the last 32 of different sizes.

    Attributes:
        tree_metadata: of the micro-batch, on the device of the hidden states.
        attention_backend: a name of :data:`mcore_prefix_tree.attention.BACKENDS`.
        deterministic_attention: whether attention has to give the same bits twice. Where it need not, back-ends take a
            faster backward, and those train that have no other.
    """

    tree_metadata: TreeMetadata | None = None
    attention_backend: str = "path"
    deterministic_attention: bool = True

    @classmethod
    def from_metadata(
        cls, metadata: TreeMetadata, *, attention_backend: str = "path", deterministic_attention: bool = True
    ) -> TreePackedSeqParams:
        """The parameters to pass as ``packed_seq_params`` to ``GPTModel.forward``.

        Raises:
            ValueError: if there is no such back-end.
        """
        check_backend(attention_backend)
        positions = 1 << (metadata.max_path_len - 1).bit_length()
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=positions,
            max_seqlen_kv=positions,
            tree_metadata=metadata,
            attention_backend=attention_backend,
            deterministic_attention=deterministic_attention,
        )


# With the source patches of patches/megatron-lm the base class has the field too, and GPTModel reads it.
CORE_KNOWS_TREES = any(field.name == "tree_metadata" for field in fields(PackedSeqParams))


def tree_params_of(packed_seq_params: Any) -> TreePackedSeqParams | None:
    """Return the tree of ``packed_seq_params``, None if it carries none."""
    metadata = getattr(packed_seq_params, "tree_metadata", None)
    if metadata is None or isinstance(packed_seq_params, TreePackedSeqParams):
        return None if metadata is None else packed_seq_params
    return TreePackedSeqParams.from_metadata(metadata)
