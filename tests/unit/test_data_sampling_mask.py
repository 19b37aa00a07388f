"""The ids that an engine kept for each token: how records give them, and what is wrong with some."""

from __future__ import annotations

import numpy as np
import pytest
from data_sources import CHAT, CharacterTokenizer

from mcore_prefix_tree import Sample, SampleError, SamplingMask, Signals
from mcore_prefix_tree.data import read_samples
from mcore_prefix_tree.data.fingerprint import check_same_samples
from mcore_prefix_tree.data.write import make_row, rows_file
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.utils.ranks import Ranks

TOKENS = {"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}
CSR = {"token_ids": [7, 3, 9, 4], "offsets": [0, 0, 0, 3, 4]}
# The kept ids of each token, ascending.
KEPT = [[], [], [3, 7, 9], [4]]


def kept_of(sample):
    mask = sample.signals.sampling_mask
    return [part.tolist() for part in np.split(mask.token_ids, mask.offsets[1:-1])]


@pytest.mark.parametrize(
    "row",
    [
        TOKENS | {"sampling_mask": CSR},
        TOKENS | {"sampling_mask": {"token_ids": CSR["token_ids"], "counts": [0, 0, 3, 1]}},
        TOKENS | {"sampling_mask": [None, [], [9, 3, 7], [4]]},
        {"prompt_tokens": [1, 2], "response_tokens": [3, 4], "sampling_mask": [[9, 7, 3], [4]]},
        {"prompt_tokens": [1, 2], "response_tokens": [3, 4], "sampling_mask": {**CSR, "offsets": [0, 3, 4]}},
        {"prompt_tokens": [1, 2], "response_tokens": [3, 4], "sampling_mask": CSR},
        {
            "tokens": [0, 0, 1, 2, 3, 4, 0],
            "attention_mask": [0, 0, 1, 1, 1, 1, 0],
            "sampling_mask": [None, None, None, None, [7, 3, 9], [4], None],
        },
    ],
    ids=[
        "ids and offsets",
        "ids and counts",
        "lists",
        "lists of the response",
        "of the response",
        "of all tokens",
        "padded",
    ],
)
def test_kept_ids_are_read(read, row):
    (sample,) = read(row)
    assert kept_of(sample) == KEPT
    assert sample.tokens.tolist() == [1, 2, 3, 4]
    assert not sample.signals.sampling_mask.token_ids.flags.writeable


def test_no_mask_is_the_whole_vocabulary(read):
    (without, empty) = read(TOKENS | {"sampling_mask": None}, TOKENS | {"sampling_mask": [None] * 4})
    assert without.signals.sampling_mask is None
    assert kept_of(empty) == [[]] * 4


@pytest.mark.parametrize("name", ["kept.jsonl", "kept.parquet", "kept.arrow"])
def test_masks_are_written_and_read_back(read, tmp_path, name):
    samples = read(TOKENS | {"sampling_mask": CSR}, TOKENS, TOKENS | {"sampling_mask": [None, None, [3], None]})
    with rows_file(tmp_path / name) as writer:
        writer.add([make_row(sample) for sample in samples])
    again = read_samples(tmp_path / name)
    assert [repr(sample.signals) for sample in again] == [repr(sample.signals) for sample in samples]


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (
            {"token_ids": [3], "offsets": [0, 0, 0, 1]},
            "has sets for 3 tokens but 'tokens' has 4; there must be one for",
        ),
        ([[3]] * 3, "has sets for 3 tokens but 'tokens' has 4"),
        ({"token_ids": [3], "offsets": [0, 0, 0, 2, 2]}, "offsets' must rise from 0 to 1, the number of"),
        ({"token_ids": [3], "offsets": [0, 0, 1, 0, 1]}, "offsets' must rise from 0 to 1"),
        ({"token_ids": [3], "offsets": [1, 1, 1, 1, 1]}, "offsets' must rise from 0 to 1"),
        ({"token_ids": [[3]], "offsets": [0, 0, 0, 1, 1]}, "token_ids' must be a flat list of integers"),
        ({"token_ids": [3], "offsets": [0, 0, 0, 1.0, 1]}, "offsets' must be a flat list of integers"),
        ([None, None, [3.5], None], "token_ids' must be a flat list of integers"),
        ([None, None, [-3, 3], None], "keeps -3 at index 2; token ids are 0 to 2147483647"),
        ([None, None, [2**31, 3], None], "keeps 2147483648 at index 2; token ids are 0 to 2147483647"),
        ([None, None, [5, 3, 5], None], "keeps 5 twice at index 2; give each id once"),
        ([None, None, [3], [5, 6]], "does not keep 4, the token at index 3; give each token the ids that it was drawn"),
        ([None, [5], None, None], "does not keep 2, the token at index 1; give"),
        ({"ids": [3], "offsets": [0]}, "must be a list of ids for each token, or an object with 'token_ids' and"),
        ("3", "must be a list of ids for each token, or an object with 'token_ids' and"),
        ([1, 2, 3, 4], "must be a list of ids for each token, or an object with 'token_ids' and"),
    ],
)
def test_mistakes_name_sample_and_place(read, mask, says):
    with pytest.raises(SampleError) as error:
        read(TOKENS, TOKENS | {"sampling_mask": mask})
    assert "rollouts.jsonl:2: field 'sampling_mask" in str(error.value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_first_tokens_set_has_no_effect(read):
    (sample,) = read(TOKENS | {"sampling_mask": [[9], None, None, None]})
    assert kept_of(sample)[0] == [9]


RESPONSE = {"prompt_tokens": [1, 2], "response_tokens": [3, 4]}
IN_VOCABULARY = TOKENS | {"sampling_mask": [None, None, [3, 8], [4]]}


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        (RESPONSE | {"sampling_mask": [[3]]}, {},
         "field 'sampling_mask' has 1 entries, but there are 4 tokens, of which 2 are the response's"),
        (RESPONSE | {"sampling_mask": {"token_ids": [3], "offsets": []}}, {}, "must be flat lists of integers"),
        (RESPONSE | {"sampling_mask": {"token_ids": [3], "offsets": [0, 2, 1]}}, {},
         "field 'sampling_mask.offsets' must rise from 0 to 1"),
        (RESPONSE | {"sampling_mask": {"token_ids": [3], "offsets": ["a"]}}, {}, "must be flat lists of integers"),
        (RESPONSE | {"sampling_mask": {"token_ids": [3]}}, {},
         "field 'sampling_mask' must be a list with an entry for each token"),
        (IN_VOCABULARY, {"vocab_size": 8}, "field 'sampling_mask' has 8 at index 2, outside the model's"),
        (IN_VOCABULARY, {"vocab_size": 9}, None),
        ({"messages": CHAT, "sampling_mask": [[1]]}, {"tokenizer": CharacterTokenizer()},
         "field 'sampling_mask' goes with 'tokens'"),
    ],
)  # fmt: skip
def test_mistakes_of_other_rows_are_named(read, row, options, says):
    if says is None:
        assert len(read(row, **options)) == 1
        return
    with pytest.raises(SampleError, match="jsonl:1: ") as error:
        read(row, **options)
    assert says in str(error.value)


def test_a_mask_of_another_type_is_refused():
    with pytest.raises(SampleError, match=r"is a list; give SamplingMask\(token_ids=..., offsets=...\)"):
        Sample([1, 2], sampling_mask=[[1], [2]])


def test_ranks_with_other_masks_are_told():
    def sample(*kept):
        return Sample([1, 2], signals=Signals(sampling_mask=SamplingMask.from_rows([None, kept])))

    digests = []
    for kept in ((2, 3), (3, 2), (2, 4)):
        check_same_samples([[sample(*kept)]], [], Ranks(size=2, gather=lambda own: digests.append(own) or [own]))
    assert digests[0].crc == digests[1].crc != digests[2].crc


@pytest.mark.parametrize("name", ["distill"])
def test_losses_of_whole_vocabularies_refuse_masks(read, name):
    samples = read(TOKENS | {"sampling_mask": CSR, "teacher": {"token_ids": [[1, 2]] * 4, "logprobs": [[-1, -2]] * 4}})
    with pytest.raises(SampleError, match=f"jsonl:1: field 'sampling_mask' limits .*objective.name={name} compares"):
        make_objective(name).targets(samples)
