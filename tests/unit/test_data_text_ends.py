"""Text without a chat format: its begin and end tokens occur once, and an end is scored if the model wrote it."""

from __future__ import annotations

from importlib.util import find_spec

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness.commands import write_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_prefix_tree.data import LineOptions, StreamedGroups, load_tokenizer, read_samples
from mcore_prefix_tree.data.stopping import with_end
from mcore_prefix_tree.sample import SampleError

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
BOS, EOS, SEP = "<s>", "</s>", "<sep>"
# Tokens that a tokenizer writes before and behind a text, and the token that begins a sequence.
KINDS = {
    "nothing": ([], [], BOS),
    "bos": ([BOS], [], BOS),
    "bos and eos": ([BOS], [EOS], BOS),
    "eos": ([], [EOS], BOS),
    "bos is eos": ([EOS], [], EOS),
    "two and eos": ([SEP, BOS], [EOS], BOS),
    "another end": ([BOS], [SEP], BOS),
}


def make(folder, before, behind, bos=BOS):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: at for at, piece in enumerate([*alphabet, "ab", "bc", "\u0120a"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("b", "c"), ("\u0120", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in (BOS, EOS, SEP)])
    if before or behind:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind],
            special_tokens=[(one, tokenizer.token_to_id(one)) for one in (BOS, EOS, SEP)],
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=EOS)
    wrapped.chat_template = "{{ messages[0].content }}"
    wrapped.save_pretrained(folder)
    return load_tokenizer(str(folder)), wrapped


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {name: make(tmp_path_factory.mktemp("folder"), *kind) for name, kind in KINDS.items()}


def ids(wrapped, *texts):
    return wrapped("".join(texts), add_special_tokens=False)["input_ids"]


def read(folder, tokenizer, *rows, table=False):
    path = folder / ("rows.parquet" if table else "rows.jsonl")
    if table:
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for row in rows for name in row}), path)
    else:
        write_rows(path, rows)
    samples = read_samples(path, tokenizer=tokenizer)
    streamed = [one for line in StreamedGroups(path, LineOptions(tokenizer=tokenizer)) for one in line]
    assert list(map(content, streamed)) == list(map(content, samples))
    return samples


def content(sample):
    return sample.tokens.tolist(), sample.loss_mask.tolist()


def split(sample):
    """Tokens before the first that is scored, and those from it on."""
    mask = sample.loss_mask.tolist()
    start = mask.index(1) if 1 in mask else len(mask)
    assert mask == [0] * start + [1] * (len(mask) - start)
    return sample.tokens[:start].tolist(), sample.tokens[start:].tolist()


@needs_transformers
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_opening_and_one_end(tmp_path, tokenizers, kind, table):
    tokenizer, wrapped = tokenizers[kind]
    before, _, bos = KINDS[kind]
    opening = "".join(before)
    rendered = f"{opening or bos}"
    rows = [
        {"prompt": "q:", "completion": "xy"},
        {"prompt": "q:", "completion": f"xy{EOS}"},
        {"prompt": "q:", "completion": f"xy{EOS}\n"},
        {"prompt": f"{rendered}q:", "completion": "xy"},
        {"prompt": f"{rendered}q:", "completion": f"xy{EOS}"},
        {"prompt": "q:", "completion": ""},
        {"prompt": "q:", "completion": "xy", "finish_reason": "length"},
        {"prompt": f"{rendered}q:", "completion": f"xy{EOS}", "finish_reason": "length"},
        {"prompt": "q:", "completion": "", "finish_reason": "length"},
        {"prompt": "q:", "completion": "xy", "finish_reason": "stop"},
    ]
    found = [split(sample) for sample in read(tmp_path, tokenizer, *rows, table=table)]
    first, given_first = ids(wrapped, opening, "q:"), ids(wrapped, rendered, "q:")
    ended, cut = ids(wrapped, "xy", EOS), ids(wrapped, "xy")
    assert found == [
        (first, ended), (first, ended), (first, ended), (given_first, ended), (given_first, ended),
        (first, ids(wrapped, EOS)), (first, cut), (given_first, cut), (first, []), (first, ended),
    ]  # fmt: skip


