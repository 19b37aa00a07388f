"""Projections: building, the exact map, trimming, and files."""

import io
import json
import pickle
import random
import warnings
import zipfile

import numpy as np
import pytest
import torch
from xtoken_toys import Toy, tokenizer_of

from mcore_prefix_tree.xtoken.projection import Entries, Projection, from_entries, trim
from mcore_prefix_tree.xtoken.projection_build import BuildSettings, Vocabularies, shares, similar_names
from mcore_prefix_tree.xtoken.projection_file import read_projection, write_projection

EXAMPLE = Vocabularies(
    Toy(["a", "b", "12"], "student", special=("<unk>", "</s>")),
    Toy(["a", "b", "1", "2"], "teacher", special=("<unk>", "</s>")),
)
NO_NAMES = BuildSettings(special_similarity=2.0)


def dense(projection):
    matrix = np.zeros((projection.student_vocab_size, projection.teacher_vocab_size))
    row, rank = np.nonzero(projection.columns >= 0)
    matrix[row, projection.columns[row, rank]] = projection.weights[row, rank]
    return matrix


def same(one, other):
    fields = ("teacher_vocab_size", "student_hash", "teacher_hash")
    assert [getattr(one, name) for name in fields] == [getattr(other, name) for name in fields]
    assert one.columns.dtype == other.columns.dtype == np.int32
    assert one.weights.dtype == other.weights.dtype == np.float32
    assert one.columns.tolist() == other.columns.tolist()
    assert one.weights.tolist() == other.weights.tolist()


def test_shares_of_two_and_three_tokens():
    assert shares(1) == [1.0]
    assert shares(2) == pytest.approx([0.909091, 0.090909], abs=5e-7)
    assert shares(3) == pytest.approx([0.900901, 0.090090, 0.009009], abs=5e-7)


def test_the_worked_example():
    projection = EXAMPLE.exact_map(EXAMPLE.build())
    expected = np.zeros((5, 6))
    expected[[0, 1, 2, 3], [0, 1, 2, 3]] = 1.0
    expected[4, [4, 5]] = 10 / 11, 1 / 11
    np.testing.assert_allclose(dense(projection), expected, atol=1e-7)
    assert projection.columns[4, :3].tolist() == [4, 5, -1]
    assert projection.columns.shape == (5, 32)


def test_both_passes_add_up():
    vocabularies = Vocabularies(Toy(["a", "b", "ab"]), Toy(["a", "b", "aba"]))
    matrix = dense(vocabularies.build(NO_NAMES))
    # a: itself from both sides; aba is written ab, a. ab: a, b, and the beginning of aba.
    a = np.array([2.0, 0.0, 1 / 11])
    np.testing.assert_allclose(matrix[2, 2:], a / a.sum(), atol=1e-7)
    ab = np.array([10 / 11, 1 / 11, 10 / 11])
    np.testing.assert_allclose(matrix[4, 2:], ab / ab.sum(), atol=1e-7)
    forward = dense(vocabularies.build(BuildSettings(reverse=False, special_similarity=2.0)))
    np.testing.assert_allclose(forward[2:, 2:], [[1, 0, 0], [0, 1, 0], [10 / 11, 1 / 11, 0]], atol=1e-7)
    assert not forward[:2].any()


def test_a_long_writing_is_cut_to_four_tokens():
    vocabularies = Vocabularies(Toy(["abcde"]), Toy(list("abcde")))
    (row,) = dense(vocabularies.build(NO_NAMES))[2:]
    np.testing.assert_allclose(row, [0, 0, *shares(4), 0], atol=1e-7)
    (row,) = dense(vocabularies.build(BuildSettings(tokens_kept=2, special_similarity=2.0)))[2:]
    np.testing.assert_allclose(row, [0, 0, *shares(2), 0, 0, 0], atol=1e-7)


def test_special_tokens_are_mapped_by_similar_names():
    student, teacher = {0: "<|im_end|>", 1: "<s>"}, {7: "<|end_turn|>", 8: "</s>", 9: "[INST]"}
    found = similar_names(student, teacher, 0.0, 2)
    assert [(row, column) for row, column, _ in found] == [(0, 7), (0, 8), (1, 8), (1, 7)]
    # 14 of 22 characters are common, and one word of two.
    assert found[0][2] == pytest.approx(0.6 * 14 / 22 + 0.4 * 1 / 2)
    assert found[2][2] == pytest.approx(0.6 * 6 / 7)
    assert [mapping[:2] for mapping in similar_names(student, teacher, 0.5, 2)] == [(0, 7), (1, 8)]
    row = dense(Vocabularies(Toy(["a"]), Toy(["a"], special=("<begin>", "</s>"), eos=None)).build())[1]
    assert row[1] == 1.0


