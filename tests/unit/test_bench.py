"""The benchmark: its shapes are those of the study, its counts are right, its files are well-formed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import bench_cpu
import numpy as np
import pytest
import torch
from attention_bench import contest
from attention_bench.contest import TimedMetadata, measure_ceilings, seconds_of
from attention_bench.contestants import Contestant
from attention_bench.report import columns, costs_of, flops, headline, lines_of
from attention_bench.settings import Settings
from attention_bench.workloads import standard_workloads, workload_of_samples
from gpu_check_parts import attention as bench
from gpu_check_parts.context import LocalContext, Options
from gpu_check_parts.sections import sections
from harness.commands import write_rows
from harness.oracles import metadata_of, random_forest
from harness.torchrun_jobs import run
from torch.multiprocessing.reductions import StorageWeakRef

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.attention import reference
from mcore_prefix_tree.attention.tile_blocks import block_plan, visible_pairs
from mcore_prefix_tree.bench import describe_machine
from mcore_prefix_tree.plan import Parts

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = Settings(heads=2, kv_heads=1, head_dim=8, value_dim=8, dtype="float32", device="cpu", repeats=2)


# Workloads.


@pytest.mark.parametrize(
    ("name", "tokens", "more_tokens", "more_pairs"),
    # From the study that the benchmark repeats, to the digits that it gives.
    [
        ("P4096 G16 R1024", 20_480, 4.0, 2.5),
        ("P1000 G16 R500-3000", None, None, None),  # random lengths
        ("P16384 G32 R2048", 81_920, 7.2, 4.26),
        ("256 leaves of 100", 27_600, 19.5, 10.4),
        ("binary, 189 nodes of 777", 146_853, None, None),
        ("no sharing, 16 of 2048", 32_768, 1.0, 1.0),
    ],
)
def test_shapes_are_those_of_the_study(name, tokens, more_tokens, more_pairs):
    (workload,) = [one for one in standard_workloads() if one.name == name]
    forest, unfolded = workload.folded(CPU), workload.unfolded(CPU)
    assert tokens is None or forest.num_tokens == tokens
    assert unfolded.num_tokens == workload.sample_lens.sum()
    if more_tokens is not None:
        assert unfolded.num_tokens / forest.num_tokens == pytest.approx(more_tokens, rel=0.02)
        assert visible_pairs(unfolded) / visible_pairs(forest) == pytest.approx(more_pairs, rel=0.02)


@pytest.mark.parametrize("workload", standard_workloads(0.002), ids=lambda workload: workload.name)
def test_samples_are_the_paths_to_the_leaves(workload):
    """Unfolding by hand: a leaf's path is as long as its last token's position, and one."""
    forest = workload.folded(CPU)
    is_leaf = np.ones(forest.num_nodes, dtype=bool)
    is_leaf[workload.node_parent[workload.node_parent >= 0]] = False
    lens = forest.node_depth + np.diff(forest.cu_node_lens)
    assert sorted(lens[is_leaf].tolist()) == sorted(workload.sample_lens.tolist())


@pytest.mark.parametrize("workload", standard_workloads(0.01), ids=lambda workload: workload.name)
def test_the_dense_sequence_has_as_many_pairs(workload):
    pairs = visible_pairs(workload.folded(CPU))
    dense = workload.dense(CPU)
    assert dense.num_nodes == 1
    assert abs(visible_pairs(dense) - pairs) <= dense.num_tokens


def test_a_workload_of_samples_is_a_micro_batch_of_them():
    samples = [Sample(tokens=[*range(10), 100 + index, 200 + index]) for index in range(8)]
    workload = workload_of_samples("data", samples, max_tokens=17)
    forest = workload.folded(CPU)
    assert forest.num_tokens <= 17
    assert set(workload.sample_lens.tolist()) == {12}
    assert visible_pairs(workload.folded(CPU)) == visible_pairs(
        type(forest).from_layout(fold(samples[: len(workload.sample_lens)]))
    )


# Counts.


def test_flops_are_two_a_product_and_pair():
    """One head, one pair, D 3, W 5: q k^T is 3 multiplications and additions, p v is 5; then the five of backward."""
    forward, backward = flops(1, 1, 3, 5)
    assert forward == 2 * (3 + 5)
    assert backward == 2 * (3 + 5 + 5 + 3 + 3)  # s again, dp, dv, dq, dk
    assert flops(7, 2, 3, 5) == (14 * forward, 14 * backward)
    assert flops(1, 1, 4, 4)[1] == 2.5 * flops(1, 1, 4, 4)[0]


def test_plans_are_timed_without_those_inside_them():
    metadata = TimedMetadata.of(metadata_of(*random_forest(1)))

    def outer(metadata):
        block_plan(metadata, 16, 16)
        return "plan"

    assert metadata.derived("outer", outer) == "plan"
    assert len(metadata.build_seconds) == 1
    metadata.derived("outer", outer)
    assert len(metadata.build_seconds) == 1
    block_plan(metadata, 32, 16)
    assert len(metadata.build_seconds) == 2
    assert all(seconds > 0 for seconds in metadata.build_seconds)


def result_of(**rows):
    """A result with one workload: for each method its layout, pairs and rounds of (forward, backward)."""
    return {
        "settings": {"heads": 1, "kv_heads": 1, "head_dim": 1, "value_dim": 1, "dtype": "bfloat16", "device": "cuda"},
        "ceilings": {"matrix_tflops": 1e-9, "copy_gbytes": 1.0},
        "machine": {"device": "a GPU", "cpu": "a CPU"},
        "workloads": [
            {
                "name": "w",
                "tokens": 10,
                "pairs": 100,
                "unfolded_tokens": 40,
                "unfolded_pairs": 250,
                "nodes": 3,
                "shape": {"tokens": 10, "segments": 3, "pairs": 100, "depth": 1},
                "rows": [
                    {
                        "method": name.replace("_", " "),
                        "layout": layout,
                        "deterministic": True,
                        "tokens": 10,
                        "pairs": pairs,
                        "forward_seconds": [forward for forward, _ in rounds],
                        "backward_seconds": [backward for _, backward in rounds],
                        "metadata_seconds": 0.001,
                        "peak_bytes": None,
                        "tile_efficiency": {"64x64": 0.75, "128x64": 0.5} if name == "triton" else {},
                        "difference": 0.0,
                    }
                    for name, (layout, pairs, rounds) in rows.items()
                ],
                "missing": [],
            }
        ],
    }


RESULT = result_of(
    triton=("tree", 100, [(1, 1), (1, 3)]),
    flex=("tree", 100, [(2, 4), (4, 4)]),
    fa=("unfolded", 250, [(3, 7), (4, 4)]),
    slow_fa=("unfolded", 250, [(30, 70), (40, 40)]),
    fa_dense=("dense", 100, [(1, 1), (1, 1)]),
)


def test_ratios_are_taken_round_by_round():
    lines = {
        line[0]: dict(zip(columns(RESULT), line, strict=True)) for line in lines_of(RESULT["workloads"][0], RESULT)
    }
    ours = lines["triton, deterministic"]
    assert ours["x unfolded"] == "3.50 (2.00-5.00)"  # 10 / 2 and 8 / 4
    assert ours["x flex"] == "2.50 (2.00-3.00)"  # 6 / 2 and 8 / 4
    assert ours["x dense rate"] == "0.75 (0.50-1.00)"  # 2 / 2 and 2 / 4, at equal pairs
    assert float(ours["forward TFLOP/s"]) == pytest.approx(2 * 100 * 2 / 1e12, rel=1e-2)
    assert ours["of matrix peak"] == f"{(400 + 1000) / 3 / 1e12 / 1e-9:.0%}"
    assert ours["tile efficiency"] == "0.500"
    assert lines["fa, deterministic"]["x unfolded"] == ""


def test_lines_are_sorted_within_layouts():
    lines = lines_of(RESULT["workloads"][0], RESULT)
    assert [line[0].partition(",")[0] for line in lines] == ["triton", "flex", "fa", "slow fa", "fa dense"]
    assert "(4.00x unfolded)" in headline(RESULT["workloads"][0])
    assert "(2.50x unfolded)" in headline(RESULT["workloads"][0])


def test_costs_are_the_fastest_way_of_each_back_end():
    result = result_of(
        **{"cascade, one": ("tree", 100, [(2, 2)]), "cascade, two": ("tree", 100, [(1, 2)])},
        path=("tree", 100, [(5, 5)]),
        reference=("tree", 100, [(1, 1)]),
        fa=("unfolded", 250, [(1, 1)]),
    )
    costs = costs_of(result)
    assert [cost["deterministic"] for cost in costs] == [True, False]
    for cost in costs:
        assert cost["seconds"] == {"cascade": 3, "path": 10}
        assert (cost["device"], cost["dtype"], cost["head_dim"]) == ("a GPU", "bfloat16", 1)


def test_a_deterministic_job_uses_only_deterministic_costs():
    result = result_of(triton=("tree", 100, [(1, 3)]), flex=("tree", 100, [(2, 3)]), fa4=("tree", 100, [(1, 1)]))
    rows = result["workloads"][0]["rows"]
    rows[2]["deterministic"] = False
    rows.append(rows[0] | {"deterministic": False, "backward_seconds": [2]})
    costs = {cost["deterministic"]: cost["seconds"] for cost in costs_of(result)}
    assert costs == {True: {"flex": 5, "triton": 4}, False: {"flex": 5, "fa4": 2, "triton": 3}}


# Running.


def contestant(method, attention=reference.attention, *, layout="tree", refusal=None):
    return Contestant(method=method, layout=layout, options=TINY.case.options, attention=attention, refusal=refusal)


def broken(*arguments):
    raise RuntimeError("no kernel image")


def broken_after(calls, error):
    """An attention that is right this many times."""
    left = [calls]

    def attention(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return reference.attention(*arguments)

    return attention


@pytest.fixture
def field(monkeypatch):
    """Who is measured."""
    entered = {"ours": []}
    monkeypatch.setattr(bench, "contestants", lambda forest, case: iter(entered["ours"]))
    return entered


# Calls of an attention before the timed rounds.
WARM_UP = 3


def measured(count=1):
    """The workloads of a result, and the context that measured it."""
    context = LocalContext("attention", Options())
    bench.run_workloads(context, TINY, standard_workloads(0.001)[:count])
    return sections(describe_machine(), list(context.rows.values()))["attention"]["workloads"], context


def reasons(workload):
    return {one["method"]: one["reason"] for one in workload["missing"]}


class NotANumber(torch.autograd.Function):
    """The identity, with a gradient that is none."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")