@needs_transformers
@settings(deadline=None, max_examples=150)
@example("bos is eos", "", "", False, False, True)
@given(
    st.sampled_from(list(KINDS)),
    st.text("abc \n", max_size=6),
    st.text("abc \n", max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_random_texts(tokenizers, kind, prompt, completion, has_opening, has_end, ended):
    tokenizer, wrapped = tokenizers[kind]
    before, _, _ = KINDS[kind]
    opening = "".join(before)
    whole = ids(wrapped, opening, prompt, completion, EOS if ended else "")
    if not whole:
        return
    given_prompt, given_completion = opening * has_opening + prompt, completion + EOS * has_end
    turn = tokenizer.encode_completion(given_prompt, given_completion, ended=ended)
    assert turn.tokens.tolist() == whole
    alone = ids(wrapped, opening, prompt)
    shared = next((at for at, pair in enumerate(zip(alone, whole, strict=False)) if pair[0] != pair[1]), len(alone))
    assert turn.start == shared


@needs_transformers
def test_many_completions_have_their_reasons(tmp_path, tokenizers):
    tokenizer, wrapped = tokenizers["bos and eos"]
    for name in ("completions", "responses"):
        row = {"prompt": "q:", name: ["xy", "xy", ""], "finish_reasons": ["stop", "length", "stop"]}
        for form in (False, True):
            found = [split(sample)[1] for sample in read(tmp_path, tokenizer, row, table=form)]
            assert found == [ids(wrapped, "xy", EOS), ids(wrapped, "xy"), ids(wrapped, EOS)]
    with pytest.raises(
        SampleError, match=r"field 'finish_reason' must be a list of 2 entries, one for each of 'responses'"
    ):
        read(tmp_path, tokenizer, {"prompt": "q:", "responses": ["a", "b"], "finish_reason": ["length"]})
    with pytest.raises(SampleError, match=r"rows.jsonl:1: field 'finish_reason' is true; it must be text"):
        read(tmp_path, tokenizer, {"prompt": "q:", "completion": "a", "finish_reason": True})


@needs_transformers
def test_an_answer_of_a_pair_that_was_cut(tmp_path, tokenizers):
    tokenizer, wrapped = tokenizers["bos"]
    row = {"prompt": "q:", "chosen": "x", "rejected": "y", "finish_reasons": ["stop", "length"]}
    found = [split(sample)[1] for sample in read(tmp_path, tokenizer, row)]
    assert found == [ids(wrapped, "x", EOS), ids(wrapped, "y")]


@pytest.mark.parametrize("name", ["mistral-v7", "mistral-v3-tekken"])
def test_mistrals_tokenizers(name):
    tokenizer = load_tokenizer(name)
    vocabulary = tokenizer.vocabulary()
    plain = tokenizer.encode_completion("2 + 3 =", " 5")
    assert plain.tokens.tolist() == [vocabulary.bos, *tokenizer.encode_text("2 + 3 = 5"), vocabulary.eos]
    rendered = tokenizer.encode_completion("<s>2 + 3 =", " 5</s>\n")
    assert (rendered.tokens.tolist(), rendered.start) == (plain.tokens.tolist(), plain.start)
    cut = tokenizer.encode_completion("<s>2 + 3 =", " 5</s>", ended=False)
    assert (cut.tokens.tolist(), cut.start) == (plain.tokens.tolist()[:-1], plain.start)
    empty = tokenizer.encode_completion("2", "", ended=False)
    assert empty.start == len(empty.tokens)


@pytest.mark.parametrize(
    ("completion", "ended", "expected"),
    [
        ("a", True, "a."), ("a.", True, "a."), ("a. \n", True, "a."), ("a ", True, "a ."), ("", True, "."),
        ("a", False, "a"), ("a.", False, "a"), ("a.\n", False, "a"), ("a\n", False, "a\n"), ("..", False, "."),
    ],
)  # fmt: skip
def test_the_end_of_a_text(completion, ended, expected):
    assert with_end(completion, ".", ended=ended) == expected
