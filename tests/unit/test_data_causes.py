"""Causes of samples that share less than they should."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_prefix_tree.data import causes
from mcore_prefix_tree.data.causes import find_causes
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
# Rollouts of a prompt: the words of user and assistant, turn after turn.
TALKS = st.lists(st.lists(st.tuples(WORDS, WORDS), min_size=2, max_size=4), min_size=1, max_size=3)


def samples_of(talks, *, history, with_ids):
    """Make a sample of each turn; ``history`` writes its answer into later turns."""
    samples = []
    for rollout, talk in enumerate(talks):
        before = letters("<")
        for number, (asked, answered) in enumerate(talk):
            before = [*before, *letters(f"{rollout}{asked.lower()}>")]
            ids = {"group": 0, "rollout": rollout, "turn": number} if with_ids else {}
            samples.append(turn(before, [*letters(answered), ord(".")], **ids))
            before = [*before, *history(answered), ord(".")]
    return samples


def drop_thinking(answer):
    return letters(answer.partition("</think>")[2])


@given(talks=TALKS, with_ids=st.booleans())
def test_text_in_other_tokens(talks, with_ids):
    samples = samples_of(talks, history=pairs, with_ids=with_ids)
    (cause,) = find_causes(samples, decode=decode).causes
    assert (cause.name, cause.is_format) == ("retokenised", False)
    assert cause.samples == sum(len(talk) - 1 for talk in talks)
    assert cause.unshared_tokens == sum(len(answered) + 1 for talk in talks for _, answered in talk[:-1])
    first = samples[0]
    assert cause.common_tokens == first.loss_mask.tolist().index(1)
    assert cause.other_words.endswith(f"{talks[0][0][1]}.")
    assert cause.words.startswith(cause.other_words)
    # Without text, only the turns of rollouts are known to continue each other.
    unknown = find_causes(samples).causes
    assert [(one.name, one.samples) for one in unknown] == ([("unknown", cause.samples)] if with_ids else [])


@given(talks=TALKS)
def test_dropped_thinking(talks):
    thought = [[(asked, f"<think>{answer[::-1]}</think>{answer}") for asked, answer in talk] for talk in talks]
    samples = samples_of(thought, history=drop_thinking, with_ids=True)
    (cause,) = find_causes(samples, decode=decode).causes
    assert (cause.name, cause.samples) == ("rewritten", sum(len(talk) - 1 for talk in talks))


@given(talks=TALKS, with_ids=st.booleans(), has_text=st.booleans())
def test_several_answers_to_one_prompt_are_no_cause(talks, with_ids, has_text):
    samples = samples_of(talks, history=letters, with_ids=with_ids)
    assert find_causes(samples, decode=decode if has_text else None).causes == []


def test_subagent_of_a_rollout_is_no_cause():
    ids = [{"rollout": 0, "turn": number} for number in range(3)]
    main, sub = letters("<find the book>"), letters("<look at shelf four>")
    answered = [*main, *letters("ABC."), *letters("<more>")]
    samples = [turn(main, letters("ABC."), **ids[0]), turn(sub, letters("none"), **ids[1])]
    assert find_causes([*samples, turn(answered, letters("D."), **ids[2])], decode=decode).causes == []
    drifted = [*main, *pairs("ABC"), *letters(".<more>")]
    (cause,) = find_causes([*samples, turn(drifted, letters("D."), **ids[2])], decode=decode).causes
    assert (cause.name, cause.samples, cause.common_tokens) == ("retokenised", 1, len(main))


def test_answers_with_a_common_beginning_are_recognised():
    """The history's first token is that of another answer, so that somebody did generate it."""
    asked = letters("<go on>")
    again = [*asked, *pairs("ABCDEF"), *letters(".<more>")]
    samples = [
        turn(asked, letters("ABCDEF.")),
        turn(again, letters("XY.")),
        turn(asked, [*pairs("AB"), *letters("Q.")]),
    ]
    (cause,) = find_causes(samples, decode=decode).causes
    assert (cause.name, cause.samples, cause.unshared_tokens) == ("retokenised", 1, 7)


def prompts(words, tail="You are a clerk. Answer in few words and do not guess."):
    return [
        turn(letters(f"\nsystem: {word} {tail}\nuser: question {number}"), letters(f" answer {number}."))
        for number, word in enumerate(words)
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["Today is 2025-03-04.", "Today is 2025-03-05."],
        ["Request a1b2c3.", "Request f6e5d4c3."],
        ["Be kind", "Be stern"],
    ],
)
def test_few_words_ahead_of_many_equal_ones(words):
    for one in (None, decode):
        (cause,) = find_causes(prompts(words), decode=one).causes
        assert (cause.name, cause.samples) == ("prompt", 1)
        assert cause.unshared_tokens > 60
    assert cause.other_words.startswith(words[0].split()[-1])
    assert cause.words.startswith(words[1].split()[-1])
    keyed = [Sample(tokens=s.tokens, loss_mask=s.loss_mask, merge_key=n) for n, s in enumerate(prompts(words))]
    assert find_causes(keyed, decode=decode).causes == []


def test_other_questions_are_no_cause():
    samples = [turn(letters(f"\nuser: What is {n} plus 4? Answer in a box."), letters(f" {n}")) for n in (12, 13, 25)]
    assert find_causes(samples, decode=decode).causes == []
    assert find_causes(samples).branches


def test_a_chain_parts_nowhere():
    samples = [Sample(tokens=list(range(length))) for length in (3, 5, 9)]
    assert find_causes(samples) == find_causes(samples[:1])
    assert not find_causes(samples).branches


def test_texts_that_are_not_compared_are_reported(monkeypatch):
    samples = samples_of([[("AB", "CDEFGH")] * 4] * 3, history=pairs, with_ids=True)
    monkeypatch.setattr(causes, "_MOST", 8)
    found = find_causes(samples, decode=decode)
    assert not found.is_complete
    assert sum(cause.samples for cause in found.causes) == 9


def test_other_routes_of_equal_tokens_are_no_cause():
    context = {"tokens": list(range(50)), "loss_mask": [0] * 49 + [1]}
    samples = [Sample(**context, routed_experts=[[[expert]]] * 50) for expert in (0, 1)]
    found = find_causes(samples, decode=decode)
    assert found.branches
    assert found.causes == []
