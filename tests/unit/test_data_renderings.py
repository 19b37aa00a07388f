"""Conversations that are encoded for several models at once."""

import numpy as np
import pytest
from harness.commands import write_rows
from harness.tokenizer_folders import CHATML, make_folder

from mcore_prefix_tree.data import LineOptions, Skipped, iter_sample_groups, load_tokenizer, read_samples
from mcore_prefix_tree.sample import SampleError

TALK = [
    {"role": "user", "content": "find parcel 7"},
    {"role": "assistant", "content": "look up the parcel"},
    {"role": "user", "content": "sorry"},
    {"role": "assistant", "content": "it is lost"},
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("folder"), CHATML)
    return [load_tokenizer("mistral-v7"), load_tokenizer("mistral-v3"), load_tokenizer(folder)]


def read(path, tokenizers, **more):
    options = LineOptions(tokenizer=tokenizers[0], renderings=tokenizers[1:], expand_turns=True)
    return [sample for samples in iter_sample_groups(path, options, **more) for sample in samples]


def test_each_rendering_equals_its_tokenizers_samples(tmp_path, tokenizers):
    path = write_rows(
        tmp_path / "chats.jsonl", [{"messages": TALK, "reward": 1.0, "merge_key": "k"}, {"messages": TALK[:2]}]
    )
    samples = read(path, tokenizers)
    assert len(samples) == 3
    for number, tokenizer in enumerate(tokenizers):
        alone = read_samples(path, tokenizer=tokenizer, expand_turns=True)
        for sample, expected in zip(samples, alone, strict=True):
            found = sample if number == 0 else sample.renderings[number - 1]
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert found.loss_mask.tolist() == expected.loss_mask.tolist()
            assert (found.merge_key, found.source) == (expected.merge_key, expected.source)
    assert samples[0].signals.reward == 1.0


def test_renderings_of_complete_conversations(tmp_path, tokenizers):
    # v3 moves the system message from turn to turn.
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": [{"role": "system", "content": "it"}, *TALK]}])
    options = LineOptions(tokenizer=tokenizers[0], renderings=[tokenizers[2]])
    ((sample,),) = iter_sample_groups(path, options)
    (rendering,) = sample.renderings
    (expected,) = read_samples(path, tokenizer=tokenizers[2])
    assert rendering.tokens.tolist() == expected.tokens.tolist()
    with pytest.raises(SampleError, match="cannot be one sample, because the chat format of tokenizer 'mistral-v3'"):
        list(iter_sample_groups(path, LineOptions(tokenizer=tokenizers[0], renderings=[tokenizers[1]])))


def test_tokens_have_no_renderings(tmp_path, tokenizers):
    (sample,) = read(write_rows(tmp_path / "tokens.jsonl", [{"tokens": [1, 2]}]), tokenizers)
    assert sample.renderings == ()


def test_formats_must_agree_on_the_turns(tmp_path, tokenizers):
    twice = [*TALK[:2], {"role": "assistant", "content": "sorry"}]
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": twice}, {"messages": TALK}])
    with pytest.raises(SampleError) as caught:
        read(path, tokenizers)
    assert str(caught.value) == (
        f"{path}:1: field 'messages' has 1 assistant turns in the chat format of tokenizer 'mistral-v7' and 2 in that "
        f"of '{tokenizers[2].name}'; join consecutive assistant messages"
    )
    skipped = Skipped()
    assert len(read(path, tokenizers, on_error="skip", skipped=skipped)) == 2
    assert skipped.count == 1


def test_ranks_compare_renderings(tmp_path, tokenizers):
    from mcore_prefix_tree.data.fingerprint import check_same_samples
    from mcore_prefix_tree.utils.ranks import Ranks

    path = write_rows(tmp_path / "chats.jsonl", [{"messages": TALK}])
    one, other = read(path, tokenizers[:2]), read(path, [tokenizers[0], tokenizers[2]])
    digests = []

    def gathered(digest):
        digests.append(digest)
        return [digest]

    for samples in (one, other, one):
        check_same_samples([samples], [str(path)], Ranks(size=2, gather=gathered))
    assert digests[0].crc == digests[2].crc != digests[1].crc
    assert np.array_equal(one[0].tokens, other[0].tokens)