def test_the_exact_map_takes_the_token_that_the_teacher_writes():
    teacher = Toy(["<0x61>", "a", "<0xFF>", "b"], "teacher")
    vocabularies = Vocabularies(Toy(["b", "a", "<0xFF>", "c"], "student"), teacher)
    given = from_entries(Entries(np.array([2, 2, 5]), np.array([3, 4, 5]), np.array([1.0, 1.0, 2.0])), (6, 6), 2)
    projection = vocabularies.exact_map(given)
    assert projection.columns.tolist() == [[0, -1], [1, -1], [5, -1], [3, -1], [4, -1], [5, -1]]
    assert projection.weights.tolist() == [[1, 0]] * 6
    with pytest.raises(
        ValueError, match="the projection has 5 rows, but the student's tokenizer 'student' has 6 tokens"
    ):
        vocabularies.exact_map(EXAMPLE.build())


def test_the_exact_map_knows_roles_of_special_tokens():
    vocabularies = Vocabularies(Toy(["a"]), Toy(["a"], special=("<end>", "<s>"), eos="<end>"))
    assert vocabularies.exact_map(vocabularies.build(NO_NAMES)).columns[:, 0].tolist() == [1, 0, 2]


def test_trim_keeps_the_heaviest_and_normalises():
    rows, columns = np.array([0, 0, 0, 2, 2]), np.array([1, 3, 2, 0, 3])
    projection = from_entries(Entries(rows, columns, np.array([0.2, 0.5, 0.3, 1.0, 1.0])), (3, 4), 4)
    assert projection.columns.tolist() == [[3, 2, 1, -1], [-1] * 4, [0, 3, -1, -1]]
    cut = trim(projection, 2)
    assert cut.columns.tolist() == [[3, 2], [-1, -1], [0, 3]]
    np.testing.assert_allclose(cut.weights, [[0.625, 0.375], [0, 0], [0.5, 0.5]], rtol=1e-6)
    assert trim(projection, 9).columns.shape == (3, 4)
    with pytest.raises(ValueError, match="top_k=0 must be at least 1"):
        trim(projection, 0)
    with pytest.raises(ValueError, match="tokens_kept=0 must be at least 1"):
        BuildSettings(tokens_kept=0)
    with pytest.raises(ValueError, match="special_similarity=nan must be at least 0"):
        BuildSettings(special_similarity=float("nan"))


def test_equal_entries_are_added_and_ties_prefer_the_lower_id():
    random_ = random.Random(1)
    triples = [(random_.randrange(5), random_.randrange(6), random_.choice([0.25, 0.5, 1.0])) for _ in range(60)]
    rows, columns, weights = (np.array(one) for one in zip(*triples, strict=True))
    projection = from_entries(Entries(rows, columns, weights), (5, 6), 3)
    matrix = np.zeros((5, 6))
    np.add.at(matrix, (rows, columns), weights)
    for row in range(5):
        best = sorted(range(6), key=lambda column, row=row: (-matrix[row, column], column))[:3]
        assert projection.columns[row].tolist() == best
        np.testing.assert_allclose(projection.weights[row], matrix[row, best] / matrix[row, best].sum(), rtol=1e-6)


@pytest.fixture(scope="module")
def wheel():
    vocabularies = Vocabularies(tokenizer_of("mistral-v7"), tokenizer_of("mistral-v3-tekken"))
    return vocabularies, vocabularies.build(BuildSettings(reverse=False, special_similarity=2.0))


