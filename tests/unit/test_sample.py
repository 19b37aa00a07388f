from __future__ import annotations

import numpy as np
import pytest
import torch

from mcore_prefix_tree import Sample, SampleError
from mcore_prefix_tree.sample import INT32_MAX, MIN_TEMPERATURE, Tempered


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"tokens": []}, "tokens", "is empty"),
        ({"tokens": [[1, 2], [3, 4]]}, "tokens", "flat list of integers"),
        ({"tokens": [[1, 2], [3]]}, "tokens", "flat list of integers"),
        ({"tokens": 7}, "tokens", "flat list of integers"),
        ({"tokens": [1.0, 2.0]}, "tokens", "flat list of integers"),
        ({"tokens": ["1"]}, "tokens", "flat list of integers"),
        ({"tokens": [True, False]}, "tokens", "flat list of integers"),
        ({"tokens": None}, "tokens", "flat list of integers"),
        ({"tokens": {"input_ids": [1]}}, "tokens", "flat list of integers"),
        ({"tokens": torch.ones(3, dtype=torch.int64).to_sparse()}, "tokens", "to_dense"),
        ({"tokens": torch.ones(3, dtype=torch.int64, device="meta")}, "tokens", "can't convert meta"),
        ({"tokens": [1], "loss_mask": torch.ones(1, requires_grad=True)}, "loss_mask", "detach"),
        ({"tokens": [None]}, "tokens", "flat list of integers"),
        ({"tokens": [10**30]}, "tokens", "flat list of integers"),
        ({"tokens": [5, -3, -4]}, "tokens", "-3 at index 1"),
        ({"tokens": [5, 1, INT32_MAX + 1]}, "tokens", f"{INT32_MAX + 1} at index 2"),
        ({"tokens": np.array([2**63], dtype=np.uint64)}, "tokens", f"{2**63} at index 0"),
        ({"tokens": [1, 2], "loss_mask": [1]}, "loss_mask", "1 entries but 'tokens' has 2"),
        ({"tokens": [1, 2], "loss_mask": []}, "loss_mask", "0 entries but 'tokens' has 2"),
        ({"tokens": [1, 2], "loss_mask": [[1, 1]]}, "loss_mask", "flat list of numbers"),
        ({"tokens": [1, 2], "loss_mask": [[1], [1, 2]]}, "loss_mask", "flat list of numbers"),
        ({"tokens": [1, 2], "loss_mask": ["a", "b"]}, "loss_mask", "flat list of numbers"),
        ({"tokens": [1, 2], "loss_mask": [1, None]}, "loss_mask", "flat list of numbers"),
        ({"tokens": [1, 2], "loss_mask": [1, -0.5]}, "loss_mask", "-0.5 at index 1"),
        ({"tokens": [1, 2], "loss_mask": [float("nan"), 1]}, "loss_mask", "nan at index 0"),
        ({"tokens": [1, 2], "loss_mask": [0, float("inf")]}, "loss_mask", "inf at index 1"),
        ({"tokens": [1, 2], "loss_mask": [0, 1e300]}, "loss_mask", "1e+300 at index 1"),
        (
            {"tokens": [1, 2], "loss_mask": [0, 1e-50]},
            "loss_mask",
            "1e-50 at index 1, which single precision rounds to 0",
        ),
        (
            {"tokens": [1, 2], "loss_mask": np.array([1e-46, 1])},
            "loss_mask",
            "1e-46 at index 0, which single precision",
        ),
    ],
)
def test_a_malformed_field_is_named_with_its_source(fields, field, says):
    with pytest.raises(SampleError) as raised:
        Sample(**fields, source="rollouts.jsonl:12 turn 3")
    message = str(raised.value)
    assert message.startswith(f"rollouts.jsonl:12 turn 3: field '{field}'")
    assert says in message
    assert "\n" not in message


def test_sample_error_is_a_value_error():
    with pytest.raises(ValueError, match="sample: field 'tokens'"):
        Sample(tokens=[])


@pytest.mark.parametrize(
    ("given", "kept"),
    # Without a mask every token is scored; booleans are weights; single precision's smallest weights are kept.
    [(None, [1.0, 1.0]), (np.array([False, True]), [0.0, 1.0]), ([-0.0, 2.0**-149], [0.0, 2.0**-149])],
)
def test_masks_are_weights_in_single_precision(given, kept):
    sample = Sample(tokens=[3, 1], loss_mask=given)
    assert (sample.loss_mask.dtype, sample.loss_mask.tolist(), len(sample)) == (np.float32, kept, 2)


@pytest.mark.parametrize("tokens", [[0, INT32_MAX], np.array([0, INT32_MAX], dtype=np.uint64), (0, INT32_MAX)])
def test_tokens_become_int32(tokens):
    sample = Sample(tokens=tokens)
    assert sample.tokens.dtype == np.int32
    assert sample.tokens.tolist() == [0, INT32_MAX]


def test_sample_copies_its_arrays():
    tokens, mask = np.array([1, 2, 3], dtype=np.int32), np.array([0, 1, 1], dtype=np.float32)
    sample = Sample(tokens=tokens, loss_mask=mask)
    tokens[0] = 9
    mask[0] = 9
    assert sample.tokens.tolist() == [1, 2, 3]
    assert sample.loss_mask.tolist() == [0, 1, 1]
    assert tokens.flags.writeable
    assert mask.flags.writeable
    for array in (sample.tokens, sample.loss_mask):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        sample.source = "elsewhere"


def test_merge_key_may_hold_the_temperature():
    assert Sample(tokens=[1]).temperature == 1.0
    assert Sample(tokens=[1], merge_key=0.5).temperature == 1.0
    assert Sample(tokens=[1], merge_key=Tempered(temperature=0.5, key="policy")).temperature == 0.5
    assert Sample(tokens=[1], merge_key=Tempered(temperature=MIN_TEMPERATURE)).temperature == 1e-3
    for temperature in (0.0, -1.0, 1e-310, 0.0009, float("nan"), float("inf")):
        with pytest.raises(
            SampleError,
            match=r"^file:3: the temperature of its merge_key is .*; it must be at least 0.001, and finite$",
        ):
            Sample(tokens=[1], merge_key=Tempered(temperature=temperature), source="file:3")


@pytest.mark.parametrize("merge_key", [[1], {"adapter": 1}, {1}, np.ones(2), (1, [2])])
def test_merge_key_that_cannot_be_hashed_is_named(merge_key):
    with pytest.raises(SampleError, match=r"^a\.jsonl:3: the merge_key .* cannot be hashed; give a string, a number"):
        Sample(tokens=[1], merge_key=merge_key, source="a.jsonl:3")


@pytest.mark.parametrize("signals", [{}, {"reward": 1.0}, 1.0, "reward"])
def test_signals_of_another_type_are_refused(signals):
    with pytest.raises(SampleError, match=r"^sample: signals is a \w+; give Signals\(reward=...\)$"):
        Sample(tokens=[1], signals=signals)
