"""Alignment of two tokenizations of one text: examples, properties, and the oracle of the dynamic programme."""

import random
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_prefix_tree.xtoken.align import align_ends, first_difference
from mcore_prefix_tree.xtoken.dynamic import align_dynamic, best_path


def aligned(student, teacher):
    """Chunks as ``(first, end, first, end)``; None is a token without text."""
    sides = []
    for tokens in (student, teacher):
        ends = np.array(list(accumulate(len(token or "") for token in tokens)), dtype=np.int64)
        sides.append((ends, np.array([token is not None for token in tokens], dtype=np.bool_)))
    found = align_ends(sides[0][0], sides[1][0], sides[0][1], sides[1][1])
    return [(*s, *t) for s, t in zip(found.student.tolist(), found.teacher.tolist(), strict=True)]


def two_pointers(student, teacher):
    """The definition, token by token."""
    chunks, i, j, s_from, t_from, s_at, t_at = [], 0, 0, 0, 0, 0, 0
    while True:
        if s_at == t_at and i > s_from:
            chunks.append((s_from, i, t_from, j))
            s_from, t_from = i, j
        if s_at <= t_at:
            if i == len(student):
                return chunks
            s_at, i = s_at + len(student[i]), i + 1
        else:
            if j == len(teacher):
                return chunks
            t_at, j = t_at + len(teacher[j]), j + 1


def sizes(chunks):
    return [(s_end - s, t_end - t) for s, s_end, t, t_end in chunks]


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        ("The| year| |201|!", "The| year| |2|0|1|!", [(1, 1), (1, 1), (1, 1), (1, 3), (1, 1)]),
        ("ab|cd", "abc|d", [(2, 2)]),
        ("12345", "1|2|3|4|5", [(1, 5)]),
        ("a|b|c", "a|b|c", [(1, 1)] * 3),
        ("ab", "a|b", [(1, 2)]),
    ],
)
def test_examples(student, teacher, expected):
    student, teacher = student.split("|"), teacher.split("|")
    assert sizes(aligned(student, teacher)) == expected
    assert aligned(student, teacher) == two_pointers(student, teacher)


@pytest.mark.parametrize(
    ("student", "teacher", "chunks"),
    [
        # A beginning token without text is in no chunk.
        ([None, "Hello"], ["Hello"], [(1, 2, 0, 1)]), ([None], [], []), ([], ["a"], []), ([], [], []),
        # A chunk that a special token interrupts is skipped.
        (["a", None, "b", "c"], ["ab", "c"], [(3, 4, 1, 2)]),
        (["a", None, "b"], ["a", "b"], [(0, 1, 0, 1), (2, 3, 1, 2)]),
        # A token of no bytes joins the chunk behind it.
        (["", "a", "b"], ["a", "b"], [(0, 2, 0, 1), (2, 3, 1, 2)]),
        (["a", "", "b"], ["a", "b"], [(0, 1, 0, 1), (1, 3, 1, 2)]), (["a", ""], ["a"], [(0, 1, 0, 1)]),
        # Text that ends on one side first is in no chunk.
        (["ab", "c"], ["ab", "cd"], [(0, 1, 0, 1)]),
    ],
)  # fmt: skip
def test_tokens_without_text_and_ends(student, teacher, chunks):
    assert aligned(student, teacher) == chunks


