"""Causes of samples that share less than they should, and the ratios that mending them gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_prefix_tree.data.causes import find_causes
from mcore_prefix_tree.data.causes.words import end_of_text, meeting, meeting_at_end
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import Signals

# A vocabulary whose text can be written in two ways: a token below 128 is a letter, one from 128 on is two of them.
LETTERS = 128


def decode(tokens):
    return "".join(
        chr(token) if token < LETTERS else chr(64 + (token - LETTERS) // 64) + chr(64 + (token - LETTERS) % 64)
        for token in tokens
    )


def letters(text):
    return [ord(letter) for letter in text]


def pairs(text):
    """Write a text in tokens of two letters."""
    even = len(text) // 2 * 2
    joined = [LETTERS + (ord(text[at]) - 64) * 64 + ord(text[at + 1]) - 64 for at in range(0, even, 2)]
    return [*joined, *letters(text[even:])]


def test_the_vocabulary_of_these_tests_writes_a_text_in_two_ways():
    for text in ("ABCD", "hello", "Q"):
        assert decode(letters(text)) == decode(pairs(text)) == text
    assert letters("hello") != pairs("hello")


def turn(prompt, answer, **signals):
    mask = [0] * len(prompt) + [1] * len(answer)
    return Sample(tokens=[*prompt, *answer], loss_mask=mask, signals=Signals(**signals) if signals else None)


WORDS = st.text(alphabet="ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=12, max_size=20)


@st.composite
def conversations(draw):
    """Rollouts of a prompt: the words of user and assistant, turn after turn."""
    opening = draw(WORDS)
    return [
        [(opening if number == 0 else draw(WORDS), draw(WORDS)) for number in range(draw(st.integers(2, 4)))]
        for _ in range(draw(st.integers(1, 3)))
    ]


def samples_of(talks, *, history, with_ids):
    """Make a sample of each turn; ``history`` writes its answer into later turns."""
    samples = []
    for rollout, talk in enumerate(talks):
        before = []
        for number, (asked, answered) in enumerate(talk):
            before = [*before, *letters(f"<{asked.lower()}>")]
            ids = {"group": 0, "rollout": rollout, "turn": number} if with_ids else {}
            samples.append(turn(before, [*letters(answered), ord(".")], **ids))
            before = [*before, *history(answered), ord(".")]
    return samples


def kept(answer):
    return letters(answer)


@settings(max_examples=60, deadline=None)
@given(talks=conversations(), with_ids=st.booleans())
def test_mended_tokens_fold_as_those_that_were_never_encoded_again(talks, with_ids):
    drifted = samples_of(talks, history=pairs, with_ids=with_ids)
    found = find_causes(drifted, decode=decode)
    right = fold(samples_of(talks, history=kept, with_ids=with_ids))
    assert [cause.name for cause in found.causes] == ["retokenised"]
    (cause,) = found.causes
    assert (cause.physical_tokens, cause.fold_ratio) == (right.physical_tokens, right.fold_ratio)
    assert not cause.is_bound
    assert found.is_complete


@settings(max_examples=60, deadline=None)
@given(talks=conversations())
def test_kept_thinking_folds_as_a_history_with_all_of_it(talks):
    thought = [[(asked, f"<think>{answer[::-1]}</think>{answer}") for asked, answer in talk] for talk in talks]
    dropped = samples_of(thought, history=lambda answer: letters(answer.partition("</think>")[2]), with_ids=True)
    found = find_causes(dropped, decode=decode)
    right = fold(samples_of(thought, history=kept, with_ids=True))
    assert [cause.name for cause in found.causes] == ["thinking"]
    assert (found.causes[0].physical_tokens, found.causes[0].fold_ratio) == (right.physical_tokens, right.fold_ratio)


@settings(max_examples=60, deadline=None)
@given(talks=conversations(), with_ids=st.booleans(), has_text=st.booleans())
def test_several_answers_to_one_prompt_are_no_cause(talks, with_ids, has_text):
    samples = samples_of(talks, history=kept, with_ids=with_ids)
    assert find_causes(samples, decode=decode if has_text else None).causes == []


@settings(max_examples=40, deadline=None)
@given(talks=conversations())
def test_without_text_the_cause_is_unknown_and_the_ratio_no_less(talks):
    drifted = samples_of(talks, history=pairs, with_ids=True)
    known, unknown = find_causes(drifted, decode=decode), find_causes(drifted)
    assert {cause.name for cause in unknown.causes} <= {"unknown"}
    for cause in unknown.causes:
        assert cause.fold_ratio >= known.causes[0].fold_ratio or not cause.is_bound


def test_answers_with_a_common_beginning_are_recognised():
    """The history's first token is that of another answer, so that somebody did generate it."""
    asked = letters("<go on>")
    sent = [*asked, *letters("ABCDEF.")]
    again = [*asked, *pairs("ABCDEF"), *letters(".<more>")]
    samples = [
        turn(asked, letters("ABCDEF.")),
        turn(again, letters("XY.")),
        turn(asked, [*pairs("AB"), *letters("Q.")]),
    ]
    (cause,) = find_causes(samples, decode=decode).causes
    assert cause.name == "retokenised"
    mended = [samples[0], turn([*sent, *letters("<more>")], letters("XY.")), samples[2]]
    assert cause.physical_tokens == fold(mended).physical_tokens


