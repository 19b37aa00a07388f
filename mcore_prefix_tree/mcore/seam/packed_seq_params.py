"""TreeMetadata's seat in Megatron-Core: a PackedSeqParams that reaches every layer of every pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mcore_prefix_tree.attention import check_backend
from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.logprob import Edges
from mcore_prefix_tree.mcore.seam.carried_keys import Carry
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.utils.upload import upload

# With the source patches of patches/megatron-lm the base class has the field too, and GPTModel reads it.
CORE_KNOWS_TREES = find_spec("megatron.core.tree_metadata") is not None

if CORE_KNOWS_TREES:
    from megatron.core.tree_metadata import TreeMetadata as CoreTreeMetadata

    @dataclass(frozen=True, kw_only=True, eq=False)
    class _TreeMetadataOfBoth(TreeMetadata, CoreTreeMetadata):  # type: ignore[misc]
        """Metadata of this package if Megatron-Core has its own class: an instance of both."""


@dataclass
class TreePackedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Parameters of a folded micro-batch: its tree, and the back-end that attends to it.

    It is a subclass, because ``TEDotProductAttention`` passes every field of the base class to TransformerEngine as a
    keyword. ``qkv_format`` stays ``'sbhd'``: ``'thd'`` would restart rotary positions at each sequence.
    ``max_seqlen_*``, the longest path rounded up to a power of two, sets the size of the model's rotary table; upstream
    keeps the last 32 of different sizes.

    Attributes:
        tree_metadata: metadata of the micro-batch's tree, on the device of the hidden states.
        attention_backend: a name of :data:`mcore_prefix_tree.attention.BACKENDS`.
        deterministic_attention: whether attention has to give the same bits twice, as it also has to under
            ``deterministic_mode`` of the model's config.
        depths: parameters of each depth of multi-token prediction; empty if the micro-batch does not train them.
        carry: keys and values of other micro-batches, for a chunk of a tree above the budget; None for whole samples.
        rotary_by_token: whether rotary embeddings have a row for each token, as in M-RoPE, not for each position.
        run_depths: function that scores the depths of a ``HybridModel``, which hands them nothing else of ours.
    """

    tree_metadata: TreeMetadata | None = None
    attention_backend: str = "path"
    deterministic_attention: bool = False
    depths: tuple[DepthPackedSeqParams, ...] = ()
    carry: Carry | None = None
    rotary_by_token: bool = False
    run_depths: Callable[..., torch.Tensor] | None = None

    @classmethod
    def from_metadata(
        cls, metadata: TreeMetadata, *, attention_backend: str = "path", deterministic_attention: bool = False
    ) -> TreePackedSeqParams:
        """Return the parameters to pass as ``packed_seq_params`` to the model's forward.

        Raises:
            ValueError: the back-end does not exist.
        """
        check_backend(attention_backend)
        positions = 1 << (metadata.max_path_len - 1).bit_length()
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=positions,
            max_seqlen_kv=positions,
            tree_metadata=_seated(metadata, attention_backend, deterministic_attention),
            attention_backend=attention_backend,
            deterministic_attention=deterministic_attention,
        )

    def with_carry(self, variant: Callable[[Carry], Carry]) -> TreePackedSeqParams:
        """Return the parameters with a variant of their carry, if they have one."""
        return self if self.carry is None else replace(self, carry=variant(self.carry))


@dataclass(kw_only=True)
class DepthPackedSeqParams(TreePackedSeqParams):
    """Parameters of a depth of multi-token prediction, whose paths begin as many tokens later.

    Row u has the hidden state of u's predecessor and the embedding of u, and predicts u's children.
    """

    # int64 [P], the predecessor of each token; a token without one has its own index. P + i is the i-th token of other
    # chunks that this one follows.
    parent: torch.Tensor
    left: torch.Tensor  # int64 [n], the tokens whose hidden states other chunks are given
    edges: Edges  # the scored edges of the depth
    weight: torch.Tensor  # float64 [E], weights of their losses
    # Factor of their sum, the divisor of the step's loss over its scored tokens: the depths' own mean is over these,
    # whatever divides the gradients.
    scale: float | torch.Tensor = 1.0

    @classmethod
    def from_layout(
        cls, layout: FlatLayout, params: TreePackedSeqParams, weights: npt.NDArray[np.float64]
    ) -> tuple[DepthPackedSeqParams, ...]:
        """Return the parameters of each depth of a layout, on the host.

        ``params`` are those of the micro-batch; ``weights``, float64 ``[K, P]``, are those of K depths by place.
        """
        metadata = params.tree_metadata
        assert metadata is not None
        handover = metadata.handover
        parent = np.where(layout.predictor < 0, np.arange(layout.padded_size), layout.predictor).astype(np.int64)
        parent[handover.heads] = layout.padded_size + handover.given
        found = []
        for depth, weight in enumerate(weights, start=1):
            # A kept set says how a token was drawn; multi-token prediction is of the whole vocabulary.
            edges = Edges.from_layout(replace(layout, kept=None), needed=weight != 0)
            assert edges.token is not None
            of_tree = TreePackedSeqParams.from_metadata(
                metadata.without_first(depth),
                attention_backend=params.attention_backend,
                deterministic_attention=params.deterministic_attention,
            )
            if params.carry is not None:
                of_tree.carry = replace(params.carry, keys=params.carry.keys.without_first(depth), windows={})
            own: dict[str, Any] = {
                "parent": upload(parent, "cpu"),
                "left": upload(handover.ends, "cpu"),
                "edges": edges,
                "weight": upload(weight, "cpu")[edges.token],
            }
            found.append(cls(**vars(of_tree), **own))
        return tuple(found)


def _seated(metadata: TreeMetadata, attention_backend: str, deterministic: bool) -> TreeMetadata:
    """Return metadata that the installed Megatron-Core can read; its plans stay shared."""
    if not CORE_KNOWS_TREES:
        return metadata
    given = {field.name: getattr(metadata, field.name) for field in fields(TreeMetadata)}
    return _TreeMetadataOfBoth(**given, attention_backend=attention_backend, deterministic=deterministic)


def convert_metadata(tree_metadata: Any) -> TreeMetadata:
    """Return this package's metadata for an object of Megatron-Core's own class; made once."""
    if isinstance(tree_metadata, TreeMetadata):
        return tree_metadata
    made: TreeMetadata | None = tree_metadata.cache.get(__name__)
    if made is None:
        made = tree_metadata.cache[__name__] = TreeMetadata.from_nodes(
            tree_metadata.cu_node_lens,
            tree_metadata.node_parent,
            padded_size=tree_metadata.padded_size,
            device=tree_metadata.subtree_end.device,
        )
    return made


def get_tree_params(packed_seq_params: Any) -> TreePackedSeqParams | None:
    """Return the tree parameters of ``packed_seq_params``, None if it carries no tree."""
    metadata = getattr(packed_seq_params, "tree_metadata", None)
    if metadata is None or isinstance(packed_seq_params, TreePackedSeqParams):
        return None if metadata is None else packed_seq_params
    return TreePackedSeqParams.from_metadata(
        convert_metadata(metadata),
        attention_backend=metadata.attention_backend,
        deterministic_attention=metadata.deterministic,
    )
