"""Scores in float32 are as near to float64 as torch's and Megatron's, wherever the logits lie."""

from __future__ import annotations

import pytest
import torch
from harness.worlds import Layout, world
from precision_jobs import errors, excluded_columns


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("temperature", [False, True])
def test_float32_scores_are_as_exact_as_stock(temperature: bool, tp: int) -> None:
    for shift in (0, 30, 64, 512):
        of_rank = world(tp).run(errors, shift, temperature, layout=Layout(tp=tp))[-1]
        for quantity, ways in of_rank.items():
            stock = [ways.pop(way) for way in ("torch", "megatron") if way in ways]
            for way, found in ways.items():
                of_stock = map(max, zip(*stock, strict=True))
                for what, error, limit in zip(("value", "gradient"), found, of_stock, strict=True):
                    assert error <= 2 * limit, f"{what} of {quantity} by {way}, logits around {shift}"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("quantity", ["entropy", "forward_kl", "reverse_kl", "jsd"])
def test_excluded_tokens_change_nothing(quantity: str, tp: int) -> None:
    for values, grad, expected, wanted in world(tp).run(excluded_columns, quantity, layout=Layout(tp=tp)):
        torch.testing.assert_close(values, expected, rtol=1e-10, atol=0)
        torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-15)