def test_failed_measurement_leaves_the_others(field):
    def not_a_number(*arguments):
        return reference.attention(*arguments) * float("nan")

    def no_gradient(query, key, value, metadata, options):
        return reference.attention(query, key, NotANumber.apply(value), metadata, options)

    field["ours"] = [
        contestant("nan", not_a_number),
        contestant("reference"),
        contestant("broken", broken),
        contestant("gradient", no_gradient),
        contestant("later", broken_after(WARM_UP + 1, RuntimeError("an illegal memory access"))),
        contestant("large", broken_after(WARM_UP, torch.OutOfMemoryError("2 GiB"))),
        contestant("absent", refusal="not installed"),
        contestant("last"),
    ]
    (workload,), _ = measured()
    assert [row["method"] for row in workload["rows"]] == ["reference", "last"]
    assert [len(row["forward_seconds"]) for row in workload["rows"]] == [TINY.repeats, TINY.repeats]
    assert reasons(workload) == {
        "nan": "its result is not finite",
        "broken": "RuntimeError: no kernel image",
        "gradient": "its result is not finite",
        "later": "RuntimeError: an illegal memory access",
        "large": "out of memory",
        "absent": "not installed",
    }


def test_failing_contestant_leaves_the_others(field, monkeypatch):
    difference, calls = contest.difference, []

    def too_large(results, first):
        calls.append(first)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("2 GiB")
        return difference(results, first)

    monkeypatch.setattr(contest, "difference", too_large)
    field["ours"] = [contestant("one"), contestant("two"), contestant("three")]
    (workload,), _ = measured()
    assert [row["method"] for row in workload["rows"]] == ["one", "three"]
    assert workload["missing"] == [{"method": "two", "layout": "tree", "reason": "out of memory"}]


