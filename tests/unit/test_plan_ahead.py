from __future__ import annotations

import threading
import time

import pytest

from mcore_prefix_tree.plan.ahead import Ahead


def running() -> int:
    return sum(thread.name == "mcore-prefix-tree ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("first", "last"), [(0, 7), (5, 7), (3, 3)])
def test_steps_come_in_order_and_once(first, last, depth):
    made = []
    with Ahead(lambda step: made.append(step) or step * step, first=first, last=last, depth=depth) as steps:
        assert list(steps) == [step * step for step in range(first, last)]
    assert made == list(range(first, last))
    assert running() == 0


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_than_depth_steps_wait(depth):
    made = []
    with Ahead(made.append, depth=depth) as steps:
        for used, _ in enumerate(steps, start=1):
            deadline = time.monotonic() + 5
            while len(made) < used + depth and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.005)  # would it go on?
            assert len(made) == used + depth
            if used == 4:
                break
    assert running() == 0


def test_it_is_made_while_the_step_before_computes():
    making = threading.Event()

    def make(step):
        if step == 1:
            making.set()
        return step

    with Ahead(make, last=2) as steps:
        for step in steps:
            assert making.wait(5), "step 1 is made before step 0 is given back"
            assert step in (0, 1)


def test_an_error_is_raised_at_its_own_step():
    made = []

    def make(step):
        made.append(step)
        if step == 2:
            raise ValueError("step 2 is bad")
        return step

    seen = []
    with Ahead(make, depth=4) as steps:
        iterator = iter(steps)
        seen += [next(iterator), next(iterator)]
        with pytest.raises(ValueError, match="step 2 is bad"):
            next(iterator)
    assert seen == [0, 1]
    assert made == [0, 1, 2]
    assert running() == 0


def test_leaving_early_ends_the_thread():
    def loop():
        with Ahead(lambda step: step) as steps:
            for _ in steps:
                raise RuntimeError("the loop fails")

    with pytest.raises(RuntimeError, match="the loop fails"):
        loop()
    assert running() == 0


def test_closing_twice_is_closing():
    ahead = Ahead(lambda step: step)
    ahead.close()
    ahead.close()
    assert list(ahead) == []


def test_depth_is_at_least_one():
    with pytest.raises(ValueError, match="depth=0 must be at least 1"):
        Ahead(lambda step: step, depth=0)
