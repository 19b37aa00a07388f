from __future__ import annotations

from collections import Counter
from itertools import count

import numpy as np
import pytest

from mcore_prefix_tree import Sample
from mcore_prefix_tree.data.batches import SampleOrder, deal_runs
from mcore_prefix_tree.plan import report_steps

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
    order = SampleOrder(lines, seed=3, order="shuffled")
    assert order.samples_per_epoch == EPOCH
    epochs = [drawn_lines(epoch(order, number)) for number in range(5)]
    assert all(sorted(drawn) == list(range(len(SIZES))) for drawn in epochs)
    assert len({tuple(drawn) for drawn in epochs}) == 5, "each epoch draws anew"


@pytest.mark.parametrize("batch", [1, 2, 5, EPOCH - 1, EPOCH, EPOCH + 1, 3 * EPOCH + 4])
def test_batches_of_any_size_cut_the_same_stream(lines, batch):
    stream = names(SampleOrder(lines, seed=3, order="shuffled").take(0, 6 * EPOCH))
    order = SampleOrder(lines, seed=3, order="shuffled")
    taken = [order.take(consumed, batch) for consumed in range(0, 6 * EPOCH, batch)]
    assert all(len(part) == batch for part in taken)
    assert [name for part in taken for name in names(part)][: 6 * EPOCH] == stream


def test_batches_can_be_read_from_any_position(lines):
    order = SampleOrder(lines, seed=3, order="shuffled")
    stream = order.take(0, 4 * EPOCH)
    for consumed in (50, 3, 29, 0, 44):
        assert order.take(consumed, 7) == stream[consumed : consumed + 7]
        assert SampleOrder(lines, seed=3, order="shuffled").take(consumed, 7) == stream[consumed : consumed + 7]


def test_the_seed_decides(lines):
    def drawn(seed):
        return names(SampleOrder(lines, seed=seed, order="shuffled").take(0, 2 * EPOCH))

    assert drawn(3) == drawn(3)
    assert len({tuple(drawn(seed)) for seed in range(10)}) == 10


def test_without_shuffling_every_epoch_is_the_files_order(lines):
    order = SampleOrder(lines, seed=3, order="file")
    files = [sample for line in lines for sample in line]
    assert order.take(0, 3 * EPOCH) == 3 * files
    assert order.take(EPOCH - 1, 2) == [files[-1], files[0]]


@pytest.mark.parametrize("nothing", [[], [[], []]])
def test_no_samples_are_refused(nothing):
    with pytest.raises(ValueError, match="no samples to train on"):
        SampleOrder(nothing, seed=0, order="shuffled")


def test_batch_counted_in_lines_takes_complete_lines(lines):
    order = SampleOrder(lines, seed=3, order="shuffled", by_line=True, step=3, whole_steps=True)
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


@pytest.mark.parametrize("kind", ["shuffled", "folded", "file"])
@pytest.mark.parametrize("per_step", [1, 3, 8])
def test_lines_can_be_asked_from_anywhere(lines, kind, per_step):
    order = SampleOrder(lines, seed=3, order=kind, by_line=True, step=per_step, whole_steps=True)
    with order.stream(0) as stream:
        steps = [stream.take(per_step) for _ in range(12)]
    consumed = 0
    for number, samples in enumerate(steps):
        again = SampleOrder(lines, seed=3, order=kind, by_line=True, step=per_step, whole_steps=True)
        assert again.samples_before(number * per_step) == consumed
        assert again.take(number * per_step, per_step) == samples
        consumed += len(samples)


def test_fewer_lines_than_a_step(lines):
    with pytest.raises(ValueError, match=r"^batch\.groups_per_step=9 is more than the 8 groups in the data"):
        SampleOrder(lines, seed=0, order="shuffled", by_line=True, step=9, whole_steps=True)


@pytest.fixture
def conversations():
    """Lines of 1 to 4 turns, several of each prompt, none next to another of the same prompt."""
    rng = np.random.default_rng(0)
    made = []
    for line in range(24):
        tokens, turns = [line % 6] * 20, []
        for turn in range(1 + line % 4):
            tokens = [*tokens, *rng.integers(10, 99, size=5).tolist()]
            turns.append(Sample(tokens=tokens, source=f"{line} turn {turn}"))
        made.append(turns)
    return made


