from __future__ import annotations

from itertools import count

import pytest

from mcore_prefix_tree import Sample
from mcore_prefix_tree.data.batches import SampleOrder

SIZES = (1, 3, 2, 1, 4, 1, 1, 2)  # turns of each line
EPOCH = sum(SIZES)


@pytest.fixture
def lines():
    number = count()
    return [
        [Sample(tokens=[next(number)], source=f"{line} turn {turn}") for turn in range(size)]
        for line, size in enumerate(SIZES)
    ]


def names(samples):
    return [sample.source for sample in samples]


def epoch(order, number):
    return order.take(number * EPOCH, EPOCH)


def drawn_lines(samples):
    """The lines in the order drawn; fails unless the turns of each stay together and in order."""
    drawn = []
    while samples:
        line = names(samples)[0].split()[0]
        size = SIZES[int(line)]
        assert names(samples[:size]) == [f"{line} turn {turn}" for turn in range(size)]
        drawn.append(int(line))
        samples = samples[size:]
    return drawn


def test_an_epoch_takes_every_line_once_and_keeps_its_turns_together(lines):
    order = SampleOrder(lines, seed=3, shuffle=True)
    assert order.samples_per_epoch == EPOCH
    epochs = [drawn_lines(epoch(order, number)) for number in range(5)]
    assert all(sorted(drawn) == list(range(len(SIZES))) for drawn in epochs)
    assert len({tuple(drawn) for drawn in epochs}) == 5, "each epoch draws anew"


@pytest.mark.parametrize("batch", [1, 2, 5, EPOCH - 1, EPOCH, EPOCH + 1, 3 * EPOCH + 4])
def test_batches_of_any_size_cut_the_same_stream(lines, batch):
    stream = names(SampleOrder(lines, seed=3, shuffle=True).take(0, 6 * EPOCH))
    order = SampleOrder(lines, seed=3, shuffle=True)
    taken = [order.take(consumed, batch) for consumed in range(0, 6 * EPOCH, batch)]
    assert all(len(part) == batch for part in taken)
    assert [name for part in taken for name in names(part)][: 6 * EPOCH] == stream


def test_it_can_be_asked_from_anywhere_and_backwards(lines):
    order = SampleOrder(lines, seed=3, shuffle=True)
    stream = order.take(0, 4 * EPOCH)
    for consumed in (50, 3, 29, 0, 44):
        assert order.take(consumed, 7) == stream[consumed : consumed + 7]
        assert SampleOrder(lines, seed=3, shuffle=True).take(consumed, 7) == stream[consumed : consumed + 7]


def test_the_samples_are_the_ones_that_were_given(lines):
    given = {id(sample) for line in lines for sample in line}
    assert {id(sample) for sample in SampleOrder(lines, seed=0, shuffle=True).take(0, EPOCH)} == given


def test_the_seed_decides(lines):
    def drawn(seed):
        return names(SampleOrder(lines, seed=seed, shuffle=True).take(0, 2 * EPOCH))

    assert drawn(3) == drawn(3)
    assert len({tuple(drawn(seed)) for seed in range(10)}) == 10


def test_without_shuffling_every_epoch_is_the_files_order(lines):
    order = SampleOrder(lines, seed=3, shuffle=False)
    files = [sample for line in lines for sample in line]
    assert order.take(0, 3 * EPOCH) == 3 * files
    assert order.take(EPOCH - 1, 2) == [files[-1], files[0]]


def test_nothing_asked_is_nothing_taken(lines):
    assert SampleOrder(lines, seed=3, shuffle=True).take(5, 0) == []


@pytest.mark.parametrize("nothing", [[], [[], []]])
def test_no_samples_are_refused(nothing):
    with pytest.raises(ValueError, match="no samples to train on"):
        SampleOrder(nothing, seed=0, shuffle=True)


def test_counted_in_lines_a_batch_takes_whole_ones(lines):
    order = SampleOrder(lines, seed=3, shuffle=True, by_line=True, whole_steps=3)
    assert (order.per_epoch, order.left_out) == (6, 2)
    consumed = 0
    for step in range(40):
        samples = order.take(3 * step, 3)
        drawn = drawn_lines(samples)
        assert len(set(drawn)) == 3
        assert order.samples_before(3 * step) == consumed
        consumed += len(samples)
        if step % 2:
            assert not set(drawn) & set(drawn_lines(order.take(3 * step - 3, 3))), "no line twice in an epoch"
    assert order.samples_per_epoch == len(order.take(0, 6))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("per_step", [1, 3, 8])
def test_lines_can_be_asked_from_anywhere(lines, shuffle, per_step):
    order = SampleOrder(lines, seed=3, shuffle=shuffle, by_line=True, whole_steps=per_step)
    with order.stream(0) as stream:
        steps = [stream.take(per_step) for _ in range(12)]
    consumed = 0
    for number, samples in enumerate(steps):
        again = SampleOrder(lines, seed=3, shuffle=shuffle, by_line=True, whole_steps=per_step)
        assert again.samples_before(number * per_step) == consumed
        assert again.take(number * per_step, per_step) == samples
        consumed += len(samples)


def test_fewer_lines_than_a_step(lines):
    with pytest.raises(ValueError, match=r"^batch\.groups_per_step=9 is more than the 8 groups there are"):
        SampleOrder(lines, seed=0, shuffle=True, by_line=True, whole_steps=9)