def test_setup_failure_is_recorded(field, monkeypatch):
    """After some errors of CUDA nothing runs on the device any more, in no workload."""
    inputs, calls = contest._inputs, []

    def dead(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return inputs(*arguments)

    monkeypatch.setattr(contest, "_inputs", dead)
    field["ours"] = [contestant("one"), contestant("two")]
    (first,), context = measured(2)  # a workload without rows is not in the result
    assert [row["method"] for row in first["rows"]] == ["one", "two"]
    second = [row for row in context.rows.values() if row["workload"] == standard_workloads()[1].name]
    assert [row["method"] for row in second] == ["shape", "one, tree", "two, tree"]
    assert all("an illegal memory access" in row["failed"] for row in second[1:])


def test_later_methods_are_compared_with_the_first_that_ran(field):
    field["ours"] = [contestant("broken", broken), contestant("ours"), contestant("unfolded", layout="unfolded")]
    field["ours"].append(contestant("wrong", lambda *arguments: 1.5 * reference.attention(*arguments)))
    (workload,), context = measured()
    assert [row["method"] for row in workload["rows"]] == ["ours", "unfolded"]
    assert reasons(workload)["wrong"] == "its result differs from the first on this layout by 5.0e-01 of the norm"
    # Also in a later process, which keeps the rows of the first.
    bench.run_workloads(context, TINY, standard_workloads(0.001)[:1])
    assert [row["method"] for row in context.rows.values() if "yardstick" in row["method"]] == ["yardstick"]
    (wrong,) = (row for row in context.rows.values() if row["method"] == "wrong, tree")
    assert "5.0e-01 of the norm" in wrong["failed"]


def test_results_are_not_kept_while_others_are_timed(field):
    alive = []

    class Watched:
        """Counts the results of warm-ups that are still alive when a round begins."""

        def __init__(self):
            self.calls, self.outs = 0, []

        def __call__(self, *arguments):
            self.calls += 1
            if self.calls > WARM_UP:
                alive.append(sum(not out.expired() for out in self.outs))
            out = reference.attention(*arguments)
            self.outs.append(StorageWeakRef(out.untyped_storage()))
            return out

    field["ours"] = [contestant("one", Watched()), contestant("two", Watched())]
    measured()
    assert alive == [1, 0, 0, 0]  # others that enter later are compared with the first one's


@pytest.mark.parametrize("rows", [1, 7, 8192, 8193, 20_000])
def test_differences_are_summed_over_parts(rows, monkeypatch):
    one, other = (torch.randn(rows, 2, 3, dtype=torch.bfloat16) for _ in range(2))
    expected = float((one.double() - other.double()).norm() / other.double().norm())
    largest = []
    convert = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: largest.append(len(self)) or convert(self))
    assert contest.difference([one], [other]) == pytest.approx(expected, rel=1e-5)
    assert max(largest) <= 8192
    assert contest.difference([one], [one]) == 0.0


