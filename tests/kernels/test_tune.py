"""The tuner from end to end on two tiny trees. Its clock is a fake: the interpreter's time does not predict a GPU's."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import INTERPRETED

from mcore_prefix_tree.attention.triton_tree import kernel_calls
from mcore_prefix_tree.attention.triton_tree.config import Launch

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="with a fake clock; on a GPU scripts/gpu_check --only tune runs it"
)


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from gpu_check_parts import tune

    ticks = itertools.count(1)

    def fake(run, device):
        run()
        return float(next(ticks))

    monkeypatch.setattr(tune, "seconds_of", fake)
    return tune


def tuned(tune, *dims):
    from gpu_check_parts.context import LocalContext, Options

    context = LocalContext("tune", Options(repeats=2))
    tune.measure_all(context, dims, (2,), 2, 0.005, torch.device("cpu"))
    return list(context.rows.values())


def test_every_part_and_candidate(tune):
    cases = tuned(tune, (64, 64), (256, 256))
    parts = {(case["head_dim"], case["method"]) for case in cases}
    wide = {(256, part) for part in ("forward", "query", "key", "value")}
    assert parts == {(64, part) for part in ("forward", "query", "key_value")} | wide
    assert len({case["tree"] for case in cases}) == 2
    for case in cases:
        assert case["shown"].startswith(f"{len(case['launches'])} of {len(case['launches'])} launches")
        dims = (case["head_dim"], case["value_dim"])
        table, *others = case["launches"]
        assert table["table"]
        assert [tuple(row["launch"]) for row in others] == tune.CANDIDATES.get((case["method"], dims), [])
        for row in case["launches"]:
            assert len(row["seconds"]) == 2
            assert 0 < row["ratio"]["least"] <= row["ratio"]["median"] <= row["ratio"]["most"]


def test_broken_spilling_and_wrong_candidates_are_skipped(tune, monkeypatch):
    broken, spilling, wrong = Launch(64, 32, 4, 1), Launch(32, 64, 4, 1), Launch(32, 32, 4, 1)
    monkeypatch.setitem(tune.CANDIDATES, ("forward", (64, 64)), [broken, spilling, wrong])
    forward = kernel_calls.forward

    def run(*arguments):
        call = arguments[-1]
        if call.configs.forward == broken:
            raise RuntimeError("out of resource: shared memory")
        out, lse = forward(*arguments)
        return out + 0.1 * (call.configs.forward == wrong), lse

    class Spilling(tune.Watched):
        def __getitem__(self, grid):
            def run(*arguments, **options):
                self.kernel[grid](*arguments, **options)
                spills = options["BLOCK_M"] == 32 and options["BLOCK_N"] == 64
                self.compiled.append(SimpleNamespace(n_spills=8 * spills))

            return run

    monkeypatch.setattr(kernel_calls, "forward", run)
    monkeypatch.setattr(tune, "Watched", Spilling)
    monkeypatch.setattr(tune, "PARTS", ("forward",))
    for case in tuned(tune, (64, 64)):
        assert "from the table's result" in case["failed"]
        table, *others = case["launches"]
        assert table["seconds"]
        said = [row.get("skipped") or row.get("failed") for row in others]
        assert said[0] == "RuntimeError: out of resource: shared memory"
        assert said[1] == "it spills 8 registers"
        assert "from the table's result" in said[2]
        assert not any("seconds" in row for row in others)


def test_a_number_that_is_not_finite_is_a_failure_and_no_end(tune):
    """In any of the results, if the table's is finite; elsewhere nothing is compared."""
    expected = [torch.ones(3), torch.tensor([1.0, 2.0, float("inf")])]
    sound = [one.clone() for one in expected]
    sound[1][2] = 7.0
    assert "failed" not in tune.why_not(lambda: sound, expected, 1e-3)[1]
    broken = [one.clone() for one in expected]
    broken[1][0] = float("nan")
    results, known = tune.why_not(lambda: broken, expected, 1e-3)
    assert (results, known["failed"]) == ([], "it differs by nan from the table's result")