@pytest.mark.parametrize("step", [1, 4, 7, 16, 59, 60, 61, 200])
def test_folded_epochs_take_each_sample_once(conversations, step):
    order = SampleOrder(conversations, seed=3, order="folded", step=step)
    everything = sorted(names(sample for line in conversations for sample in line))
    assert order.per_epoch == len(everything) == 60
    epochs = [names(order.take(60 * number, 60)) for number in range(5)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    if step < 60:
        assert len(set(map(tuple, epochs))) == 5, "each epoch deals anew"


def test_folded_samples_can_be_asked_from_anywhere(conversations):
    def order():
        return SampleOrder(conversations, seed=3, order="folded", step=7)

    stream = order().take(0, 300)
    again = order()
    for consumed in (0, 1, 59, 60, 61, 133, 7, 250):
        assert order().take(consumed, 9) == again.take(consumed, 9) == stream[consumed : consumed + 9]
    assert [sample for start in range(0, 300, 20) for sample in again.take(start, 20)] == stream


def test_folded_steps_hold_neighbours(conversations):
    def physical(kind):
        return sum(
            report_steps(SampleOrder(conversations, seed=seed, order=kind, step=10).first_epoch()).fold_ratio.mean
            for seed in range(5)
        )

    assert physical("folded") > 1.3 * physical("shuffled")


def test_every_folded_step_takes_every_sample_equally_often(conversations):
    """Steps of 9 of 60 samples: steps 0 to 5 are of the first epoch, 7 to 12 of the second, and 6 of both."""
    step, seeds, steps = 9, 400, 13
    found = np.zeros((steps, 60))
    place = {name: number for number, name in enumerate(names(sample for line in conversations for sample in line))}
    for seed in range(seeds):
        with SampleOrder(conversations, seed=seed, order="folded", step=step).stream(0) as stream:
            for number in range(steps):
                for name in names(stream.take(step)):
                    found[number, place[name]] += 1
    expected = seeds * step / 60
    # Each count is binomial with that mean: its squared error is 0.85 times the mean, on average over 780 of them.
    assert (np.square(found - expected) / expected).mean() < 1
    assert np.abs(found - expected).max() < 5 * np.sqrt(expected)


def test_folded_runs_start_everywhere_equally_often(conversations):
    """Exact: over all starts of the circle, the first and the last run take each sample as often as any other."""
    sizes = np.array([len(line) for line in conversations])
    first, last = np.zeros(60), np.zeros(60)
    line_starts = np.cumsum(sizes) - sizes
    for start in range(60):
        pieces = deal_runs(sizes, step=7, head=5, start=start, rng=np.random.default_rng(0))
        dealt = np.concatenate([line_starts[line] + before + np.arange(size) for line, before, size in pieces])
        assert sorted(dealt) == list(range(60))
        first[dealt[:5]] += 1
        last[dealt[-6:]] += 1  # 60 - 5 - 7 * 7
    assert (first == 5).all()
    assert (last == 6).all()


def test_folded_groups_stay_together_and_are_dropped_in_turn(conversations):
    left_out = Counter()
    for seed in range(200):
        order = SampleOrder(conversations, seed=seed, order="folded", by_line=True, step=5, whole_steps=True)
        assert (order.per_epoch, order.left_out) == (20, 4)
        drawn = [names(samples) for samples in order.first_epoch()]
        lines = [{name.split()[0] for name in step} for step in drawn]
        assert all(len(of_step) == 5 for of_step in lines)
        assert len(set.union(*lines)) == 20
        assert all(
            sum(name.split()[0] == line for name in step) == 1 + int(line) % 4
            for step, of_step in zip(drawn, lines, strict=True)
            for line in of_step
        )
        left_out.update({str(line) for line in range(24)} - set.union(*lines))
    assert len(left_out) == 24
    assert max(left_out.values()) < 3 * 200 * 4 / 24
