"""The benchmark: its shapes are those of the study, its counts are right, its files are well-formed."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import case_of
from oracles import metadata_of, random_forest, worst
from typer.testing import CliRunner

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.attention import AttentionOptions, reference
from mcore_prefix_tree.attention.blocks import block_plan, visible_pairs
from mcore_prefix_tree.attention.reference import visibility
from mcore_prefix_tree.bench import attention as bench
from mcore_prefix_tree.bench.attention import Settings, TimedMetadata, bench_attention
from mcore_prefix_tree.bench.contestants import Contestant
from mcore_prefix_tree.bench.costs import costs_of
from mcore_prefix_tree.bench.machine import describe_machine, measure_ceilings
from mcore_prefix_tree.bench.peers import PEERS, _build_areal, token_parents
from mcore_prefix_tree.bench.plot import draw_roofline, points_of
from mcore_prefix_tree.bench.report import cells, columns, flops, headline, lines_of
from mcore_prefix_tree.bench.workloads import standard_workloads, workload_of_samples
from mcore_prefix_tree.cli.main import app

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
    lines = {line.method: line for line in lines_of(RESULT["workloads"][0], RESULT)}
    ours = lines["triton"]
    assert (ours.against_unfolded.low, ours.against_unfolded.high) == (2.0, 5.0)  # 10 / 2 and 8 / 4
    assert ours.against_flex.median == 2.5  # 6 / 2 and 8 / 4
    assert ours.against_dense.median == 0.75  # 2 / 2 and 2 / 4, at equal pairs
    assert ours.forward_tflops.median == pytest.approx(2 * 100 * 2 / 1e12)
    assert ours.share == pytest.approx((400 + 1000) / 3 / 1e12 / 1e-9)
    assert ours.tile_efficiency == 0.5
    assert lines["fa"].against_unfolded is None


def test_lines_are_sorted_within_layouts():
    assert [line.method for line in lines_of(RESULT["workloads"][0], RESULT)] == [
        "triton",
        "flex",
        "fa",
        "slow fa",
        "fa dense",
    ]
    for line in lines_of(RESULT["workloads"][0], RESULT):
        assert len(cells(line, RESULT)) == len(columns(RESULT))
    assert "(4.00x unfolded)" in headline(RESULT["workloads"][0])
    assert "(2.50x unfolded)" in headline(RESULT["workloads"][0])


def test_costs_are_the_fastest_way_of_each_back_end():
    result = result_of(
        **{"cascade, one": ("tree", 100, [(2, 2)]), "cascade, two": ("tree", 100, [(1, 2)])},
        path=("tree", 100, [(5, 5)]),
        reference=("tree", 100, [(1, 1)]),
        fa=("unfolded", 250, [(1, 1)]),
    )
    (cost,) = costs_of(result)
    assert cost["seconds"] == {"cascade": 3, "path": 10}
    assert cost["deterministic"] is True
    assert (cost["device"], cost["dtype"], cost["head_dim"]) == ("a GPU", "bfloat16", 1)


def test_costs_are_kept_apart_by_mode():
    result = result_of(triton=("tree", 100, [(1, 3)]), flex=("tree", 100, [(2, 3)]), fa4=("tree", 100, [(1, 1)]))
    rows = result["workloads"][0]["rows"]
    rows[2]["deterministic"] = False
    rows.append(rows[0] | {"deterministic": False, "backward_seconds": [2]})
    costs = {cost["deterministic"]: cost["seconds"] for cost in costs_of(result)}
    assert costs == {True: {"flex": 5, "triton": 4}, False: {"fa4": 2, "triton": 3}}


def test_points_count_the_bytes_that_must_move():
    points = {(method, part): (x, y) for method, part, x, y in points_of(RESULT)}
    # 10 tokens, one head of 1, two bytes: q, k, v and out are 20 bytes each.
    assert points["triton", "forward"] == (400 / 80, pytest.approx(400 / 1e12))
    assert points["triton", "backward"] == (1000 / 160, pytest.approx(1000 / 2 / 1e12))
    assert ("fa", "forward") not in points


def test_the_roofline_is_a_png(tmp_path):
    draw_roofline(RESULT, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


# Peers.


@pytest.mark.parametrize("seed", range(5))
def test_parents_of_tokens_are_the_mask(seed):
    """A token sees itself and what its parent sees."""
    metadata = metadata_of(*random_forest(seed, node_lens=(0, 1, 3), root_rate=0.3), padding=2)
    parents = token_parents(metadata)
    mask = torch.eye(metadata.padded_size, dtype=torch.bool)
    for token, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[token] |= mask[parent]
    assert torch.equal(mask, visibility(metadata))


@pytest.mark.skipif(find_spec("prefix_grouper") is None, reason="prefix_grouper is not installed")
def test_prefix_grouper_computes_the_same():
    metadata = metadata_of([7, 3, 5, 2], [-1, 0, 0, 0])
    peer = PEERS["PrefixGrouper"]
    options = AttentionOptions(softmax_scale=0.3)
    query, key, value = (torch.randn(17, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    assert peer.misfit(metadata) is None
    out = peer.attention(query, key, value, metadata, options)
    assert worst(out, reference.attention(query, key, value, metadata, options)) < 1e-12


@pytest.mark.parametrize("lens", [([5, 3], [-1, -1]), ([5, 3, 2], [-1, 0, 1]), ([5], [-1])])
def test_prefix_grouper_is_not_asked_for_other_forests(lens):
    assert "shares one prefix" in PEERS["PrefixGrouper"].misfit(metadata_of(*lens))


def test_peers_are_not_asked_for_what_they_lack():
    peer = PEERS["AReaL Triton"]
    assert re.search("not installed|needs a GPU", peer.refusal(case_of(dtype=torch.float32)))
    assert "token by token in Python" in peer.misfit(metadata_of([100_000], [-1]))


@pytest.mark.skipif(find_spec("areal") is None, reason="areal is not installed")
def test_areal_is_given_the_same_mask():
    metadata = metadata_of(*random_forest(3, node_lens=(1, 30, 70)))
    assert PEERS["AReaL Triton"].misfit(metadata) is None
    data = _build_areal(metadata)
    bits = torch.arange(metadata.padded_size)
    mask = (data["packed_mask"][0][:, bits // 64] >> (bits % 64)) & 1
    assert torch.equal(mask.bool(), visibility(metadata))


# Running.


def test_one_that_fails_does_not_cost_the_others(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no kernel image")

    def not_a_number(query, key, value, metadata, options):
        return reference.attention(query, key, value, metadata, options) * float("nan")

    options = TINY.case.options

    def some(forest, case):
        yield Contestant(
            method="reference", layout="tree", options=options, attention=reference.attention, refusal=None
        )
        yield Contestant(method="broken", layout="tree", options=options, attention=broken, refusal=None)
        yield Contestant(method="nan", layout="tree", options=options, attention=not_a_number, refusal=None)
        yield Contestant(method="absent", layout="tree", options=options, attention=broken, refusal="not installed")

    monkeypatch.setattr(bench, "contestants", some)
    result = bench_attention(standard_workloads(0.001)[:1], TINY)
    (workload,) = result.workloads
    assert [row.method for row in workload.rows] == ["reference"]
    assert {one["method"]: one["reason"] for one in workload.missing} == {
        "broken": "failed: RuntimeError: no kernel image",
        "nan": "failed: its result is not finite",
        "absent": "not installed",
    }


def test_ceilings_and_machine():
    ceilings = measure_ceilings(CPU, torch.float32, repeats=1)
    assert ceilings.matrix_tflops > 0
    assert ceilings.copy_gbytes > 0
    machine = describe_machine()
    assert machine["torch"] == torch.__version__
    assert json.dumps(machine)


def bench_cli(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_the_command_writes_a_well_formed_file(tmp_path):
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("".join(json.dumps({"tokens": [*range(30), 50 + line]}) + "\n" for line in range(6)))
    output, plot = tmp_path / "a" / "attention.json", tmp_path / "roofline.png"
    sizes = ["--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--dtype", "float32", "--device", "cpu"]
    done = bench_cli(
        *("attention", "--scale", "0.0005", "--repeats", "2", *sizes, "--data", str(rollouts), "--max-tokens", "64"),
        *("--only", "rollouts, ", "--only", "P4096", "--output", str(output), "--plot", str(plot)),
    )
    assert done.exit_code == 0, done.output
    assert "rollouts, a sample per turn" in done.output
    result = json.loads(output.read_text())
    assert result["kind"] == "attention"
    assert [one["name"] for one in result["workloads"]] == [
        "P4096 G16 R1024",
        "rollouts, whole lines",
        "rollouts, a sample per turn",
    ]
    for workload in result["workloads"]:
        methods = {(row["method"], row["layout"]) for row in workload["rows"]}
        assert {("path", "tree"), ("cascade, torch on the CPU", "tree")} <= methods
        assert {("torch on the CPU", "unfolded"), ("torch on the CPU", "dense")} <= methods
        assert {"triton", "fa4", "flex", "magi", "PrefixGrouper", "AReaL Triton"} <= {
            one["method"] for one in workload["missing"]
        } | {row["method"] for row in workload["rows"]}
        for row in workload["rows"]:
            assert len(row["forward_seconds"]) == len(row["backward_seconds"]) == 2
            assert min(row["forward_seconds"] + row["backward_seconds"]) > 0
            assert row["difference"] < 1e-5
            pairs = "unfolded_pairs" if row["layout"] == "unfolded" else "pairs"
            assert row["layout"] == "dense" or row["pairs"] == workload[pairs]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert costs_of(result)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "int8"], "--dtype int8 is not one of bfloat16, float16, float32"),
        (["--device", "tpu"], "--device tpu is not one of auto, cuda, cpu"),
        (["--heads", "3", "--kv-heads", "2"], "--heads 3 is not a multiple of --kv-heads 2"),
        (["--device", "cpu", "--only", "nothing"], "--only nothing matches none of: P4096 G16 R1024;"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: torch sees no GPU; use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_mistakes_are_told(arguments, says):
    done = bench_cli("attention", *arguments)
    assert done.exit_code == 2
    assert says in done.output


def test_the_step_command_writes_a_well_formed_file(tmp_path):
    output = tmp_path / "step.json"
    small = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "model.ffn_hidden_size=16"]
    small += ["model.kv_channels=8", "model.num_query_groups=1", "batch.global_batch_size=4", "device=cpu"]
    command = [sys.executable, "-m", "mcore_prefix_tree", "bench", "step", "recipes/quickstart.yaml", *small]
    done = subprocess.run(
        [*command, "--repeats", "1", "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["kind"] == "step"
    assert result["machine"]["torch"] == torch.__version__
    assert result["comparison"]["folded"]["tokens"] < result["comparison"]["packed"]["tokens"]
    assert result["speedup_over_fold_ratio"] == pytest.approx(result["speedup"] / result["comparison"]["fold_ratio"])


def test_gpu_check_says_that_there_is_no_gpu(monkeypatch, capsys):
    """The script as a program, but in this process: nothing here depends on what a busy machine does to another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "scripts" / "lib" / "gpu_check.py"), run_name="__main__")
    assert left.value.code == 2
    assert capsys.readouterr().err == "gpu_check: torch sees no GPU; run it on a machine with one\n"


def test_gpu_check_reads_what_pytest_writes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "lib"))
    import gpu_check

    def write(command, **more):
        suite = ElementTree.Element("testsuite", tests="3", failures="1", errors="0", skipped="1")
        for name, fault in (("good", None), ("bad", "failure"), ("left_out", "skipped")):
            case = ElementTree.SubElement(suite, "testcase", classname="tests.gpu", name=name)
            if fault is not None:
                ElementTree.SubElement(case, fault, message=f"{name}!")
        root = ElementTree.Element("testsuites")
        root.append(suite)
        ElementTree.ElementTree(root).write(command[-1].removeprefix("--junitxml="))

    monkeypatch.setattr(gpu_check.subprocess, "run", write)
    tests = gpu_check.run_tests(tmp_path)
    assert {name: tests[name] for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": 3,
        "failures": 1,
        "errors": 0,
        "skipped": 1,
    }
    assert tests["faults"] == [{"test": "tests.gpu::bad", "message": "bad!"}]


def test_settings_are_the_case():
    case = replace(TINY, head_dim=16, value_dim=8).case
    assert (case.head_dim, case.value_dim, case.dtype, case.needs_grad) == (16, 8, torch.float32, True)
    assert case.options.softmax_scale == 0.25
