"""Pairs of samples in two tokenizers: by both chat formats, and by encoding the student's text anew."""

import random
from pathlib import Path

import numpy as np
import pytest
from harness.commands import write_rows
from xtoken_toys import Toy, tokenizer_of

from mcore_prefix_tree.data import Skipped
from mcore_prefix_tree.sample import Sample, SampleError, Tempered
from mcore_prefix_tree.xtoken.align import align_ends
from mcore_prefix_tree.xtoken.pairs import Pairing, iter_pairs

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "recipes" / "data" / "quickstart_rollouts.jsonl"
TAU = ROOT.parent / "shared" / "data" / "tau_bench_airline_gpt4o.jsonl"
# v3's format rejects text next to a tool call, so lines with both are omitted.
NAMES = ("mistral-v7", "mistral-v3-tekken")


@pytest.fixture(scope="module")
def wheel():
    tokenizers = [tokenizer_of(name) for name in NAMES]
    return {"down": Pairing(*tokenizers), "up": Pairing(*tokenizers[::-1])}


def toys(aligner="bytes"):
    student = Toy(["a", "b", "12", "ab"], "student")
    teacher = Toy(["a", "b", "1", "2"], "teacher")
    return student, teacher, Pairing(student, teacher, aligner=aligner)


def chunks_of(pair):
    ranges = (map(tuple, side.tolist()) for side in (pair.alignment.student, pair.alignment.teacher))
    return list(zip(*ranges, strict=True))


def check(pair, pairing):
    """Chunks are scored, monotone and of equal text; each token of the teacher that one holds is marked."""
    spelled = pairing.student.spell(pair.student.tokens), pairing.teacher.spell(pair.teacher.tokens)
    before, marked = (0, 0), np.zeros(len(pair.teacher))
    for (s, s_end), (t, t_end) in chunks_of(pair):
        assert spelled[0].text(s, s_end) == spelled[1].text(t, t_end)
        assert (s, t) >= before
        assert s < s_end
        assert t < t_end
        before = s_end, t_end
        marked[t:t_end] = 1
        assert (pair.student.loss_mask[s:s_end] > 0).all()
    assert pair.teacher.loss_mask.tolist() == marked.tolist()
    return spelled


def test_tokens_are_encoded_anew():
    student, _, pairing = toys()
    pair = pairing.reencode(student.sample("<s>", "a", "12", "ab", "</s>", source="f:1"))
    assert pair.teacher.tokens.tolist() == [0, 2, 4, 5, 2, 3, 1]
    assert chunks_of(pair) == [((1, 2), (1, 2)), ((2, 3), (2, 4)), ((3, 4), (4, 6)), ((4, 5), (6, 7))]
    assert pair.weight.tolist() == [1, 1, 1, 1]
    assert pair.teacher.source == "f:1"
    check(pair, pairing)


def test_chunk_of_only_the_first_token_has_no_predictor():
    student, _, pairing = toys()
    pair = pairing.reencode(student.sample("a", "12", "b"))
    assert chunks_of(pair) == [((1, 2), (1, 3)), ((2, 3), (3, 4))]
    # The teacher predicts a part of this one.
    assert chunks_of(pairing.reencode(student.sample("ab", "b"))) == [((1, 2), (2, 3))]
    assert chunks_of(Pairing(Toy(["a", "b"]), Toy(["ab"])).reencode(Toy(["a", "b"]).sample("a", "b"))) == []


def test_a_chunk_is_valid_if_all_its_student_tokens_are_scored():
    student, teacher = Toy(["ab", "cd", "e"]), Toy(["abc", "d", "e"])
    pairing = Pairing(student, teacher)
    for mask, kept in (([0, 1, 1, 1], 2), ([0, 1, 0, 1], 1), ([0, 0, 1, 1], 1), ([0, 0, 0, 0], 0)):
        pair = pairing.reencode(student.sample("<s>", "ab", "cd", "e", loss_mask=mask))
        assert len(pair) == kept
        check(pair, pairing)


def test_the_weight_of_a_chunk_is_the_mean_of_its_tokens_weights():
    student, teacher = Toy(["ab", "cd", "e"]), Toy(["abc", "d", "e"])
    pair = Pairing(student, teacher).reencode(student.sample("<s>", "ab", "cd", "e", loss_mask=[0, 0.5, 1, 0.1]))
    assert pair.weight.tolist() == [0.75, float(np.float32(0.1))]


def test_special_tokens_are_matched_by_name_and_role():
    student = Toy(["a"], "student", special=("<s>", "</s>", "[CALL]", "[ONLY]"))
    teacher = Toy(["a"], "teacher", special=("<s>", "<end>", "[CALL]"), eos="<end>")
    pair = Pairing(student, teacher).reencode(student.sample("<s>", "a", "[CALL]", "a", "[ONLY]", "a", "</s>"))
    assert [teacher.pieces[token] for token in pair.teacher.tokens] == ["<s>", "a", "[CALL]", "a", "a", "<end>"]
    assert chunks_of(pair) == [((1, 2), (1, 2)), ((3, 4), (3, 4)), ((5, 6), (4, 5)), ((6, 7), (5, 6))]


