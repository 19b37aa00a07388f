"""Chunks of folded samples against those of unfolded samples."""

import random
from collections import defaultdict

import numpy as np
import pytest
from xtoken_toys import Toy

from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.xtoken.fold import fold_chunks
from mcore_prefix_tree.xtoken.pairs import Pairing

EXAMPLE = Toy(["a", "b", "12"]), Toy(["a", "b", "1", "2"])


def folded(pairs, *, keyed_by_tokens, **options):
    layouts = fold([pair.student for pair in pairs], **options), fold([pair.teacher for pair in pairs], **options)
    return layouts, fold_chunks(*layouts, pairs, keyed_by_tokens=keyed_by_tokens)


def sides(chunks, c):
    return [
        (
            side.rows[side.starts[c] : side.starts[c + 1]].tolist(),
            side.tokens[side.starts[c] : side.starts[c + 1]].tolist(),
        )
        for side in (chunks.student, chunks.teacher)
    ]


def test_weights_and_multiplicities_add_up():
    student, teacher = EXAMPLE
    pairing = Pairing(student, teacher)
    masks = [0, 0.5, 0.25], [0, 2, 0]
    pairs = [pairing.reencode(student.sample("a", "12", "b", loss_mask=mask)) for mask in masks]
    _, chunks = folded(pairs, keyed_by_tokens=True)
    assert chunks.weight.tolist() == [2.5, 0.25]
    assert chunks.multiplicity.tolist() == [2, 1]
    assert chunks.first_sample.tolist() == [0, 0]


def terms(pairs, *, keyed_by_tokens, **options):
    """Weight and multiplicity by chunk: tokens up to each predictor, on both sides, and the predicted tokens."""
    (student, teacher), chunks = folded(pairs, keyed_by_tokens=keyed_by_tokens, **options)

    def path(layout, row):
        tokens = []
        while row >= 0:
            tokens.append(int(layout.input_ids[row]))
            row = int(layout.predictor[row])
        return tuple(tokens[::-1])

    found = defaultdict(lambda: np.zeros(2))
    for c in range(len(chunks)):
        (s_rows, s_tokens), (t_rows, t_tokens) = sides(chunks, c)
        key = tuple(path(student, row) for row in s_rows), tuple(path(teacher, row) for row in t_rows)
        if keyed_by_tokens:
            key += tuple(s_tokens), tuple(t_tokens)
        assert key not in found
        found[key] += chunks.weight[c], chunks.multiplicity[c]
    return found


def random_pairs(random_, count):
    student, teacher = Toy(["a", "b", "ab", "ba", "aab"]), Toy(["a", "b", "aa", "bb", "abb"])
    pairing = Pairing(student, teacher)
    pairs = []
    for _ in range(count):
        pieces = random_.choices(student.pieces[2:], k=random_.randint(1, 6))
        lead = ["<s>"] if random_.random() < 0.8 else []
        mask = random_.choices([0, 0.5, 1], weights=[1, 1, 4], k=len(lead) + len(pieces) + 1)
        pairs.append(pairing.reencode(student.sample(*lead, *pieces, "</s>", loss_mask=mask)))
    return pairs


@pytest.mark.parametrize("keyed_by_tokens", [False, True])
def test_folded_chunks_equal_unfolded_chunks(keyed_by_tokens):
    random_ = random.Random(7)
    for _ in range(15):
        pairs = random_pairs(random_, random_.randint(1, 12))
        together = terms(pairs, keyed_by_tokens=keyed_by_tokens)
        alone = defaultdict(lambda: np.zeros(2))
        for pair in pairs:
            for key, values in terms([pair], keyed_by_tokens=keyed_by_tokens).items():
                alone[key] += values
        assert together.keys() == alone.keys()
        for key, values in together.items():
            assert values.tolist() == alone[key].tolist()
        assert sum(values[1] for values in together.values()) == sum(map(len, pairs))
        weight = sum(pair.weight.sum() for pair in pairs)
        assert sum(values[0] for values in together.values()) == pytest.approx(weight, rel=1e-14)


def test_order_of_pairs_does_not_change_the_chunks():
    random_ = random.Random(8)
    pairs = random_pairs(random_, 12)
    _, chunks = folded(pairs, keyed_by_tokens=True)
    shuffled = random_.sample(pairs, len(pairs))
    _, again = folded(shuffled, keyed_by_tokens=True)
    for name in ("weight", "multiplicity"):
        assert getattr(chunks, name).tolist() == getattr(again, name).tolist()
    for side, other in ((chunks.student, again.student), (chunks.teacher, again.teacher)):
        for name in ("rows", "tokens", "starts"):
            assert getattr(side, name).tolist() == getattr(other, name).tolist()
    assert (np.diff(chunks.student.rows[chunks.student.starts[1:] - 1]) >= 0).all()


@pytest.mark.parametrize("keyed_by_tokens", [False, True])
def test_nothing_to_align_gives_no_chunks(keyed_by_tokens):
    student, teacher = EXAMPLE
    pairs = [Pairing(student, teacher).reencode(student.sample("a"))]
    for some in (pairs, []):
        _, chunks = folded(some, keyed_by_tokens=keyed_by_tokens)
        assert len(chunks) == 0
        assert chunks.student.starts.tolist() == [0]


def test_keys_that_overflow_are_numbered_anew():
    from mcore_prefix_tree.xtoken.fold import unique_rows

    random_ = np.random.default_rng(1)
    columns = [random_.integers(0, 3, 50) * (2**31 - 5) for _ in range(6)]
    first, group, count = unique_rows(columns)
    expected, e_first, e_group, e_count = np.unique(
        np.stack(columns, 1), axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    assert (first.tolist(), group.tolist(), count.tolist()) == (
        e_first.tolist(),
        e_group.reshape(-1).tolist(),
        e_count.tolist(),
    )
    assert len(expected) > 1


def test_layouts_of_other_samples_are_refused():
    student, teacher = EXAMPLE
    pair = Pairing(student, teacher).reencode(student.sample("a", "12", "b"))
    layouts = fold([pair.student]), fold([pair.teacher])
    with pytest.raises(ValueError, match="the teacher's layout is not of the samples of these 1 pairs"):
        fold_chunks(layouts[0], layouts[0], [pair], keyed_by_tokens=False)
