"""Chunk losses over vocabularies that tensor-parallel ranks hold parts of, of different sizes on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.worlds import Layout, world
from harness.xtoken_problems import SETTINGS, Found, expected, problem, product_terms
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STUDENT, TEACHER = 29, 37
# Uneven parts; and even ones that padding fills up, so that the last rank has hardly a column, or none.
BORDERS = {"uneven": ((0, 18, 29), (0, 11, 37)), "padded": ((0, 32, 64), (0, 32, 64))}


# Operations that read a device's values on the host: sizes that depend on them.
WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class NoWholeVocabulary(TorchDispatchMode):
    """Fails if an operation makes rows of a full vocabulary, or if the host would wait for its device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        masks = function is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if function in WAITS or masks:
            raise AssertionError(f"{function} waits for the device")
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[-1] >= STUDENT:
                raise AssertionError(f"{function} made {list(leaf.shape)}: a vocabulary has {STUDENT} columns")
        return made


def terms_of_part(name: str, borders: tuple[tuple[int, ...], tuple[int, ...]], watched: bool) -> Found:
    """The product on this rank's columns."""
    group = parallel_state.get_tensor_model_parallel_group()
    task = problem(student_size=STUDENT, teacher_size=TEACHER)
    return product_terms(
        task,
        SETTINGS[name],
        student_borders=borders[0],
        teacher_borders=borders[1],
        group=group,
        limit=5,
        watch=NoWholeVocabulary() if watched else None,
    )


@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_vocabulary_parts_equal_full_vocabularies(name, borders):
    terms, grad_hidden, grad_weight = expected(problem(student_size=STUDENT, teacher_size=TEACHER), SETTINGS[name])
    # A rank of the padded parts has a vocabulary by itself.
    parts = world(2).run(terms_of_part, name, BORDERS[borders], borders == "uneven", layout=Layout(tp=2))
    for part in parts:
        assert torch.equal(part.terms, parts[0].terms), "all ranks know the same"
        assert (part.terms - terms).norm() <= 1e-12 * terms.norm()
        assert (part.grad_hidden - grad_hidden).norm() <= 1e-12 * grad_hidden.norm()
        assert not part.padding.any()
    grad = torch.cat([part.grad_weight for part in parts])
    assert (grad - grad_weight).norm() <= 1e-12 * grad_weight.norm()