def cut(random_, text):
    places = [0, *sorted(random_.sample(range(1, len(text)), random_.randint(0, len(text) - 1))), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def check_random(trials, seed):
    """Two letters, so that texts repeat themselves; a prefix of both sides, and two continuations."""
    random_ = random.Random(seed)
    for _ in range(trials):
        text = ["".join(random_.choices("ab", k=random_.randint(1, 8))) for _ in range(3)]
        prefix = cut(random_, text[0]), cut(random_, text[0])
        whole = [[prefix[side] + cut(random_, text[way]) for side in (0, 1)] for way in (1, 2)]
        before = aligned(*prefix)
        for student, teacher in whole:
            chunks = aligned(student, teacher)
            inside = [chunk for chunk in chunks if chunk[1] <= len(prefix[0]) and chunk[3] <= len(prefix[1])]
            assert inside == before  # prefix-causal
            assert chunks == two_pointers(student, teacher)
            s_ends, t_ends = [chunk[1] for chunk in chunks], [chunk[3] for chunk in chunks]
            assert [0, *s_ends[:-1]] == [chunk[0] for chunk in chunks]  # monotone, and covers all tokens
            assert [0, *t_ends[:-1]] == [chunk[2] for chunk in chunks]
            assert (s_ends[-1], t_ends[-1]) == (len(student), len(teacher))
            for s, s_end, t, t_end in chunks:
                assert "".join(student[s:s_end]) == "".join(teacher[t:t_end])


def test_random_texts_are_aligned_prefix_causally():
    check_random(500, seed=1)


TOKENS = st.lists(st.sampled_from(["a", "b", "ab", "ba", "", None, "aab"]), max_size=12)


@settings(max_examples=200, deadline=None)
@given(student=TOKENS, teacher=TOKENS, more=st.tuples(TOKENS, TOKENS))
def test_any_tokens_are_aligned_prefix_causally(student, teacher, more):
    before = aligned(student, teacher)
    after = aligned(student + more[0], teacher + more[1])
    assert after[: len(before)] == before
    for s, s_end, t, t_end in after:
        assert s < s_end
        assert t < t_end
    for (_, s_end, _, t_end), (s, _, t, _) in pairwise(after):
        assert s >= s_end
        assert t >= t_end


def plain_path(student, teacher):
    """The recurrence as XTOKEN.md writes it, cell by cell."""
    scores, moves = {(0, 0): 0.0}, {}
    for i in range(len(student) + 1):
        for j in range(len(teacher) + 1):
            ways = []
            if i and j:
                ways.append((scores[i - 1, j - 1] + (3 if student[i - 1] == teacher[j - 1] else -3), 1, 1))
            if i:
                ways.append((scores[i - 1, j] - 1.5, 1, 0))
            if j:
                ways.append((scores[i, j - 1] - 1.5, 0, 1))
            ways += [
                (scores[i - 1, j - k] + 1.5 * k, 1, k)
                for k in (2, 3, 4)
                if i and j >= k and student[i - 1] == "".join(teacher[j - k : j])
            ]
            ways += [
                (scores[i - k, j - 1] + 1.5 * k, k, 1)
                for k in (2, 3, 4)
                if j and i >= k and teacher[j - 1] == "".join(student[i - k : i])
            ]
            if ways:
                best = max(way[0] for way in ways)
                scores[i, j], *moves[i, j] = next(way for way in ways if way[0] == best)
    path, i, j = [], len(student), len(teacher)
    while i or j:
        s, t = moves[i, j]
        path.append((i - s, i, j - t, j))
        i, j = i - s, j - t
    return path[::-1], scores[len(student), len(teacher)]


def path_of(student, teacher):
    steps, score = best_path(student, teacher)
    return [(step.s_start, step.s_end, step.t_start, step.t_end) for step in steps], score


def test_the_dynamic_programme_is_the_plain_recurrence():
    random_ = random.Random(3)
    for _ in range(400):
        sides = [random_.choices(["a", "b", "ab", "aa", "aba", ""], k=random_.randint(0, 7)) for _ in range(2)]
        assert path_of(*sides) == plain_path(*sides)


def dynamic(student, teacher):
    found = align_dynamic([token.encode() for token in student], [token.encode() for token in teacher])
    return [(*s, *t) for s, t in zip(found.student.tolist(), found.teacher.tolist(), strict=True)]


def test_the_dynamic_aligner_finds_the_examples():
    split = ["The", " year", " ", "201", "!"], ["The", " year", " ", "2", "0", "1", "!"]
    assert sizes(dynamic(*split)) == [(1, 1), (1, 1), (1, 1), (1, 3), (1, 1)]
    assert dynamic(["ab", "cd"], ["abc", "d"]) == [(0, 2, 0, 2)]
    assert dynamic(["<s>", "Hello"], ["Hello"]) == [(1, 2, 0, 1)]
    assert dynamic(["a"], ["c"]) == dynamic([], []) == []


def test_the_dynamic_aligner_sees_through_normalisation():
    assert dynamic(["caf", "\u00e9", "!"], ["cafe", "\u0301", "!"]) == [(0, 2, 0, 2), (2, 3, 2, 3)]
    assert dynamic(["\ufb01", "t"], ["fi", "t"]) == [(0, 1, 0, 1), (1, 2, 1, 2)]


def test_the_dynamic_aligner_is_not_prefix_causal():
    random_ = random.Random(5)
    changed = 0
    for _ in range(300):
        text = ["".join(random_.choices("ab", k=random_.randint(1, 8))) for _ in range(2)]
        prefix = cut(random_, text[0]), cut(random_, text[0])
        student, teacher = (prefix[side] + cut(random_, text[1]) for side in (0, 1))
        before, after = dynamic(*prefix), dynamic(student, teacher)
        changed += after[: len(before)] != before
    assert changed > 0


def test_first_difference():
    def at(one, other):
        return first_difference(np.frombuffer(one, dtype=np.uint8), np.frombuffer(other, dtype=np.uint8))

    assert (at(b"abc", b"abc"), at(b"abc", b"abd"), at(b"abc", b"ab"), at(b"", b"a")) == (None, 2, 2, 0)
