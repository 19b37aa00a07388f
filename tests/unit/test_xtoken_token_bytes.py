"""Bytes of tokens: encoded text is spelled back to the same bytes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from harness.tokenizer_folders import PLAIN, make_folder
from hypothesis import given
from hypothesis import strategies as st
from xtoken_toys import tokenizer_of

from mcore_prefix_tree.data import load_tokenizer
from mcore_prefix_tree.data.chat import Vocabulary
from mcore_prefix_tree.xtoken.token_bytes import token_bytes

NAMES = ("mistral-v7", "mistral-v3-tekken")
VARIANTS = {
    "byte level": {},
    "metaspace": {"prepend_space": True},
    "prepends": {"prepend_always": True},
    "joined": {"joins": ("\n\n", "<think>")},
}


@pytest.fixture(scope="module")
def wheel():
    loaded = {name: tokenizer_of(name) for name in NAMES}
    return {name: (tokenizer, token_bytes(tokenizer)) for name, tokenizer in loaded.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name, variant in VARIANTS.items():
        tokenizer = load_tokenizer(make_folder(tmp_path_factory.mktemp("folder"), PLAIN, **variant))
        found[name] = tokenizer, token_bytes(tokenizer)
    return found


class OfPieces:
    """A tokenizer with the given vocabulary."""

    name = "pieces"

    def __init__(self, pieces, spelling, special=(), **fields):
        self._vocabulary = Vocabulary(pieces=pieces, spelling=spelling, special=frozenset(special), **fields)

    def vocabulary(self):
        return self._vocabulary


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_text_is_spelled_back_from_its_tokens(wheel, name, text):
    tokenizer, table = wheel[name]
    spelled = table.spell(tokenizer.encode_text(text))
    assert spelled.data.tobytes() == text.encode()
    assert not spelled.is_special.any()


@pytest.mark.parametrize("name", NAMES)
def test_every_token_has_bytes_or_is_special(wheel, name):
    tokenizer, table = wheel[name]
    assert table.vocab_size == tokenizer.vocab_size
    lengths = np.diff(table.starts)
    assert ((lengths == 0) == table.is_special).all()
    assert table.is_special[[table.bos, table.eos]].all()
    assert table.special_names[table.eos] == "</s>"


def test_each_byte_is_a_token_of_both_wheel_tokenizers(wheel):
    for _, table in wheel.values():
        single = {table.of(token) for token in np.flatnonzero(np.diff(table.starts) == 1)}
        assert single == {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("text", ["look up", "lost\n\nnow  ", "0", "<think>x", 'it\'s <|im_end|> {"a": 1}'])
def test_hugging_face_folders_spell_text_back(folders, variant, text):
    tokenizer, table = folders[variant]
    spelled = table.spell(tokenizer.encode_text(text))
    assert spelled.data.tobytes() == text.encode()
    assert not spelled.is_special.any()


@pytest.mark.parametrize("text", ["naïve — 日本", "\x00\x7f"])
def test_byte_level_spells_any_character(folders, text):
    tokenizer, table = folders["byte level"]
    assert table.spell(tokenizer.encode_text(text)).data.tobytes() == text.encode()


@pytest.mark.parametrize(
    ("variant", "where"), [("byte level", "never"), ("metaspace", "first"), ("prepends", "always")]
)
def test_tokenizer_without_a_digit(variant, where, tmp_path):
    folder = make_folder(tmp_path, PLAIN, **VARIANTS[variant])
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: number for token, number in vocabulary.items() if "0" not in token}
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode_text("a0")) == len(tokenizer.encode_text("a"))
    assert token_bytes(tokenizer).dummy_space == where


def test_dummy_space_of_mistral(wheel):
    assert [table.dummy_space for _, table in wheel.values()] == ["always", "never"]


def test_sentencepiece_marks_are_spaces_and_escapes_are_bytes():
    pieces = ["<s>", "\u2581", "\u2581year", "<0x0A>", "\u2581\u2581", "é", "<0xA>"]
    table = token_bytes(OfPieces(pieces, "sentencepiece", special=[0], dummy_space="always"))
    assert [table.of(token) for token in range(7)] == [b"", b" ", b" year", b"\n", b"  ", "é".encode(), b"<0xA>"]
    spelled = table.spell([0, 2, 2, 0, 1, 3, 0, 4, 0, 5])
    assert spelled.data.tobytes() == b"year year" + b"\n" + b" " + "é".encode()
    assert spelled.ends.tolist() == [0, 4, 9, 9, 9, 10, 10, 11, 11, 13]
    assert spelled.text(4, 6) == b"\n"
    # Only the first text of a sequence, if it has no control token in front.
    first = replace(table, dummy_space="first")
    assert first.spell([2, 2, 0, 2]).data.tobytes() == b"year year year"
    assert first.spell([0, 2]).data.tobytes() == b" year"


def test_byte_level_table_is_that_of_gpt2():
    transformers = pytest.importorskip("transformers.convert_slow_tokenizer")
    official = transformers.bytes_to_unicode()
    table = token_bytes(OfPieces([official[byte] for byte in range(256)], "byte_level"))
    assert [table.of(token) for token in range(256)] == [bytes([byte]) for byte in range(256)]


def test_prefix_is_spelled_as_in_the_full_text(wheel):
    for tokenizer, table in wheel.values():
        tokens = [table.bos, *tokenizer.encode_text("An  Étude\n日本"), table.eos, *tokenizer.encode_text("more")]
        whole = table.spell(tokens)
        for cut in range(len(tokens)):
            part = table.spell(tokens[:cut])
            assert part.ends.tolist() == whole.ends[:cut].tolist()
            assert part.data.tobytes() == whole.text(0, cut)


def test_hash_distinguishes_vocabularies(wheel):
    hashes = {table.hash for _, table in wheel.values()}
    again = token_bytes(load_tokenizer("mistral-v7")).hash
    assert len(hashes) == 2
    assert again in hashes
    one = token_bytes(OfPieces(["a", "b"], "sentencepiece"))
    assert one.hash == token_bytes(OfPieces([b"a", b"b"], "bytes")).hash
    assert one.hash != token_bytes(OfPieces(["ab"], "sentencepiece")).hash
    assert one.hash != token_bytes(OfPieces(["a", "b"], "sentencepiece", special=[1])).hash


def test_errors_name_the_token(wheel):
    with pytest.raises(ValueError, match=r"tokenizer 'pieces': token 1 \('a日'\) has no bytes: '日' is not"):
        token_bytes(OfPieces(["a", "a日"], "byte_level"))
    with pytest.raises(ValueError, match="token 32768 at index 1 is not in the vocabulary of tokenizer 'mistral-v7'"):
        wheel["mistral-v7"][1].spell([5, 32768])


def test_a_tokenizer_without_bytes_is_refused(tmp_path):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=words)
    wrapped.chat_template = PLAIN
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not tell the bytes of its tokens \\(its decoder is WordPiece\\)"):
        token_bytes(load_tokenizer(str(tmp_path)))


def test_hash_distinguishes_the_order_of_merges(tmp_path):
    pytest.importorskip("transformers")
    folder = make_folder(tmp_path, PLAIN)
    before = token_bytes(load_tokenizer(folder))
    path = tmp_path / "tokenizer.json"
    rules = json.loads(path.read_text())
    rules["model"]["merges"][:2] = rules["model"]["merges"][1::-1]
    path.write_text(json.dumps(rules))
    after = token_bytes(load_tokenizer(folder))
    assert after.data.tobytes() == before.data.tobytes()
    assert after.hash != before.hash
