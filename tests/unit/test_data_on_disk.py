"""Samples whose arrays lie in a mapped file."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.commands import run_command, write_rows

from mcore_prefix_tree import Sample
from mcore_prefix_tree.data.on_disk import hold_on_disk
from mcore_prefix_tree.signals import SamplingMask


def test_samples_on_disk_are_those_in_memory() -> None:
    """With signals of every kind, in more lines than are written at once; their arrays are read-only."""
    signals: dict[str, Any] = {
        "old_logprobs": np.array([np.nan, -1.5, -0.25]),
        "sampling_mask": SamplingMask.from_rows([[1, 2], [3], [4, 5, 6]]),
        "routed_experts": np.arange(12).reshape(3, 2, 2) % 4,
        "group": "a",
        "reward": 0.5,
    }
    lines = [[Sample([at, 2, 3], source=f"line {at}")] for at in range(3000)]
    lines += [[], [Sample([1, 3, 6], loss_mask=[0, 0.5, 1], merge_key=("a", 1), **signals), Sample([7])]]
    held = hold_on_disk(lines)
    assert [len(line) for line in held] == [len(line) for line in lines]
    for line, expected in zip(held, lines, strict=True):
        for one, other in zip(line, expected, strict=True):
            assert (one.source, one.merge_key, repr(one.signals)) == (
                other.source,
                other.merge_key,
                repr(other.signals),
            )
            assert not one.tokens.flags.owndata
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
    with pytest.raises(ValueError, match="read-only"):
        held[0][0].tokens[0] = 1
    assert hold_on_disk([]) == []


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{"tokens": [1] * 4000}])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        result = run_command("inspect", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 2, result.output
    assert "set TMPDIR to a folder with room for them" in result.stderr


@pytest.mark.ci
def test_inspect_takes_less_memory_than_its_samples(tmp_path: Path) -> None:
    """Eight million tokens take 64 MB as samples, and as much again folded."""
    text = ", ".join(map(str, range(10_000)))
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"tokens": [{at}, {text}, {", ".join(["7"] * 40_000)}]}}\n' for at in range(160)))
    limited = f"ulimit -d 220000; exec {sys.executable} -m mcore_prefix_tree inspect {path} --trees 1"
    result = subprocess.run(["bash", "-c", limited], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    assert b"8,000,160" in result.stdout