def test_the_clock_of_a_plan_starts_when_the_device_is_idle(monkeypatch):
    """Work queued before the call is not part of its time; work that it queues is."""
    waits = []

    def wait(device):
        waits.append(device)
        time.sleep(0.2 if len(waits) == 1 else 0.05)

    monkeypatch.setattr(contest, "wait_for", wait)
    metadata = TimedMetadata.of(metadata_of([3, 2], [-1, 0]))
    metadata.derived("plan", lambda metadata: waits.append("built"))
    assert waits == [CPU, "built", CPU]
    (seconds,) = metadata.build_seconds
    assert 0.05 <= seconds < 0.2


def test_a_gpu_is_busy_when_its_clock_starts(monkeypatch):
    """Or the time from the first event to the second would be that of the host's launches."""
    did = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            did.append("record")

        def synchronize(self):
            did.append("synchronize")

        def elapsed_time(self, other):
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: did.append("sleep"), raising=False)
    assert seconds_of(lambda: did.append("run"), torch.device("cuda")) == 0.003
    assert did == ["sleep", "record", "run", "record", "synchronize"]


@pytest.mark.slow
def test_the_benchmark_of_attention_needs_no_megatron():
    script = "import sys; sys.modules['megatron'] = None; import gpu_check_parts.attention"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT / "scripts", check=True)


def test_ceilings_and_machine():
    ceilings = measure_ceilings(CPU, torch.float32)
    assert min(ceilings["matrix_tflops"], ceilings["copy_gbytes"]) > 0
    machine = describe_machine()
    assert machine["torch"] == version("torch")
    assert json.dumps(machine)


@pytest.mark.ci
def test_the_script_writes_a_well_formed_file(tmp_path, capsys):
    rollouts = write_rows(tmp_path / "rollouts.jsonl", ({"tokens": [*range(30), 50 + line]} for line in range(6)))
    output = tmp_path / "attention.json"
    words = ["attention", "--scale", "0.0005", "--repeats", "2", "--data", str(rollouts)]
    assert bench_cpu.main([*words, "--workload", "rollouts, ", "--workload", "P4096", "--output", str(output)]) == 0
    assert "rollouts, a sample per turn, path, tree: " in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert result["kind"] == "attention"
    assert [one["name"] for one in result["workloads"]] == [
        "P4096 G16 R1024",
        "rollouts, whole lines",
        "rollouts, a sample per turn",
    ]
    for workload in result["workloads"]:
        methods = {(row["method"], row["layout"]) for row in workload["rows"]}
        assert {("path", "tree"), ("cascade", "tree")} <= methods
        assert {("torch on the CPU", "unfolded"), ("torch on the CPU", "dense")} <= methods
        assert {"triton", "fa4", "flex"} <= {one["method"] for one in workload["missing"]} | {
            row["method"] for row in workload["rows"]
        }
        for row in workload["rows"]:
            assert len(row["forward_seconds"]) == len(row["backward_seconds"]) == 2
            assert min(row["forward_seconds"] + row["backward_seconds"]) > 0
            assert row["difference"] < 1e-5
            pairs = "unfolded_pairs" if row["layout"] == "unfolded" else "pairs"
            assert row["layout"] == "dense" or row["pairs"] == workload[pairs]
    assert costs_of(result)