def test_teacher_keeps_the_merge_key():
    student, _, pairing = toys()
    key = Tempered(temperature=0.5, key="x")
    assert pairing.reencode(student.sample("<s>", "a", merge_key=key)).teacher.merge_key == key


def test_templates_may_differ_between_the_scored_runs():
    student, teacher, pairing = toys()
    ours = student.sample("<s>", "b", "12", "a", "</s>", "b", "ab", "</s>", loss_mask=[0, 0, 1, 1, 1, 0, 1, 1])
    theirs = teacher.sample("a", "a", "1", "2", "a", "</s>", "a", "b", "</s>", loss_mask=[0, 0, 1, 1, 1, 1, 1, 1, 1])
    # One scored run against two.
    with pytest.raises(SampleError, match=r"toy: has 2 scored runs in .*'student' and 1 in .*'teacher'; render both"):
        pairing.pair(ours, theirs)
    theirs = teacher.sample("a", "1", "2", "a", "</s>", "b", "a", "b", "</s>", loss_mask=[0, 1, 1, 1, 1, 0, 1, 1, 1])
    pair = pairing.pair(ours, theirs)
    assert chunks_of(pair) == [
        ((2, 3), (1, 3)), ((3, 4), (3, 4)), ((4, 5), (4, 5)), ((6, 7), (6, 8)), ((7, 8), (8, 9)),
    ]  # fmt: skip
    check(pair, pairing)


def test_unequal_text_names_line_and_tokens():
    student, teacher, pairing = toys()
    ours = student.sample("<s>", "12", "ab", source="chats.jsonl:7", loss_mask=[0, 1, 1])
    theirs = teacher.sample("<s>", "1", "2", "a", "a", loss_mask=[0, 1, 1, 1, 1])
    with pytest.raises(SampleError) as caught:
        pairing.pair(ours, theirs)
    assert str(caught.value) == (
        "chats.jsonl:7: the text differs between the student's tokenizer 'student' and the teacher's, 'teacher', first "
        "at token 2 ('ab', id 5) and token 4 ('a', id 2); render both with the student's chat format, or choose "
        "tokenizers whose formats write the same text"
    )
    short = teacher.sample("<s>", "1", "2", "a", loss_mask=[0, 1, 1, 1])
    with pytest.raises(SampleError, match=r"at token 2 \('ab', id 5\) and the end of the turn at token 4;"):
        pairing.pair(ours, short)


def test_dynamic_aligner_skips_differing_text():
    student, teacher, pairing = toys("dynamic")
    ours = student.sample("<s>", "12", "ab", "a", "</s>", loss_mask=[0, 1, 1, 1, 1])
    theirs = teacher.sample("<s>", "1", "2", "b", "b", "a", "</s>", loss_mask=[0, 1, 1, 1, 1, 1, 1])
    pair = pairing.pair(ours, theirs)
    assert chunks_of(pair) == [((1, 2), (1, 3)), ((3, 4), (5, 6)), ((4, 5), (6, 7))]
    check(pair, pairing)
    again = pairing.reencode(student.sample("<s>", "a", "12", "</s>"))
    assert chunks_of(again) == [((1, 2), (1, 2)), ((2, 3), (2, 4)), ((3, 4), (4, 5))]


def test_bytes_that_are_no_text_are_refused(wheel):
    table = wheel["up"].student
    broken = next(token for token in range(table.vocab_size) if table.of(token) == b"\xff")
    with pytest.raises(SampleError, match=rf"f:3: token 1 \(id {broken}\) has bytes that are not UTF-8 \(b'\\xff'\)"):
        wheel["up"].reencode(Sample(tokens=[1, broken], source="f:3"))


def test_wrong_settings_are_refused():
    student, teacher, pairing = toys()
    with pytest.raises(ValueError, match="aligner='byte' must be one of 'bytes', 'dynamic'"):
        Pairing(student, teacher, aligner="byte")
    with pytest.raises(ValueError, match="rendering='both' must be one of 'own', 'student'"):
        next(iter_pairs(SHIPPED, pairing, rendering="both"))


def aligned(spelled, cuts):
    """Chunks of the beginnings of two texts."""
    ends = [side.ends[:cut] for side, cut in zip(spelled, cuts, strict=True)]
    has_text = [~side.is_special[:cut] for side, cut in zip(spelled, cuts, strict=True)]
    found = align_ends(*ends, *has_text)
    return np.concatenate([found.student, found.teacher], axis=1)


