from __future__ import annotations

import pytest
import torch
from harness.weights import Piece, assemble, uniform


def test_values_depend_on_the_global_index_only() -> None:
    whole = uniform("w", (6, 10), (0, 0), seed=1)
    assert torch.equal(uniform("w", (2, 4), (3, 5), seed=1), whole[3:5, 5:9])
    assert torch.equal(uniform("w", (100, 10), (0, 0), seed=1)[:6], whole), "a padded vocabulary keeps its real rows"


def test_values_are_spread_and_distinct() -> None:
    whole = uniform("w", (500, 200), (0, 0), seed=1)
    assert whole.dtype is torch.float64
    assert whole.min() >= -1
    assert whole.max() < 1
    assert abs(whole.mean()) < 0.01
    assert abs(whole.var() - 1 / 3) < 0.01
    assert whole.unique().numel() == whole.numel()
    assert torch.linalg.svdvals(whole)[0] < 30, "rows and columns are not related"
    assert not torch.equal(whole, uniform("v", (500, 200), (0, 0), seed=1))
    assert not torch.equal(whole, uniform("w", (500, 200), (0, 0), seed=2))


def piece(offset: int, values: list[float]) -> Piece:
    return Piece(name="w", shape=(4,), offset=(offset,), data=torch.tensor(values))


def test_assemble() -> None:
    made = assemble([piece(2, [3.0, 4.0]), piece(0, [1.0, 2.0]), piece(1, [2.0])])
    assert torch.equal(made["w"], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(ValueError, match="1 entries of w"):
        assemble([piece(0, [1.0, 2.0, 3.0])])
    with pytest.raises(ValueError, match="replicas of w differ"):
        assemble([piece(0, [1.0, 2.0]), piece(1, [2.5, 3.0, 4.0])])
