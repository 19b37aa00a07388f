"""Malformed inputs of every reader and command end in a sentence, and none is accepted that is wrong."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fault_cases import Case, Runner, Table
from fault_generator import all_cases

SEED = 18
# Commands that import Megatron take seconds, the others some milliseconds in a fork and one second in a process.
_HEAVY = ("train", "verify", "score", "bench")


@pytest.fixture(scope="module")
def cases(runner: Runner) -> list[Case]:
    return all_cases(runner.bases, SEED)


def is_heavy(case: Case) -> bool:
    return bool(case.arguments) and case.arguments[0] in _HEAVY


def drawn(cases: list[Case], seed: int, light: int, heavy: int) -> list[Case]:
    rng = random.Random(seed)
    return [
        *rng.sample([case for case in cases if not is_heavy(case)], light),
        *rng.sample([case for case in cases if is_heavy(case) and not case.is_valid], heavy),
    ]


def test_some_malformed_inputs_end_in_a_sentence(runner: Runner, cases: list[Case]) -> None:
    table = Table()
    for case in drawn(cases, 1, light=20, heavy=3):
        table.add(case, *runner.judge(case))
    assert table.faults == [], "\n".join(table.faults)


@pytest.mark.slow
def test_every_malformed_input_ends_in_a_sentence(runner: Runner, cases: list[Case]) -> None:
    table = Table()
    for case in cases:
        table.add(case, *runner.judge(case))
    for case in drawn(cases, 2, light=50, heavy=10):
        table.add(replace(case, reader="some of these, in a process each"), *runner.judge(case, process=True))
    table.write("malformed", seed=SEED)
    assert table.faults == [], "\n".join(table.faults)