@pytest.mark.ci
def test_the_real_tokenizers_agree_on_most_tokens(wheel):
    vocabularies, projection = wheel
    text = ~vocabularies.student.is_special
    assert (projection.columns[text, 0] >= 0).mean() > 0.99  # the others are parts of characters
    exact = vocabularies.exact_map(projection)
    ours, theirs = vocabularies.student, vocabularies.teacher
    one_to_one = np.flatnonzero((exact.weights[:, 0] == 1) & text)
    assert len(one_to_one) > 28_000
    for token in one_to_one[::97].tolist():
        assert ours.of(token) == theirs.of(int(exact.columns[token, 0]))
    # A single byte is a token of both, and a letter is not the byte that stands for it.
    for byte in range(256):
        token = next(i for i in range(771, 1027) if ours.of(i) == bytes([byte]))
        assert theirs.of(int(exact.columns[token, 0])) == bytes([byte])
    np.testing.assert_allclose(exact.weights.sum(1)[exact.columns[:, 0] >= 0], 1, rtol=1e-6)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_files_hold_a_projection(tmp_path, name):
    path, projection = tmp_path / name, EXAMPLE.exact_map(EXAMPLE.build())
    write_projection(path, projection, student_name="s", teacher_name="t")
    first = path.read_bytes()
    same(read_projection(path, student=EXAMPLE.student, teacher=EXAMPLE.teacher), projection)
    write_projection(path, projection, student_name="s", teacher_name="t")
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_the_sparse_form_is_read(tmp_path):
    path, projection = tmp_path / "w.pt", EXAMPLE.exact_map(EXAMPLE.build())
    entries = np.argwhere(dense(projection))
    torch.save({(row, column): float(dense(projection)[row, column]) for row, column in entries.tolist()}, path)
    found = read_projection(path, student=EXAMPLE.student, teacher=EXAMPLE.teacher)
    assert found.columns.shape == (5, 2)
    np.testing.assert_array_equal(dense(found), dense(projection))


def nemo(path, indices, likelihoods, dtype=torch.float32, **more):
    content = {"indices": torch.tensor(indices), "likelihoods": torch.tensor(likelihoods, dtype=dtype), **more}
    torch.save(content, path)
    return path


ROWS = [[0, -1, 5], [1, 0, 5], [2, 3, 5], [3, -1, -1], [4, 5, 0]]


def test_scale_column_is_dropped_by_default(tmp_path):
    likelihoods = [[1, 0, 0.2], [1, 0, 0.2], [0.3, 0.6, 0.2], [1, 0, 0], [0.9, 0.1, 0.2]]
    path = nemo(tmp_path / "w.pt", ROWS, likelihoods, enable_scale_trick=True)
    sides = {"student": EXAMPLE.student, "teacher": EXAMPLE.teacher}
    found = read_projection(path, **sides)
    assert found.columns.tolist() == [[0, -1, -1], [1, -1, -1], [3, 2, -1], [3, -1, -1], [4, 5, -1]]
    np.testing.assert_allclose(found.weights[2], [2 / 3, 1 / 3, 0], rtol=1e-6)
    kept = read_projection(path, **sides, scale_column=True)
    assert kept.columns[0].tolist() == [0, 5, -1]
    np.testing.assert_allclose(kept.weights[0], [5 / 6, 1 / 6, 0], rtol=1e-6)
    plain = nemo(tmp_path / "plain.pt", ROWS, likelihoods, dtype=torch.bfloat16)
    assert read_projection(plain, **sides).columns[4].tolist() == [4, 0, 5]


class Harmful:
    def __reduce__(self):
        return print, ("executed",)


def test_learned_weights_are_read(tmp_path):
    path = tmp_path / "w.pt"
    content = {"indices": torch.tensor([[0]] * 5), "likelihoods": torch.nn.Parameter(torch.ones(5, 1))}
    torch.save(content, path)
    read = read_projection(path, student=EXAMPLE.student, teacher=EXAMPLE.teacher)
    assert read.weights.tolist() == [[1.0]] * 5


def harmful(path):
    path.write_bytes(pickle.dumps({"indices": Harmful()}, protocol=2))


def harmful_archive(path):
    stream = io.BytesIO()
    torch.save({"indices": Harmful(), "likelihoods": 1}, stream)
    path.write_bytes(stream.getvalue())


def truncated(path):
    write_projection(path, EXAMPLE.build())
    path.write_bytes(path.read_bytes()[:-40])


def tensors(indices=None, likelihoods=None, **others):
    """Write a file in NeMo-RL's form with some of its content replaced."""
    given = {
        "indices": torch.zeros(5, 1, dtype=torch.int64) if indices is None else indices,
        "likelihoods": torch.ones(5, 1) if likelihoods is None else likelihoods,
    }
    return lambda path: torch.save(given | others, path)


