"""NeMo Automodel's calls for rollouts that share a prompt, with every completion token supervised.

Labels hold one target per position, and the last prompt token has a target in every completion. So each completion
begins with a copy of that token: one more token per completion, and its first token is supervised too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree.layout import FlatLayout, fold
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.trie import Sharing, build_trie

IGNORED = -100

Rollouts = tuple[Sequence[int], Sequence[Sequence[int]]]


@dataclass(frozen=True, kw_only=True)
class FoldedRollouts:
    """Completions of a prompt in one flat layout."""

    input_ids: list[int]  # tokens of the nodes, node after node
    labels: list[int]  # token that each position predicts, or the ignored index; the loss must not shift them
    position_ids: list[int]  # position of each token in its own rollout
    node_lengths: list[int]
    sample_paths: list[list[int]]  # nodes of each completion from the root, in the caller's order of completions


def fold_shared_prefix_rollouts(
    prompt_ids: Sequence[int], completions: Sequence[Sequence[int]], *, ignore_idx: int = IGNORED
) -> FoldedRollouts:
    """Fold the completions of a prompt.

    With an empty prompt, the first token of each completion is not supervised. ``ignore_idx`` labels such positions.

    Raises:
        ValueError: no completion is given, or one is empty.
    """
    layout, labels = _fold([(prompt_ids, completions)], ignore_idx)
    paths = []
    for node in layout.sample_node.tolist():
        path = [node]
        while (parent := int(layout.node_parent[path[-1]])) >= 0:
            path.append(parent)
        paths.append(path[::-1])
    return FoldedRollouts(
        input_ids=layout.input_ids.tolist(),
        labels=labels.tolist(),
        position_ids=layout.position_ids.tolist(),
        node_lengths=np.diff(layout.cu_node_lens).tolist(),
        sample_paths=paths,
    )


def prefix_tree_collate_fn(batch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fold any number of groups with ``prompt_ids`` and ``completions`` into one batch; prompts share common prefixes.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, int64 ``[1, T]``, and the tree as ``prefix_tree``. They are
        arguments of a Transformers model with ``attn_implementation="prefix_tree"``; for its own loss, pass the labels
        as ``shift_labels`` too.

    Raises:
        ValueError: no group is given, or a group has no completion or an empty one.
    """
    layout, labels = _fold([(group["prompt_ids"], group["completions"]) for group in batch], IGNORED)
    return {
        "input_ids": torch.from_numpy(layout.input_ids).long()[None],
        "labels": torch.from_numpy(labels)[None],
        "position_ids": torch.from_numpy(layout.position_ids).long()[None],
        "prefix_tree": TreeMetadata.from_layout(layout),
    }


def _fold(groups: Sequence[Rollouts], ignored: int) -> tuple[FlatLayout, np.ndarray[Any, np.dtype[np.int64]]]:
    if not groups:
        raise ValueError("the batch has no group; give at least one")
    samples: list[Sample] = []
    first: list[int] = []
    for index, (prompt, completions) in enumerate(groups):
        if not completions or not all(map(len, completions)):
            raise ValueError(f"group {index}: every group needs a completion, and every completion a token")
        # The last prompt token counts as scored, so that it is not shared.
        mask = [0] * (len(prompt) - 1)
        for completion in completions:
            scored = len(completion) + len(prompt) - len(mask)
            alone = None if mask else len(samples)  # a prompt of one token is shared with no completion
            samples.append(Sample(tokens=[*prompt, *completion], loss_mask=mask + [1] * scored, merge_key=alone))
            first.append(len(mask))
    layout = fold(samples, trie=build_trie(samples, Sharing(share="prompt")))
    labels = np.full(layout.padded_size, ignored, dtype=np.int64)
    for index, sample in enumerate(samples):
        labels[layout.sample_tokens(index)[first[index] : -1]] = sample.tokens[first[index] + 1 :]
    return layout, labels
