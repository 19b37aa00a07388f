#!/usr/bin/env python3
"""Measure the losses across tokenizers on a CPU: a block of chunks at a time, and with the logits of all rows at once.

    OMP_NUM_THREADS=1 benchmarks/xtoken.py      # writes benchmarks/results/xtoken_losses.json; takes minutes

The baseline computes both models' logits of all rows and lets autograd differentiate the same loss, as in trainers that
keep full logits. Both start from hidden states and end with the gradients of the student's hidden states and output
weight. Times are CPU seconds of the process, which other processes disturb less than wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree.bench.machine import describe_machine
from mcore_prefix_tree.logprob import Edges, Head, head_block_losses
from mcore_prefix_tree.utils.memory import PeakMemory
from mcore_prefix_tree.xtoken.fold import Chunks, Side
from mcore_prefix_tree.xtoken.losses import (
    Block,
    ChunkTerms,
    LossSettings,
    Part,
    Vocabularies,
    block_loss,
    cut_blocks,
    make_loss,
    ordered,
    teacher_logits,
)
from mcore_prefix_tree.xtoken.projection import Projection

OUTPUT = Path(__file__).parent / "results" / "xtoken_losses.json"
STUDENT_SIZE, TEACHER_SIZE, HIDDEN = 32_768, 131_072, 128
BLOCK_ROWS = 128
SETTINGS = {
    "p_kl, top 2,048": LossSettings(mode="p_kl", top_k=2048),
    "p_kl": LossSettings(mode="p_kl"),
    "gold": LossSettings(mode="gold"),
    "alm": LossSettings(mode="alm"),
    "uld": LossSettings(mode="uld"),
}


def random_chunks(rows: int, rng: np.random.Generator) -> Chunks:
    """Return chunks of one or two tokens on either side, over so many rows of the student, one after another."""
    lens = rng.choice([1, 2], p=[0.7, 0.3], size=(2, rows))
    count = int(np.searchsorted(np.cumsum(lens, axis=1).max(axis=0), rows))
    sides = []
    for own, size in zip(lens[:, :count], (STUDENT_SIZE, TEACHER_SIZE), strict=True):
        starts = np.concatenate([[0], np.cumsum(own)])
        tokens = rng.integers(0, size, starts[-1]).astype(np.int32)
        sides.append(Side(rows=np.arange(starts[-1]), tokens=tokens, starts=starts))
    ones = np.ones(count)
    return Chunks(
        student=sides[0],
        teacher=sides[1],
        weight=ones / count,
        multiplicity=ones,
        first_sample=np.zeros(count, dtype=np.int64),
    )


def projection(rng: np.random.Generator) -> Projection:
    """Map a third of the student's tokens to one token, and the others to two."""
    columns = np.stack([rng.permutation(TEACHER_SIZE)[:STUDENT_SIZE], rng.integers(0, TEACHER_SIZE, STUDENT_SIZE)], 1)
    weights = np.tile(np.float32([0.75, 0.25]), (STUDENT_SIZE, 1))
    single = np.arange(STUDENT_SIZE) % 3 == 0
    columns[single, 1], weights[single] = -1, [1, 0]
    return Projection(columns=columns.astype(np.int32), weights=weights, teacher_vocab_size=TEACHER_SIZE)


class Case:
    """Both models' hidden states and weights, chunks, and a loss."""

    def __init__(self, settings: LossSettings, rows: int) -> None:
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.settings, self.chunks = settings, ordered(random_chunks(rows, rng))
        sizes = len(self.chunks.student.rows), len(self.chunks.teacher.rows)
        self.hidden = torch.randn(sizes[0], HIDDEN, generator=generator).requires_grad_()
        self.weight = (torch.randn(STUDENT_SIZE, HIDDEN, generator=generator) / 8).requires_grad_()
        self.teacher = torch.randn(sizes[1], HIDDEN, generator=generator)
        self.teacher_weight = torch.randn(TEACHER_SIZE, HIDDEN, generator=generator) / 8
        self.vocabularies = Vocabularies(
            student=Part.even(STUDENT_SIZE, STUDENT_SIZE, None),
            teacher=Part.even(TEACHER_SIZE, TEACHER_SIZE, None),
            projection=projection(rng),
            device=torch.device("cpu"),
        )
        columns = None
        if settings.top_k is not None:
            columns = np.sort(rng.permutation(TEACHER_SIZE)[: settings.top_k])
        self.loss = make_loss(settings, self.vocabularies, columns=columns)

    def blocks(self, limit: int) -> list[Block]:
        """Cut the chunks."""
        rows = [np.arange(len(states)) for states in (self.hidden, self.teacher)]
        return cut_blocks(
            self.chunks, student_rows=rows[0], teacher_rows=rows[1], student_limit=limit, teacher_limit=limit
        )

    def blockwise(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients, a block at a time."""
        blocks = self.blocks(BLOCK_ROWS)
        heads = [head_of(len(states)) for states in (self.hidden, self.teacher)]
        gradient, _ = head_block_losses(
            self.hidden,
            self.weight,
            heads[0],
            blocks=[block.student.rows for block in blocks],
            loss=block_loss(
                ChunkTerms(loss=self.loss),
                self.vocabularies,
                blocks,
                teacher_logits(self.teacher, self.teacher_weight, heads[1], blocks),
            ),
        )
        return torch.autograd.grad(gradient, (self.hidden, self.weight))

    def gathered(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients from the logits of all rows."""
        (block,) = self.blocks(10**9)
        terms = self.loss.shares(self.hidden @ self.weight.t(), self.teacher @ self.teacher_weight.t(), block)
        return torch.autograd.grad(torch.dot(terms, block.weight.float()), (self.hidden, self.weight))


def head_of(rows: int) -> Head:
    """Return a head over so many rows."""
    edges = Edges.of_candidates(np.arange(rows), np.zeros((rows, 1), dtype=np.int64), padded_size=rows)
    return Head(edges=edges)


def measured(way: Callable[[], tuple[torch.Tensor, ...]], repeats: int) -> dict[str, float]:
    """Return CPU seconds and the peak memory of one variant."""
    seconds, peaks = [], []
    for _ in range(repeats):
        peak, started = PeakMemory(torch.device("cpu")), time.process_time()
        way()
        seconds.append(time.process_time() - started)
        peaks.append(peak.bytes() or 0)
    return {"cpu_seconds": statistics.median(seconds), "peak_bytes": max(peaks)}


def main() -> None:
    """Measure every loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--rows", type=int, default=512, help="of the student")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = []
    for name, settings in SETTINGS.items():
        case = Case(settings, args.rows)
        one, other = case.blockwise(), case.gathered()
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))
        found = {way: measured(getattr(case, way), args.repeats) for way in ("blockwise", "gathered")}
        cases.append({"loss": name, "rows": args.rows, "largest_error": error, **found})
        print(json.dumps(cases[-1]), flush=True)
    result = {
        "machine": describe_machine(),
        "vocabularies": [STUDENT_SIZE, TEACHER_SIZE],
        "hidden": HIDDEN,
        "block_rows": BLOCK_ROWS,
        "cases": cases,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
