"""The forests that attention is measured on: rollouts of one prompt, many short leaves, a deep tree, no sharing, data.

Legend: T tokens, N nodes, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mcore_prefix_tree.attention.tile_blocks import visible_pairs
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.plan import plan_step
from mcore_prefix_tree.sample import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A forest, and the lengths of its unfolded samples."""

    name: str
    cu_node_lens: npt.NDArray[np.int64]  # [N + 1], flat borders of the nodes, in depth-first pre-order
    node_parent: npt.NDArray[np.int64]  # [N]
    sample_lens: npt.NDArray[np.int64]  # [S], tokens of every sample

    def folded(self, device: torch.device) -> TreeMetadata:
        """Metadata of the forest."""
        return TreeMetadata.from_nodes(self.cu_node_lens, self.node_parent, device=device)

    def unfolded(self, device: torch.device) -> TreeMetadata:
        """Return metadata of the samples as an ordinary packed batch."""
        return chains(self.sample_lens, device)

    def dense(self, device: torch.device) -> TreeMetadata:
        """Return metadata of one causal sequence with about as many visible pairs as the forest."""
        pairs = visible_pairs(self.folded(torch.device("cpu")))
        return chains(np.array([max(1, round((2 * pairs + 0.25) ** 0.5 - 0.5))]), device)


def chains(lens: npt.NDArray[np.int64], device: torch.device) -> TreeMetadata:
    """Metadata of sequences that share nothing."""
    return TreeMetadata.from_nodes(np.concatenate([[0], np.cumsum(lens)]), np.full(len(lens), -1), device=device)


def _rollouts(name: str, prompt: int, responses: Sequence[int]) -> Workload:
    lens = np.array([prompt, *responses])
    return Workload(
        name=name,
        cu_node_lens=np.concatenate([[0], np.cumsum(lens)]),
        node_parent=np.array([-1, *[0] * len(responses)]),
        sample_lens=prompt + lens[1:],
    )


def _binary(name: str, nodes: int, length: int) -> Workload:
    """A binary tree filled level by level, laid out in depth-first order; every leaf is a sample."""
    parent: list[int] = []
    sample_lens = []
    stack = [(0, -1, 1)]
    while stack:
        heap, above, depth = stack.pop()
        parent.append(above)
        children = [child for child in (2 * heap + 2, 2 * heap + 1) if child < nodes]
        stack += [(child, len(parent) - 1, depth + 1) for child in children]
        if not children:
            sample_lens.append(depth * length)
    return Workload(
        name=name,
        cu_node_lens=np.arange(nodes + 1) * length,
        node_parent=np.array(parent),
        sample_lens=np.array(sample_lens),
    )


def standard_workloads(scale: float = 1.0) -> list[Workload]:
    """Five trees and a batch without sharing. ``scale`` is a factor on all lengths, so that a CPU can run them."""

    def scaled(length: float) -> int:
        return max(1, round(length * scale))

    varied = np.random.default_rng(0).integers(500, 3001, size=16)
    return [
        _rollouts("P4096 G16 R1024", scaled(4096), [scaled(1024)] * 16),
        _rollouts("P1000 G16 R500-3000", scaled(1000), [scaled(length) for length in varied]),
        _rollouts("P16384 G32 R2048", scaled(16384), [scaled(2048)] * 32),
        _rollouts("256 leaves of 100", scaled(2000), [scaled(100)] * 256),
        _binary("binary, 189 nodes of 777", 189, scaled(777)),
        Workload(
            name="no sharing, 16 of 2048",
            cu_node_lens=np.arange(17) * scaled(2048),
            node_parent=np.full(16, -1),
            sample_lens=np.full(16, scaled(2048)),
        ),
    ]


def workload_of_samples(name: str, samples: Sequence[Sample], *, max_tokens: int) -> Workload:
    """The first micro-batch of a step that takes all samples."""
    first = plan_step(samples, max_tokens=max_tokens, dp_size=1).micro_batches[0][0]
    chosen = [samples[index] for index in first]
    layout = fold(chosen)
    return Workload(
        name=name,
        cu_node_lens=layout.cu_node_lens.astype(np.int64),
        node_parent=layout.node_parent.astype(np.int64),
        sample_lens=np.array([len(sample) for sample in chosen]),
    )


def workloads_of_file(path: str, max_tokens: int = 32768) -> list[Workload]:
    """Two views of a file of samples: its records as one sample each, and as one sample per assistant turn."""
    from mcore_prefix_tree.cli.samples import SampleOptions

    stem, views = Path(path).name.partition(".")[0], {"whole lines": False, "a sample per turn": True}
    read = {view: SampleOptions(files=[path], expand_turns=expand).read().all for view, expand in views.items()}
    return [workload_of_samples(f"{stem}, {view}", read[view], max_tokens=max_tokens) for view in views]
