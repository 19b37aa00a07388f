"""Teacher rows stored with samples: shared and unshared ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from xtoken_texts import samples, texts

from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.objectives import BoundCrossTokenizer, make_objective
from mcore_prefix_tree.signals import Signals, Teacher
from mcore_prefix_tree.trie import build_trie
from mcore_prefix_tree.xtoken.exported import Labelled

K = 3


def with_rows(sample, *, seed=0):
    """Rows that depend only on the teacher's preceding tokens and a seed."""
    tokens = texts().pairing.reencode(sample).teacher.tokens
    ids, logprobs, realised = [], [], []
    for at, token in enumerate(tokens.tolist()):
        rng = np.random.default_rng([seed, *tokens[:at].tolist()])
        ids.append(rng.choice(texts().teacher.vocab_size, size=K, replace=False))
        logprobs.append(np.log(rng.dirichlet(np.ones(K + 1))[:K]))
        realised.append(-float(np.random.default_rng([seed, *tokens[:at].tolist(), token]).random()))
    teacher = Teacher(
        token_ids=np.stack(ids),
        logprobs=np.stack(logprobs),
        tokens=tokens,
        realised=np.array(realised),
        tokenizer=texts().pairing.teacher.hash,
    )
    return replace(sample, signals=Signals(teacher=teacher))


def labelled(given):
    found = Labelled.of([texts().pairing.reencode(sample) for sample in given])
    return found, fold(found.samples, trie=build_trie(found.samples))


def tokens_of(given):
    return build_trie(given).num_tokens


def test_equal_rows_share_like_their_tokens():
    whole = [replace(sample, loss_mask=np.ones(len(sample))) for sample in samples()[:6]]
    given = [with_rows(sample) for sample in (*whole, whole[0])]
    shared = tokens_of(labelled(given)[0].samples)
    teachers = [texts().pairing.reencode(sample).teacher for sample in given]
    # A label also identifies the next token: the last token before paths part may have one for each.
    assert tokens_of(teachers) <= shared <= tokens_of(teachers) + len(given)
    other = [*given[:-1], with_rows(whole[0], seed=1)]
    assert tokens_of(labelled(other)[0].samples) >= shared + len(teachers[0]) - 2


def test_labels_spell_tokens_and_rows():
    given = [with_rows(sample) for sample in samples()]
    found, layout = labelled(given)
    for number, sample in enumerate(given):
        pair, teacher = texts().pairing.reencode(sample), sample.signals.teacher
        own = found.samples[number].tokens
        assert np.array_equal(found.token[own], pair.teacher.tokens)
        assert np.array_equal(layout.input_ids[layout.sample_tokens(number)], own)
        for at in np.flatnonzero(pair.teacher.loss_mask[1:]) + 1:
            row = found.row[own[at - 1]]
            assert np.array_equal(found.token_ids[row], teacher.token_ids[at])
            assert np.array_equal(found.logprobs[row], teacher.logprobs[at])
            assert found.realised[own[at]] == teacher.realised[at]


@pytest.mark.parametrize("teacher", ["full", "top_k"])
def test_micro_batch_of_no_samples_has_no_chunks(teacher):
    settings = make_objective("xtoken", {"mode": "alm", "teacher": teacher})
    objective = BoundCrossTokenizer(settings=settings, sides=(texts().side(settings.losses),))
    targets = objective.targets([with_rows(sample) for sample in samples()])
    empty = fold([], trie=build_trie([]))
    (taught,) = objective.rows(targets, empty, []).taught
    assert taught.blocks == ()
    assert len(taught.weight) == 0