def prompts(words, tail="You are a clerk. Answer in few words and do not guess."):
    return [
        turn(letters(f"\nsystem: {word} {tail}\nuser: question {number}"), letters(f" answer {number}."))
        for number, word in enumerate(words)
    ]


@pytest.mark.parametrize(
    ("words", "detail"),
    [
        (["Today is 2025-03-04.", "Today is 2025-03-05.", "Today is 2025-11-20."], "date"),
        (["It is Monday, 3 March 2025.", "It is Tuesday, 4 March 2025."], "date"),
        (["Time: 12:00:01.", "Time: 12:31:59."], "date"),
        (["Session 0b5d7a3e-c41f-4d29-8e07-94f1b6a25d38.", "Session f2c96e81-70ad-4b53-9c1e-5a08d7e46f9b."], "id"),
        (["Request a1b2c3d4e5f6.", "Request f6e5d4c3b2a1."], "id"),
        (["You have 17 credits.", "You have 230 credits."], "number"),
        (["Be kind.", "Be stern."], "words"),
    ],
)
def test_words_that_should_not_matter_are_named_and_mended(words, detail):
    samples = prompts(words)
    (cause,) = find_causes(samples, decode=decode).causes
    assert (cause.name, cause.detail) == ("prompt", detail)
    right = fold(prompts([words[0]] * len(words)))
    # The report does not name the common words, only that all have the same.
    assert abs(cause.physical_tokens - right.physical_tokens) <= max(map(len, words))
    assert cause.physical_tokens < fold(samples).physical_tokens
    assert find_causes(samples).causes == [] or detail in ("number", "words", "date", "id")


def test_other_questions_are_no_cause():
    samples = [
        turn(
            letters(f"\nuser: What is {n} plus 4? Think, and give the answer in a box at the very end."),
            letters(f" {n}"),
        )
        for n in (12, 13, 25, 71)
    ]
    assert find_causes(samples, decode=decode).causes == []
    assert find_causes(samples).branches


def test_random_ids_of_calls_in_two_rollouts():
    call = '\nuser: renew\nassistant: {"id": "%s", "name": "find", "arguments": {}}\ntool: Ann Lee\nassistant: ok %d'
    ids = ("call_Ab12Cd34Ef56", "call_Zz98Yy76Xx54")
    samples = [
        turn(letters("\nuser: renew\n"), letters((call % (id, n)).partition("renew\n")[2])) for n, id in enumerate(ids)
    ]
    (cause,) = find_causes(samples, decode=decode).causes
    assert cause.name == "call ids"
    same = [turn(letters("\nuser: renew\n"), letters((call % (ids[0], n)).partition("renew\n")[2])) for n in range(2)]
    assert cause.physical_tokens == fold(same).physical_tokens


def test_a_chain_parts_nowhere():
    samples = [Sample(tokens=list(range(length))) for length in (3, 5, 9)]
    assert find_causes(samples) == find_causes(samples[:1])
    assert not find_causes(samples).branches


def test_other_merge_keys_are_no_cause():
    samples = prompts(["Today is 2025-03-04.", "Today is 2025-03-05."])
    keyed = [Sample(tokens=s.tokens, loss_mask=s.loss_mask, merge_key=n) for n, s in enumerate(samples)]
    assert find_causes(keyed, decode=decode).causes == []


def array(*tokens):
    return np.array(tokens, dtype=np.int32)


@settings(max_examples=100, deadline=None)
@given(
    left=st.lists(st.integers(0, 3), max_size=40),
    right=st.lists(st.integers(0, 3), max_size=40),
    tail=st.lists(st.integers(0, 3), min_size=8, max_size=12),
)
def test_sequences_meet_by_the_shortest_way(left, right, tail):
    one, other = array(*left, *tail), array(*right, *tail)
    ways = [
        (i, j)
        for i in range(len(one) - 7)
        for j in range(len(other) - 7)
        if np.array_equal(one[i : i + 8], other[j : j + 8])
    ]
    found = meeting(one, other)
    assert found in ways
    assert sum(found) == min(map(sum, ways))


def test_an_end_is_met_with_two_tokens():
    assert meeting_at_end(array(1, 2, 7, 8), array(3, 7, 8, 4)) == (2, 1)
    assert meeting_at_end(array(1, 8), array(3, 8)) is None


@given(text=WORDS, more=WORDS)
def test_text_ends_with_its_tokens(text, more):
    assert end_of_text(decode, array(*letters(text), *letters(more)), 0, text) == len(text)
    if len(text) % 2 == 0:
        assert end_of_text(decode, array(*pairs(text), *letters(more)), 0, text) == len(text) // 2
    assert end_of_text(decode, array(*letters(more.lower())), 0, text) is None
