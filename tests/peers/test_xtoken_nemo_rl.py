"""Alignment and projections against NeMo-RL's own functions, if its definitions are ours.

Needs a checkout of NeMo-RL that NEMO_RL_PATH names; nothing of it has to be installed.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections import defaultdict
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from xtoken_toys import Toy

from mcore_prefix_tree.xtoken.align import align_ends
from mcore_prefix_tree.xtoken.dynamic import best_path
from mcore_prefix_tree.xtoken.projection import Entries, from_entries, trim
from mcore_prefix_tree.xtoken.projection_build import BuildSettings, Vocabularies, shares, similar_names
from mcore_prefix_tree.xtoken.projection_file import read_projection, write_projection

CHECKOUT = os.environ.get("NEMO_RL_PATH")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="NEMO_RL_PATH names no checkout of NeMo-RL")
SCORES = {
    "exact_match_score": 3.0,
    "combination_score_multiplier": 1.5,
    "gap_penalty": -1.5,
    "max_combination_len": 4,
    "ignore_leading_char_diff": False,
}
# Imports of their loss utilities for functions that are not compared here: Ray, DTensor, hydra.
UNUSED = ("nemo_rl.distributed.model_utils", "nemo_rl.models.dtensor", "nemo_rl.models.dtensor.parallelize")


@pytest.fixture(scope="module")
def theirs():
    """Their modules by name; their imports are removed again."""
    before = dict(sys.modules)
    assert CHECKOUT is not None
    sys.path.insert(0, CHECKOUT)
    sys.modules |= {name: MagicMock(spec=ModuleType(name)) for name in UNUSED if name not in sys.modules}
    for name in UNUSED:
        for attribute in (
            "cp_load_balanced_to_contiguous", "cp_shift_next", "get_logprobs_from_vocab_parallel_logits",
            "group_all_reduce_sum_with_grad", "vocab_parallel_argmax", "to_local_if_dtensor",
        ):  # fmt: skip
            setattr(sys.modules[name], attribute, None)
    names = {
        "aligner": "nemo_rl.algorithms.x_token.token_aligner",
        "loss_utils": "nemo_rl.algorithms.x_token.loss_utils",
        "build": "tools.x_token.minimal_projection_via_multitoken",
        "exact": "tools.x_token.reapply_exact_map",
        "cut": "tools.x_token.sort_and_cut_projection_matrix",
    }
    yield SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})
    sys.path.remove(CHECKOUT)
    for name in [name for name in sys.modules if name.split(".")[0] in ("nemo_rl", "tools")]:
        del sys.modules[name]
    sys.modules |= {name: module for name, module in before.items() if name not in sys.modules}


def ranges(pairs):
    """Their ranges as ours; -1 marks a gap."""
    return [(pair.s_start, pair.s_end, pair.t_start, pair.t_end) for pair in pairs]


def test_the_dynamic_programme_takes_the_same_path(theirs):
    random_ = random.Random(11)
    for _ in range(300):
        student, teacher = (random_.choices(["a", "b", "ab", "aa", "aba", "c"], k=random_.randint(0, 8)) for _ in "st")
        pairs, score = theirs.aligner.TokenAligner._align_dp(student, teacher, **SCORES)
        steps, ours = best_path(student, teacher)
        assert ours == score
        found = [
            (
                *((step.s_start, step.s_end) if step.s_end > step.s_start else (-1, -1)),
                *((step.t_start, step.t_end) if step.t_end > step.t_start else (-1, -1)),
            )
            for step in steps
        ]
        assert found == ranges(pairs)


def cut(random_, text):
    places = sorted({0, len(text), *random_.sample(range(len(text) + 1), k=min(len(text), random_.randint(0, 9)))})
    return [text[a:b] for a, b in pairwise(places)]


def test_bytes_and_their_aligner_agree_on_chunks_with_one_token_per_side(theirs):
    """Different letters, so that no other path scores as much; runs of up to four tokens, as theirs."""
    random_ = random.Random(12)
    compared = 0
    aligner = theirs.aligner.TokenAligner(None, None, "")
    for _ in range(400):
        text = "".join(random_.sample("abcdefghijklmnopqrstuvwxyz", k=random_.randint(1, 20)))
        student, teacher = cut(random_, text), cut(random_, text)
        ends = [np.cumsum([len(token) for token in side]) for side in (student, teacher)]
        found = align_ends(ends[0], ends[1], np.ones(len(student), bool), np.ones(len(teacher), bool))
        sizes = np.diff(found.student)[:, 0], np.diff(found.teacher)[:, 0]
        if (np.minimum(*sizes) > 1).any() or (np.maximum(*sizes) > 4).any():
            continue
        compared += 1
        pairs, _ = aligner._align_with_anchors(student, teacher, **SCORES)
        ours = [(*s, *t) for s, t in zip(found.student.tolist(), found.teacher.tolist(), strict=True)]
        assert ranges(pairs) == ours
    assert compared > 60


def test_shares_of_a_writing_are_theirs(theirs):
    for count in range(1, 5):
        assert shares(count) == pytest.approx(theirs.build.create_weight_distribution(count), rel=1e-15)


class Decoding(Toy):
    """The calls of a Hugging Face tokenizer that their tools make."""

    def __call__(self, text, **_):
        return {"input_ids": self.encode_text(text)}

    def decode(self, tokens):
        return "".join(self.pieces[token] for token in tokens)

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[token] for token in ids]

    def get_vocab(self):
        return {piece: token for token, piece in enumerate(self.pieces)}

    def __len__(self):
        return len(self.pieces)


STUDENT = Decoding(["a", "b", "c", "ab", "abc", "abcabc"], "student", special=("<s>", "</s>", "<|im_end|>"))
TEACHER = Decoding(["a", "b", "c", "bc", "ca", "abca"], "teacher", special=("<begin_of_text>", "</s>", "<|end|>"))
OURS = Vocabularies(STUDENT, TEACHER)


def test_special_tokens_are_mapped_alike(theirs):
    sides = OURS.student.special_names, OURS.teacher.special_names
    for least in (0.0, 0.3, 0.5):
        found = theirs.build.find_similar_special_tokens(STUDENT, TEACHER, similarity_threshold=least, top_k_matches=2)
        expected = [(one["student_id"], one["teacher_id"], one["similarity"]) for one in found]
        assert similar_names(*sides, least, 2) == expected


def test_both_passes_have_their_weights(theirs):
    counts: dict[tuple[int, int], float] = defaultdict(float)
    for source, target, role in ((STUDENT, TEACHER, "student"), (TEACHER, STUDENT, "teacher")):
        theirs.build.add_multitoken_mappings(
            source_tokenizer=source,
            target_tokenizer=target,
            source_total_vocab_size=len(source),
            source_ignore_ids={0, 1, 2},
            target_ignore_ids={0, 1, 2},
            source_role=role,
            transformation_counts=counts,
            tokens_to_cut=4,
            use_raw_tokens=False,
            use_canonicalization=False,
        )
    matrix = np.zeros((len(STUDENT), len(TEACHER)))
    for place, weight in counts.items():
        matrix[place] = weight
    matrix /= np.maximum(matrix.sum(1, keepdims=True), 1e-300)
    built = OURS.build(BuildSettings(special_similarity=2.0))
    rows, rank = np.nonzero(built.columns >= 0)
    columns, weights = built.columns[rows, rank], built.weights[rows, rank]
    found = np.zeros_like(matrix)
    found[rows, columns] = weights
    np.testing.assert_allclose(found, matrix, atol=1e-7)


@pytest.fixture
def built(tmp_path):
    """A random projection, in a file of theirs."""
    rng = np.random.default_rng(3)
    size = 40
    rows, columns = (rng.integers(0, len(side), size) for side in (STUDENT, TEACHER))
    projection = from_entries(Entries(rows, columns, rng.random(size)), (len(STUDENT), len(TEACHER)), 5)
    write_projection(tmp_path / "w.pt", projection)
    return tmp_path / "w.pt", projection


def read(path):
    return read_projection(path, student=OURS.student, teacher=OURS.teacher)


def test_they_read_our_files(theirs, built):
    path, projection = built
    indices, values, v_student, _ = theirs.loss_utils.parse_projection_file(path)
    assert v_student == len(STUDENT)
    kept = indices[1] >= 0
    row, rank = np.nonzero(projection.columns >= 0)
    assert indices[:, kept].tolist() == [row.tolist(), projection.columns[row, rank].tolist()]
    np.testing.assert_allclose(values[kept], projection.weights[row, rank], rtol=1e-6)


def test_their_cut_is_our_trim(theirs, built, tmp_path):
    path, projection = built
    theirs.cut.sort_and_cut_projection_matrix(path, tmp_path / "cut.pt", 2, verbose=False)
    found, expected = read(tmp_path / "cut.pt"), trim(projection, 2)
    assert found.columns.tolist() == expected.columns.tolist()
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)


def test_their_exact_map_is_ours(theirs, built, monkeypatch):
    """No role of special tokens differs in name here, and no two tokens have the same bytes."""
    path, projection = built
    tokenizers = {"student": STUDENT, "teacher": TEACHER}
    monkeypatch.setattr(theirs.exact, "AutoTokenizer", SimpleNamespace(from_pretrained=tokenizers.get))
    monkeypatch.setattr(theirs.exact, "AutoConfig", SimpleNamespace(from_pretrained=tokenizers.get))
    arguments = SimpleNamespace(
        student_model="student", teacher_model="teacher", use_canonicalization=False, initial_projection_path=str(path)
    )
    found = read(theirs.exact.reapply_exact_map(arguments))
    named_alike = Vocabularies(STUDENT, Decoding(TEACHER.pieces[3:], "teacher", special=TEACHER.pieces[:3], eos=None))
    expected = named_alike.exact_map(projection)
    assert found.columns.tolist() == expected.columns.tolist()
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)
    assert (expected.weights[:, 0] == 1).sum() >= 4  # a, b, c, </s>


def test_the_exact_columns_of_their_losses_come_from_our_file(theirs, built, tmp_path):
    path = tmp_path / "exact.pt"
    write_projection(path, OURS.exact_map(built[1]))
    found = theirs.loss_utils.build_exact_token_map(
        path, torch.device("cpu"), xtoken_loss=False, teacher_vocab_size=len(TEACHER)
    )
    pairs = dict(zip(found["common_student"].tolist(), found["common_teacher"].tolist(), strict=True))
    expected = {token: token for token in (3, 4, 5)}  # a, b, c
    assert {token: pairs[token] for token in expected} == expected
    assert pairs[1] == 1
