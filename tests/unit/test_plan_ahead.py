from __future__ import annotations

import threading

import pytest

from mcore_prefix_tree.mcore.engine.step_planner import Ahead


def test_requested_steps_are_returned():
    made = []
    ahead = Ahead(lambda step: made.append(step) or step * step)
    assert [ahead.take(step, then=step + 1 if step < 6 else None) for step in range(7)] == [
        step**2 for step in range(7)
    ]
    assert made == list(range(7))
    ahead.close()


def test_the_next_step_is_made_while_this_one_computes():
    making = threading.Event()
    ahead = Ahead(lambda step: making.set() if step == 1 else None)
    ahead.take(0, then=1)
    assert making.wait(5)
    ahead.close()


def test_another_step_than_the_one_begun_is_made_when_asked_for():
    threads = []
    running = threading.Lock()

    def make(step):
        assert running.acquire(blocking=False), "no two steps are made at a time"
        threads.append((step, threading.current_thread() is threading.main_thread()))
        running.release()
        return step

    ahead = Ahead(make)
    assert ahead.take(0, then=1) == 0
    assert ahead.take(5, then=6) == 5
    assert ahead.take(6, then=None) == 6
    ahead.close()
    assert threads == [(0, True), (1, False), (5, True), (6, False)]


def test_an_error_is_raised_at_its_own_step():
    def make(step):
        if step == 1:
            raise ValueError("step 1 is bad")
        return step

    ahead = Ahead(make)
    assert ahead.take(0, then=1) == 0
    with pytest.raises(ValueError, match="step 1 is bad"):
        ahead.take(1, then=2)
    assert ahead.take(2, then=None) == 2
    ahead.close()


def test_closing_waits_for_the_step_in_the_making():
    made = []
    ahead = Ahead(made.append)
    ahead.take(0, then=1)
    ahead.close()
    ahead.close()
    assert made in ([0], [0, 1])  # one that has not begun is dropped
    assert not any("ahead" in thread.name for thread in threading.enumerate())