def check_prefixes(spelled, random_):
    """Later text does not change the chunks of the beginnings."""
    lengths = [len(side.ends) for side in spelled]
    whole = aligned(spelled, lengths)
    for _ in range(3):
        cuts = [random_.randint(0, length) for length in lengths]
        inside = whole[(whole[:, 1] <= cuts[0]) & (whole[:, 3] <= cuts[1])]
        assert aligned(spelled, cuts).tolist() == inside.tolist()


def check_file(path, pairing, rendering):
    skipped = Skipped()
    records = list(iter_pairs(path, pairing, rendering=rendering, expand_turns=True, on_error="skip", skipped=skipped))
    assert all("does not fit the chat format" in reason for reason in skipped.first)
    random_ = random.Random(1)
    for pairs in records:
        pair = pairs[-1]
        spelled = check(pair, pairing)
        # Every scored byte and the end of the turn are in a chunk.
        lengths = spelled[0].ends - spelled[0].starts
        covered = sum(int(lengths[s:end].sum()) for (s, end), _ in chunks_of(pair))
        assert covered == int(lengths[pair.student.loss_mask > 0].sum())
        assert chunks_of(pair)[-1][0] == (len(pair.student) - 1, len(pair.student))
        if rendering == "student":
            check_prefixes(spelled, random_)
    return sum(map(len, records)), skipped.count


@pytest.mark.parametrize("rendering", ["own", "student"])
@pytest.mark.parametrize("way", ["down", "up"])
def test_the_shipped_sample_is_aligned_by_both_real_tokenizers(wheel, way, rendering):
    pairs, skipped = check_file(SHIPPED, wheel[way], rendering)
    # v3's format refuses nine of 48 lines, whether it is the student's or the teacher's.
    assert (pairs, skipped) == ((283, 0) if (way, rendering) == ("down", "student") else (242, 9))


@pytest.mark.slow
@pytest.mark.skipif(not TAU.exists(), reason=f"needs {TAU.name}")
@pytest.mark.parametrize("rendering", ["own", "student"])
@pytest.mark.parametrize("way", ["down", "up"])
def test_all_shared_data_are_aligned_by_both_real_tokenizers(wheel, way, rendering):
    pairs, _ = check_file(TAU, wheel[way], rendering)
    assert pairs > 1000


def test_turns_of_a_rollout_share_their_chunks(wheel):
    """The chunks of a turn's history are those that the earlier turn had, because alignment is prefix-causal."""
    student, seen = wheel["down"].student_tokenizer, None
    for pair in next(iter_pairs(SHIPPED, wheel["down"], expand_turns=True)):
        everything = wheel["down"].reencode(Sample(tokens=pair.student.tokens))
        chunks = chunks_of(everything)
        if seen is not None:
            assert chunks[: len(seen)] == seen
        seen = chunks
    assert seen is not None
    assert student.name == "mistral-v7"


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]


def test_records_of_tokens_and_messages_are_read_from_one_file(tmp_path, wheel):
    tokens = wheel["down"].student_tokenizer.encode_text("Hello")
    path = write_rows(
        tmp_path / "mixed.jsonl",
        [{"messages": MESSAGES}, {"tokens": [1, *tokens], "loss_mask": [0] + [1] * len(tokens)}],
    )
    first, second = (pairs[0] for pairs in iter_pairs(path, wheel["down"]))
    assert (first.student.source, second.teacher.source) == (f"{path}:1", f"{path}:2")
    assert len(first) == 3  # two words and the end of the turn
    assert len(second) == len(tokens)


def test_bad_pairs_end_the_reading_or_are_counted(tmp_path, wheel):
    path = write_rows(tmp_path / "bad.jsonl", [{"tokens": [1, 40_000]}, {"messages": MESSAGES}])
    with pytest.raises(SampleError, match=r"bad.jsonl:1: .*outside the model's vocabulary of 32768"):
        list(iter_pairs(path, wheel["down"]))
    skipped = Skipped()
    assert len(list(iter_pairs(path, wheel["down"], on_error="skip", skipped=skipped))) == 1
    assert skipped.count == 1
    both = wheel["down"].student_tokenizer, wheel["down"].teacher_tokenizer
    long = Pairing(*both, teacher_limits={"teacher.max_tokens": 2})
    with pytest.raises(
        SampleError, match=r"bad.jsonl:2: the sample has \d+ of the teacher's tokens, but teacher.max_t"
    ):
        list(iter_pairs(write_rows(path, [{"tokens": [1]}, {"messages": MESSAGES}]), long))
    with pytest.raises(SampleError, match="no samples; skipped 2 bad samples"):
        list(iter_pairs(write_rows(path, [{"tokens": [40_000]}, {"x": 1}]), long, on_error="skip", skipped=Skipped()))
