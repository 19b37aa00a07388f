"""The definition of folding, token by token: slow, and too simple to be wrong in the same way as the package."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mcore_prefix_tree import FlatLayout, Sample, TreeMetadata

# A token is known by everything that leads to it: merge key and all ids up to its own.
Path = tuple[Hashable, tuple[int, ...]]


def paths_of(sample: Sample) -> list[Path]:
    tokens = tuple(sample.tokens.tolist())
    return [(sample.merge_key, tokens[: end + 1]) for end in range(len(tokens))]


def samples_through(samples: Sequence[Sample]) -> dict[Path, set[int]]:
    """Every unique token, and which samples pass through it."""
    through: dict[Path, set[int]] = {}
    for index, sample in enumerate(samples):
        for path in paths_of(sample):
            through.setdefault(path, set()).add(index)
    return through


def parent_path(path: Path) -> Path:
    return path[0], path[1][:-1]


def flat_paths(samples: Sequence[Sample], layout: FlatLayout) -> list[Path]:
    """The path of every flat token, read through the sample map; every physical token must belong to a sample."""
    found: dict[int, Path] = {}
    for index, sample in enumerate(samples):
        for flat, path in zip(layout.sample_tokens(index).tolist(), paths_of(sample), strict=True):
            assert found.setdefault(flat, path) == path
    assert sorted(found) == list(range(layout.physical_tokens))
    return [found[flat] for flat in range(layout.physical_tokens)]


@st.composite
def sample_lists(draw: st.DrawFn, max_samples: int = 10, min_samples: int = 0) -> list[Sample]:
    """Samples of a small alphabet, so that prefixes, duplicates and single tokens are common."""
    token = st.integers(0, draw(st.sampled_from([0, 1, 2, 40])))
    keys: list[list[Hashable]] = [[None], [None, "a", 7]]
    key = st.sampled_from(draw(st.sampled_from(keys)))
    samples: list[Sample] = []
    for _ in range(draw(st.integers(min_samples, max_samples))):
        head: list[int] = []
        if len(samples) > 0 and draw(st.booleans()):
            ancestor = draw(st.sampled_from(samples)).tokens.tolist()
            head = ancestor[: draw(st.integers(0, len(ancestor)))]
        tail = draw(st.lists(token, min_size=0 if head else 1, max_size=9))
        tokens = head + tail
        # Quarters add up exactly, in any order.
        mask = draw(st.lists(st.sampled_from([0, 1, 0.25]), min_size=len(tokens), max_size=len(tokens)))
        samples.append(Sample(tokens=tokens, loss_mask=mask, merge_key=draw(key)))
    return samples


def forest_samples(node_lens: Sequence[int], node_parent: Sequence[int], *, inner: bool = True) -> list[Sample]:
    """Samples that fold into exactly these nodes: a token's id is its flat index, one sample ends in every node."""
    starts = np.concatenate([[0], np.cumsum(node_lens)])
    paths: list[list[int]] = []
    for node, parent in enumerate(node_parent):
        own = list(range(starts[node], starts[node + 1]))
        paths.append((paths[parent] if parent >= 0 else []) + own)
    leaves = set(range(len(node_parent))) - set(node_parent)
    return [Sample(tokens=path) for node, path in enumerate(paths) if inner or node in leaves]


def comb(depth: int) -> list[Sample]:
    """Each sample leaves one spine of zeros a token later than the one before."""
    return [Sample(tokens=[0] * length + [1]) for length in range(1, depth + 1)]


def random_parents(rng: random.Random, nodes: int, *, root_rate: float = 0.1) -> list[int]:
    """A forest in depth-first pre-order: a node hangs below some node on the path to the one before it."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(nodes):
        keep = 0 if not path or rng.random() < root_rate else rng.randint(1, len(path))
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def random_forest(
    seed: int, *, nodes: int = 12, node_lens: Sequence[int] = (1, 2, 3, 5, 8), root_rate: float = 0.1
) -> tuple[list[int], list[int]]:
    """Node lengths and parents."""
    rng = random.Random(seed)
    parents = random_parents(rng, nodes, root_rate=root_rate)
    return [rng.choice(node_lens) for _ in range(nodes)], parents


def content_of(samples: Sequence[Sample], plan: Any) -> list[list[Any]]:
    """Contents of each micro-batch of each rank, without reference to the caller's order."""
    return [
        [sorted((repr(samples[i].merge_key), samples[i].tokens.tolist()) for i in batch) for batch in rank]
        for rank in plan.micro_batches
    ]


def metadata_of(node_lens: Sequence[int], node_parent: Sequence[int], *, padding: int = 0) -> TreeMetadata:
    borders = np.concatenate([[0], np.cumsum(node_lens)])
    return TreeMetadata.from_nodes(borders, node_parent, padded_size=int(borders[-1]) + padding)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """One sample, ``[n, H, D] x [n, K, D] x [n, K, W]``, row by row."""
    group = query.shape[1] // key.shape[1]
    rows = []
    for i in range(len(query)):
        heads = []
        for head in range(query.shape[1]):
            scores = scale * (key[: i + 1, head // group] @ query[i, head])
            heads.append(torch.softmax(scores, dim=0) @ value[: i + 1, head // group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error of a tensor, in the norm; comparable to the tolerances of DESIGN.md section 5."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.numel():
        return 0.0
    scale = expected.double().norm().item()
    return float((actual.double() - expected.double()).norm().item() / (scale or 1.0))
