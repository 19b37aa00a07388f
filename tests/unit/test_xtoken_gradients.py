"""Losses of chunks have the same gradients folded and unfolded, at both models; training takes only the student's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.xtoken_problems import SETTINGS, Problem, reference_terms
from xtoken_texts import chunks_of_pairs, samples, texts

from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.trie import build_trie
from mcore_prefix_tree.xtoken.fold import fold_chunks
from mcore_prefix_tree.xtoken.losses import Part, Vocabularies, cut_blocks, make_loss, ordered

HIDDEN = 8
NAMES = ("student's hidden states", "student's weight", "teacher's hidden states", "teacher's weight")


@pytest.mark.parametrize("name", [name for name, settings in SETTINGS.items() if settings.top_k is None])
def test_gradients_of_both_models_equal_unfolded_samples(name):
    settings, both = SETTINGS[name], texts()
    pairs = [both.pairing.reencode(sample) for sample in samples()]
    sides = [[pair.student for pair in pairs], [pair.teacher for pair in pairs]]
    layouts = [fold(side, trie=build_trie(side)) for side in sides]
    sizes = both.student.vocab_size, both.teacher.vocab_size
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
        for layout, size in zip(layouts, sizes, strict=True)
        for rows in (layout.padded_size, size)
    ]
    logits = [leaves[0] @ leaves[1].t(), leaves[2] @ leaves[3].t()]

    chunks = ordered(fold_chunks(*layouts, pairs, keyed_by_tokens=settings.reads.tokens))
    side = both.side(settings)
    vocabularies = Vocabularies(
        student=Part(size=sizes[0], borders=(0, sizes[0])),
        teacher=Part(size=sizes[1], borders=(0, sizes[1])),
        projection=side.projection,
        device=torch.device("cpu"),
    )
    rows = [np.arange(layout.padded_size) for layout in layouts]
    blocks = cut_blocks(chunks, student_rows=rows[0], teacher_rows=rows[1], student_limit=9, teacher_limit=9)
    loss = make_loss(settings, vocabularies)
    folded = sum(
        torch.dot(
            loss.shares(
                *(z[own.rows] / settings.temperature for z, own in zip(logits, both_of(block), strict=True)), block
            ),
            block.weight,
        )
        for block in blocks
    )
    found = torch.autograd.grad(folded * settings.scale, leaves, retain_graph=True)

    alone = [z[torch.from_numpy(layout.sample_map).long()] for z, layout in zip(logits, layouts, strict=True)]
    own_chunks = chunks_of_pairs(pairs)
    assert len(own_chunks) > len(chunks), "chunks are shared"
    nothing = (torch.empty(0), torch.empty(0))
    weight = torch.from_numpy(np.concatenate([pair.weight for pair in pairs]))
    task = Problem(
        student=nothing,
        teacher=nothing,
        w=both.w,
        student_bytes=both.token_bytes[0],
        teacher_bytes=both.token_bytes[1],
        chunks=own_chunks,
        weight=weight,
    )
    unfolded = torch.dot(weight, reference_terms(task, settings, *alone))
    wanted = torch.autograd.grad(unfolded, leaves)
    assert float(folded.detach() * settings.scale) == pytest.approx(float(unfolded.detach()), rel=1e-12)
    for of_leaf, one, other in zip(NAMES, found, wanted, strict=True):
        error = float((one - other).norm() / other.norm())
        assert error <= 1e-12, f"{of_leaf}: {error:.2e}"


def both_of(block):
    return block.student, block.teacher