def quantized(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to remove these types
        tensors(likelihoods=torch.quantize_per_tensor(torch.ones(5, 1), 0.1, 0, torch.qint8))(path)


def stored(**arrays):
    """Write a file of this version with other arrays."""

    def write(path):
        from safetensors.torch import save_file

        about = {"format": "mcore-prefix-tree projection 1", "student_hash": "", "teacher_hash": ""}
        save_file(arrays, path, metadata={"projection": json.dumps(about)})

    return write


BAD = {
    "sparse.pt": (tensors(likelihoods=torch.ones(5, 1).to_sparse()), "'likelihoods' is nested or has the layout torch"),
    "sparse_ids.pt": (tensors(indices=torch.ones(5, 1).long().to_sparse()), "'indices' is nested or has the layout"),
    "meta.pt": (tensors(likelihoods=torch.ones(5, 1, device="meta")), "'likelihoods' is on the meta device"),
    "meta_ids.pt": (tensors(indices=torch.ones(5, 1, dtype=torch.int64, device="meta")), "'indices' is on the meta"),
    "quantized.pt": (quantized, "'likelihoods' is quantized .torch.qint8."),
    "complex.pt": (tensors(likelihoods=torch.ones(5, 1, dtype=torch.complex64)), "'likelihoods' has the type torch"),
    "bool.pt": (tensors(indices=torch.ones(5, 1, dtype=torch.bool)), "'indices' has the type torch.bool"),
    "float_ids.pt": (tensors(indices=torch.ones(5, 1)), "'indices' has the type torch.float32"),
    "lists.pt": (tensors(indices=[[0]] * 5), "'indices' is a list and no tensor"),
    "none.pt": (tensors(likelihoods=None, indices=torch.zeros(5)), "'indices' has the type torch.float32"),
    "flat.pt": (tensors(torch.zeros(5).long(), torch.ones(5)), "are not matrices of one shape"),
    "narrow.pt": (tensors(torch.zeros(5, 0).long(), torch.ones(5, 0)), "are not matrices of one shape"),
    "trick.pt": (tensors(enable_scale_trick=torch.ones(2)), "'enable_scale_trick' is a Tensor, not true or false"),
    "meta_pair.pt": (
        lambda path: torch.save({(0, 0): torch.ones((), device="meta")}, path),
        "its pairs are not two tokens with a weight",
    ),
    "sparse_pair.pt": (
        lambda path: torch.save({(0, 0): torch.ones(2).to_sparse()}, path),
        "its pairs are not two tokens with a weight",
    ),
    "bf16.safetensors": (
        stored(columns=torch.zeros(5, 1, dtype=torch.int32), weights=torch.ones(5, 1, dtype=torch.bfloat16)),
        "is damaged or no projection|its arrays are not those of a projection",
    ),
    "int64.safetensors": (
        stored(columns=torch.zeros(5, 1, dtype=torch.int64), weights=torch.ones(5, 1)),
        "its arrays are not those of a projection",
    ),
    "flat.safetensors": (
        stored(columns=torch.zeros(5, dtype=torch.int32), weights=torch.ones(5)),
        "its arrays are not those of a projection",
    ),
    "cut.safetensors": (truncated, "is damaged or no projection"),
    "cut.pt": (truncated, "is damaged or no projection"),
    "empty.safetensors": (lambda path: path.touch(), "is damaged or no projection"),
    "empty.pt": (lambda path: path.touch(), "is damaged or no projection"),
    "text.pt": (lambda path: path.write_text("hello"), "is damaged or no projection"),
    "pickle.pt": (harmful, "is damaged or no projection"),
    "archive.pt": (harmful_archive, "is damaged or no projection"),
    "zip.pt": (lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"), "is damaged or no projection"),
    "list.pt": (lambda path: torch.save([1], path), "has neither 'indices' and 'likelihoods' nor pairs of tokens"),
    "shape.pt": (lambda path: nemo(path, ROWS, [[1.0]]), "are not matrices of one shape"),
    "text_keys.pt": (lambda path: torch.save({("a", "b"): 1.0}, path), "its pairs are not two tokens with a weight"),
    "nan.pt": (lambda path: nemo(path, [[0]] * 5, [[float("nan")]] * 5), "negative or not finite"),
    "beyond.pt": (lambda path: torch.save({(1, 9): 1.0}, path), "maps token 1 to 9, but the tokenizers 'student' and"),
    "row.pt": (lambda path: torch.save({(-1, 0): 1.0}, path), "maps token -1 to 0, but the tokenizers 'student' and"),
    "large.pt": (lambda path: torch.save({(2**50, 0): 1.0}, path), "but the tokenizers 'student' and"),
    "column.pt": (lambda path: torch.save({(1, -1): 1.0}, path), "maps token 1 to -1, but the tokenizers 'student'"),
    "rows.pt": (lambda path: nemo(path, [[0]] * 4, [[1.0]] * 4), "has 4 rows, but the student's tokenizer 'student'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_sentence(tmp_path, name, capfd):
    make, reason = BAD[name]
    make(tmp_path / name)
    with pytest.raises(ValueError, match=reason) as caught:
        read_projection(tmp_path / name, student=EXAMPLE.student, teacher=EXAMPLE.teacher)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert str(caught.value).endswith("; build it again with mcore-prefix-tree xtoken build-projection")
    assert "\n" not in str(caught.value)
    assert "executed" not in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_damage_anywhere_ends_in_a_sentence(tmp_path, name):
    path, random_ = tmp_path / name, random.Random(4)
    write_projection(path, EXAMPLE.build())
    whole, refused = path.read_bytes(), []
    for _ in range(150):
        damaged = bytearray(whole[: random_.randrange(len(whole))] if random_.random() < 0.3 else whole)
        for _ in range(random_.choice([0, 1, 8])):
            damaged[random_.randrange(len(damaged))] = random_.randrange(256)
        path.write_bytes(damaged)
        try:
            read_projection(path, student=EXAMPLE.student, teacher=EXAMPLE.teacher)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all(reason.startswith(f"{path}: ") for reason in refused)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_projection_of_another_tokenizer_names_file_and_tokenizer(tmp_path, name):
    other = Vocabularies(Toy(["a", "c", "12"], "another", special=("<unk>", "</s>")), Toy(["a", "b", "1", "3"], "else"))
    write_projection(tmp_path / name, EXAMPLE.build())
    with pytest.raises(ValueError, match=rf"{name}: was built for another student's tokenizer than 'another' \(hash"):
        read_projection(tmp_path / name, student=other.student, teacher=EXAMPLE.teacher)
    with pytest.raises(ValueError, match=rf"{name}: was built for another teacher's tokenizer than 'else' \(hash"):
        read_projection(tmp_path / name, student=EXAMPLE.student, teacher=other.teacher)
    with pytest.raises(FileNotFoundError):
        read_projection(tmp_path / f"missing-{name}", student=EXAMPLE.student, teacher=EXAMPLE.teacher)


def test_our_file_is_checked(tmp_path):
    from safetensors.numpy import save_file

    path, sides = tmp_path / "w.safetensors", {"student": EXAMPLE.student, "teacher": EXAMPLE.teacher}
    save_file({"columns": np.zeros((5, 1), dtype=np.int32)}, path)
    with pytest.raises(ValueError, match="is a safetensors file, but not a projection of this version"):
        read_projection(path, **sides)
    built = EXAMPLE.build()
    for columns, weights, reason in (
        (built.columns, built.weights - 1, "negative or not finite"),
        (built.columns + 5, built.weights, "row 1 maps to a token that the teacher's tokenizer 'teacher' of 6 tokens"),
        (built.columns.astype(np.int64), built.weights, "its arrays are not those of a projection"),
        (built.columns[:, :0], built.weights[:, :0], "its arrays are not those of a projection"),
    ):
        wrong = Projection(columns=columns, weights=weights, teacher_vocab_size=6)
        write_projection(path, wrong)
        with pytest.raises(ValueError, match=reason):
            read_projection(path, **sides)


def test_file_describes_itself(tmp_path):
    from safetensors import safe_open

    write_projection(tmp_path / "w.safetensors", EXAMPLE.build(), student_name="s", teacher_name="t")
    with safe_open(str(tmp_path / "w.safetensors"), framework="numpy") as file:
        about = json.loads(file.metadata()["projection"])
    assert (about["student"], about["teacher"], about["student_hash"]) == ("s", "t", EXAMPLE.student.hash)