@pytest.mark.ci
def test_the_step_command_writes_a_well_formed_file(tmp_path, monkeypatch):
    output = tmp_path / "step.json"
    small = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "model.ffn_hidden_size=16"]
    small += ["model.kv_channels=8", "model.num_query_groups=1", "batch.global_batch_size=4", "device=cpu"]
    monkeypatch.chdir(ROOT)
    done = run(1, "bench", "step", "recipes/quickstart.yaml", *small, "--repeats", 2, "--output", output, code=0)
    result = json.loads(output.read_text())
    assert result["kind"] == "step"
    assert result["machine"]["torch"] == version("torch")
    comparison = result["comparison"]
    expected, gain = comparison["expected_speedup"], result["gain"]
    assert comparison["folded"]["tokens"] < comparison["packed"]["tokens"]
    assert comparison["fold_ratio"] == expected["body"]["ratio"] > expected["ratio"] > expected["head"]["ratio"] >= 1
    for clock in ("gain", "cpu_gain"):
        bound, speedup, share = (result[clock][name] for name in ("bound", "speedup", "share_of_bound"))
        least = sum(bound[part]["least_unfolded_seconds"] / bound[part]["ratio"] for part in Parts._fields)
        assert bound["ratio"] == pytest.approx(bound["unfolded_seconds"] / least)
        assert share == pytest.approx({name: value / bound["ratio"] for name, value in speedup.items()})
        assert speedup["min"] <= speedup["median"] <= speedup["max"]
    assert gain["bound"]["body"]["ratio"] == comparison["fold_ratio"]
    for name, kind in (("seconds", "parts"), ("cpu_seconds", "cpu_parts")):
        for way in (comparison["folded"], comparison["packed"]):
            assert way[name] == pytest.approx([sum(parts.values()) for parts in way[kind]])
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert any(re.fullmatch(r"sharing can give at most \S+x; \d+% of it, by CPU time", line) for line in lines)


def test_unfolded_batch_in_parts_counts_like_one_batch():
    """It does not fit the memory; its samples share nothing, so their pairs add up, and the parts' rounds do."""
    workload = standard_workloads(0.002)[0]
    case = TINY.case
    one = Contestant(method="a", layout="unfolded", options=case.options, attention=reference.attention, refusal=None)
    whole, divided = contest.Contest(workload, TINY), contest.Contest(workload, TINY)
    parts = [contest.chains(part, CPU) for part in np.array_split(workload.sample_lens, 3)]
    inputs = contest._inputs(max(part.padded_size for part in parts), TINY)
    divided._layouts["unfolded"] = [contest.LayoutPart(part, contest._rows(inputs, part.padded_size)) for part in parts]
    runners = [each.warm_up(one) for each in (whole, divided)]
    for runner in runners * 2:
        runner.run()
    rows = [runner.row() for runner in runners]
    assert [(row["tokens"], row["pairs"]) for row in rows] == [(rows[0]["tokens"], rows[0]["pairs"])] * 2
    assert [row["parts"] for row in rows] == [1, 3]
    assert all(len(row["forward_seconds"]) == 2 for row in rows)


def test_layout_beyond_memory_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(contest, "available_bytes", lambda device: 1 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    entered = contest.Contest(standard_workloads(0.002)[0], replace(TINY, device="cuda"))
    monkeypatch.setattr(type(entered.workload), "folded", lambda self, device: metadata_of([3, 4], [-1, 0]))
    options = TINY.case.options
    one = Contestant(method="a", layout="tree", options=options, attention=reference.attention, refusal=None)
    with pytest.raises(contest.NoRoomError, match="it would need about 0 GiB, and 0 GiB are free"):
        entered.warm_up(one)
